"""EnvPool's environments as host environments, against EnvPool itself and against pools that misbehave."""

import os
import threading
import time
import warnings
from types import SimpleNamespace
from typing import ClassVar

import envpool as envpool_package
import gymnasium
import numpy as np
import pytest
from envpool.registration import registry

from podracer.envs import EnvironmentSlice, atari, envpool
from podracer.envs.host_recording import random_numbers, record
from podracer.envs.host_testing import HostEnvironmentConformance
from podracer.types import BoundedSpec, DiscreteSpec, StepType

FIRST, MID, LAST = StepType


class TestCartPole(HostEnvironmentConformance):
    def make(self, where):
        return envpool.make("CartPole-v1", max_episode_steps=20)(where)


class TestAsynchronous(HostEnvironmentConformance):
    """Two are received at a time, and where there is one environment, one."""

    def make(self, where):
        return envpool.make("CartPole-v1", max_episode_steps=20, batch_size=2, num_threads=2)(where)


class TestHalfCheetah(HostEnvironmentConformance):
    num_steps = 40

    def make(self, where):
        return envpool.make("HalfCheetah-v4", max_episode_steps=6)(where)


class TestLunarLander(HostEnvironmentConformance):
    num_steps = 150

    def make(self, where):
        return envpool.make("LunarLander-v3", max_episode_steps=100)(where)


class TestPong(HostEnvironmentConformance):
    """Two environments only: an emulator takes a sixth of a second to start."""

    num_steps = 40
    batch_size = 2

    def make(self, where):
        return envpool.make("Pong-v5", max_episode_steps=7, num_threads=2)(where)


@pytest.mark.slow
class TestBreakout(HostEnvironmentConformance):
    num_steps = 150
    discount_zero_within_episodes = True

    def make(self, where):
        return envpool.make("Breakout-v5", sticky_actions=True, max_episode_steps=120, batch_size=2)(where)


def raw_pool(name, seeds, **parameters):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered")
        pool = envpool_package.make_gymnasium(name, num_envs=len(seeds), seed=list(seeds), **parameters)
        # Made here, where their warnings are ignored.
        assert pool.observation_space is not None
        assert pool.action_space is not None
    return pool


def test_the_names_are_those_of_the_installed_envpool():
    families = ("envpool.atari", "envpool.classic_control", "envpool.box2d", "envpool.mujoco.gym")
    registered = {name for name, (module, _, _) in registry.specs.items() if module in families}
    assert {name for name in registered if not name.startswith("phys2d/")} == {*envpool.names()}
    tasks = {name: config["task"] for name, (module, _, config) in registry.specs.items() if module == families[0]}
    assert tasks == envpool._ATARI


# C13.
def test_cartpole_with_a_limit_of_four_steps():
    environment = envpool.make("CartPole-v1", max_episode_steps=4)(EnvironmentSlice(3))
    rows = [environment.reset()]
    rows += [environment.step(np.zeros(3, np.int32)) for _ in range(14)]
    for b in range(3):
        assert [row.step_type[b] for row in rows] == [FIRST, MID, MID, MID, LAST] * 3
        assert [row.reward[b] for row in rows] == [0, 1, 1, 1, 1] * 3
        assert [row.discount[b] for row in rows] == [1] * 15
        # The observation on LAST goes on from the one before it, the one on FIRST does not.
        positions = [row.observation[b][0] for row in rows]
        velocities = [row.observation[b][1] for row in rows]
        for t in range(14):
            follows = abs(positions[t + 1] - positions[t] - 0.02 * velocities[t]) < 1e-6
            assert follows == (rows[t].step_type[b] != LAST)
    # Rows that are steps: all but those that reset.
    assert sum((row.step_type != LAST).sum() for row in rows[:-1]) == 3 * 12


