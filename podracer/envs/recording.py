"""A stream of random legal steps, recorded so that the conformance suite can look at it from every side."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from podracer.envs.actions import sample_legal_action
from podracer.types import EnvironmentSpec, StepType, TimeStep


@dataclasses.dataclass(frozen=True)
class Recording:
    """Rows `0 .. T` of a batch of `B` environments, and what was done between them.

    Attributes:
        reset: The stream's `reset(keys)`, compiled.
        step: The stream's `step(state, action, keys)`, compiled.
        states: `[T + 1, B, ...]`, the stream's.
        timesteps: `[T + 1, B, ...]`, in NumPy.
        actions: `[T, B, ...]`.
        keys: `[T, B]`, those of `step`.
        first_keys: `[B]`, those of `reset`.
    """

    spec: EnvironmentSpec
    reset: Callable[[jax.Array], Any]
    step: Callable[[PyTree, PyTree, jax.Array], Any]
    states: PyTree
    timesteps: TimeStep
    actions: PyTree
    keys: jax.Array
    first_keys: jax.Array

    def rows(self, step_type: StepType) -> list[tuple[int, int]]:
        """The `(t, b)` of every timestep of this type."""
        return [(int(t), int(b)) for t, b in np.argwhere(self.timesteps.step_type == step_type)]

    def vectors(self, rows: list[tuple[int, int]]) -> Float[np.ndarray, "rows N"]:
        """The raw states and observations in these rows, flattened."""
        joined = flatten(self.states[0], self.timesteps.observation, self.timesteps.step_type.shape)
        return np.asarray([joined[t, b] for t, b in rows])


def record(stream: Any, batch_size: int, num_steps: int) -> Recording:
    """Drives a batched stream, `podracer.envs.Autoreset` for instance, by random legal actions."""
    choose = jax.jit(lambda observation, key: sample_legal_action(stream.spec, observation, key, batch_size))
    reset, step = jax.jit(stream.reset), jax.jit(stream.step)
    first_keys = jax.random.split(jax.random.key(0), batch_size)
    keys = jax.random.split(jax.random.key(1), (num_steps, batch_size))
    state, timestep = reset(first_keys)
    states, timesteps, actions = [state], [timestep], []
    for t in range(num_steps):
        actions.append(choose(timestep.observation, jax.random.fold_in(jax.random.key(2), t)))
        state, timestep = step(state, actions[-1], keys[t])
        states.append(state)
        timesteps.append(timestep)
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows) for rows in (states, timesteps, actions)]
    timesteps_numpy = jax.tree.map(to_numpy, stacked[1])
    return Recording(stream.spec, reset, step, stacked[0], timesteps_numpy, stacked[2], keys, first_keys)


def flatten(state: PyTree, observation: PyTree, batch: tuple[int, ...]) -> Float[np.ndarray, "*batch N"]:
    """All numbers of a raw state and an observation in one vector, behind the axes `batch` that the leaves share."""
    leaves = [to_numpy(leaf) for leaf in jax.tree.leaves((state, observation))]
    return np.concatenate([np.zeros((*batch, 0)), *(leaf.reshape(*batch, -1) for leaf in leaves)], axis=-1)


def to_numpy(leaf: Any) -> np.ndarray:
    """A leaf in NumPy; of random keys the integers behind them."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def difference(emitted: PyTree, expected: PyTree, tolerance: float) -> str | None:
    """Where two pytrees differ, by leaf name and values, or None. Integers must be equal whatever the tolerance."""
    leaves = jax.tree_util.tree_leaves_with_path(emitted)
    for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
        a, b = to_numpy(a), to_numpy(b)
        real = np.issubdtype(a.dtype, np.floating)
        bound = tolerance if real else 0
        if not np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=bound, atol=bound, equal_nan=True):
            return (
                f"{jax.tree_util.keystr(path) or 'the observation'} is {a.tolist()!s:.200} against {b.tolist()!s:.200}"
            )
    return None
