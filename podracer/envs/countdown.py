"""Episodes of a known length: the environment to count and to bootstrap with."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from podracer.envs.base import Step
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec

_ENDINGS = ("termination", "truncation", "both")


@dataclasses.dataclass(frozen=True)
class Countdown:
    """Every episode has `length` steps, each with reward 1, and the observation is the number of steps taken, `[1]`.

    Neither actions nor keys matter. The return is exactly `length`. With `ends="termination"` (or "both", since
    termination wins) the value at step `t` is `1 + discount + ... + discount ** (length - t - 1)`, which is
    `length - t` without discounting. With `ends="truncation"` it is that plus `discount ** (length - t) * v`, where
    `v` is the value that the agent gives to the final observation, `[length]`.

    Args:
        length: Steps in an episode, 1 or more.
        ends: "termination", "truncation", or "both" at the same step.

    Raises:
        ValueError: Either argument is out of range.
    """

    length: int = 3
    ends: str = "termination"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length is {self.length}; an episode has at least 1 step")
        if self.ends not in _ENDINGS:
            raise ValueError(f"ends is {self.ends!r}; it must be one of {', '.join(_ENDINGS)}")

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((1,), "float32", 0, self.length), DiscreteSpec(2))

    def reset(self, key: jax.Array) -> tuple[Int32[Array, ""], Float[Array, "1"]]:
        return jnp.int32(0), jnp.zeros(1, jnp.float32)

    def step(self, state: Int32[Array, ""], action: Int32[Array, ""], key: jax.Array) -> tuple[Int32[Array, ""], Step]:
        state = state + 1
        over, never = state >= self.length, jnp.bool_(False)
        step = Step(
            observation=state.astype(jnp.float32)[None],
            reward=jnp.float32(1),
            terminated=over if self.ends != "truncation" else never,
            truncated=over if self.ends != "termination" else never,
        )
        return state, step
