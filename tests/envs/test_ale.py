"""ALE's vector environment as a host environment, against ALE itself and against one that plays back rows."""

import os
import threading
import time
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from ale_py import Action, ALEInterface, roms
from ale_py.vector_env import AtariVectorEnv

from podracer.envs import EnvironmentSlice, ale, atari, make_host
from podracer.envs.host_recording import random_numbers, record
from podracer.envs.host_testing import HostEnvironmentConformance
from podracer.types import DiscreteSpec, StepType

FIRST, MID, LAST = StepType


# An emulator takes a sixth of a second to start, so there are few of them here, and most of the games are left for
# `make test-slow`.


class TestBreakout(HostEnvironmentConformance):
    num_steps = 60
    batch_size = 2
    discount_zero_within_episodes = True

    def make(self, where):
        return ale.make("breakout", sticky_actions=True, max_episode_steps=25, num_threads=2)(where)


@pytest.mark.slow
class TestPong(HostEnvironmentConformance):
    num_steps = 40

    def make(self, where):
        return ale.make("pong", max_episode_steps=7, num_threads=2)(where)


def raw_vector(game, where, **parameters):
    vector = AtariVectorEnv(game, where.num_envs, reward_clipping=False, num_threads=2, **parameters)
    return vector, vector.reset(seed=np.asarray(where.seeds()))


# ALE with the same limit of frames, but for the newest frame where it cuts a game.
@pytest.mark.parametrize(
    ("game", "limit", "parameters"),
    [
        ("breakout", 180, {}),
        pytest.param("pong", 30, {}, marks=pytest.mark.slow),
        pytest.param("space_invaders", 400, {}, marks=pytest.mark.slow),
        pytest.param("breakout", 27_000, {"noop_max": 3}, marks=pytest.mark.slow),
    ],
)
def test_every_row_is_what_ale_itself_gives(game, limit, parameters):
    where = EnvironmentSlice(2, seed=3)
    environment = ale.make(game, max_episode_steps=limit, **parameters)(where)
    recording = record(environment, random_numbers(environment.spec, 400, 2))
    raw, (frames, info) = raw_vector(game, where, max_num_frames_per_episode=4 * limit, **parameters)
    reward, terminated, truncated = np.zeros(2), np.zeros(2, bool), np.zeros(2, bool)
    last, lives, seen = np.ones(2, bool), info["lives"], {"terminated": 0, "truncated": 0, "life": 0}
    for t, row in enumerate(recording.rows):
        over = terminated | truncated
        expected = np.where(last, FIRST, np.where(over, LAST, MID))
        np.testing.assert_array_equal(row.step_type, expected, err_msg=f"t = {t}")
        fewer = (info["lives"] < lives) & ~last
        np.testing.assert_array_equal(row.discount, np.where(terminated | fewer, 0, 1), err_msg=f"t = {t}")
        np.testing.assert_array_equal(row.reward, reward, err_msg=f"t = {t}")
        observation = np.moveaxis(frames, 1, -1)
        whole = ~truncated
        np.testing.assert_array_equal(row.observation[whole], observation[whole], err_msg=f"t = {t}")
        np.testing.assert_array_equal(row.observation[..., :3], observation[..., :3], err_msg=f"t = {t}")
        seen["terminated"] += int(terminated.sum())
        seen["truncated"] += int(truncated.sum())
        seen["life"] += int((fewer & ~over).sum())
        last, lives = over, info["lives"]
        if t < len(recording.actions):
            frames, reward, terminated, truncated, info = raw.step(recording.actions[t])
    assert seen["truncated"] > 0 or limit == 27_000
    assert (seen["terminated"] > 0 and seen["life"] > 0) or game != "breakout"