# Against EnvPool with the same limit. Short ones, so that terminations and truncations both occur.
@pytest.mark.parametrize(
    ("name", "limit", "steps", "batch_size"),
    [
        ("CartPole-v1", 25, 400, 0),
        ("CartPole-v1", 25, 400, 2),
        ("Hopper-v4", 15, 200, 0),
        ("LunarLander-v3", 80, 400, 2),
        ("Breakout-v5", 180, 400, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("Acrobot-v1", 10, 40, 0),
                ("MountainCar-v0", 10, 40, 2),
                ("Pendulum-v1", 9, 60, 0),
                ("LunarLanderContinuous-v3", 70, 200, 0),
                ("BipedalWalker-v3", 60, 150, 2),
                ("CarRacing-v3", 5, 20, 0),
                ("HalfCheetah-v4", 7, 40, 2),
                ("Ant-v4", 9, 100, 0),
                ("Breakout-v5", 180, 400, 1),
                ("Pong-v5", 30, 100, 0),
                ("SpaceInvaders-v5", 300, 500, 0),
            ]
        ),
    ],
)
def test_every_row_is_what_envpool_itself_gives(name, limit, steps, batch_size):
    num_envs, is_atari = (2, True) if name in envpool._ATARI else (4, False)
    where = EnvironmentSlice(num_envs, seed=3)
    environment = envpool.make(name, max_episode_steps=limit, batch_size=batch_size)(where)
    raw = raw_pool(name, where.seeds(), max_episode_steps=limit)
    recording = record(environment, random_numbers(environment.spec, steps, num_envs))
    raw.async_reset()
    last, lives, seen = np.ones(num_envs, bool), 0, {"terminated": 0, "truncated": 0, "life": 0}
    for t, row in enumerate(recording.rows):
        observation, reward, terminated, truncated, info = raw.recv()
        if is_atari:
            observation = np.moveaxis(observation, 1, -1)
        np.testing.assert_array_equal(row.observation, observation.astype(row.observation.dtype), err_msg=f"t = {t}")
        np.testing.assert_array_equal(row.reward, reward, err_msg=f"t = {t}")
        over = terminated | truncated
        np.testing.assert_array_equal(row.step_type, np.where(last, FIRST, np.where(over, LAST, MID)), f"t = {t}")
        np.testing.assert_array_equal(row.step_type == FIRST, info["elapsed_step"] == 0)
        life = (info.get("lives", 0) < lives) & ~last
        # EnvPool says truncated for what terminates at the limit, so the discount there is not known from it.
        known = info["elapsed_step"] < limit
        expected = np.where(terminated | life, 0, 1)
        np.testing.assert_array_equal(row.discount[known], expected[known], err_msg=f"t = {t}")
        seen["terminated"] += int(terminated.sum())
        seen["truncated"] += int((row.discount[over & ~known] == 1).sum())
        seen["life"] += int((life & ~over).sum())
        last, lives = over, info.get("lives", 0)
        if t < steps:
            action = recording.actions[t].astype(raw.action_space.dtype)
            raw.send(action.reshape(num_envs, *raw.action_space.shape))
    assert seen["truncated"] > 0
    if name in ("CartPole-v1", "LunarLander-v3", "Hopper-v4", "Breakout-v5"):
        assert seen["terminated"] > 0
    assert (seen["life"] > 5) == (name == "Breakout-v5")


@pytest.mark.parametrize("name", ["CartPole-v1", "Hopper-v4", "LunarLander-v3", "HalfCheetah-v4", "Pong-v5"])
def test_the_final_observation_is_that_of_an_episode_that_goes_on(name):
    recordings = []
    for limit in (6, 7):
        environment = envpool.make(name, max_episode_steps=limit)(EnvironmentSlice(2, seed=6))
        recordings.append(record(environment, random_numbers(environment.spec, 7, 2)))
    short, long = (recording.rows for recording in recordings)
    assert [row.step_type[1] for row in short] == [FIRST] + [MID] * 5 + [LAST, FIRST]
    assert [row.step_type[1] for row in long] == [FIRST] + [MID] * 6 + [LAST]
    np.testing.assert_array_equal(short[6].observation, long[6].observation)
    assert (short[7].observation != long[7].observation).any()


# C12.
def test_a_termination_at_the_time_limit_is_a_termination():
    def fall(limit, batch_size=0):
        environment = envpool.make("CartPole-v1", max_episode_steps=limit, batch_size=batch_size)(EnvironmentSlice(8))
        rows = [environment.reset()] + [environment.step(np.ones(8, np.int32)) for _ in range(12)]
        return [[(int(row.step_type[b]), float(row.discount[b])) for row in rows] for b in range(8)]

    ends = [[step_type for step_type, _ in rows].index(LAST) for rows in fall(500)]
    limit = min(ends)
    assert max(ends) > limit
    for batch_size in (0, 4):
        for rows, end in zip(fall(limit, batch_size), ends, strict=True):
            assert rows[limit] == (LAST, 0 if end == limit else 1)
            assert rows[limit + 1] == (FIRST, 1)
    # EnvPool itself cannot tell them apart.
    raw = raw_pool("CartPole-v1", EnvironmentSlice(8).seeds(), max_episode_steps=limit)
    raw.reset()
    *_, terminated, truncated, _ = [raw.step(np.ones(8, np.int32)) for _ in range(limit)][-1]
    assert truncated.all()
    assert not terminated.any()


