"""Sebulba against Anakin, against itself, and what the learner devices are given."""

import dataclasses
import functools
import logging
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sebulba.toys import Script, ScriptedEnvironment, Watcher

from podracer.agents import IMPALAConfig, PPOConfig
from podracer.anakin import Anakin, AnakinConfig
from podracer.envs import HostFactory, make, make_host
from podracer.networks import NetworkConfig
from podracer.sebulba import Sebulba, SebulbaConfig
from podracer.types import StepType


def bits(tree):
    def data(x):
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(jax.tree.map(data, tree)))]


@dataclasses.dataclass(frozen=True)
class Remembering(Watcher):
    """Keeps of the last trajectory what acting remembered under a name."""

    extra: str = "seen"

    def init_memory(self, example):
        return example.extras[self.extra]

    def update(self, learner, memory, trajectory, key, *, axis=None):
        learner, _, metrics = super().update(learner, memory, trajectory, key, axis=axis)
        return learner, trajectory.extras[self.extra], metrics


@functools.cache
def compiled(agent, config):
    return Sebulba(agent, Script().factory(), config)


def scripted(script=None, agent=None, **config):
    """Compiled once for all tests that differ in the environments' script only."""
    defaults = {"num_envs": 8, "rollout_length": 5, "actor_devices": (0,), "learner_devices": (0,)}
    sebulba = compiled(agent or Watcher(), SebulbaConfig(**defaults | config))
    sebulba.environments = (script or Script()).factory()
    return sebulba


def run(sebulba, *chunks):
    with sebulba:
        state = sebulba.init(7)
        windows = []
        for chunk in chunks:
            state, window = sebulba.run(state, chunk)
            windows.append(window)
        return jax.device_get(dataclasses.replace(state, key=())), windows


def test_a_serial_run_stops_in_the_middle_of_a_rollout_and_goes_on_with_new_environments():
    script, stop = Script(delay=0.05), threading.Event()
    with scripted(script, serial=True, rollout_length=100) as sebulba:
        state = sebulba.init(7)
        sebulba.compile()
        threading.Timer(0.2, stop.set).start()
        began = time.perf_counter()
        state, window = sebulba.run(state, 1, stop=stop)
        assert time.perf_counter() - began < 2
        assert window.updates == 0
        script.delay = 0.0
        assert sebulba.run(state, 1)[1].updates == 1
    assert [where.first_index for where in script.made] == [0, 0, 4]


def test_without_lag_it_gives_the_parameters_and_the_trajectories_of_anakin():
    name, parameters, devices = "gymnax:CartPole-v1", {"max_steps_in_episode": 7}, jax.devices()[:1]
    anakin = Anakin(Watcher(4), make(name, **parameters), AnakinConfig(6, 5), devices)
    expected, anakin_window = anakin.run(anakin.init(7), 4)
    config = SebulbaConfig(6, 5, threads_per_actor_device=1, max_lag=0)

    sebulba = Sebulba(Watcher(4), make_host(name, **parameters), config, devices)
    with sebulba:
        state, window = sebulba.run(sebulba.init(7), 4)
    # The memory is the last trajectory.
    assert bits((state.learner, state.memory)) == bits((expected.learner, expected.memory))
    found, wanted = window.summarize(), anakin_window.summarize()
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert int(window.env_steps) == int(anakin_window.env_steps)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """An agent without a memory of its own, with the last trajectory for one."""

    agent: Any

    def __getattr__(self, name):
        return getattr(self.agent, name)

    def init_memory(self, example):
        return example

    def update(self, learner, memory, trajectory, key, *, axis=None):
        learner, _, metrics = self.agent.update(learner, (), trajectory, key, axis=axis)
        return learner, trajectory, metrics


AGENTS = {
    "ppo": PPOConfig(num_minibatches=2, network=NetworkConfig(hidden_sizes=(8,))),
    "ppo lstm": PPOConfig(num_minibatches=2, network=NetworkConfig(hidden_sizes=(8,), recurrent_size=4)),
    "impala gru": IMPALAConfig(
        network=NetworkConfig(hidden_sizes=(8,), recurrent_size=4, recurrent_cell="gru"), reward_clip=0.5
    ),
}