# ALE's own limit leaves ghosts of the step before in it.
def test_the_final_observation_of_a_cut_game_is_that_of_a_game_that_goes_on():
    rows = []
    for limit in (40, 41):
        environment = ale.make("pong", max_episode_steps=limit)(EnvironmentSlice(1))
        numbers = random_numbers(environment.spec, 41, 1)
        rows.append(record(environment, numbers).rows)
    short, long = rows
    assert [row.step_type[0] for row in short] == [FIRST] + [MID] * 39 + [LAST, FIRST]
    assert [row.step_type[0] for row in long] == [FIRST] + [MID] * 40 + [LAST]
    np.testing.assert_array_equal(short[40].observation, long[40].observation)
    vector, _ = raw_vector("pong", EnvironmentSlice(1), max_num_frames_per_episode=160)
    for t in range(40):
        frames, *_ = vector.step((numbers[t, :, 0] * 6).astype(np.int64))
    assert (np.moveaxis(frames, 1, -1) != long[40].observation).any()


@pytest.mark.parametrize("limit", [1, 3])
def test_a_limit_cuts_after_exactly_so_many_steps(limit):
    environment = ale.make("breakout", max_episode_steps=limit)(EnvironmentSlice(1))
    episode = [FIRST] + [MID] * (limit - 1) + [LAST]
    rows = [environment.reset()] + [environment.step(np.ones(1, np.int32)) for _ in range(3 * len(episode) - 1)]
    assert [row.step_type[0] for row in rows] == episode * 3
    assert all(row.discount[0] == 1 for row in rows)


class Vector:
    """Stands in for ALE's: plays back rows of (terminated, truncated, lives), by environment."""

    single_observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    single_action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, *rows):
        self._rows = iter(rows)
        self.actions, self.resets = [], []

    def _frames(self):
        return np.full((2, 4, 84, 84), len(self.actions) + 100 * len(self.resets), np.uint8)

    def reset(self, seed=None, options=None):
        self.resets.append(seed.tolist() if options is None else options["reset_mask"].tolist())
        return self._frames(), {"lives": np.array([3, 3])}

    def step(self, actions):
        self.actions.append(actions.tolist())
        terminated, truncated, lives = (np.array(column) for column in zip(*next(self._rows), strict=True))
        return self._frames(), np.ones(2, np.int32), terminated, truncated, {"lives": lives}


def play(*rows, **settings):
    vector = Vector(*rows)
    environment = ale.AleEnvironment("breakout", EnvironmentSlice(2), ale.AleSettings(**settings), vector)
    environment.reset()
    return vector, [environment.step(np.array([1, 2], np.int32)) for _ in rows]


# C16.
@pytest.mark.parametrize("life_loss", [True, False])
def test_a_lost_life_and_the_end_of_the_game_on_the_next_step(life_loss):
    vector, rows = play(
        [(False, False, 2), (False, False, 3)],
        [(True, False, 2), (False, False, 3)],
        [(False, False, 3), (False, False, 3)],
        life_loss=life_loss,
    )
    assert [row.step_type[0] for row in rows] == [MID, LAST, FIRST]
    assert [row.discount[0] for row in rows] == [0 if life_loss else 1, 0, 1]
    assert [row.reward[0] for row in rows] == [1, 1, 0]
    assert [row.discount[1] for row in rows] == [1, 1, 1]
    # Nothing was reset after the start, and no action inserted.
    assert len(vector.resets) == 1
    assert vector.actions == [[1, 2]] * 3


def test_a_game_that_ends_at_the_limit_has_terminated_and_is_left_to_ale():
    vector, rows = play(
        [(True, False, 0), (False, False, 3)],
        [(False, False, 3), (False, False, 3)],
        max_episode_steps=1,
    )
    assert rows[0].step_type.tolist() == [LAST, LAST]
    assert rows[0].discount.tolist() == [0, 1]
    assert rows[1].step_type.tolist() == [FIRST, FIRST]
    # The one that was cut is reset from here; what the agent chose for it is not played.
    assert vector.resets[1:] == [[False, True]]
    assert vector.actions == [[1, 2], [1, 0]]
    assert (rows[1].observation == 1 + 1 + 200).all()