# C89.
def test_seeds_differ_between_runs_threads_and_environments_and_repeat():
    def starts(**where):
        environment = envpool.make("CartPole-v1")(EnvironmentSlice(4, **where))
        return [tuple(row) for row in environment.reset().observation.tolist()]

    assert starts(seed=1) == starts(seed=1)
    every = starts(seed=1) + starts(seed=2) + starts(seed=1, first_index=4) + starts(seed=1, attempt=1)
    assert len(set(every)) == 16
    assert starts(seed=1, first_index=2)[:2] == starts(seed=1)[2:]


def test_two_pools_in_two_threads_are_as_in_one():
    def run(first_index):
        environment = envpool.make("CartPole-v1", num_threads=2)(EnvironmentSlice(4, first_index=first_index))
        return record(environment, random_numbers(environment.spec, 50, 4, seed=first_index)).timesteps

    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: run(i)})) for i in (0, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 4):
        np.testing.assert_array_equal(results[i].observation, run(i).observation)


@pytest.mark.parametrize(("num_envs", "received"), [(1, 1), (3, 1), (6, 2), (8, 4)])
def test_the_batch_size_of_an_asynchronous_pool_is_made_to_fit(num_envs, received):
    rows = []
    for batch_size in (0, 4):
        factory = envpool.make("CartPole-v1", max_episode_steps=6, batch_size=batch_size)
        environment = factory(EnvironmentSlice(num_envs))
        assert environment._pool.config["batch_size"] == (received if batch_size else num_envs)
        rows.append(record(environment, random_numbers(environment.spec, 40, num_envs)).timesteps)
    for field in ("step_type", "reward", "discount", "observation"):
        np.testing.assert_array_equal(getattr(rows[0], field), getattr(rows[1], field))


# C26. Without the check EnvPool waits for ever.
@pytest.mark.parametrize("batch_size", [0, 2])
@pytest.mark.parametrize("actions", [np.zeros(2, np.int32), np.zeros(5, np.int32), np.zeros((4, 2), np.int32)])
def test_a_wrong_number_of_actions_is_refused(actions, batch_size):
    environment = envpool.make("CartPole-v1", batch_size=batch_size)(EnvironmentSlice(4))
    environment.reset()
    with pytest.raises(ValueError, match="actions"):
        environment.step(actions)
    assert environment.step(np.zeros(4, np.int32)).step_type.tolist() == [MID] * 4


def test_a_button_that_does_not_exist_is_refused():
    environment = envpool.make("Pong-v5")(EnvironmentSlice(2))
    environment.reset()
    with pytest.raises(ValueError, match="environment 1 is 6; actions are 0 to 5"):
        environment.step(np.array([0, 6], np.int32))


class Pool:
    """Stands in for an Atari pool: plays back rows of (done, truncated, game over, lives, elapsed), by environment."""

    config: ClassVar = {"num_envs": 2, "batch_size": 2, "frame_skip": 4}
    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, *rows):
        self._rows = iter([[(False, False, False, 3, 0)] * 2, *rows])
        self.sent, self.resets = [], []

    def async_reset(self):
        pass

    def send(self, action, env_id):
        self.sent.append((action.tolist(), env_id.tolist()))

    def _reset(self, env_id):
        self.resets.append(env_id.tolist())

    def recv(self):
        done, truncated, game_over, lives, elapsed = (
            np.array(column) for column in zip(*next(self._rows), strict=True)
        )
        info = {"env_id": np.arange(2), "elapsed_step": elapsed, "lives": lives, "terminated": game_over.astype(int)}
        return np.zeros((2, 4, 84, 84), np.uint8), np.ones(2, np.float32), done & ~truncated, truncated, info


def play(*rows, limit=100, **parameters):
    environment = envpool.EnvPoolEnvironment("Breakout-v5", Pool(*rows), limit, game="breakout", **parameters)
    environment.reset()
    return environment, [environment.step(np.zeros(2, np.int32)) for _ in rows]


GOING_ON = (False, False, False, 3, 1)


# C16.
@pytest.mark.parametrize("life_loss", [True, False])
def test_a_lost_life_and_the_end_of_the_game_on_the_next_step(life_loss):
    environment, rows = play(
        [(False, False, False, 2, 1), GOING_ON],
        [(True, False, True, 2, 2), (False, False, False, 3, 2)],
        [(False, False, False, 3, 0), (False, False, False, 3, 3)],
        life_loss=life_loss,
    )
    assert [row.step_type[0] for row in rows] == [MID, LAST, FIRST]
    assert [row.discount[0] for row in rows] == [0 if life_loss else 1, 0, 1]
    assert [row.reward[0] for row in rows] == [1, 1, 0]
    assert [row.discount[1] for row in rows] == [1, 1, 1]
    # Nothing was reset, and no action inserted.
    assert environment._pool.resets == []
    assert environment._pool.sent == [([0, 0], [0, 1])] * 3


