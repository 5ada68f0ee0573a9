"""Policy and value networks, built from a configuration and an environment's spec."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from podracer.networks.base import Network, RecurrentNetwork
from podracer.networks.inputs import flattener, image
from podracer.networks.torsos import ACTIVATIONS, CNN, MLP, dense
from podracer.ops.distributions import num_parameters
from podracer.types import EnvironmentSpec, split_mask


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """An actor-critic network.

    Attributes:
        torso: `mlp` flattens and joins all leaves of the observation; `cnn` takes one image `[H, W, C]`.
        hidden_sizes: Units of the dense layers.
        channels: Channels of the 3x3 convolutions of `cnn`.
        activation: After every hidden layer.
        shared: Whether actor and critic share the torso, which halves the work of small networks on a CPU.
        recurrent_size: Units of an LSTM after a shared torso; 0 for none.

    Raises:
        ValueError: A size is no integer or too small, or a name is unknown; the rule is said.
    """

    torso: Literal["mlp", "cnn"] = "mlp"
    hidden_sizes: tuple[int, ...] = (64, 64)
    channels: tuple[int, ...] = (16,)
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    shared: bool = False
    recurrent_size: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_sizes", "channels"):
            sizes = getattr(self, name)
            if not isinstance(sizes, tuple) or not all(type(size) is int and size >= 1 for size in sizes):
                raise ValueError(f"{name} is {sizes!r}; it must be a tuple of integers, each at least 1")
        for name, valid in (("torso", ("mlp", "cnn")), ("activation", tuple(ACTIVATIONS)), ("shared", (False, True))):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}; valid: {', '.join(map(str, valid))}")
        if type(self.recurrent_size) is not int or self.recurrent_size < 0:
            raise ValueError(f"recurrent_size is {self.recurrent_size!r}; it must be an integer, 0 for none or more")

    def torso_module(self, name: str) -> nn.Module:
        """The torso as a module."""
        activation = ACTIVATIONS[self.activation]
        if self.torso == "cnn":
            return CNN(self.channels, self.hidden_sizes, activation, name=name)
        return MLP(self.hidden_sizes, activation, name=name)


class ActorCritic(nn.Module):
    """From `[*B, ...]` to `(policy outputs [*B, P], value [*B])`."""

    config: NetworkConfig
    num_outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "*B"]) -> tuple[Float[Array, "*B P"], Float[Array, "*B"]]:
        if self.config.shared:
            actor = critic = self.config.torso_module("torso")(x)
        else:
            actor = self.config.torso_module("actor_torso")(x)
            critic = self.config.torso_module("critic_torso")(x)
        return dense(self.num_outputs, 0.01)(actor), dense(1, 1.0)(critic)[..., 0]


class RecurrentActorCritic(nn.Module):
    """One step of a torso and an LSTM on `[B, ...]`; the state restarts where an episode does."""

    config: NetworkConfig
    num_outputs: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "B *"], first: Bool[Array, "B"], state: PyTree
    ) -> tuple[tuple[Float[Array, "B P"], Float[Array, "B"]], PyTree]:
        state = jax.tree.map(lambda s: jnp.where(first[:, None], 0, s), state)
        features = self.config.torso_module("torso")(x)
        state, features = nn.OptimizedLSTMCell(self.config.recurrent_size)(state, features)
        return (dense(self.num_outputs, 0.01)(features), dense(1, 1.0)(features)[..., 0]), state


def actor_critic(config: NetworkConfig, spec: EnvironmentSpec) -> Network | RecurrentNetwork:
    """The network of `config` for an environment.

    Raises:
        ValueError: The torso cannot take the observation; the leaf is named.
    """
    observation_spec, _ = split_mask(spec.observation)
    prepare = flattener(observation_spec)
    if config.torso == "cnn":
        prepare = image(observation_spec, smallest=2 * len(config.channels) + 1)
    outputs = num_parameters(spec.action)
    if not config.recurrent_size:
        module = ActorCritic(config, outputs)
        axes = 3 if config.torso == "cnn" else 1

        def apply(params: PyTree, observation: PyTree) -> tuple[Float[Array, "*B P"], Float[Array, "*B"]]:
            x = prepare(observation)
            lead = x.shape[:-axes]
            # One leading axis: with two, the weights' gradient contracts over both, which XLA does at half the speed.
            policy, value = module.apply(params, x.reshape(-1, *x.shape[-axes:]))
            return policy.reshape(*lead, -1), value.reshape(lead)

        return Network(init=lambda key, observation: module.init(key, prepare(observation)), apply=apply)
    cell = RecurrentActorCritic(config, outputs)

    def initial_state(batch_size: int) -> PyTree:
        zeros = jnp.zeros((batch_size, config.recurrent_size), jnp.float32)
        return zeros, zeros

    def init(key: jax.Array, observation: PyTree) -> Any:
        x = prepare(observation)
        return cell.init(key, x, jnp.ones(x.shape[0], bool), initial_state(x.shape[0]))

    return RecurrentNetwork(
        init=init,
        apply=lambda params, observation, first, state: cell.apply(params, prepare(observation), first, state),
        initial_state=initial_state,
    )
