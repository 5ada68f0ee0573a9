"""What an environment is: two pure functions on one environment, without batch, reset or time-out bookkeeping."""

import dataclasses
from typing import Protocol, TypeVar

import jax
from jaxtyping import Array, Bool, Float, PyTree

from podracer.types import EnvironmentSpec

State = TypeVar("State")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What one raw step gives.

    Attributes:
        observation: After the step; where the episode ends, the true final observation.
        reward: Scalar.
        terminated: The episode reached an end of the task: the value of what follows is 0.
        truncated: The episode was cut, by a time limit for instance: what follows still has a value.
            Where both are true, termination wins.
    """

    observation: PyTree
    reward: Float[Array, ""]
    terminated: Bool[Array, ""]
    truncated: Bool[Array, ""]


class Environment(Protocol[State]):
    """A single environment written in JAX.

    `podracer.envs.Autoreset` makes the batched, self-resetting stream of timesteps out of it, so an environment never
    resets itself. An environment may also have `render(state) -> uint8 [H, W, 3]`, in NumPy, outside `jit`; it is used
    to record episodes.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """Observation and action spaces."""
        ...

    def reset(self, key: jax.Array) -> tuple[State, PyTree]:
        """A fresh episode: its state and first observation."""
        ...

    def step(self, state: State, action: PyTree, key: jax.Array) -> tuple[State, Step]:
        """One step from a state in which the episode has not ended."""
        ...