# C14: over, by no flag. Seen at the limit, it is a truncation.
def test_an_end_without_a_reason_at_the_limit_is_a_truncation():
    environment, rows = play(
        [(True, False, False, 3, 1), (True, False, True, 0, 1)],
        [(False, False, False, 3, 0), (False, False, False, 3, 0)],
        limit=1,
    )
    assert rows[0].step_type.tolist() == [LAST, LAST]
    assert rows[0].discount.tolist() == [1, 0]
    # The pool resets by itself what it ended.
    assert rows[1].step_type.tolist() == [FIRST, FIRST]
    assert environment._pool.resets == []


def test_an_end_without_a_reason_before_the_limit_is_an_error():
    with pytest.raises(RuntimeError, match=r"environment 1 of envpool:Breakout-v5 ended .* at step 1, .* limit of 100"):
        play([GOING_ON, (True, False, False, 3, 1)])


def test_an_episode_that_ends_silently_is_an_error():
    with pytest.raises(RuntimeError, match=r"environment 0 .* is at step 0 of its episode, 2 is due"):
        play([GOING_ON, GOING_ON], [(False, False, False, 3, 0), (False, False, False, 3, 2)])


def test_a_reset_that_does_not_come_is_an_error():
    with pytest.raises(RuntimeError, match=r"environment 0 .* is at step 2 of its episode, 0 is due"):
        play([(True, False, True, 0, 1), GOING_ON], [(False, False, False, 3, 2), (False, False, False, 3, 2)])


def test_a_truncation_of_the_pool_itself_is_one():
    environment, rows = play(
        [(True, True, False, 3, 1), GOING_ON], [(False, False, False, 3, 0)] * 1 + [(0, 0, 0, 3, 2)]
    )
    assert rows[0].step_type.tolist() == [LAST, MID]
    assert rows[0].discount.tolist() == [1, 1]
    assert environment._pool.resets == []


def test_a_game_that_is_over_where_it_is_cut_is_a_termination():
    _, rows = play([(True, True, True, 0, 1), GOING_ON])
    assert rows[0].discount.tolist() == [0, 1]


def test_rewards_are_not_clipped():
    environment = envpool.make("SpaceInvaders-v5")(EnvironmentSlice(1))
    assert record(environment, random_numbers(environment.spec, 150, 1)).timesteps.reward.max() >= 5


def test_a_new_game_shows_nothing_of_the_one_before():
    environment = envpool.make("Breakout-v5", max_episode_steps=9)(EnvironmentSlice(1))
    for row in record(environment, random_numbers(environment.spec, 30, 1)).rows:
        same = (row.observation[0] == row.observation[0][..., -1:]).all()
        if row.step_type[0] != MID:
            assert same == (row.step_type[0] == FIRST)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "bounds", "action"),
    [
        ("CartPole-v1", (4,), "float32", (None, None), DiscreteSpec(2)),
        ("Pendulum-v1", (3,), "float32", (-8, 8), BoundedSpec((-2.0,), (2.0,))),
        ("HalfCheetah-v4", (17,), "float32", (None, None), BoundedSpec((-1.0,) * 6, (1.0,) * 6)),
        ("LunarLander-v3", (8,), "float32", (None, None), DiscreteSpec(4)),
        ("LunarLanderContinuous-v3", (8,), "float32", (None, None), BoundedSpec((-1.0,) * 2, (1.0,) * 2)),
        ("CarRacing-v3", (96, 96, 3), "uint8", (0, 255), BoundedSpec((-1.0, 0.0, 0.0), (1.0, 1.0, 1.0))),
        ("SpaceInvaders-v5", (84, 84, 4), "uint8", (0, 255), DiscreteSpec(6)),
    ],
)
def test_specs(name, shape, dtype, bounds, action):
    environment = envpool.make(name)(EnvironmentSlice(2))
    observation = environment.spec.observation
    assert (observation.shape, observation.dtype) == (shape, dtype)
    assert (observation.minimum, observation.maximum) == bounds
    assert environment.spec.action == action


def test_what_the_evaluation_of_atari_needs():
    environment = envpool.make("SpaceInvaders-v5", full_action_space=True)(EnvironmentSlice(1))
    assert (environment.frames_per_step, environment.reference_scores) == (4, (148.0, 1668.7))
    assert environment.spec.action == DiscreteSpec(18)
    for name in ("Tetris-v5", "CartPole-v1"):
        other = envpool.make(name)(EnvironmentSlice(1))
        assert other.reference_scores is None
    assert other.frames_per_step == 1


