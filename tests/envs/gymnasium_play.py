"""Helpers of the tests of Gymnasium: its toys in batches, and what batches emit."""

import contextlib

import gymnasium_toys
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from podracer.envs import EnvironmentSlice, gymnasium
from podracer.envs.host import check_timestep
from podracer.envs.host_recording import random_numbers, record

MODES = tuple(AutoresetMode)

# One process, since each takes half a second to start.
VECTORIZATIONS = (
    pytest.param({}, id="sync"),
    pytest.param({"vectorization": "async", "num_processes": 1}, id="async"),
)


def counters(mode, kind=gymnasium_toys.Counter, **parameters):
    """A function that makes vector environments of toys."""

    def make_vector_env(where):
        return SyncVectorEnv([lambda: kind(**parameters)] * where.num_envs, autoreset_mode=mode)

    return make_vector_env


def warned(mode, num_envs=2):
    """Where a batch is made of a function's vector environments: the warning that they are stepped one at a time."""
    if num_envs == 1 or AutoresetMode(mode) == AutoresetMode.NEXT_STEP:
        return contextlib.nullcontext()
    return pytest.warns(RuntimeWarning, match="one at a time")


def played(factory, num_steps=20, where=None):
    """What a batch emits under random legal actions, `[T + 1, B]`."""
    environment = factory(where or EnvironmentSlice(2))
    try:
        recording = record(environment, random_numbers(environment.spec, num_steps, environment.num_envs))
    finally:
        environment.close()
    for row in recording.rows:
        check_timestep("toy", recording.spec, environment.num_envs, row)
    return recording.timesteps


def stepped(name, action, num_envs=2, **parameters):
    """The timestep after one action in every environment."""
    environment = gymnasium.make(name, **parameters)(EnvironmentSlice(num_envs))
    try:
        environment.reset()
        return jax.tree.map(np.copy, environment.step(action))
    finally:
        environment.close()
