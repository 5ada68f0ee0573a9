"""Rewards as a loss reads them."""

import dataclasses

import jax.numpy as jnp

from podracer.types import TimeStep


def clip_rewards(timestep: TimeStep, limit: float | None) -> TimeStep:
    """The timesteps with rewards within `[-limit, limit]`; as they are where `limit` is None.

    An agent's business and not an environment's: episode returns stay those of the game (DQN, Mnih et al. 2015, clips
    Atari's to 1, so that one learning rate serves every game).
    """
    if limit is None:
        return timestep
    return dataclasses.replace(timestep, reward=jnp.clip(timestep.reward, -limit, limit))
