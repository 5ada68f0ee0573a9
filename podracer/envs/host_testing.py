"""What every host environment must satisfy, as tests to inherit.

```
from podracer.envs.host_testing import HostEnvironmentConformance

class TestGrid(HostEnvironmentConformance):
    def make(self, where):
        return Grid(where, size=5)
```

pytest collects the inherited tests. They drive batches by random legal actions and look at what is emitted. Each
failure says what is wrong and what to do about it. A test that has nothing to look at is skipped and says why.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from podracer.envs.child_processes import child_processes
from podracer.envs.host import EnvironmentSlice, HostEnvironment, check_timestep
from podracer.envs.host_recording import HostRecording, choose, random_numbers, record
from podracer.envs.recording import difference, flatten
from podracer.envs.rendering import is_frame
from podracer.envs.stream_testing import StreamConformance
from podracer.types import EnvironmentSpec, StepType, TimeStep, leaf_name, split_mask


class HostEnvironmentConformance(StreamConformance):
    """Inherit, override `make`, and declare below what is so on purpose.

    Attributes:
        num_steps: Length of the recordings. Episodes must end within it, so give `make` a short time limit.
        batch_size: Environments side by side, 2 or more.
        deterministic: The same actions always give the same episode; seeds do not matter.
        deterministic_reset: Every episode starts in the same state; seeds matter later.
        ends: False for a task that never ends.
        ends_where_it_starts: Episodes end in a state that may be that of a reset.
        discount_zero_within_episodes: The discount may be 0 before LAST, as at a lost life.
        bounds_slack: How far observations may leave the bounds in the spec, for rounding.
        tolerance: Relative and absolute difference between one environment alone and in a batch.
        patience: Seconds within which calls that are refused, `close` and the end of processes must be done.
        exceptions: Names of tests that a package cannot pass, each with the reason; they are skipped.
    """

    num_steps: ClassVar[int] = 100
    batch_size: ClassVar[int] = 4
    deterministic: ClassVar[bool] = False
    deterministic_reset: ClassVar[bool] = False
    discount_zero_within_episodes: ClassVar[bool] = False
    tolerance: ClassVar[float] = 0.0
    patience: ClassVar[float] = 10.0
    exceptions: ClassVar[Mapping[str, str]] = {}

    def make(self, where: EnvironmentSlice) -> HostEnvironment:
        """The environments of a slice; called more than once."""
        raise NotImplementedError(
            f"{type(self).__name__} must override make(where) to return the environments of the slice `where`"
        )

    @pytest.fixture(autouse=True)
    def _skip_exceptions(self, request: pytest.FixtureRequest) -> None:
        self._skip_exception(request.function.__name__)

    def _skip_exception(self, test: str) -> None:
        unknown = sorted(name for name in self.exceptions if not hasattr(self, name))
        assert not unknown, f"exceptions names {unknown[0]}, which is no test of the suite"
        if test in self.exceptions:
            pytest.skip(self.exceptions[test])

    # The spec.

    def test_spec_is_valid_and_hashable(self) -> None:
        specs = []
        for where in (self._slice(), replace(self._slice(), num_envs=1)):
            environment = self.make(where)
            try:
                specs += [environment.spec, environment.spec]
                made, asked = environment.num_envs, where.num_envs
            finally:
                environment.close()
            assert made == asked, f"num_envs is {made}; the slice has {asked}"
        self._check_leaves(specs[0])
        for spec in specs[1:]:
            assert (spec, hash(spec)) == (specs[0], hash(specs[0])), (
                "spec must be equal, and hash equally, every time and whatever the slice"
            )

    def test_emitted_shapes_and_dtypes_are_those_of_the_spec(self) -> None:
        environment = self.make(self._slice())
        try:
            timestep: Any = environment.reset()
            self._check_emitted("reset", environment.spec, timestep)
            for numbers in random_numbers(environment.spec, self.num_steps, self.batch_size):
                timestep = environment.step(choose(environment.spec, timestep.observation, numbers))
                self._check_emitted("step", environment.spec, timestep)
        finally:
            environment.close()

    # The stream.

    def test_discounts_are_0_or_1_and_0_where_an_episode_ends(self) -> None:
        timesteps = self._recorded().timesteps
        seen = np.unique(np.asarray(timesteps.discount))
        assert np.isin(seen, (0, 1)).all(), f"discounts must be 0 or 1; got {seen}"
        within = np.argwhere((timesteps.discount == 0) & (timesteps.step_type != StepType.LAST))
        if not self.discount_zero_within_episodes:
            assert not len(within), (
                f"the discount must be 1 before LAST; in row (t, b) = {within[0]} it is 0. Discounting is the agent's. "
                "Declare discount_zero_within_episodes = True if nothing that follows counts there, as at a lost life"
            )

    def test_the_action_on_last_is_ignored(self) -> None:
        recording = self._recorded()
        if not (recording.timesteps.step_type[:-1] == StepType.LAST).any():
            pytest.skip("no episode ended before the last step")
        other = random_numbers(recording.spec, self.num_steps, self.batch_size, seed=1)
        self._must_equal(
            recording,
            self._run(self._slice(), on_last=other),
            "the stream depends on the action chosen on LAST: the step after LAST must ignore it and return FIRST",
        )

    def test_episodes_start_as_differently_as_declared(self) -> None:
        starts = self._recorded().starts()
        differ = (starts != starts[0]).any()
        if self.deterministic or self.deterministic_reset:
            assert not differ, "episodes start differently, although the test declares that they start alike"
        else:
            assert differ, (
                f"all {len(starts)} episodes start alike; seed every environment with its own of where.seeds(), or "
                "declare deterministic_reset = True (deterministic = True if seeds never matter)"
            )

    def test_later_episodes_do_not_repeat_the_first(self) -> None:
        if self.deterministic or self.deterministic_reset:
            pytest.skip("every episode is declared to start alike")
        timesteps = self._recorded().timesteps
        later = [(t, b) for t, b in np.argwhere(timesteps.step_type == StepType.FIRST) if t > 0]
        if len(later) < 5:  # By chance a few episodes may repeat the first, of two possible starts.
            pytest.skip(f"{len(later)} episodes began after another; 5 are needed, so raise num_steps")
        vectors = flatten((), timesteps.observation, timesteps.step_type.shape)
        assert any((vectors[t, b] != vectors[0, b]).any() for t, b in later), (
            f"all {len(later)} later episodes start as the first one of their environment did: seed on the first reset "
            "only, and let later ones continue the environment's random numbers"
        )

    def test_last_shows_the_final_observation(self) -> None:
        self._check_ends_differ_from_starts(
            lambda step_type: self._recorded().vectors(step_type),
            "every episode ends with the observation of a reset: LAST must have the true final one, and FIRST the "
            "reset's (declare ends_where_it_starts = True if that is the task)",
        )

    # Seeds and columns.

    def test_the_same_slice_gives_the_same_stream(self) -> None:
        self._must_equal(
            self._recorded(),
            self._run(self._slice()),
            "the same slice and actions give another stream; draw from where.seeds(), and from nothing else",
        )

    def test_every_field_of_the_slice_changes_the_stream(self) -> None:
        if self.deterministic:
            pytest.skip("deterministic = True")
        recording = self._recorded()
        for field, value in (("seed", 1), ("first_index", self.batch_size), ("start", 1), ("attempt", 1)):
            other = self._run(replace(self._slice(), **{field: value}))
            for b in range(self.batch_size):
                assert self._difference(recording, other, [b], [b], 0.0) is not None, (
                    f"environment {b} of the batch gives the same stream with another {field}; seed it with "
                    "where.seeds(), or declare deterministic = True"
                )

    def test_the_environments_of_a_batch_differ(self) -> None:
        if self.deterministic:
            pytest.skip("deterministic = True")
        if split_mask(self._recorded().spec.observation)[1] is not None:
            pytest.skip("with action masks they cannot be given the same actions")
        numbers = random_numbers(self._recorded().spec, self.num_steps, self.batch_size)
        recording = self._run(self._slice(), np.broadcast_to(numbers[:, :1], numbers.shape))
        for b in range(1, self.batch_size):
            assert self._difference(recording, recording, [0], [b], 0.0) is not None, (
                f"environments 0 and {b} of a batch give the same stream for the same actions; seed each with its own "
                "of where.seeds()"
            )

    def test_an_environment_alone_gives_its_column_of_the_batch(self) -> None:
        recording = self._recorded()
        numbers = random_numbers(recording.spec, self.num_steps, self.batch_size)
        for b in sorted({0, 1, self.batch_size - 1}):
            alone = self._run(replace(self._slice(), num_envs=1, first_index=b), numbers[:, b : b + 1])
            found = self._difference(recording, alone, [b], [0], self.tolerance)
            assert found is None, (
                f"environment {b} of the batch differs from the one made alone with first_index = {b}: {found}; seed "
                "by index, share nothing between environments, and keep their order"
            )

    def test_environments_do_not_affect_each_other(self) -> None:
        recording = self._recorded()
        numbers = random_numbers(recording.spec, self.num_steps, self.batch_size).copy()
        numbers[:, 0] = random_numbers(recording.spec, self.num_steps, 1, seed=2)[:, 0]
        others = list(range(1, self.batch_size))
        found = self._difference(recording, self._run(self._slice(), numbers), others, others, 0.0)
        assert found is None, (
            f"the other environments change where environment 0 is given other actions: {found}; column b must be the "
            "same environment at every step, with random numbers of its own"
        )

    # What Sebulba's threads rely on.

    def test_a_wrong_number_of_actions_is_refused_at_once(self) -> None:
        for wrong in (self.batch_size - 1, self.batch_size + 1):
            environment = self.make(self._slice())
            try:
                observation = environment.reset().observation
                numbers = random_numbers(environment.spec, 1, self.batch_size)[0]
                action = np.resize(choose(environment.spec, observation, numbers), (wrong, *_action_shape(environment)))
                raised = self._within_patience(partial(environment.step, action), f"step with {wrong} actions")
                assert isinstance(raised, ValueError), (
                    f"step with {wrong} actions for {self.batch_size} environments must raise ValueError; "
                    f"{'it returned' if raised is None else f'it raised {type(raised).__name__}: {raised}'}. "
                    "podracer.envs.host.check_actions checks it"
                )
            finally:
                self._within_patience(environment.close, "close after a wrong number of actions")

    def test_close_may_be_called_twice_and_from_another_thread(self) -> None:
        environment = self.make(self._slice())
        environment.reset()
        for _ in range(2):
            raised = self._within_patience(environment.close, "close from another thread")
            assert raised is None, f"close raised {type(raised).__name__}: {raised}; it may be called twice"
        environment.close()

    def test_close_leaves_no_process(self) -> None:
        before = child_processes()
        self._run(self._slice(), steps=2)
        deadline = time.monotonic() + self.patience
        while (left := child_processes() - before) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"after close {len(left)} child processes still run: {sorted(left)}; close must end them"

    def test_render_gives_a_picture(self) -> None:
        environment: Any = self.make(self._slice())
        try:
            if not hasattr(environment, "render"):
                pytest.skip("the environment has no render")
            environment.reset()
            frame = environment.render()
        finally:
            environment.close()
        assert is_frame(frame), (
            f"render must return uint8 [H, W, 3]; got {getattr(frame, 'dtype', '')}{list(np.shape(frame))}"
        )

    # What the tests above share.

    def _check_emitted(self, method: str, spec: EnvironmentSpec, timestep: TimeStep) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(timestep):
            assert isinstance(leaf, np.ndarray), (
                f"{method} emits a {type(leaf).__name__} at {leaf_name(path)}; a NumPy array [B, ...] is needed"
            )
        try:
            check_timestep(method, spec, self.batch_size, timestep)
        except ValueError as error:
            raise AssertionError(str(error)) from error

    def _slice(self) -> EnvironmentSlice:
        return EnvironmentSlice(self.batch_size)

    def _run(
        self,
        where: EnvironmentSlice,
        numbers: np.ndarray | None = None,
        on_last: np.ndarray | None = None,
        steps: int | None = None,
    ) -> HostRecording:
        environment = self.make(where)
        try:
            if numbers is None:
                numbers = random_numbers(environment.spec, self.num_steps, where.num_envs)
            return record(environment, numbers[:steps], on_last)
        finally:
            environment.close()

    def _recorded(self) -> HostRecording:
        """The recording that most tests look at, made once for the class."""
        cls: Any = type(self)
        if "_recording" not in cls.__dict__:
            cls._recording = self._run(self._slice())
        return cls._recording

    def _must_equal(self, recording: HostRecording, other: HostRecording, message: str) -> None:
        found = self._difference(recording, other, ..., ..., 0.0)
        assert found is None, f"{message}: {found}"

    @staticmethod
    def _difference(a: HostRecording, b: HostRecording, a_columns: Any, b_columns: Any, tolerance: float) -> str | None:
        """The first row in which columns of two recordings differ, and how."""
        for t, (row, other) in enumerate(zip(a.rows, b.rows, strict=True)):
            emitted = jax.tree.map(lambda leaf: leaf[a_columns], row)
            found = difference(emitted, jax.tree.map(lambda leaf: leaf[b_columns], other), tolerance)
            if found is not None:
                return f"at t = {t}, {found}"
        return None

    def _within_patience(self, call: Callable[[], Any], what: str) -> Exception | None:
        """What `call` raises in another thread, in the time that there is."""
        raised: list[Exception] = []

        def run() -> None:
            try:
                call()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.patience)
        assert not thread.is_alive(), f"{what} has not returned after {self.patience} seconds; it must never block"
        return raised[0] if raised else None


def _action_shape(environment: HostEnvironment) -> tuple[int, ...]:
    numbers = random_numbers(environment.spec, 1, 1)[0]
    mask_free = replace(environment.spec, observation=split_mask(environment.spec.observation)[0])
    return choose(mask_free, (), numbers).shape[1:]
