"""What every environment must satisfy, as tests to inherit.

```
from podracer.envs.testing import EnvironmentConformance

class TestGrid(EnvironmentConformance):
    def make(self):
        return Grid(size=5)
```

pytest collects the inherited tests. The environment is driven by random legal actions for `num_steps` steps, once for
the class, and the tests look at that recording. Each failure says what is wrong and what to do about it. A test that
has nothing to look at, of masks where there are none for instance, is skipped and says why.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from podracer.envs.actions import sample_action, sample_legal_action
from podracer.envs.autoreset import Autoreset
from podracer.envs.base import Environment, Step
from podracer.envs.recording import Recording, difference, flatten, record
from podracer.envs.rendering import is_frame
from podracer.envs.stream_testing import StreamConformance
from podracer.types import StepType, TimeStep, key_shape, leaf_name


class EnvironmentConformance(StreamConformance):
    """Inherit, override `make`, and declare below what is so on purpose.

    Attributes:
        num_steps: Length of the recording. Episodes must end within it, so give `make` a short time limit.
        batch_size: Environments recorded side by side, 2 or more.
        deterministic: The same actions always give the same episode; keys do not matter.
        deterministic_reset: Every episode starts in the same state; keys matter later.
        ends: False for a task that never ends.
        ends_where_it_starts: Episodes end in a state that may be that of a reset.
        bounds_slack: How far observations may leave the bounds in the spec, for rounding.
        tolerance: Relative and absolute difference between one environment alone and in a batch, for rounding.
    """

    batch_size: ClassVar[int] = 4
    deterministic: ClassVar[bool] = False
    deterministic_reset: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-4

    def make(self) -> Environment:
        """The environment under test; called more than once."""
        raise NotImplementedError(f"{type(self).__name__} must override make() to return the environment under test")

    def stream(self) -> Any:
        """The batched stream under test. Its state is a pair: the raw state and the type of the last timestep."""
        return Autoreset(self.make())

    # The spec.

    def test_spec_is_valid_and_hashable(self) -> None:
        spec, again = self.make().spec, self.make().spec
        self._check_leaves(spec)
        assert (spec, hash(spec)) == (again, hash(again)), "spec must be equal, and hash equally, every time"

    def test_emitted_shapes_and_dtypes_are_those_of_the_spec(self) -> None:
        environment = self.make()
        state, first = jax.eval_shape(environment.reset, key_shape())
        _, step = jax.eval_shape(environment.step, state, _action_shape(environment), key_shape())
        assert isinstance(step, Step), f"step must return (state, Step); got a {type(step).__name__}"
        specs = jax.tree_util.tree_leaves_with_path(environment.spec.observation)
        for method, emitted in (("reset", first), ("step", step.observation)):
            for (path, spec), leaf in zip(specs, jax.tree.leaves(emitted), strict=True):
                assert (leaf.shape, str(leaf.dtype)) == (spec.shape, spec.dtype), (
                    f"{method} emits {leaf.dtype}{list(leaf.shape)} at {leaf_name(path)}, "
                    f"the spec says {spec.dtype}{list(spec.shape)}"
                )

    # The stream.

    def test_the_action_on_last_is_ignored(self) -> None:
        recording = self._recorded()
        rows = [t for t, _ in recording.rows(StepType.LAST) if t < self.num_steps]
        if not rows:
            pytest.skip("no episode ended before the last step")
        for t in rows[:3]:
            last = recording.timesteps.step_type[t] == StepType.LAST
            after = []
            for other in (t, t - 1, t - 2):
                with jax.debug_key_reuse(False):  # The same keys again: only the actions differ.
                    action = jax.tree.map(lambda x, i=other: x[i], recording.actions)
                    state = jax.tree.map(lambda x, t=t: x[t], recording.states)
                    _, timestep = recording.step(state, action, recording.keys[t])
                after.append([np.asarray(leaf)[last] for leaf in jax.tree.leaves(timestep)])
            for timestep in after[1:]:
                found = difference(timestep, after[0], 0)
                assert found is None, f"the step after LAST depends on the action: {found}"

    def test_episodes_start_as_differently_as_declared(self) -> None:
        recording = self._recorded()
        starts = recording.vectors(recording.rows(StepType.FIRST))
        for i in range(8 if (starts == starts[0]).all() else 0):  # There may be only two starts, hence eight tries.
            state, timestep = recording.reset(jax.random.split(jax.random.key(100 + i), self.batch_size))
            starts = np.concatenate([starts, flatten(state[0], timestep.observation, (self.batch_size,))])
        differ = (starts != starts[0]).any()
        if self.deterministic or self.deterministic_reset:
            assert not differ, "episodes start differently, although the test declares that they start alike"
        else:
            assert differ, (
                f"all {len(starts)} episodes start alike, whatever the key; use the key in reset, or declare "
                "deterministic_reset = True (deterministic = True if keys never matter)"
            )

    def test_later_episodes_do_not_repeat_the_first(self) -> None:
        if self.deterministic or self.deterministic_reset:
            pytest.skip("every episode is declared to start alike")
        recording = self._recorded()
        # Each against its own environment's: a stream that keeps every environment's first start has different ones.
        later = [(t, b) for t, b in recording.rows(StepType.FIRST) if t > 0]
        if len(later) < 5:  # By chance a few episodes may repeat the first, of two possible starts.
            pytest.skip(f"{len(later)} episodes began after another; 5 are needed, so raise num_steps")
        repeated = recording.vectors(later) == recording.vectors([(0, b) for _, b in later])
        assert not repeated.all(), (
            f"all {len(later)} later episodes start as the first one of their environment did: reset from a new key "
            "each time, and keep no first state"
        )

    def test_the_environment_does_not_reset_itself(self) -> None:
        self._check_ends_differ_from_starts(
            lambda step_type: self._recorded().vectors(self._recorded().rows(step_type)),
            "every episode ends in the state of a reset: step must return the true final state and observation, and "
            "leave resetting to podracer.envs.Autoreset (declare ends_where_it_starts = True if that is the task)",
        )

    def test_last_rows_are_those_of_the_raw_step(self) -> None:
        ends = list(self._ends())
        if not ends:
            pytest.skip("no episode ended")
        for row, raw, timestep in ends:
            expected = (raw.observation, np.reshape(raw.reward, ()))
            found = difference((timestep.observation, timestep.reward), expected, self.tolerance)
            assert found is None, f"LAST in row (t, b) = {row} is not what the raw step gives: {found}"

    def test_discount_tells_termination_from_truncation(self) -> None:
        timesteps = self._recorded().timesteps
        seen = np.unique(np.asarray(timesteps.discount))
        assert np.isin(seen, (0, 1)).all(), f"discounts must be 0 or 1; got {seen}"
        before = timesteps.discount[timesteps.step_type != StepType.LAST]
        assert (before == 1).all(), "the discount must be 1 before LAST; discounting is the agent's"
        for row, raw, timestep in self._ends():
            terminated, truncated = bool(np.all(raw.terminated)), bool(np.all(raw.truncated))
            assert terminated or truncated, f"row (t, b) = {row} is LAST but the raw step did not end the episode"
            assert timestep.discount == (0 if terminated else 1), (
                f"the discount on LAST must be 0 after a termination, 1 after a mere truncation; in row (t, b) = {row} "
                f"it is {timestep.discount} with terminated={terminated}, truncated={truncated}"
            )

    # Randomness.

    def test_the_same_keys_give_the_same_stream(self) -> None:
        recording = self._recorded()
        with jax.debug_key_reuse(False):
            state, timestep = recording.reset(recording.first_keys)
            for t in range(min(20, self.num_steps)):
                action = jax.tree.map(lambda x, t=t: x[t], recording.actions)
                state, timestep = recording.step(state, action, recording.keys[t])
                found = difference(timestep, jax.tree.map(lambda x, t=t: x[t + 1], recording.timesteps), 0)
                assert found is None, f"the same keys and actions give another stream at t = {t + 1}: {found}"

    def test_other_keys_give_another_stream(self) -> None:
        if self.deterministic:
            pytest.skip("deterministic = True")
        recording = self._recorded()
        one, other = (recording.vectors([(t, b) for t in range(self.num_steps + 1)]) for b in (0, 1))
        rewards = recording.timesteps.reward
        differ = (one != other).any() or (rewards[:, 0] != rewards[:, 1]).any()
        assert differ, (
            "environments with different keys give the same stream; use the key, or declare deterministic = True"
        )

    def test_one_environment_alone_gives_its_stream_in_a_batch(self) -> None:
        recording, (reset, step), b = self._recorded(), self._alone(), self.batch_size - 1
        with jax.debug_key_reuse(False):
            state, observation = reset(recording.first_keys[b])
            for t in range(min(25, self.num_steps)):
                row = jax.tree.map(lambda x, t=t: x[t, b], recording.timesteps)
                found = difference(row.observation, observation, self.tolerance)
                assert found is None, (
                    f"environment {b} in a batch of {self.batch_size} differs at t = {t} from the same environment, "
                    f"made again and run alone with the same keys: {found}; draw from the keys, and from nothing else"
                )
                step_key, reset_key = jax.random.split(recording.keys[t, b])
                if row.step_type == StepType.LAST:
                    state, observation = reset(reset_key)
                else:
                    state, raw = step(state, jax.tree.map(lambda x, t=t: x[t, b], recording.actions), step_key)
                    observation = raw.observation

    def test_no_key_is_used_twice(self) -> None:
        environment = self.make()
        try:
            with jax.debug_key_reuse(True):
                state, _ = jax.eval_shape(jax.jit(lambda key: environment.reset(key)), key_shape())
                step = jax.jit(lambda state, action, key: environment.step(state, action, key))
                step.trace(state, _action_shape(environment), key_shape())
        except jax.errors.KeyReuseError as error:
            raise AssertionError(f"a random key is used twice; split it first: {error}") from error

    # What compilation and recording need.

    def test_types_are_strong_and_constant(self) -> None:
        stream = self.stream()
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
        action = jax.eval_shape(lambda key: sample_action(stream.spec, key, 2), key_shape())
        before = jax.eval_shape(stream.reset, keys)
        after = jax.eval_shape(stream.step, before[0], action, keys)
        for (path, a), (other, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (before, after)), strict=True):
            assert path == other, f"reset returns {leaf_name(path)} where step returns {leaf_name(other)}"
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{leaf_name(path)} is {a} from reset and {b} from step"
            assert not any((a.weak_type, b.weak_type)), (
                f"{leaf_name(path)} is weakly typed, so everything compiles twice"
            )

    def test_steps_inside_scan_and_vmap(self) -> None:
        stream = self.stream()

        def unroll(key: jax.Array) -> TimeStep:
            def body(carry: Any, key: jax.Array) -> Any:
                action_key, step_key = jax.random.split(key)
                action = sample_legal_action(stream.spec, carry[1].observation, action_key, 2)
                following = stream.step(carry[0], action, jax.random.split(step_key, 2))
                return following, following[1]

            reset_key, scan_key = jax.random.split(key)
            first = stream.reset(jax.random.split(reset_key, 2))
            return jax.lax.scan(body, first, jax.random.split(scan_key, 3))[1]

        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 5))
        with jax.debug_key_reuse(False):  # It takes the transposed keys of a scan under vmap for used ones.
            shapes = jax.eval_shape(jax.vmap(unroll), keys)
        assert shapes.reward.shape == (5, 3, 2), f"vmap of scan gives rewards {shapes.reward.shape}, not (5, 3, 2)"

    def test_state_is_a_pytree_of_arrays(self) -> None:
        environment = self.make()

        def check(key: jax.Array) -> None:
            for path, leaf in jax.tree_util.tree_leaves_with_path(environment.reset(key)[0]):
                assert isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float), (
                    f"the state at {leaf_name(path)} is a {type(leaf).__name__}, not an array; register its class as a "
                    "pytree (jax.tree_util.register_dataclass), and keep configuration in the environment"
                )

        jax.eval_shape(check, key_shape())

    def test_render_gives_a_picture(self) -> None:
        render = getattr(self.make(), "render", None)
        if render is None:
            pytest.skip("the environment has no render")
        frame = render(self._alone()[0](jax.random.key(0))[0])
        assert is_frame(frame), (
            f"render must return uint8 [H, W, 3]; got {getattr(frame, 'dtype', '')}{list(np.shape(frame))}"
        )

    def _alone(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`reset` and `step` of the environment, made again and compiled without a batch."""
        if "_compiled" not in type(self).__dict__:
            environment = self.make()
            type(self)._compiled = jax.jit(environment.reset), jax.jit(environment.step)  # type: ignore[attr-defined]
        return type(self)._compiled  # type: ignore[attr-defined]

    def _recorded(self) -> Recording:
        if "_recording" not in type(self).__dict__:
            with jax.debug_key_reuse(False):  # What is recorded is run again with the same keys.
                recording = record(self.stream(), self.batch_size, self.num_steps)
            type(self)._recording = recording  # type: ignore[attr-defined]
        return type(self)._recording  # type: ignore[attr-defined]

    def _ends(self) -> Iterator[tuple[tuple[int, int], Step, TimeStep]]:
        """Up to eight LAST rows: where, what the raw step gives there, and what the stream gave."""
        recording, (_, step) = self._recorded(), self._alone()
        for t, b in recording.rows(StepType.LAST)[:8]:
            with jax.debug_key_reuse(False):
                state, action = jax.tree.map(lambda x, t=t, b=b: x[t - 1, b], (recording.states[0], recording.actions))
                _, raw = step(state, action, jax.random.split(recording.keys[t - 1, b])[0])
            yield (t, b), jax.tree.map(np.asarray, raw), jax.tree.map(lambda x, t=t, b=b: x[t, b], recording.timesteps)


def _action_shape(environment: Environment) -> Any:
    return jax.eval_shape(lambda key: sample_action(environment.spec, key, 1)[0], key_shape())