def test_sticky_actions_reach_the_emulator():
    def frames(**parameters):
        environment = envpool.make("Pong-v5", **parameters)(EnvironmentSlice(1))
        return record(environment, random_numbers(environment.spec, 60, 1)).timesteps.observation

    assert (frames() != frames(sticky_actions=True)).any()


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("Pong-v4", {}, "no environment 'envpool:Pong-v4'; nearest: envpool:Pong-v5"),
        ("Pong-v5", {"num_thread": 2}, "envpool:Pong-v5 named 'num_thread'; nearest: num_threads"),
        ("CartPole-v1", {"noop_max": 2}, "named 'noop_max'"),
        ("CartPole-v1", {"life_loss": True}, "named 'life_loss'"),
        ("Pong-v5", {"episodic_life": True}, "episodic_life is no parameter of envpool:Pong-v5: an episode is a whole"),
        ("Pong-v5", {"reward_clip": True}, "never clip"),
        ("CartPole-v1", {"seed": 3}, "seeded by the run"),
        ("CartPole-v1", {"num_envs": 3}, "the run says"),
        ("CartPole-v1", {"max_episode_steps": 0}, "max_episode_steps is 0; it must be an integer of 1 or more"),
        ("Pong-v5", {"noop_max": 0}, "noop_max is 0"),
        ("CartPole-v1", {"batch_size": 2.5}, "batch_size is 2.5"),
        ("Pong-v5", {"sticky_actions": 2}, "sticky_actions is 2"),
        ("Pong-v5", {"life_loss": 1}, "life_loss is 1; it must be True or False"),
        ("Pong-v5", {"img_height": "tall"}, r"img_height is 'tall'; it must be of the kind int \(default 84\)"),
        ("Pong-v5", {"full_action_space": 1}, "full_action_space is 1; it must be True or False"),
        ("Hopper-v4", {"healthy_reward": True}, "healthy_reward is True; it must be of the kind float"),
    ],
)
def test_what_cannot_be_made_is_refused_when_asked_for(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        envpool.make(name, **parameters)


def test_parameters_reach_envpool():
    environment = envpool.make("Pong-v5", stack_num=2, img_height=42, frame_skip=2, num_threads=1)(EnvironmentSlice(1))
    assert environment.reset().observation.shape == (1, 42, 84, 2)
    assert environment.frames_per_step == 2


@pytest.mark.parametrize("name", ["CartPole-v1", "LunarLander-v3", "Pong-v5", "HalfCheetah-v4"])
def test_a_picture_changes_nothing(name):
    def run(draws):
        environment = envpool.make(name, max_episode_steps=6)(EnvironmentSlice(2))
        numbers, rows, frames = random_numbers(environment.spec, 12, 2), [environment.reset()], []
        for t in range(12):
            frames += [environment.render()] if draws else []
            action = environment.spec.action
            chosen = (
                (numbers[t] * 2 - 1).astype(np.float32)
                if isinstance(action, BoundedSpec)
                else (numbers[t, :, 0] * action.num_actions).astype(np.int32)
            )
            rows.append(environment.step(chosen))
        return [np.copy(row.observation) for row in rows], frames

    (plain, _), (drawn, frames) = run(False), run(True)
    np.testing.assert_array_equal(plain, drawn)
    assert all(frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 for frame in frames)
    assert any((frame != frames[0]).any() for frame in frames)


def test_close_ends_the_threads_and_what_comes_after_is_refused():
    def count():
        return len(os.listdir("/proc/self/task"))

    before = count()
    environment = envpool.make("Pong-v5", num_threads=3)(EnvironmentSlice(1))
    environment.reset()
    assert count() > before
    environment.close()
    deadline = time.monotonic() + 5
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() <= before
    with pytest.raises(RuntimeError, match="envpool:Pong-v5 are closed"):
        environment.step(np.zeros(1, np.int32))


def test_close_from_another_thread_during_a_step():
    environment = envpool.make("Pong-v5", num_threads=1)(EnvironmentSlice(2))
    environment.reset()
    ended = SimpleNamespace(by=None)

    def step():
        try:
            while True:
                environment.step(np.zeros(2, np.int32))
        except RuntimeError as error:
            ended.by = str(error)

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.1)
    environment.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "are closed" in ended.by


def test_half_an_hour_is_the_limit_of_a_game():
    environment = envpool.make("Pong-v5")(EnvironmentSlice(1))
    assert environment._limit == atari.MAX_EPISODE_STEPS == 108_000 / environment.frames_per_step
