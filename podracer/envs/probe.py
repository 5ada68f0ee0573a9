"""Environments whose optimal returns and values are known exactly, each of which isolates one thing an agent must do.

An agent that fails one of them and passes those before it points to its own fault: the value loss (constant reward),
the network's input (reward of the observation), discounting (delayed reward), the policy's gradient (action matters),
recurrence (memory), and the action spaces. With one step per episode the discount plays no part.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PyTree

from podracer.envs.base import Step
from podracer.types import (
    ArraySpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MaskedObservation,
    MultiDiscreteSpec,
)

_SIGN = ArraySpec((1,), "float32", -1, 1)


def _sign(key: jax.Array) -> Float[Array, "1"]:
    return jnp.where(jax.random.bernoulli(key), 1.0, -1.0).astype(jnp.float32)[None]


def _step(observation: PyTree, reward: jax.Array, over: Bool[Array, ""] | bool = True) -> Step:
    return Step(observation, jnp.float32(reward), terminated=jnp.bool_(over), truncated=jnp.bool_(False))


@dataclasses.dataclass(frozen=True)
class ProbeConstantReward:
    """One step, observation 0, reward 1 whatever the action. Return 1; value 1."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((1,), "float32", 0, 0), DiscreteSpec(2))

    def reset(self, key: jax.Array) -> tuple[tuple[()], Float[Array, "1"]]:
        return (), jnp.zeros(1, jnp.float32)

    def step(self, state: tuple[()], action: Int32[Array, ""], key: jax.Array) -> tuple[tuple[()], Step]:
        return (), _step(jnp.zeros(1, jnp.float32), jnp.float32(1))


@dataclasses.dataclass(frozen=True)
class ProbeObservationReward:
    """One step, observation -1 or 1 at random, the reward is the observation. Mean return 0; value(o) = o."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(_SIGN, DiscreteSpec(2))

    def reset(self, key: jax.Array) -> tuple[Float[Array, "1"], Float[Array, "1"]]:
        observation = _sign(key)
        return observation, observation

    def step(
        self, state: Float[Array, "1"], action: Int32[Array, ""], key: jax.Array
    ) -> tuple[Float[Array, "1"], Step]:
        return state, _step(state, state[0])


@dataclasses.dataclass(frozen=True)
class ProbeDelayedReward:
    """`length` steps, the observation is the fraction of them taken, only the last is rewarded, with 1.

    Actions do not matter. Return 1; the value after `t` steps is `discount ** (length - 1 - t)`.
    """

    length: int = 2

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length is {self.length}; an episode has at least 1 step")

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((1,), "float32", 0, 1), DiscreteSpec(2))

    def reset(self, key: jax.Array) -> tuple[Int32[Array, ""], Float[Array, "1"]]:
        return jnp.int32(0), jnp.zeros(1, jnp.float32)

    def step(self, state: Int32[Array, ""], action: Int32[Array, ""], key: jax.Array) -> tuple[Int32[Array, ""], Step]:
        state = state + 1
        over = state >= self.length
        observation = state.astype(jnp.float32)[None] / self.length
        return state, _step(observation, over.astype(jnp.float32), over)


@dataclasses.dataclass(frozen=True)
class ProbeActionMatters:
    """One step, observation -1 or 1 at random; the first action is right on -1, the second on 1.

    The reward is 1 for the right action and -1 for the other. Optimal return 1 and value 1; a random policy gets 0.

    Args:
        start: The number of the first action.
    """

    start: int = 0

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(_SIGN, DiscreteSpec(2, start=self.start))

    def reset(self, key: jax.Array) -> tuple[Float[Array, "1"], Float[Array, "1"]]:
        observation = _sign(key)
        return observation, observation

    def step(
        self, state: Float[Array, "1"], action: Int32[Array, ""], key: jax.Array
    ) -> tuple[Float[Array, "1"], Step]:
        right = (action - self.start).astype(jnp.int32) == (state[0] > 0).astype(jnp.int32)
        return state, _step(state, jnp.where(right, 1.0, -1.0))


@dataclasses.dataclass(frozen=True)
class ProbeMemory:
    """A cue of -1 or 1 on the first observation; the action `length` steps later must agree with it.

    The observation is `[cue, now]`: the cue at step 0 only and 0 after it, and `now` is 1 at step `length`, when the
    action counts, and 0 before. There the first action is right for -1 and the second for 1, with reward 1 for the
    right one and -1 for the other, and the episode ends: it has `length + 1` steps. All other rewards are 0.

    Optimal return 1, with memory; the value at step `t` is `discount ** (length - t)`. Without memory every policy has
    mean return 0.
    """

    length: int = 5

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length is {self.length}; the cue has to be remembered for at least 1 step")

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((2,), "float32", -1, 1), DiscreteSpec(2))

    def reset(self, key: jax.Array) -> tuple[tuple[Float[Array, "1"], Int32[Array, ""]], Float[Array, "2"]]:
        cue = _sign(key)
        return (cue, jnp.int32(0)), jnp.concatenate([cue, jnp.zeros(1, jnp.float32)])

    def step(
        self, state: tuple[Float[Array, "1"], Int32[Array, ""]], action: Int32[Array, ""], key: jax.Array
    ) -> tuple[tuple[Float[Array, "1"], Int32[Array, ""]], Step]:
        cue, time = state
        over = time == self.length
        outcome = jnp.where(action == (cue[0] > 0).astype(action.dtype), 1.0, -1.0)
        now = (time + 1 == self.length).astype(jnp.float32)
        observation = jnp.stack([jnp.zeros((), jnp.float32), now])
        return (cue, time + 1), _step(observation, jnp.where(over, outcome, 0.0), over)


@dataclasses.dataclass(frozen=True)
class ProbeContinuous:
    """One step; the action has to point at the observation, through bounds that are not symmetric.

    The observation is uniform in `[-1, 1]`, `[2]`. The action's bounds are `[-1, 3]` and `[0, 10]`; the right action is
    as far between its bounds as the observation is between -1 and 1. The reward is 1 minus the mean square of the
    distance to it, in units of half the width of the bounds. Optimal return 1 and value 1; a uniformly random policy
    has mean return 1/3.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((2,), "float32", -1, 1), BoundedSpec((-1.0, 0.0), (3.0, 10.0)))

    def reset(self, key: jax.Array) -> tuple[Float[Array, "2"], Float[Array, "2"]]:
        observation = jax.random.uniform(key, (2,), jnp.float32, -1, 1)
        return observation, observation

    def step(
        self, state: Float[Array, "2"], action: Float[Array, "2"], key: jax.Array
    ) -> tuple[Float[Array, "2"], Step]:
        centre, half = jnp.asarray([1, 5], jnp.float32), jnp.asarray([2, 5], jnp.float32)
        distance = (action - centre) / half - state
        return state, _step(state, 1 - jnp.mean(distance**2))


