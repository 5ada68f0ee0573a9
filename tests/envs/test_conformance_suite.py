"""The conformance suite must pass what is right and fail what is broken, each fault by the test named for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.envs import Autoreset, Step
from podracer.envs.testing import EnvironmentConformance
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, MaskedObservation, StepType


@dataclasses.dataclass(frozen=True)
class Walk:
    """A correct environment: a walk from a random start, for five steps or until it is 3 away from 0."""

    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((2,), "float32", -4.5, 6), DiscreteSpec(2))

    def reset(self, key):
        x = jax.random.uniform(key, (), jnp.float32, -1, 1)
        return (x, jnp.int32(0)), self.observe((x, jnp.int32(0)))

    def step(self, state, action, key):
        noise = jax.random.uniform(key, (), jnp.float32, -0.3, 0.3)
        state = state[0] + jnp.where(action == 1, 1.0, -1.0) + noise, state[1] + 1
        over = jnp.abs(state[0]) > 3, state[1] >= 5
        return state, Step(self.observe(state), jnp.float32(1), *over)

    def observe(self, state):
        return jnp.stack([state[0], state[1].astype(jnp.float32)])


class WrongShape(Walk):
    def reset(self, key):
        state, observation = super().reset(key)
        return state, observation.astype(jnp.float16)


class WrongBounds(Walk):
    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((2,), "float32", -1, 6), DiscreteSpec(2))


class UnequalSpecs(Walk):
    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((2,), "float32", -4.5, 6 + np.random.default_rng().random()), DiscreteSpec(2))


class NotFinite(Walk):
    def step(self, state, action, key):
        state, step = super().step(state, action, key)
        return state, dataclasses.replace(step, reward=jnp.where(state[1] == 2, jnp.nan, step.reward))


class EmptyMask(Walk):
    @property
    def spec(self):
        return EnvironmentSpec(MaskedObservation(super().spec.observation, ArraySpec((2,), "bool")), DiscreteSpec(2))

    def observe(self, state):
        return MaskedObservation(super().observe(state), jnp.broadcast_to(state[1] != 5, (2,)))


class NeverEnds(Walk):
    def step(self, state, action, key):
        state, step = super().step(state, action, key)
        never = jnp.bool_(False)
        return state, dataclasses.replace(step, terminated=never, truncated=never)


class SameStart(Walk):
    def reset(self, key):
        return super().reset(jax.random.key(0))


class IgnoresKeys(SameStart):
    def step(self, state, action, key):
        return super().step(state, jnp.int32(1), jax.random.key(0))


class ResetsItself(Walk):
    def step(self, state, action, key):
        step_key, reset_key = jax.random.split(key)
        state, step = super().step(state, action, step_key)
        fresh, observation = self.reset(reset_key)
        over = step.terminated | step.truncated
        state = jax.tree.map(lambda a, b: jnp.where(over, a, b), fresh, state)
        return state, dataclasses.replace(step, observation=jnp.where(over, observation, step.observation))


class GlobalRandomness(Walk):
    def reset(self, key):
        x = jax.random.uniform(key, (), jnp.float32, -1, 1) + np.float32(np.random.default_rng().random())
        return (x, jnp.int32(0)), self.observe((x, jnp.int32(0)))


class CallsHome(Walk):
    """State outside of the functions, through a callback."""

    def reset(self, key):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        draw = jax.pure_callback(
            lambda _: np.float32(np.random.default_rng().random()), shape, key, vmap_method="sequential"
        )
        return (draw, jnp.int32(0)), self.observe((draw, jnp.int32(0)))


class KeyTwice(Walk):
    def reset(self, key):
        x = jax.random.uniform(key, (), jnp.float32, -1, 1) + 0.1 * jax.random.normal(key, (), jnp.float32)
        return (x, jnp.int32(0)), self.observe((x, jnp.int32(0)))


class NotAnArray(Walk):
    def reset(self, key):
        state, observation = super().reset(key)
        return (*state, "level one"), observation


class BadPicture(Walk):
    def render(self, state):
        return np.zeros((8, 8), np.float32)


class BrokenStream(Autoreset):
    """A stream for an environment that is right, wrong in the way that its subclass says."""


class StaysLast(BrokenStream):
    def _step(self, state, action, key):
        state, timestep = super()._step(state, action, key)
        wrong = jnp.where(timestep.step_type == StepType.FIRST, jnp.int8(StepType.MID), timestep.step_type)
        return state, dataclasses.replace(timestep, step_type=wrong)


class RewardOnFirst(BrokenStream):
    def _reset(self, key):
        state, timestep = super()._reset(key)
        return state, dataclasses.replace(timestep, reward=jnp.float32(1))


class DiscountOnFirst(BrokenStream):
    def _reset(self, key):
        state, timestep = super()._reset(key)
        return state, dataclasses.replace(timestep, discount=jnp.float32(0))


class ActsOnLast(BrokenStream):
    def _step(self, state, action, key):
        following, timestep = super()._step(state, action, key)
        shown = timestep.observation + jnp.where(state[1] == StepType.LAST, action.astype(jnp.float32), 0.0)
        return following, dataclasses.replace(timestep, observation=shown)


class HidesTheEnd(BrokenStream):
    """The observation of a reset in the place of the final one, as in a stream that resets at once."""

    def _step(self, state, action, key):
        following, timestep = super()._step(state, action, key)
        first = self.environment.reset(jax.random.key(3))[1]
        shown = jnp.where(timestep.step_type == StepType.LAST, first, timestep.observation)
        return following, dataclasses.replace(timestep, observation=shown)


class TruncationIsTermination(BrokenStream):
    def _step(self, state, action, key):
        following, timestep = super()._step(state, action, key)
        over = timestep.step_type == StepType.LAST
        return following, dataclasses.replace(timestep, discount=jnp.where(over, jnp.float32(0), timestep.discount))


class TerminationIsTruncation(BrokenStream):
    def _step(self, state, action, key):
        following, timestep = super()._step(state, action, key)
        return following, dataclasses.replace(timestep, discount=jnp.float32(1))


class MixesTheBatch(BrokenStream):
    def step(self, state, action, keys):
        return super().step(state, action, jnp.broadcast_to(keys[0], keys.shape))


class CachesTheStart(BrokenStream):
    """Every episode of an environment starts as its first one did, as in Brax. The start is kept with the state."""

    def reset(self, keys):
        state, timestep = super().reset(keys)
        return (*state, (state[0], timestep.observation)), timestep

    def step(self, state, action, keys):
        (inner, step_type), timestep = super().step(state[:2], action, keys)
        start, observation = state[2]
        first = timestep.first()
        inner = jax.tree.map(lambda a, b: jnp.where(first, a, b), start, inner)
        observation = jnp.where(first[:, None], observation, timestep.observation)
        return (inner, step_type, state[2]), dataclasses.replace(timestep, observation=observation)


class WeakTypes(BrokenStream):
    def _reset(self, key):
        state, timestep = super()._reset(key)
        return state, dataclasses.replace(timestep, reward=0.0)


class ChangesType(BrokenStream):
    def reset(self, keys):
        state, timestep = super().reset(keys)
        return state, dataclasses.replace(timestep, discount=timestep.discount.astype(jnp.int32))


def suite(environment, stream=Autoreset, **declared):
    """An instance of the suite for an environment's class."""
    methods = {"make": lambda self: environment(), "stream": lambda self: stream(environment()), "num_steps": 40}
    return type("Suite", (EnvironmentConformance,), {**methods, **declared})()


