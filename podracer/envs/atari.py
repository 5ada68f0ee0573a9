"""Atari games as the field evaluates them: what the adapters of ALE and of EnvPool share.

| | |
|---|---|
| observation | uint8 `[84, 84, 4]`: the last four frames in grey, the newest last, each the maximum of two |
| a step | four frames with the same action; the reward is their sum, never clipped: agents clip in their loss |
| an episode | a whole game, from fewer than 30 no-ops on (and FIRE, if it waits for that), cut after 27 000 steps |
| actions | those that the game uses, or with `full_action_space` all 18 |
| `sticky_actions` | the emulator repeats the last action, each frame with a probability of 0.25 |
| `life_loss` | a lost life is a discount of 0 on a MID row |

Sticky actions are those of Machado et al. 2018 (https://arxiv.org/abs/1709.06009), who also argue for whole games.

A lost life ends no episode. The value does not reach past it, while the episode, its return and the recurrent state go
on. So returns are those of whole games, and nothing is reset, and no no-op made, before a game is over.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped, UInt8

from podracer.types import ArraySpec, StepType, TimeStep

FRAMES_PER_STEP = 4
MAX_EPISODE_STEPS = 27_000  # 30 minutes at 60 frames per second.
STICKY_PROBABILITY = 0.25

_GAMES = """
    adventure air_raid alien amidar assault asterix asteroids atlantis atlantis2 backgammon bank_heist basic_math
    battle_zone beam_rider berzerk blackjack bowling boxing breakout carnival casino centipede chopper_command
    crazy_climber crossbow darkchambers defender demon_attack donkey_kong double_dunk earthworld elevator_action enduro
    entombed et fishing_derby flag_capture freeway frogger frostbite galaxian gopher gravitar hangman haunted_house hero
    human_cannonball ice_hockey jamesbond journey_escape kaboom kangaroo keystone_kapers king_kong klax koolaid krull
    kung_fu_master laser_gates lost_luggage mario_bros miniature_golf montezuma_revenge mr_do ms_pacman name_this_game
    othello pacman phoenix pitfall pitfall2 pong pooyan private_eye qbert riverraid road_runner robotank seaquest
    sir_lancelot skiing solaris space_invaders space_war star_gunner superman surround tennis tetris tic_tac_toe_3d
    time_pilot trondead turmoil tutankham up_n_down venture video_checkers video_chess video_cube video_pinball
    wizard_of_wor word_zapper yars_revenge zaxxon
"""
# Those for one player, all of which both packages have. Asked for one of the four others, ALE ends the process.
GAMES = tuple(_GAMES.split())


def sticky_probability(sticky_actions: bool | float) -> float:
    """With which an emulator repeats its last action: 0.25 for True, 0 for False, or a number.

    Raises:
        ValueError: It is no probability.
    """
    if isinstance(sticky_actions, bool):
        return STICKY_PROBABILITY if sticky_actions else 0.0
    if not isinstance(sticky_actions, int | float) or not 0 <= sticky_actions <= 1:
        raise ValueError(f"sticky_actions is {sticky_actions!r}; it must be True, False or a probability")
    return float(sticky_actions)


def check_whole_number(name: str, value: Any, least: int) -> None:
    """Refuses what is no integer of at least `least`.

    Raises:
        ValueError: Names the parameter, its value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of {least} or more")


def check_buttons(action: Int[np.ndarray, "B"], num_actions: int) -> None:
    """Refuses actions that do not exist: with one of them ALE waits for ever, and EnvPool reads past its table.

    Raises:
        ValueError: Names the first of them and the environment that it is for.
    """
    wrong = np.flatnonzero((action < 0) | (action >= num_actions))
    if wrong.size:
        raise ValueError(
            f"the action for environment {wrong[0]} is {action[wrong[0]]}; actions are 0 to {num_actions - 1}"
        )


def channels_last(frames: UInt8[np.ndarray, "B C H W"]) -> UInt8[np.ndarray, "B H W C"]:
    """The stack as networks take it.

    A view: moving it to a device copies it anyway, and JAX transposes on the way, several times faster than NumPy.
    """
    return np.moveaxis(frames, 1, -1)


def observation_spec(channels: int, height: int, width: int) -> ArraySpec:
    """Of `channels_last`."""
    return ArraySpec((height, width, channels), "uint8", 0, 255)


def newest_frame(observation: UInt8[np.ndarray, "H W C"], scale: int = 3) -> UInt8[np.ndarray, "H W 3"]:
    """The newest grey frame of a stack, magnified, for adapters without the emulator's own screen."""
    return np.ascontiguousarray(observation[..., -1:].repeat(scale, axis=0).repeat(scale, axis=1).repeat(3, axis=2))


def timestep(
    first: Bool[np.ndarray, "B"],
    last: Bool[np.ndarray, "B"],
    worthless: Bool[np.ndarray, "B"],
    reward: Shaped[np.ndarray, "B"],
    observation: np.ndarray,
) -> TimeStep:
    """The rows of a package that resets on the step after the last.

    Args:
        first: Where an episode begins, whatever the package says of the reward there.
        last: Where one ends.
        worthless: Where nothing that follows counts.
        reward: As the package gives it.
        observation: `[B, ...]`.
    """
    leaves: Any = (
        np.where(first, StepType.FIRST, np.where(last, StepType.LAST, StepType.MID)).astype(np.int8),
        np.where(first, 0, reward).astype(np.float32),
        1 - worthless.astype(np.float32),
        observation,
    )
    return TimeStep(*leaves)


class LostLives:
    """Finds the rows on which a life was lost.

    The number of lives may rise as well, with a bonus or a new game, and it may reach 0 some steps before the game is
    over. Both are as they should be: the last life is lost once, and the end of the game is a termination.

    Args:
        num_envs: B.
    """

    def __init__(self, num_envs: int) -> None:
        self._lives = np.zeros(num_envs, np.int64)

    def __call__(self, lives: Int[np.ndarray, "B"], first: Bool[np.ndarray, "B"]) -> Bool[np.ndarray, "B"]:
        """True where fewer lives are left than on the row before, of the same game.

        Args:
            lives: Those left, by environment.
            first: Where a new game begins.
        """
        lost = (lives < self._lives) & ~first
        self._lives = np.array(lives)
        return lost
