"""Whatever goes wrong ends the run within seconds, is named, and leaves nothing behind."""

import dataclasses
import re
import threading
import time
import traceback

import jax
import numpy as np
import pytest
from sebulba.test_sebulba import scripted
from sebulba.toys import Script, ScriptedEnvironment, Watcher

from podracer.agents import IMPALAConfig, PPOConfig
from podracer.envs import EnvironmentSlice, HostFactory
from podracer.sebulba import ActorError, Sebulba, SebulbaConfig
from podracer.types import ArraySpec

CONFIG = SebulbaConfig(8, 5, actor_devices=(0,), learner_devices=(0,), start_timeout=2.0, step_timeout=0.5)


def failing(script, **config):
    sebulba = scripted(script, start_timeout=2.0, step_timeout=0.5, **config)
    sebulba.compile()
    return sebulba


def ends(sebulba, error, match, within=5.0):
    """Runs until the error, which must come in time and leave no thread and no environment."""
    state = sebulba.init(0)
    began = time.perf_counter()
    with pytest.raises(error, match=match) as raised:
        sebulba.run(state, 1000)
    assert time.perf_counter() - began < within
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("actor", "close"))]
    return raised.value


@pytest.mark.parametrize("serial", [False, True])
def test_a_crash_of_an_environment_names_thread_device_and_environment_and_keeps_its_traceback(serial):
    script = Script(fail_at=7, fail_in=1)
    match = r"^actor 1 on .*0, scripted 4 to 7: step: RuntimeError: the emulator crashed$"
    error = ends(failing(script, serial=serial), ActorError, match)
    where = traceback.extract_tb(error.__cause__.__traceback__)[-1]
    assert where.filename.endswith("toys.py")
    assert not script.open


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_environment_cannot_end_the_program(error):
    class Ending(ScriptedEnvironment):
        def step(self, action):
            raise error(3)

    sebulba = failing(Script())
    sebulba.environments = HostFactory("ending", lambda where: Ending(Script(), where))
    ends(sebulba, ActorError, rf"actor \d .*: step: {error.__name__}: 3")


def test_which_of_the_environments_failed_is_said_where_it_is_known():
    class Knowing(ScriptedEnvironment):
        def step(self, action):
            error = ValueError("no such level")
            error.add_note("in environment 6 of scripted")
            error.add_note("The traceback of its process:\nof many lines")
            raise error

    sebulba = failing(Script())
    sebulba.environments = HostFactory("scripted", lambda where: Knowing(Script(), where))
    ends(sebulba, ActorError, r"^actor \d .*: step: ValueError: no such level, in environment 6 of scripted$")


def test_environments_that_cannot_be_closed_are_made_anew_all_the_same():
    class Broken(ScriptedEnvironment):
        def close(self):
            if self.steps == 6:
                raise BrokenPipeError("closed already")
            super().close()

    script = Script(fail_at=7, fail_in=1, fail_times=1)
    sebulba = failing(script, max_restarts=1)
    sebulba.environments = HostFactory("broken", lambda where: Broken(script, where))
    with sebulba:
        _, window = sebulba.run(sebulba.init(0), 4)
    assert len(window.failures) == 1


class Unclosable(ScriptedEnvironment):
    def close(self):
        super().close()
        raise OSError("no room for the replay")


@pytest.mark.parametrize("serial", [False, True])
def test_environments_that_cannot_be_closed_at_the_end_are_named(serial):
    sebulba, script = failing(Script(), serial=serial), Script()
    sebulba.environments = HostFactory("scripted", lambda where: Unclosable(script, where))
    match = r"^actor \d on .*, scripted \d to \d: close: OSError: no room for the replay$"
    with pytest.warns(RuntimeWarning, match=match) as warned, sebulba:
        sebulba.run(sebulba.init(0), 2)
    assert len(warned) == 2
    assert not script.open


def test_environments_that_cannot_be_closed_do_not_hide_what_went_wrong_before():
    sebulba, script = failing(Script()), Script(fail_at=7, fail_in=1)
    sebulba.environments = HostFactory("scripted", lambda where: Unclosable(script, where))
    error = ends(sebulba, ActorError, "the emulator crashed")
    (note,) = error.__notes__
    assert note.startswith("actor 0 on")
    assert note.endswith("close: OSError: no room for the replay")


def test_a_crash_while_the_learner_is_busy_ends_the_run_too(monkeypatch):
    sebulba = failing(Script(fail_at=7, fail_in=0))

    class Never:
        def is_ready(self):
            return False

    update = sebulba._learning.update

    def slow_update(*arguments):
        state, window = update(*arguments)
        object.__setattr__(window, "updates", Never())
        return state, window

    monkeypatch.setattr(sebulba._learning, "update", slow_update)
    ends(sebulba, ActorError, "the emulator crashed")


