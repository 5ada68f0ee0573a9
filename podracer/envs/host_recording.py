"""A host environment driven by random legal actions, recorded so that the conformance suite can look at it."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, PyTree

from podracer.envs.actions import split_components
from podracer.envs.host import HostEnvironment
from podracer.envs.recording import flatten
from podracer.types import BoundedSpec, DiscreteSpec, EnvironmentSpec, StepType, TimeStep, split_mask

Numbers = Float[np.ndarray, "T B K"]


@dataclasses.dataclass(frozen=True)
class HostRecording:
    """Rows `0 .. T` of a batch of `B` environments, and the actions between them.

    Attributes:
        spec: The environment's.
        rows: `T + 1` timesteps `[B, ...]`, copies of those emitted.
        actions: `T` actions `[B, ...]`.
    """

    spec: EnvironmentSpec
    rows: list[TimeStep]
    actions: list[np.ndarray]

    @functools.cached_property
    def timesteps(self) -> TimeStep:
        """`[T + 1, B, ...]`."""
        return jax.tree.map(lambda *leaves: np.stack(leaves), *self.rows)

    def starts(self) -> Float[np.ndarray, "rows N"]:
        """The observations on FIRST, flattened."""
        return self.vectors(StepType.FIRST)

    def vectors(self, step_type: StepType) -> Float[np.ndarray, "rows N"]:
        """The observations on timesteps of this type, flattened."""
        timesteps = self.timesteps
        return flatten((), timesteps.observation, timesteps.step_type.shape)[timesteps.step_type == step_type]


def random_numbers(spec: EnvironmentSpec, num_steps: int, batch_size: int, seed: int = 0) -> Numbers:
    """Numbers within [0, 1) from which `record` chooses actions, one per component of an action."""
    action = spec.action
    match action:
        case DiscreteSpec():
            size = 1
        case BoundedSpec():
            size = len(action.low)
        case _:
            size = len(action.num_actions)
    return np.random.default_rng(seed).random((num_steps, batch_size, size))


def record(environment: HostEnvironment, numbers: Numbers, on_last: Numbers | None = None) -> HostRecording:
    """Steps an environment once for each row of numbers.

    The action of column `b` at step `t` follows from `numbers[t, b]` and its own action mask, and from nothing else. So
    environments with equal streams meet equal actions, in batches of other sizes as well.

    Args:
        environment: Fresh; `reset` is called.
        numbers: `[T, B, K]`, by `random_numbers`.
        on_last: Those that choose the actions on LAST instead, which are to be ignored.
    """
    rows, actions = [_copy(environment.reset())], []
    for t in range(len(numbers)):
        chosen = numbers[t]
        if on_last is not None:
            chosen = np.where((np.asarray(rows[-1].step_type) == StepType.LAST)[:, None], on_last[t], chosen)
        actions.append(choose(environment.spec, rows[-1].observation, chosen))
        rows.append(_copy(environment.step(actions[-1].copy())))
    return HostRecording(environment.spec, rows, actions)


def choose(spec: EnvironmentSpec, observation: PyTree, numbers: Float[np.ndarray, "B K"]) -> np.ndarray:
    """Legal actions `[B, ...]`, uniform if the numbers are. Where a mask leaves none, any action."""
    action: Any = spec.action
    if isinstance(action, BoundedSpec):
        low, high = np.asarray(action.low, np.float32), np.asarray(action.high, np.float32)
        return np.clip((low + numbers * (high - low)).astype(np.float32), low, high)
    sizes = [action.num_actions] if isinstance(action, DiscreteSpec) else action.num_actions
    mask = split_mask(observation)[1]
    masks = [np.ones((len(numbers), n), np.bool_) for n in sizes] if mask is None else split_components(spec, mask)
    chosen = np.stack([_pick(np.asarray(m), numbers[:, i]) for i, m in enumerate(masks)], axis=-1)
    if isinstance(action, DiscreteSpec):
        chosen = chosen[:, 0] + action.start
    return chosen.astype(action.dtype)


def _pick(mask: np.ndarray, numbers: Float[np.ndarray, "B"]) -> np.ndarray:
    mask = mask | ~mask.any(-1, keepdims=True)
    # The k-th legal action is the first one that k + 1 legal actions end at.
    wanted = (numbers * mask.sum(-1)).astype(np.int64)
    return (mask.cumsum(-1) > wanted[:, None]).argmax(-1)


def _copy(timestep: Any) -> Any:
    """A copy, since the next step may overwrite what this one returned."""
    return jax.tree.map(np.copy, timestep)