# C89. What else there is to seeds is in the suite above.
def test_every_environment_has_a_seed_of_its_own():
    def games(**where):
        environment = ale.make("breakout", num_threads=1)(EnvironmentSlice(2, **where))
        observations = record(environment, np.zeros((8, 2, 1))).timesteps.observation
        return [observations[:, b].tobytes() for b in range(2)]

    one = games(seed=1)
    assert games(seed=1, first_index=1)[0] == one[1]
    assert len({*one, *games(seed=2)}) == 4


@pytest.fixture(scope="module")
def pong():
    environment = ale.make("pong")(EnvironmentSlice(2))
    environment.reset()
    return environment


# C26. Without the checks ALE waits for ever.
@pytest.mark.parametrize(
    "actions",
    [np.zeros(1, np.int32), np.zeros(3, np.int32), np.zeros((2, 1), np.int32), np.zeros(2), np.array([0, 6])],
)
def test_wrong_actions_are_refused(pong, actions):
    with pytest.raises(ValueError, match="action"):
        pong.step(actions)
    assert pong.step(np.zeros(2, np.int32)).step_type.tolist() == [MID] * 2


def test_the_picture_is_of_the_first_environment(pong):
    row = pong.step(np.zeros(2, np.int32))
    frame = pong.render()
    assert (frame.shape, frame.dtype) == ((252, 252, 3), np.uint8)
    np.testing.assert_array_equal(frame[::3, ::3, 1], row.observation[0, :, :, 3])


def test_rewards_are_not_clipped():
    environment = ale.make("space_invaders")(EnvironmentSlice(1))
    assert record(environment, random_numbers(environment.spec, 150, 1)).timesteps.reward.max() >= 5


def means(rows, size):
    """The means of `size` equal parts of the rows, the edges of which may lie within a row."""
    edges = np.arange(size + 1) * len(rows) / size
    whole = edges.astype(int)
    sums, following = np.pad(rows.cumsum(0), ((1, 0), (0, 0))), np.pad(rows, ((0, 1), (0, 0)))
    up_to = sums[whole] + (edges - whole)[:, None] * following[whole]
    return np.diff(up_to, axis=0) * size / len(rows)


def shows(observation, screen):
    """Whether the newest frame is a screen, shrunk as OpenCV's INTER_AREA does it; halves are rounded up or down."""
    exact = means(means(screen, 84).T, 84).T
    return np.abs(observation[..., 3] - exact).max() < 0.5001


@pytest.mark.parametrize(
    ("game", "noop_max", "sticky", "scores"),
    [
        ("ms_pacman", 0, False, (0, 180)),
        ("ms_pacman", 30, True, None),
        # FIRE is pressed before its first observation.
        ("pong", 0, True, None),
    ],
)
def test_a_step_is_what_the_emulator_shows_and_pays_in_four_frames(game, noop_max, sticky, scores):
    """Against the emulator with the same seed, frame by frame."""
    where = EnvironmentSlice(1, seed=3)
    environment = make_host(f"ale:{game}", noop_max=noop_max, sticky_actions=sticky)(where)
    emulator = ALEInterface()
    emulator.setInt("random_seed", int(where.seeds()[0]))
    emulator.setFloat("repeat_action_probability", 0.25 if sticky else 0.0)
    emulator.loadROM(roms.get_rom_path(game))
    buttons = emulator.getMinimalActionSet()
    observation = environment.reset().observation[0].copy()
    if Action.FIRE in buttons:
        emulator.act(Action.FIRE)
    noops = 0
    while not shows(observation, emulator.getScreenGrayscale()):
        emulator.act(Action.NOOP)
        noops += 1
        assert noops < noop_max
    last_frames = total = telling = 0
    for t, action in enumerate(np.random.default_rng(0).integers(len(buttons), size=(300, 1), dtype=np.int32)):
        rewards, screens = [], []
        for _ in range(4):
            rewards.append(emulator.act(buttons[action[0]]))
            screens.append(emulator.getScreenGrayscale())
        row = environment.step(action)
        assert row.reward.tolist() == [sum(rewards)], f"t = {t}"
        assert shows(row.observation[0], np.maximum(screens[2], screens[3])), f"t = {t}"
        np.testing.assert_array_equal(row.observation[0, ..., :3], observation[..., 1:], err_msg=f"t = {t}")
        observation = row.observation[0].copy()
        others = screens[2], screens[3], np.maximum(screens[1], screens[2])
        telling += not any(shows(observation, other) for other in others)
        last_frames, total = last_frames + rewards[-1], total + sum(rewards)
    # No other frames, and no other rewards, would have done.
    assert telling > 150
    assert last_frames != total
    assert scores in (None, (last_frames, total))