class Stalling(Watcher):
    """Whose devices are busy for longer than they may be."""

    def __init__(self, when):
        super().__init__()
        object.__setattr__(self, "when", when)

    def act(self, params, timestep, actor_state, key, *, evaluate=False):
        output = super().act(params, timestep, actor_state, key, evaluate=evaluate)
        return dataclasses.replace(output, action=self._stall("act", output.action))

    def update(self, learner, memory, trajectory, key, *, axis=None):
        learner, memory, metrics = super().update(learner, memory, trajectory, key, axis=axis)
        return learner | {"updates": self._stall("update", learner["updates"])}, memory, metrics

    def _stall(self, activity, array):
        def stall(array):
            time.sleep(2)
            return array

        return jax.pure_callback(stall, array, array) if activity == self.when else array


@pytest.mark.parametrize(("when", "what"), [("act", r"actor 0 on .*, scripted 0 to 7: act"), ("update", "update 0")])
def test_a_device_that_hangs_is_named(when, what):
    config = dataclasses.replace(CONFIG, threads_per_actor_device=1, device_timeout=0.3)
    sebulba = Sebulba(Stalling(when), Script().factory(), config)
    sebulba.compile()
    ends(sebulba, TimeoutError, rf"^{what} has not come back for \d\.\d s; the limit is device_timeout, 0\.3 s")


def test_an_environment_that_hangs_is_named_and_does_not_hold_the_run():
    script = Script(hang_at=3, fail_in=1)
    sebulba = failing(script)
    state = sebulba.init(0)
    began = time.perf_counter()
    match = (
        r"^actor 1 on .*, scripted 4 to 7: step has not come back for .* s; the limit is step_timeout, 0.5 s\n"
        r"actor 1 on .*, scripted 4 to 7 did not end$"
    )
    with pytest.raises(TimeoutError, match=match):
        sebulba.run(state, 1000)
    assert time.perf_counter() - began < 5
    assert not script.open  # Of the one that hangs too: it was closed from another thread.
    script.released.set()


@pytest.mark.parametrize("hangs", [False, True])
def test_time_for_which_the_process_is_stopped_is_not_that_of_the_environments(hangs, monkeypatch):
    """Ctrl-Z, during a step that takes 0.3 s besides, and `fg` 100 s later; the limit is 0.5 s."""
    clock, stopped = time.perf_counter, []
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 100 * len(stopped))

    class Interrupted(ScriptedEnvironment):
        def step(self, action):
            if self.steps == 6 and self.where.first_index == 4:
                time.sleep(0.15)
                stopped.append(True)
                self.script.released.wait(60 if hangs else 0.15)
            return super().step(action)

    sebulba, script = failing(Script()), Script()
    sebulba.environments = HostFactory("scripted", lambda where: Interrupted(script, where))
    with sebulba:
        state, began = sebulba.init(0), clock()
        if hangs:
            with pytest.raises(TimeoutError, match=r"scripted 4 to 7: step has not come back for 10\d\.\d s"):
                sebulba.run(state, 4)
            script.released.set()
        else:
            assert sebulba.run(state, 4)[1].updates == 4
        assert clock() - began < 5
    assert stopped


def test_a_crash_ends_the_run_in_time_though_another_thread_hangs_even_when_it_is_closed():
    release = threading.Event()

    class Stuck(ScriptedEnvironment):
        def step(self, action):
            if self.where.first_index == 0 and self.steps == 5:
                release.wait(60)
            return super().step(action)

        def close(self):
            if self.where.first_index == 0 and not release.is_set():
                release.wait(60)
            super().close()

    script = Script(fail_at=7, fail_in=1)
    sebulba = failing(script)
    sebulba.environments = HostFactory("scripted", lambda where: Stuck(script, where))
    state = sebulba.init(0)
    began = time.perf_counter()
    with pytest.raises(ActorError, match="the emulator crashed"):
        sebulba.run(state, 1000)
    assert time.perf_counter() - began < 5
    release.set()


def test_a_factory_that_is_slow_is_named():
    script = Script(make_delay=3.0)
    sebulba = failing(script)
    state = sebulba.init(0)
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"actor 0 .*: make has not come back .* start_timeout, 2 s"):
        sebulba.run(state, 1)
    assert time.perf_counter() - began < 2 + 5


def test_a_factory_that_returns_nothing_is_named():
    def make(where):
        return None if where.first_index else ScriptedEnvironment(Script(), where)

    sebulba = failing(Script())
    sebulba.environments = HostFactory("forgotten", make)
    ends(sebulba, ActorError, "actor 1 .*: make: ValueError: the factory of forgotten returned None")


def test_a_factory_that_returns_nothing_at_all_is_refused_at_once():
    with pytest.raises(ValueError, match="the factory of forgotten returned None"):
        Sebulba(Watcher(), HostFactory("forgotten", lambda where: None), CONFIG)


def test_a_slow_factory_is_named_before_anything_is_compiled():
    factory = HostFactory("slow", lambda where: time.sleep(5), start_timeout=0.2)
    with pytest.raises(TimeoutError, match=r"the factory of slow: making one environment .* 0.2 s"):
        Sebulba(Watcher(), factory, CONFIG)