def outcomes(instance):
    """The tests that fail and those that are skipped, with their messages."""
    failed, skipped = {}, {}
    for name in (name for name in dir(instance) if name.startswith("test_")):
        try:
            getattr(instance, name)()
        except pytest.skip.Exception as reason:
            skipped[name] = str(reason)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed, skipped


def test_a_correct_environment_passes_every_test_that_applies():
    failed, skipped = outcomes(suite(Walk))
    assert failed == {}
    assert skipped == {
        "test_every_mask_leaves_a_legal_action": "observations have no action mask",
        "test_render_gives_a_picture": "the environment has no render",
    }


@pytest.mark.parametrize(
    ("environment", "test", "message"),
    [
        (WrongShape, "test_emitted_shapes_and_dtypes_are_those_of_the_spec", "reset emits float16[2] at (root)"),
        (WrongBounds, "test_observations_stay_within_the_bounds_of_the_spec", "the spec says -1 to 6"),
        (UnequalSpecs, "test_spec_is_valid_and_hashable", "must be equal"),
        (NotFinite, "test_emissions_are_finite", ".reward is not finite"),
        (EmptyMask, "test_every_mask_leaves_a_legal_action", "no legal action"),
        (NeverEnds, "test_an_episode_ends", "no episode ended within num_steps = 40"),
        (SameStart, "test_episodes_start_as_differently_as_declared", "use the key in reset"),
        (IgnoresKeys, "test_other_keys_give_another_stream", "declare deterministic = True"),
        (ResetsItself, "test_the_environment_does_not_reset_itself", "leave resetting to podracer.envs.Autoreset"),
        (GlobalRandomness, "test_one_environment_alone_gives_its_stream_in_a_batch", "and from nothing else"),
        (CallsHome, "test_the_same_keys_give_the_same_stream", "another stream at t = "),
        (KeyTwice, "test_no_key_is_used_twice", "split it first"),
        (NotAnArray, "test_state_is_a_pytree_of_arrays", "the state at [2] is a str"),
        (BadPicture, "test_render_gives_a_picture", "got float32[8, 8]"),
    ],
)
def test_a_broken_environment_fails_the_test_named_for_its_fault(environment, test, message):
    with pytest.raises(AssertionError) as error:
        getattr(suite(environment), test)()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("stream", "test", "message"),
    [
        (StaysLast, "test_first_comes_from_reset_and_after_last_only", "FIRST must come after LAST"),
        (RewardOnFirst, "test_first_has_reward_0_and_discount_1", "rewards on FIRST must be 0"),
        (DiscountOnFirst, "test_first_has_reward_0_and_discount_1", "discounts on FIRST must be 1"),
        (ActsOnLast, "test_the_action_on_last_is_ignored", "depends on the action"),
        (HidesTheEnd, "test_last_rows_are_those_of_the_raw_step", "is not what the raw step gives"),
        (TruncationIsTermination, "test_discount_tells_termination_from_truncation", "1 after a mere truncation"),
        (TerminationIsTruncation, "test_discount_tells_termination_from_truncation", "0 after a termination"),
        (MixesTheBatch, "test_one_environment_alone_gives_its_stream_in_a_batch", "in a batch of 4 differs at t ="),
        (CachesTheStart, "test_later_episodes_do_not_repeat_the_first", "start as the first one of their environment"),
        (WeakTypes, "test_types_are_strong_and_constant", "weakly typed"),
        (ChangesType, "test_types_are_strong_and_constant", "from reset and"),
    ],
)
def test_a_broken_stream_fails_the_test_named_for_its_fault(stream, test, message):
    with pytest.raises(AssertionError) as error:
        getattr(suite(Walk, stream), test)()
    assert message in str(error.value)