@pytest.mark.parametrize("name", AGENTS)
def test_without_lag_a_trajectory_is_anakins_leaf_by_leaf(name):
    environment, devices = make("podracer:Catch", rows=5, columns=3), jax.devices()[:1]
    agent = Keeping(AGENTS[name].make(environment.spec, 10))
    anakin = Anakin(agent, environment, AnakinConfig(6, 12), devices)
    expected = anakin.run(anakin.init(3), 2)[0].memory
    config = SebulbaConfig(6, 12, threads_per_actor_device=1, max_lag=0)
    factory = make_host("podracer:Catch", rows=5, columns=3)
    with Sebulba(agent, factory, config, devices) as sebulba:
        found = sebulba.run(sebulba.init(3), 2)[0].memory
    # What was done and seen bit by bit, and what networks gave to rounding, for they are compiled among other things.
    assert bits((found.timestep, found.action)) == bits((expected.timestep, expected.action))
    assert len(np.unique(found.action)) == 3
    assert (np.asarray(found.timestep.step_type) == StepType.FIRST).sum() > 6
    # In the middle of an episode, so that the state which recurrent networks act from is not that of a fresh one.
    assert (np.asarray(found.timestep.step_type)[0, 0] != StepType.FIRST).all()
    rest = jax.tree.leaves_with_path((expected.extras, expected.actor_state))
    for (path, leaf), other in zip(rest, jax.tree.leaves((found.extras, found.actor_state)), strict=True):
        np.testing.assert_allclose(other, leaf, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ppo", {"actor_devices": (0,), "learner_devices": (1, 2)}),
        ("ppo lstm", {"max_lag": 0}),
        ("impala gru", {}),
    ],
)
def test_two_runs_of_a_real_agent_are_equal_whatever_the_timing(name, config):
    agent = AGENTS[name].make(ScriptedEnvironment.spec, 10)
    first, _ = run(scripted(Script(jitter=True), agent, **config), 2, 2)
    again, _ = run(scripted(Script(jitter=True, delay=0.002), agent, **config), 4)
    assert bits(first) == bits(again)
    with scripted(agent=agent, **config) as sebulba:
        other, _ = sebulba.run(sebulba.init(8), 4)
    assert bits(first.learner) != bits(other.learner)


SETS = {
    "one device for all": {"actor_devices": (0,), "learner_devices": (0,)},
    "disjoint": {"actor_devices": (0,), "learner_devices": (1, 2)},
    "equal": {"actor_devices": (0, 1), "learner_devices": (0, 1)},
    "overlapping, out of order, with gaps": {"actor_devices": (6, 3), "learner_devices": (5, 3)},
}


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("devices", SETS.values(), ids=SETS)
def test_two_runs_with_one_seed_are_equal_whatever_the_timing(devices, max_lag):
    config = {"max_lag": max_lag, **devices}
    first, _ = run(scripted(Script(jitter=True), **config), 3, 3)
    again, _ = run(scripted(Script(jitter=True, delay=0.002), **config), 6)
    serial, _ = run(scripted(serial=True, **config), 6)
    assert bits(first) == bits(again) == bits(serial)


def test_another_seed_or_another_lag_gives_another_run():
    first, _ = run(scripted(), 4)
    with scripted() as sebulba:
        other, _ = sebulba.run(sebulba.init(8), 4)
    lagging, _ = run(scripted(max_lag=0), 4)
    assert len({tuple(bits(state.learner)) for state in (first, jax.device_get(other), lagging)}) == 3


def test_a_learner_device_holds_its_columns_and_no_others(monkeypatch):
    sebulba = scripted(num_envs=24, actor_devices=(0, 1), learner_devices=(2, 3, 5), threads_per_actor_device=2)
    seen = []
    assemble = sebulba._learning.assemble
    monkeypatch.setattr(sebulba._learning, "assemble", lambda parts: seen.append(assemble(parts)) or seen[-1])
    run(sebulba, 2)
    devices = jax.devices()
    assert len(seen[0]) == 4  # One per actor.
    for trajectory in seen[0]:
        assert trajectory.timestep.observation.shape == (6, 6, 3)
        for leaf in jax.tree.leaves(trajectory):
            shards = {shard.device: shard.data.shape for shard in leaf.addressable_shards}
            axis = 0 if leaf is trajectory.actor_state else 1
            assert set(shards) == {devices[2], devices[3], devices[5]}
            assert all(shape[axis] == 2 for shape in shards.values())


