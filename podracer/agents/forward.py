"""Feed-forward and recurrent networks by the same calls: one step to act, a trajectory to learn.

The state of a feed-forward network is `()`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from podracer.networks import Network, RecurrentNetwork
from podracer.types import EnvironmentSpec, split_mask

AnyNetwork = Network | RecurrentNetwork


def initial_params(network: AnyNetwork, spec: EnvironmentSpec, key: jax.Array) -> Any:
    """Parameters for an environment's observations, drawn with `key`."""
    example, _ = split_mask(spec.observation)
    return network.init(key, jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), example))


def initial_state(network: AnyNetwork, batch_size: int) -> Any:
    """The state before an episode, `[batch_size, ...]`."""
    return network.initial_state(batch_size) if isinstance(network, RecurrentNetwork) else ()


def apply_step(
    network: AnyNetwork, params: PyTree, observation: PyTree, first: Bool[Array, "B"], state: PyTree
) -> tuple[Any, Any]:
    """The network on `[B, ...]`: outputs and the next state."""
    if isinstance(network, RecurrentNetwork):
        return network.apply(params, observation, first, state)
    return network.apply(params, observation), ()


def apply_over_time(
    network: AnyNetwork, params: PyTree, observation: PyTree, first: Bool[Array, "T B"], state: PyTree
) -> Any:
    """The network on `[T, B, ...]`, from the state before row 0: outputs of every row, as acting computed them."""
    if isinstance(network, RecurrentNetwork):
        return network.unroll(params, observation, first, state)[0]
    return network.apply(params, observation)
