"""The data that flows between environments, agents and architectures.

`T` is the number of steps in a trajectory and `B` the number of environments handled by one call. Everything is
time-major, `[T, B, ...]`.
"""

import dataclasses
import enum
import itertools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int8, PyTree, Shaped


class StepType(enum.IntEnum):
    """Where a timestep stands in its episode (the contract of dm_env)."""

    FIRST = 0
    MID = 1
    LAST = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TimeStep:
    """What the environments emit at one moment.

    Attributes:
        step_type: `[B]`, a `StepType`.
        reward: `[B]`, for the action that led here; 0 on FIRST.
        discount: `[B]`, 0 where the episode terminated, 1 otherwise, also where it was truncated.
        observation: Pytree of arrays `[B, ...]`; on LAST the true final observation.
    """

    step_type: Int8[Array, "*B"]
    reward: Float[Array, "*B"]
    discount: Float[Array, "*B"]
    observation: PyTree

    def first(self) -> Bool[Array, "*B"]:
        return self.step_type == StepType.FIRST

    def last(self) -> Bool[Array, "*B"]:
        return self.step_type == StepType.LAST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trajectory:
    """`T` steps of `B` environments, with the row that follows them.

    Attributes:
        timestep: `[T + 1, B]`; row `T` is row 0 of the next trajectory.
        action: Pytree `[T, B, ...]`; `action[t]` was chosen on `timestep[t]`.
        extras: Pytree `[T, B, ...]`; what `Agent.act` chose to remember (log-probability, value, search policy).
        actor_state: Pytree `[B, ...]`; the agent's recurrent state before row 0.
    """

    timestep: TimeStep
    action: PyTree
    extras: PyTree
    actor_state: PyTree


def valid_mask(trajectory: Trajectory) -> Bool[Array, "T B"]:
    """False on the rows `LAST -> FIRST`, where the environment reset itself and ignored the action.

    Every loss is weighted by this mask, and masked rows are not environment steps.
    """
    return trajectory.timestep.step_type[:-1] != StepType.LAST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedObservation:
    """An observation with the actions that are legal on it.

    Attributes:
        observation: Pytree `[B, ...]`, the network's input.
        action_mask: `[B, num_actions]`, True where legal; for multi-discrete actions the masks of the components side
            by side, `[B, sum(num_actions)]`.
    """

    observation: PyTree
    action_mask: Bool[Array, "*B A"]


def split_mask(observation: PyTree) -> tuple[PyTree, Bool[Array, "*B A"] | None]:
    """The network's input and the action mask, None where the environment has none."""
    if isinstance(observation, MaskedObservation):
        return observation.observation, observation.action_mask
    return observation, None


def key_shape() -> jax.ShapeDtypeStruct:
    """A typed random key without its value, to trace with."""
    return jax.eval_shape(lambda: jax.random.key(0))


def leaf_name(path: tuple[Any, ...]) -> str:
    """What errors call a leaf of a pytree: its path, for example `.action_mask` or `['image']`."""
    return jax.tree_util.keystr(path) or "(root)"


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array without its batch axis, with its bounds where they are known."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    minimum: float | None = None
    maximum: float | None = None


@dataclasses.dataclass(frozen=True)
class DiscreteSpec:
    """One of `num_actions` integers, the first of which is `start`. An action is a scalar of `dtype`.

    Raises:
        ValueError: There is no action.
    """

    num_actions: int
    start: int = 0
    dtype: str = "int32"

    def __post_init__(self) -> None:
        if self.num_actions < 1:
            raise ValueError(f"num_actions is {self.num_actions}; a discrete action needs at least 1")


@dataclasses.dataclass(frozen=True)
class MultiDiscreteSpec:
    """Several independent discrete components. An action is a vector `[len(num_actions)]` of `dtype`.

    Raises:
        ValueError: There is no component, or one of them has no action.
    """

    num_actions: tuple[int, ...]
    dtype: str = "int32"

    def __post_init__(self) -> None:
        if not self.num_actions or min(self.num_actions) < 1:
            raise ValueError(f"num_actions is {self.num_actions}; every component needs at least 1 action")

    def split(self, x: Shaped[Array, "*B A"]) -> list[Shaped[Array, "*B n"]]:
        """What is side by side for all actions of all components, such as a mask or logits, by component."""
        ends = itertools.accumulate(self.num_actions)
        return [x[..., end - size : end] for end, size in zip(ends, self.num_actions, strict=True)]


@dataclasses.dataclass(frozen=True)
class BoundedSpec:
    """A vector of reals, each between its finite bounds. An action is float32 `[len(low)]`.

    Environments whose action is a scalar or has more axes reshape in their adapter.

    Raises:
        ValueError: A bound is not finite, or a lower one not below the upper one.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        bounds = np.asarray([self.low, self.high], np.float64)
        if not np.isfinite(bounds).all() or (bounds[0] >= bounds[1]).any():
            raise ValueError(f"continuous actions need finite bounds with low < high; got {self.low} and {self.high}")


ActionSpec = DiscreteSpec | MultiDiscreteSpec | BoundedSpec


@dataclasses.dataclass(frozen=True)
class EnvironmentSpec:
    """What an agent knows of its environment.

    Attributes:
        observation: Pytree of `ArraySpec`; a `MaskedObservation` of them where actions can be illegal.
        action: The action space.

    Raises:
        ValueError: The action mask is not what the action space needs: bool, of shape `(num_actions,)` or, if
            multi-discrete, `(sum(num_actions),)`. Real actions have none.
    """

    observation: Any
    action: ActionSpec

    def __post_init__(self) -> None:
        mask: Any = split_mask(self.observation)[1]
        if mask is None:
            return
        if isinstance(self.action, BoundedSpec):
            raise ValueError(f"the observation has an action mask, {mask}; actions that are real have none")
        needed = (int(np.sum(self.action.num_actions)),)
        if not isinstance(mask, ArraySpec) or mask.shape != needed or np.dtype(mask.dtype) != bool:
            raise ValueError(f"the action mask is {mask}; {self.action} needs one of shape {needed} and dtype bool")

    def __hash__(self) -> int:
        leaves, structure = jax.tree.flatten(self.observation)
        return hash((tuple(leaves), structure, self.action))