def test_column_b_is_the_same_environment_in_every_trajectory_and_rows_follow_each_other():
    learners = 2
    sebulba = scripted(num_envs=16, learner_devices=(1, 2), actor_devices=(0,))
    with sebulba:
        state = sebulba.init(0)
        columns, steps = [], []
        for _ in range(3):
            state, _ = sebulba.run(state, 1)
            observation = np.asarray(state.memory).transpose(1, 0, 2, 3).reshape(6, 16, 3)
            columns.append(observation[..., 0])
            steps.append(observation[..., 1] * 4 + observation[..., 2])
    # Each thread's 8 environments are cut in two; a learner device has its half of the first thread, then the second.
    expected = np.arange(16).reshape(2, learners, 4).transpose(1, 0, 2).reshape(16)
    for column in columns:
        assert (column == expected).all()
    # Row T is row 0 of the next trajectory, and what the environments overwrote was kept.
    for number, rows in enumerate(steps):
        assert (rows == (np.arange(6) + 5 * number)[:, None]).all()


def test_what_the_agent_keeps_is_no_view_of_the_environments_memory():
    state, _ = run(scripted(agent=Remembering(extra="seen"), threads_per_actor_device=1, num_envs=4), 2)
    seen = state.memory.reshape(5, 4, 3)
    # `act` returns the observation as its state, so what it is given is the row before.
    before = np.arange(4, 9)
    assert (seen[..., 1] * 4 + seen[..., 2] == before[:, None]).all()


def test_the_lag_is_what_the_agent_saw():
    class Dated(Watcher):
        def update(self, learner, memory, trajectory, key, *, axis=None):
            lag = learner["updates"] - trajectory.extras["updates"]
            learner, memory, metrics = super().update(learner, memory, trajectory, key, axis=axis)
            return learner, memory, metrics | {"seen_lag": lag.astype("float32").mean()}

    for max_lag, expected in ((0, [0, 0]), (1, [3 / 4, 1])):
        _, windows = run(scripted(agent=Dated(), max_lag=max_lag), 4, 4)
        for window, lag in zip(windows, expected, strict=True):
            summary = window.summarize()
            assert summary["policy_lag"] == summary["seen_lag"] == lag
            assert sum(window.lag.values()) == 4 * 8 * 5


def test_what_passes_between_calls_is_a_part_of_where_the_time_goes():
    with scripted() as sebulba:
        state, _ = sebulba.run(sebulba.init(0), 2)
        time.sleep(0.5)
        began = time.perf_counter()
        _, window = sebulba.run(state, 2)
        seconds = time.perf_counter() - began
    assert window.learner_shares["other"] > 0.5 / (0.5 + seconds) - 0.05
    assert sum(window.learner_shares.values()) == pytest.approx(1)
    # Both actors have waited as long: they may be one update ahead and no further.
    assert window.actor_shares["parameters"] > 0.5


def test_actors_may_be_further_ahead_but_no_further_than_they_may(monkeypatch):
    sebulba = scripted(Script(jitter=True), max_lag=3)
    update = sebulba._learning.update
    monkeypatch.setattr(sebulba._learning, "update", lambda *arguments: time.sleep(0.1) or update(*arguments))
    _, windows = run(sebulba, 10)
    assert 1 < max(windows[0].lag) <= 3
    assert sum(windows[0].lag.values()) == 10 * 8 * 5


def test_parameters_may_change_at_every_step():
    config = {"refresh": "step", "threads_per_actor_device": 1, "rollout_length": 20}
    sebulba, changed = scripted(Script(delay=0.003), Remembering(extra="updates"), **config), []
    with sebulba:
        state = sebulba.init(0)
        for _ in range(4):
            state, window = sebulba.run(state, 1)
            versions = np.asarray(state.memory)[0, :, 0]
            assert (np.diff(versions) >= 0).all()
            lag = dict(zip(*np.unique(int(state.updates) - 1 - versions, return_counts=True), strict=True))
            assert window.lag == {age: 8 * rows for age, rows in lag.items()}
            changed.append(len(lag) > 1)
    assert any(changed)