def test_an_environment_that_breaks_its_spec_is_named():
    class Doubling(ScriptedEnvironment):
        def reset(self):
            self.observation = self.observation.astype(np.float64)
            return super().reset()

    sebulba = failing(Script())
    sebulba.environments = HostFactory("doubling", lambda where: Doubling(Script(), where))
    ends(
        sebulba,
        ActorError,
        r"reset: ValueError: doubling emits float64\[4, 3\] at \.observation; float32\[4, 3\] is due",
    )


def test_an_environment_that_breaks_its_spec_later_or_has_another_is_named():
    class Later(ScriptedEnvironment):
        def step(self, action):
            timestep = super().step(action)
            return timestep if self.steps < 8 else dataclasses.replace(timestep, reward=0.5)

    class Wider(ScriptedEnvironment):
        @property
        def spec(self):
            return dataclasses.replace(Script().factory().spec, observation=ArraySpec((4,), "float32"))

        def _emit(self):
            observation = np.zeros((self.num_envs, 4), np.float32)
            return dataclasses.replace(super()._emit(), observation=observation)

    for kind, message in (
        (Later, r"step: ValueError: other emits a float \[\] at \.reward; float32\[4\] is due"),
        (Wider, r"reset: ValueError: other emits float32\[4, 4\] at \.observation; float32\[4, 3\] is due"),
    ):
        sebulba = failing(Script())
        sebulba.environments = HostFactory("other", lambda where, kind=kind: kind(Script(), where))
        ends(sebulba, ActorError, message)


def test_an_error_in_the_learner_ends_the_actors(monkeypatch):
    script = Script()
    sebulba = failing(script)

    def broken(*arguments):
        raise RuntimeError("the learner broke")

    monkeypatch.setattr(sebulba._learning, "update", broken)
    ends(sebulba, RuntimeError, "the learner broke")
    assert not script.open


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_what_is_no_number_is_named_with_its_update(what):
    with failing(Script(nan_at=8, nan_in=what)) as sebulba:
        _, window = sebulba.run(sebulba.init(0), 4)
    # Step 8 is a reset; step 9 is in the second update.
    with pytest.raises(FloatingPointError, match=f"{what} was not finite at update 2"):
        window.summarize()


@pytest.mark.parametrize("config", [PPOConfig(learning_rate=1e38), IMPALAConfig(learning_rate=1e38)])
def test_a_learning_rate_that_is_far_too_large_is_noticed_at_once(config):
    environments = Script().factory()
    agent = config.make(ScriptedEnvironment.spec, num_updates=10)
    with Sebulba(agent, environments, CONFIG) as sebulba:
        _, window = sebulba.run(sebulba.init(0), 4)
    with pytest.raises(FloatingPointError, match=r"(approx_kl|entropy|loss) was not finite at update [123]"):
        window.summarize()


def test_environments_that_crash_are_made_anew_as_often_as_allowed():
    script = Script(fail_at=7, fail_in=1, fail_times=1)
    with failing(script, max_restarts=1) as sebulba:
        state, window = sebulba.run(sebulba.init(0), 4)
    summary = window.summarize()
    # In its second rollout it had stepped once: a row of 4 environments.
    assert (summary["environment_restarts"], summary["discarded_rows"]) == (1, 4)
    (failure,) = window.failures
    assert re.fullmatch(r"actor 1 on .*: step: RuntimeError: the emulator crashed; made anew, 1 of 1", failure)
    slices = [(where.first_index, where.start, where.attempt) for where in script.made]
    assert sorted(slices) == [(0, 0, 0), (4, 0, 0), (4, 1, 1)]
    # The other thread's rows, and those of the environments that began anew with the second rollout.
    rows = np.asarray(state.memory)[0, :, :, 1:]
    assert (rows[:, 0] @ [4, 1] == 15 + np.arange(6)).all()
    assert (rows[:, 4] @ [4, 1] == 10 + np.arange(6)).all()


def test_environments_that_crash_once_more_end_the_run():
    script = Script(fail_at=2, fail_in=1)
    error = ends(failing(script, max_restarts=2), ActorError, "the emulator crashed")
    assert [note[-19:] for note in error.__notes__] == ["; made anew, 1 of 2", "; made anew, 2 of 2"]
    assert [where.attempt for where in script.made if where.first_index == 4] == [0, 1, 2]


def test_environments_that_were_made_anew_in_an_update_before_the_last_are_told_too():
    """After 7 steps, in the second update; and made anew, after 7 again, in the third."""
    error = ends(failing(Script(fail_at=7, fail_in=1), max_restarts=1), ActorError, "the emulator crashed")
    (note,) = error.__notes__
    assert note.endswith("; made anew, 1 of 1")


def test_the_seeds_of_another_attempt_are_others():
    first = EnvironmentSlice(4, 4, seed=1, start=1).seeds()
    assert first != EnvironmentSlice(4, 4, seed=1, start=1, attempt=1).seeds()
    assert first != EnvironmentSlice(4, 4, seed=1).seeds()
