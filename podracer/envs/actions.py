"""Random actions, legal ones where the environment says which are."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from podracer.types import BoundedSpec, DiscreteSpec, EnvironmentSpec, MultiDiscreteSpec, split_mask


def sample_action(spec: EnvironmentSpec, key: jax.Array, batch_size: int) -> jax.Array:
    """Uniformly random actions `[batch_size, ...]`, legal or not."""
    action = spec.action
    match action:
        case DiscreteSpec():
            drawn = jax.random.randint(key, (batch_size,), action.start, action.start + action.num_actions, jnp.int32)
            return drawn.astype(action.dtype)
        case MultiDiscreteSpec():
            shape = (batch_size, len(action.num_actions))
            above = jnp.broadcast_to(jnp.asarray(action.num_actions, jnp.int32), shape)
            return jax.random.randint(key, shape, 0, above, jnp.int32).astype(action.dtype)
        case BoundedSpec():
            low, high = jnp.asarray(action.low, jnp.float32), jnp.asarray(action.high, jnp.float32)
            return jax.random.uniform(key, (batch_size, len(action.low)), jnp.float32, low, high)


def sample_legal_action(spec: EnvironmentSpec, observation: PyTree, key: jax.Array, batch_size: int) -> jax.Array:
    """Uniformly random actions among the legal ones on `observation [batch_size, ...]`."""
    action, mask = spec.action, split_mask(observation)[1]
    if mask is None or isinstance(action, BoundedSpec):  # Real actions have no masks: `EnvironmentSpec` refuses them.
        return sample_action(spec, key, batch_size)
    drawn = [
        jax.random.categorical(jax.random.fold_in(key, i), jnp.where(component, 0.0, -jnp.inf))
        for i, component in enumerate(split_components(spec, mask))
    ]
    if isinstance(action, DiscreteSpec):
        return (drawn[0] + action.start).astype(action.dtype)
    return jnp.stack(drawn, axis=-1).astype(action.dtype)


def split_components(spec: EnvironmentSpec, mask: Bool[Array, "*B A"]) -> list[Any]:
    """The mask of each component of the action, `[*B, num_actions]`."""
    return spec.action.split(mask) if isinstance(spec.action, MultiDiscreteSpec) else [mask]
