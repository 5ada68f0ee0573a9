"""The environments that the agent conformance suite brings along: one to act in, and one that tells endings apart."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PyTree

from podracer.envs.base import Step
from podracer.types import (
    ActionSpec,
    ArraySpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MaskedObservation,
    MultiDiscreteSpec,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PatchworkState:
    time: Int32[Array, ""]
    length: Int32[Array, ""]
    truncates: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class Patchwork:
    """Episodes of 1 to 3 steps, half of which are truncated, with any kind of action.

    The observation is `[time / 3, length / 3, truncates, noise]`, and the reward is 1 plus the noise, which is uniform
    in `[-1, 1]`. With `masked` every action but the last of each component is legal half of the time.
    """

    action: ActionSpec
    masked: bool = False

    @property
    def spec(self) -> EnvironmentSpec:
        observation: Any = ArraySpec((4,), "float32", -1, 1)
        if self.masked:
            observation = MaskedObservation(observation, ArraySpec((sum(self._sizes()),), "bool"))  # type: ignore[arg-type]
        return EnvironmentSpec(observation, self.action)

    def reset(self, key: jax.Array) -> tuple[PatchworkState, PyTree]:
        length_key, ending_key, key = jax.random.split(key, 3)
        length = jax.random.randint(length_key, (), 1, 4, jnp.int32)
        state = PatchworkState(jnp.int32(0), length, jax.random.bernoulli(ending_key))
        return state, self._observe(state, key)[0]

    def step(self, state: PatchworkState, action: PyTree, key: jax.Array) -> tuple[PatchworkState, Step]:
        state = dataclasses.replace(state, time=state.time + 1)
        observation, noise = self._observe(state, key)
        over = state.time == state.length
        return state, Step(observation, 1 + noise, over & ~state.truncates, over & state.truncates)

    def _observe(self, state: PatchworkState, key: jax.Array) -> tuple[PyTree, Float[Array, ""]]:
        noise_key, mask_key = jax.random.split(key)
        noise = jax.random.uniform(noise_key, (), jnp.float32, -1, 1)
        vector = jnp.stack([x.astype(jnp.float32) for x in (state.time / 3, state.length / 3, state.truncates, noise)])
        if not self.masked:
            return vector, noise
        sizes = self._sizes()
        # The last of each component stays legal, and not the first, which an arg max over equal numbers would take.
        always = [place == size - 1 for size in sizes for place in range(size)]
        return MaskedObservation(vector, jax.random.bernoulli(mask_key, 0.5, (sum(sizes),)) | jnp.array(always)), noise

    def _sizes(self) -> tuple[int, ...]:
        match self.action:
            case DiscreteSpec():
                return (self.action.num_actions,)
            case MultiDiscreteSpec():
                return self.action.num_actions
            case BoundedSpec():
                raise ValueError("continuous actions have no mask")


@dataclasses.dataclass(frozen=True)
class ProbeTruncation:
    """One step of reward 1. From the observation 1 it terminates; from -1 it is truncated, and 1 is observed last.

    So the value of 1 is exactly 1, and that of -1 is `1 + discount`. An agent that takes truncation for termination
    says 1 for both, one that takes termination for truncation says `1 / (1 - discount)`, and one that bootstraps from
    the first observation of the next episode says something in between.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((1,), "float32", -1, 1), DiscreteSpec(2))

    def reset(self, key: jax.Array) -> tuple[Bool[Array, ""], Float[Array, "1"]]:
        truncates = jax.random.bernoulli(key)
        return truncates, jnp.where(truncates, -1.0, 1.0).astype(jnp.float32)[None]

    def step(self, state: Bool[Array, ""], action: Int32[Array, ""], key: jax.Array) -> tuple[Bool[Array, ""], Step]:
        return state, Step(jnp.ones(1, jnp.float32), jnp.float32(1), ~state, state)