def test_a_new_game_shows_nothing_of_the_one_before():
    environment = ale.make("breakout", max_episode_steps=9)(EnvironmentSlice(1))
    for row in record(environment, random_numbers(environment.spec, 30, 1)).rows:
        shows = row.observation[0].any(axis=(0, 1)).tolist()
        if row.step_type[0] == FIRST:
            assert shows == [False, False, False, True]
        if row.step_type[0] == LAST:
            assert shows == [True] * 4


def test_what_the_evaluation_of_atari_needs():
    environment = ale.make("space_invaders")(EnvironmentSlice(1))
    assert (environment.frames_per_step, environment.reference_scores) == (4, (148.0, 1668.7))
    assert environment.spec.action == DiscreteSpec(6)
    assert ale.make("tetris")(EnvironmentSlice(1)).reference_scores is None
    assert ale.make("pong", full_action_space=True)(EnvironmentSlice(1)).spec.action == DiscreteSpec(18)
    assert ale.AleSettings().max_episode_steps == 108_000 / atari.FRAMES_PER_STEP


def test_parameters_reach_the_emulator():
    def frames(**parameters):
        environment = ale.make("breakout", **parameters)(EnvironmentSlice(1))
        return record(environment, random_numbers(environment.spec, 30, 1)).timesteps.observation

    plain = frames()
    for other in ({"sticky_actions": True}, {"use_fire_reset": False}, {"noop_max": 0}):
        assert (plain != frames(**other)).any(), other
    assert ale.make("pong", stack_num=2)(EnvironmentSlice(1)).reset().observation.shape == (1, 84, 84, 2)


@pytest.mark.parametrize(
    ("game", "parameters", "message"),
    [
        ("Pong", {}, "no environment 'ale:Pong'; nearest: ale:pong"),
        ("combat", {}, "no environment 'ale:combat'"),
        ("pong", {"sticky_action": True}, "ale:pong named 'sticky_action'; nearest: sticky_actions"),
        ("pong", {"episodic_life": True}, "named 'episodic_life'"),
        ("pong", {"sticky_actions": -1}, "sticky_actions is -1"),
        ("pong", {"noop_max": -1}, "noop_max is -1; it must be an integer of 0 or more"),
        ("pong", {"max_episode_steps": 0}, "max_episode_steps is 0"),
        ("pong", {"num_threads": 1.5}, "num_threads is 1.5"),
        ("pong", {"life_loss": "no"}, "life_loss is 'no'; it must be True or False"),
    ],
)
def test_what_cannot_be_made_is_refused_when_asked_for(game, parameters, message):
    with pytest.raises(ValueError, match=message):
        ale.make(game, **parameters)


def test_close_ends_the_threads_and_what_comes_after_is_refused():
    def count():
        return len(os.listdir("/proc/self/task"))

    before = count()
    environment = ale.make("pong", num_threads=3)(EnvironmentSlice(1))
    environment.reset()
    assert count() > before
    environment.close()
    environment.close()
    deadline = time.monotonic() + 5
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() <= before
    with pytest.raises(RuntimeError, match="closed"):
        environment.step(np.zeros(1, np.int32))


def test_close_from_another_thread_during_a_step():
    environment = ale.make("pong", num_threads=1)(EnvironmentSlice(2))
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
    assert "closed" in ended.by
