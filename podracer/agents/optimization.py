"""Gradient steps as the agents here make them: clipped, on one flat vector, with rates by the agent's own count."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree


def flat_optimizer(scale: optax.GradientTransformation, max_grad_norm: float | None) -> optax.GradientTransformation:
    """Clips the gradient to a global norm, if one is given, then scales it, for instance by Adam's moments.

    All parameters are one vector to it, so that a small network does not pay for a dozen small kernels. The learning
    rate is no part of it, see `descend`.
    """
    clipped = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.flatten(optax.chain(clipped, scale))


def descend(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    gradients: PyTree,
    learning_rate: float | Float[Array, ""],
) -> tuple[Any, Any]:
    """Parameters and the optimiser's state after one step against the gradients."""
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer count.
        updates, state = optimizer.update(gradients, state, params)
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates), state


def linear_schedule(start: float, end: float | None, updates: Int[Array, ""], num_updates: int) -> Float[Array, ""]:
    """Linear from `start` at update 0 to `end` at `num_updates` and after; always `start` where `end` is None."""
    if end is None:
        return jnp.float32(start)
    done = jnp.minimum(updates.astype(jnp.float32) / num_updates, 1)
    return start + (end - start) * done