@dataclasses.dataclass(frozen=True)
class ProbeMultiDiscrete:
    """One step; each component of the action has to equal the number that the observation shows, one-hot.

    The components have 2 and 3 actions, and the observation is `[5]`. The reward is the fraction of components that are
    right. Optimal return 1 and value 1; a uniformly random policy has mean return 5/12.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((5,), "float32", 0, 1), MultiDiscreteSpec((2, 3)))

    def reset(self, key: jax.Array) -> tuple[Int32[Array, "2"], Float[Array, "5"]]:
        goal = jax.random.randint(key, (2,), 0, jnp.asarray([2, 3], jnp.int32), jnp.int32)
        return goal, self._show(goal)

    def step(
        self, state: Int32[Array, "2"], action: Int32[Array, "2"], key: jax.Array
    ) -> tuple[Int32[Array, "2"], Step]:
        return state, _step(self._show(state), jnp.mean((action == state).astype(jnp.float32)))

    def _show(self, goal: Int32[Array, "2"]) -> Float[Array, "5"]:
        shown = [jax.nn.one_hot(goal[0], 2, dtype=jnp.float32), jax.nn.one_hot(goal[1], 3, dtype=jnp.float32)]
        return jnp.concatenate(shown)


@dataclasses.dataclass(frozen=True)
class ProbeMasked:
    """One step, four actions of which a random non-empty set is legal; the legal action of the highest number is right.

    The observation is the mask again, as numbers. Reward 1 for the right action, 0 for another legal one, and -1 for an
    illegal one, which an agent that reads the mask never takes. Optimal return 1 and value 1; a uniformly random legal
    policy has mean return 103/180.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        mask: Any = ArraySpec((4,), "bool")
        return EnvironmentSpec(MaskedObservation(ArraySpec((4,), "float32", 0, 1), mask), DiscreteSpec(4))

    def reset(self, key: jax.Array) -> tuple[Bool[Array, "4"], MaskedObservation]:
        # The bits of 1 .. 15 are the non-empty sets, each as likely as the others.
        mask = (jax.random.randint(key, (), 1, 16, jnp.int32) >> jnp.arange(4, dtype=jnp.int32)) % 2 == 1
        return mask, self._observation(mask)

    def step(self, state: Bool[Array, "4"], action: Int32[Array, ""], key: jax.Array) -> tuple[Bool[Array, "4"], Step]:
        highest = 3 - jnp.argmax(state[::-1])
        reward = jnp.where(state[action], jnp.where(action == highest, 1.0, 0.0), -1.0)
        return state, _step(self._observation(state), reward)

    def _observation(self, mask: Bool[Array, "4"]) -> MaskedObservation:
        return MaskedObservation(mask.astype(jnp.float32), mask)


PROBES = (
    ProbeConstantReward,
    ProbeObservationReward,
    ProbeDelayedReward,
    ProbeActionMatters,
    ProbeMemory,
    ProbeContinuous,
    ProbeMultiDiscrete,
    ProbeMasked,
)
