"""What the adapters of ALE and EnvPool share: games, scores, lost lives, pictures."""

import os
import subprocess
import sys

import ale_py
import jax
import numpy as np
import pytest

from podracer.envs import ale, atari, atari_scores, envpool
from podracer.envs.atari import LostLives
from podracer.types import StepType


def test_there_are_57_games_with_scores_and_the_human_beats_the_random_player():
    assert len(atari_scores.REFERENCE_SCORES) == 57
    assert set(atari_scores.REFERENCE_SCORES) < set(atari.GAMES)
    assert all(human > random for random, human in atari_scores.REFERENCE_SCORES.values())


# Sums of the published table, which no single wrong entry leaves as they are.
def test_the_table_of_scores_sums_up():
    random, human = zip(*atari_scores.REFERENCE_SCORES.values(), strict=True)
    assert sum(random) == pytest.approx(50_864.9, abs=0.01)
    assert sum(human) == pytest.approx(606_494.2, abs=0.01)


def test_the_games_are_those_of_the_installed_ale_for_one_player():
    known = set(ale_py.roms.get_all_rom_ids())
    assert known - set(atari.GAMES) == {"combat", "joust", "maze_craze", "warlords"}
    assert set(atari.GAMES) < known
    assert list(atari.GAMES) == sorted(atari.GAMES)


def test_listing_imports_neither_package():
    code = (
        "import sys\nfrom podracer.envs import ale, envpool\n"
        "assert len(ale.names()) == 104 and len(envpool.names()) == 152\n"
        "assert not {'ale_py', 'envpool', 'gymnasium'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_both_adapters_name_every_game():
    assert {"pong", "space_invaders", "tic_tac_toe_3d"} < {*ale.names()}
    assert {"Pong-v5", "SpaceInvaders-v5", "TicTacToe3d-v5"} < {*envpool.names()}


@pytest.mark.parametrize(("given", "probability"), [(True, 0.25), (False, 0.0), (0.1, 0.1), (1, 1.0), (0, 0.0)])
def test_sticky_probability(given, probability):
    assert atari.sticky_probability(given) == probability


@pytest.mark.parametrize("given", [-0.1, 1.5, "yes", None, float("nan")])
def test_what_is_no_probability_is_refused(given):
    with pytest.raises(ValueError, match=r"sticky_actions is .*; it must be True, False or a probability"):
        atari.sticky_probability(given)


@pytest.mark.parametrize("given", [True, 2.0, "3", 0])
def test_what_is_no_whole_number_is_refused(given):
    with pytest.raises(ValueError, match=r"noop_max is .*; it must be an integer of 1 or more"):
        atari.check_whole_number("noop_max", given, 1)


def test_buttons_that_do_not_exist_are_refused():
    atari.check_buttons(np.array([0, 5]), 6)
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=f"environment 1 is {wrong}; actions are 0 to 5"):
            atari.check_buttons(np.array([0, wrong]), 6)


def test_lives_are_lost_within_a_game_only():
    lost_lives = LostLives(4)
    lives = np.array([3, 3, 3, 0])
    assert not lost_lives(lives, np.ones(4, bool)).any()
    # Lost, kept, won another one, and a game without lives.
    lives[:] = [2, 3, 4, 0]
    assert lost_lives(lives, np.zeros(4, bool)).tolist() == [True, False, False, False]
    # The next row is compared with this one, even in the array that held the last one; a new game loses none.
    lives[:] = [2, 0, 3, 0]
    assert lost_lives(lives, np.array([False, False, True, False])).tolist() == [False, True, False, False]
    lives[:] = [2, 0, 2, 0]
    assert lost_lives(lives, np.zeros(4, bool)).tolist() == [False, False, True, False]


def test_the_stack_becomes_channels_without_a_copy():
    frames = np.random.default_rng(0).integers(0, 256, (3, 4, 84, 84)).astype(np.uint8)
    observation = atari.channels_last(frames)
    assert observation.shape == (3, 84, 84, 4)
    assert np.shares_memory(observation, frames)
    np.testing.assert_array_equal(observation[1, :, :, 3], frames[1, 3])
    np.testing.assert_array_equal(jax.device_put(observation)[2, 5, 7], frames[2, :, 5, 7])


def test_the_picture_is_the_newest_frame_in_grey():
    observation = np.zeros((84, 84, 4), np.uint8)
    observation[10, 20] = [1, 2, 3, 200]
    frame = atari.newest_frame(observation, scale=2)
    assert (frame.shape, frame.dtype) == ((168, 168, 3), np.uint8)
    assert (frame[20:22, 40:42] == 200).all()
    assert frame.sum() == 200 * 4 * 3


def test_rows():
    row = atari.timestep(
        np.array([True, False, False, False]),
        np.array([False, False, True, True]),
        np.array([False, True, True, False]),
        np.array([7, 2, 3, 4], np.int32),
        np.zeros((4, 1)),
    )
    assert row.step_type.tolist() == [StepType.FIRST, StepType.MID, StepType.LAST, StepType.LAST]
    assert row.reward.tolist() == [0, 2, 3, 4]
    assert row.discount.tolist() == [1, 0, 0, 1]
    assert (row.step_type.dtype, row.reward.dtype, row.discount.dtype) == (np.int8, np.float32, np.float32)