def test_steps_of_resets_are_not_counted():
    # Episodes of 3 steps and a row for the reset, which the second rollout begins with.
    _, windows = run(scripted(num_envs=4, rollout_length=4, threads_per_actor_device=1), 1, 3)
    assert [int(window.env_steps) for window in windows] == [4 * 3, 3 * 4 * 3]
    assert windows[1].summarize()["episode_length"] == 3
    assert windows[1].summarize()["episode_return"] == 3


@pytest.mark.parametrize("splits", [2, 4])
def test_a_batch_is_learnt_from_in_parts(splits):
    class Counting(Watcher):
        def init_memory(self, example):
            return ()

        def update(self, learner, memory, trajectory, key, *, axis=None):
            learner, _, metrics = super().update(learner, memory, trajectory, key, axis=axis)
            columns = trajectory.timestep.observation[0, :, 0]
            return learner, memory, metrics | {"first": columns[0], "count": np.float32(columns.size)}

    state, windows = run(scripted(agent=Counting(), batch_splits=splits, num_envs=8, max_lag=0), 3)
    assert state.learner["updates"] == 3 * splits
    assert state.updates == 3
    summary = windows[0].summarize()
    assert summary["count"] == 8 / splits
    assert summary["first"] == np.mean(np.arange(0, 8, 8 / splits))
    assert int(windows[0].env_steps) == sum(8 for row in range(15) if row % 4 != StepType.LAST + 1)


def test_parts_are_refused_to_an_agent_with_a_memory():
    with pytest.raises(ValueError, match="batch_splits is 2; this agent has a memory"):
        scripted(batch_splits=2)


@pytest.mark.parametrize("devices", SETS.values(), ids=SETS)
def test_the_running_learner_moves_nothing_and_nothing_is_compiled_again(devices):
    compiled = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with scripted(**devices) as sebulba:
            state, _ = sebulba.run(sebulba.init(0), 1)
            with jax.transfer_guard("disallow"), jax.log_compiles():
                state, window = sebulba.run(state, 4)
                jax.block_until_ready(state)
    finally:
        logger.removeHandler(handler)
    assert not [message for message in compiled if message.startswith("Compiling")]
    window.summarize()


@dataclasses.dataclass(frozen=True)
class Heavy(Watcher):
    """Acts with 40 kB of parameters, of a shape that nothing else has, which every update changes."""

    weight: int = 10_000

    def init(self, key):
        return super().init(key) | {"heavy": jnp.zeros(self.weight, jnp.float32)}

    def actor_params(self, learner):
        return super().actor_params(learner) | {"heavy": learner["heavy"]}

    def update(self, learner, memory, trajectory, key, *, axis=None):
        heavy = learner["heavy"] + 1
        learner, memory, metrics = super().update(learner, memory, trajectory, key, axis=axis)
        return learner | {"heavy": heavy}, memory, metrics


@pytest.mark.parametrize("devices", [SETS["disjoint"], SETS["overlapping, out of order, with gaps"]])
def test_device_memory_does_not_grow(devices):
    agent, counts, copies = Heavy(), [], []
    with scripted(agent=agent, **devices) as sebulba:
        state, _ = sebulba.run(sebulba.init(0), 5)
        for _ in range(3):
            state, _ = sebulba.run(state, 10)
            counts.append(sum(leaf.nbytes for leaf in jax.live_arrays()))
            copies.append(sum(leaf.shape == (agent.weight,) for leaf in jax.live_arrays()))
    # The learner's, and on every device that acts the newest and those before them.
    assert copies == [1 + 2 * len(devices["actor_devices"])] * 3
    # Actors may be anywhere within the one rollout that they are ahead.
    rollout = 2 * 6 * 8 * (3 + 3 + 4) * 4
    assert max(counts) - min(counts) < 3 * rollout < 4 * agent.weight


@pytest.mark.parametrize("slow", ["actor", "learner"])
def test_neither_a_slow_actor_nor_a_slow_learner_stops_it(slow, monkeypatch):
    sebulba = scripted(Script(delay=0.004 if slow == "actor" else 0), threads_per_actor_device=1)
    if slow == "learner":
        update = sebulba._learning.update
        monkeypatch.setattr(sebulba._learning, "update", lambda *arguments: time.sleep(0.03) or update(*arguments))
    _, windows = run(sebulba, 25, 25)
    summary = windows[1].summarize()
    assert summary["policy_lag"] == 1
    waits = {"actor": summary["learner_time_trajectories"], "learner": summary["actor_time_parameters"]}
    assert waits[slow] == max(waits.values()) > 0.2