def test_a_false_declaration_fails():
    with pytest.raises(AssertionError, match="although the test declares"):
        suite(Walk, deterministic_reset=True).test_episodes_start_as_differently_as_declared()


def test_declarations_allow_what_they_name():
    failed, skipped = outcomes(suite(IgnoresKeys, deterministic=True))
    assert failed == {}
    assert {"test_later_episodes_do_not_repeat_the_first", "test_other_keys_give_another_stream"} <= set(skipped)


@pytest.mark.parametrize(
    ("declared", "skipped"),
    [
        # Too few steps for an episode to end, and an environment in which none does.
        ({"num_steps": 2, "ends": False}, "an_episode_ends"),
        ({"num_steps": 2}, "last_rows_are_those_of_the_raw_step"),
        ({"num_steps": 2}, "the_action_on_last_is_ignored"),
        ({"num_steps": 2}, "the_environment_does_not_reset_itself"),
        ({"num_steps": 2}, "later_episodes_do_not_repeat_the_first"),
        ({"ends_where_it_starts": True}, "the_environment_does_not_reset_itself"),
        ({"deterministic_reset": True}, "later_episodes_do_not_repeat_the_first"),
    ],
)
def test_a_test_with_nothing_to_look_at_is_skipped(declared, skipped):
    with pytest.raises(pytest.skip.Exception):
        getattr(suite(Walk, **declared), f"test_{skipped}")()


def test_make_must_be_overridden():
    with pytest.raises(NotImplementedError, match=r"must override make\(\)"):
        EnvironmentConformance().test_spec_is_valid_and_hashable()
