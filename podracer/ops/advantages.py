"""Advantage estimation over trajectories with episode ends inside them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podracer.types import Trajectory, valid_mask


def generalized_advantages(
    trajectory: Trajectory, values: Float[Array, "T1 B"], discount: float | jax.Array, lambda_: float | jax.Array
) -> Float[Array, "T B"]:
    """GAE(lambda) (Schulman et al. 2016, arXiv 1506.02438, equation 16), cut at episode ends.

    ```
    delta_t = r_{t+1} + gamma * discount_{t+1} * v_{t+1} - v_t
    A_t     = delta_t + gamma * discount_{t+1} * lambda_{t+1} * A_{t+1},    A_T = 0
    ```

    where `lambda_{t+1}` is lambda, and 0 where timestep `t + 1` is LAST: what follows is of another episode.

    At a truncation the last advantage bootstraps from the value of the true final observation, at a termination from 0.
    Nothing flows backwards across the row `LAST -> FIRST`, whose own advantage is 0 whatever it contains.

    Args:
        trajectory: Its rewards, discounts and step types are read.
        values: `[T + 1, B]`, the critic's value of each timestep.
        discount: gamma.
        lambda_: lambda.

    Returns:
        The advantages, 0 on masked rows; advantages plus `values[:-1]` are the value targets.
    """
    valid = valid_mask(trajectory)
    timestep = trajectory.timestep
    r_t = jnp.where(valid, timestep.reward[1:], 0)
    discount_t = jnp.where(valid, discount * timestep.discount[1:], 0)
    lambda_t = jnp.where(timestep.last()[1:], 0, jnp.float32(lambda_))
    error = r_t + discount_t * values[1:] - values[:-1]

    def backwards(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        error, decay = row
        advantage = error + decay * following
        return advantage, advantage

    rows = (error, discount_t * lambda_t)
    _, advantages = jax.lax.scan(backwards, jnp.zeros_like(error[0]), rows, reverse=True)
    return jnp.where(valid, advantages, 0)