def test_a_state_of_another_time_makes_actors_begin_anew():
    script = Script()
    with scripted(script) as sebulba:
        sebulba.run(sebulba.init(0), 3)
        state, _ = sebulba.run(sebulba.init(0), 2)
        assert int(state.updates) == 2
        assert len(script.open) == 2
    assert sorted((where.first_index, where.start) for where in script.made) == [(0, 0), (0, 0), (4, 0), (4, 0)]
    assert not script.open


def test_a_state_from_elsewhere_makes_actors_begin_anew_though_it_is_as_old():
    script = Script()
    with scripted(script) as sebulba:
        state, _ = sebulba.run(sebulba.init(0), 2)
        state, _ = sebulba.run(state, 1)
        assert len(script.made) == 2
        sebulba.run(jax.tree.map(lambda x: x.copy(), state), 1)
    assert [where.start for where in script.made] == [0, 0, 3, 3]


def test_environments_that_ctrl_c_has_ended_too_do_not_spoil_the_state():
    """A terminal sends it to all processes, also to those that belong to environments."""
    stop = threading.Event()

    class Interrupted(ScriptedEnvironment):
        def step(self, action):
            if self.steps == 12:
                stop.set()
                raise KeyboardInterrupt
            return super().step(action)

    sebulba = scripted(max_lag=0)
    sebulba.environments = HostFactory("interrupted", lambda where: Interrupted(Script(), where))
    with sebulba:
        state, window = sebulba.run(sebulba.init(0), 100, stop=stop)
        assert int(state.updates) == window.updates == 2


def test_a_state_that_was_donated_is_refused():
    with scripted() as sebulba:
        state = sebulba.init(0)
        sebulba.run(state, 1)
        with pytest.raises(ValueError, match="the state was given to an earlier call"):
            sebulba.run(state, 1)


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_a_number_of_updates_that_is_none_is_refused(number):
    with scripted() as sebulba, pytest.raises(ValueError, match="num_updates is"):
        sebulba.run(sebulba.init(0), number)


def test_it_stops_between_updates_when_it_is_told_to():
    stop = threading.Event()
    with scripted(Script(delay=0.02)) as sebulba:
        sebulba.compile()
        state = sebulba.init(0)
        threading.Timer(0.5, stop.set).start()
        began = time.perf_counter()
        state, window = sebulba.run(state, 10_000, stop=stop)
        assert time.perf_counter() - began < 3
        assert 0 < window.updates < 10_000
        assert int(state.updates) == window.updates
        state, window = sebulba.run(state, 10, stop=stop)
        assert window.updates == 0


def test_a_run_that_was_stopped_while_it_waited_goes_on():
    stop = threading.Event()
    with scripted(Script(delay=0.01), max_lag=0) as sebulba:
        state = sebulba.init(0)
        threading.Timer(0.12, stop.set).start()
        state, window = sebulba.run(state, 10_000, stop=stop)
        state, _ = sebulba.run(state, 2)
        assert int(state.updates) == window.updates + 2


@pytest.mark.parametrize("max_lag", [0, 1])
def test_what_came_before_it_was_stopped_is_learnt_from_when_it_goes_on(max_lag):
    """The second thread is in the middle of its rollout when the first one's has been taken."""
    script, stop = Script(hang_at=3, fail_in=1), threading.Event()
    with scripted(script, max_lag=max_lag) as sebulba:
        sebulba.compile()
        state = sebulba.init(7)
        threading.Timer(0.5, stop.set).start()
        state, window = sebulba.run(state, 3, stop=stop)
        assert window.updates == 0
        script.released.set()
        too_late = threading.Event()
        timer = threading.Timer(30, too_late.set)
        timer.start()
        state, window = sebulba.run(state, 3, stop=too_late)
        timer.cancel()
        assert window.updates == 3
    expected, _ = run(scripted(serial=True, max_lag=max_lag), 3)
    assert bits(dataclasses.replace(state, key=())) == bits(expected)
