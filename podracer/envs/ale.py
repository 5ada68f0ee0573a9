"""Atari games by ALE's own vector environment (ale-py 0.12 and later), stepped by its C++ threads.

What an episode, an observation and a lost life are is in `podracer.envs.atari`.

ALE resets on the step after the last and ignores the action of that step, as our contract asks for. But where it cuts a
game at its own limit of frames, the final observation has not been completed: the newest frame has ghosts of the step
before. So ALE gets no limit. Steps are counted here, and a game that was cut is reset from here. A game that ends by
itself before the fourth frame of a step has such ghosts too; its discount is 0, and nothing is learnt from them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from podracer.envs import atari
from podracer.envs.atari_scores import REFERENCE_SCORES
from podracer.envs.host import EnvironmentSlice, check_actions
from podracer.envs.names import check_parameters, unknown_name
from podracer.envs.packages import import_package
from podracer.types import DiscreteSpec, EnvironmentSpec, TimeStep

_NO_LIMIT = 2**30  # ALE adds to it, in 32 bits.


def names() -> tuple[str, ...]:
    """The games for one player. Imports nothing."""
    return atari.GAMES


def make(game: str, **parameters: Any) -> Callable[[EnvironmentSlice], "AleEnvironment"]:
    """What makes batches of a game, for example "space_invaders".

    Args:
        game: As ALE writes it.
        parameters: Those of `AleSettings`.

    Raises:
        ValueError: The game or a parameter is unknown (the nearest are named), or its value is not allowed.
        EnvironmentUnavailableError: ale-py is missing or broken.
    """
    if game not in atari.GAMES:
        raise unknown_name("environment", f"ale:{game}", [f"ale:{name}" for name in atari.GAMES])
    check_parameters(f"ale:{game}", parameters, [field.name for field in dataclasses.fields(AleSettings)])
    settings = AleSettings(**parameters)
    import_package("ale-py", "ale_py.vector_env")  # Says now that it is missing, and not in a thread.
    return lambda where: AleEnvironment(game, where, settings)


@dataclasses.dataclass(frozen=True)
class AleSettings:
    """How a game is played; the defaults are those of the field.

    Attributes:
        sticky_actions: True for a probability of 0.25 to repeat the last action, False for none, or the probability.
        full_action_space: All 18 actions instead of those that the game uses.
        life_loss: A lost life is a discount of 0.
        use_fire_reset: FIRE is pressed on resets, in games that have it; some wait for it for ever.
        noop_max: A game begins with fewer no-ops than this, drawn uniformly.
        stack_num: Frames in an observation.
        max_episode_steps: Steps, of four frames each, after which a game is cut.
        num_threads: Of the batch; by default as many as there are cores, or environments if those are fewer.

    Raises:
        ValueError: A value is not allowed.
    """

    sticky_actions: bool | float = False
    full_action_space: bool = False
    life_loss: bool = True
    use_fire_reset: bool = True
    noop_max: int = 30
    stack_num: int = 4
    max_episode_steps: int = atari.MAX_EPISODE_STEPS
    num_threads: int = 0

    def __post_init__(self) -> None:
        atari.sticky_probability(self.sticky_actions)
        for name in ("full_action_space", "life_loss", "use_fire_reset"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        for name, least in (("noop_max", 0), ("stack_num", 1), ("max_episode_steps", 1), ("num_threads", 0)):
            atari.check_whole_number(name, getattr(self, name), least)


class AleEnvironment:
    """A batch of one game, under the contract of `podracer.envs.HostEnvironment`.

    Args:
        game: As ALE writes it.
        where: The slice.
        settings: How it is played.
        vector: What to step instead of ALE's, for tests.

    Attributes:
        frames_per_step: 4.
        reference_scores: The returns of a random player and of a human; None outside the 57 games that have them.
    """

    frames_per_step = atari.FRAMES_PER_STEP

    def __init__(self, game: str, where: EnvironmentSlice, settings: AleSettings, vector: Any = None) -> None:
        self.reference_scores = REFERENCE_SCORES.get(game)
        self._where, self._settings = where, settings
        self._vector = _vector(game, where.num_envs, settings) if vector is None else vector
        channels, height, width = self._vector.single_observation_space.shape
        self._num_actions = int(self._vector.single_action_space.n)
        self.spec = EnvironmentSpec(atari.observation_spec(channels, height, width), DiscreteSpec(self._num_actions))
        self._lost_lives = atari.LostLives(where.num_envs)
        self._elapsed = np.zeros(where.num_envs, np.int64)
        self._last = np.ones(where.num_envs, np.bool_)
        self._cut = np.zeros(where.num_envs, np.bool_)
        self._observation: Any = None

    @property
    def num_envs(self) -> int:
        return self._where.num_envs

    def reset(self) -> TimeStep:
        frames, info = self._open().reset(seed=np.asarray(self._where.seeds()))
        self._last[:] = True
        nothing = np.zeros(self.num_envs, np.bool_)
        return self._emit(frames, np.zeros(self.num_envs, np.int32), nothing, nothing, info)

    def step(self, action: Int[np.ndarray, "B"]) -> TimeStep:
        vector, cut = self._open(), self._cut
        action = np.asarray(action)
        check_actions(action, self.num_envs)
        if action.shape != (self.num_envs,) or action.dtype.kind not in "iu":
            raise ValueError(
                f"the actions are {action.dtype}{list(action.shape)}; integers of shape [{self.num_envs}] are needed"
            )
        # ALE steps all or none. A game that was cut plays on for a step that is not seen, always with the same action,
        # since the agent's is to have no effect.
        action = np.where(cut, 0, action).astype(np.int32)
        atari.check_buttons(action, self._num_actions)
        frames, reward, terminated, truncated, info = vector.step(action)
        if cut.any():
            frames, info = vector.reset(options={"reset_mask": cut})
        return self._emit(frames, reward, terminated, truncated, info)

    def render(self) -> UInt8[np.ndarray, "H W 3"]:
        """The newest frame of the first environment, in grey: ALE's vector environment shows no screen."""
        return atari.newest_frame(self._observation[0])

    def close(self) -> None:
        # Its threads end with the last reference to it, which a step in another thread may hold.
        vector, self._vector = self._vector, None
        if vector is not None:
            vector.close()

    def _open(self) -> Any:
        vector = self._vector
        if vector is None:
            raise RuntimeError("the environments are closed")
        return vector

    def _emit(
        self, frames: np.ndarray, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, info: Any
    ) -> TimeStep:
        first = self._last
        self._elapsed = np.where(first, 0, self._elapsed + 1)
        terminated = terminated & ~first
        over = (terminated | truncated) & ~first
        # Where the game was not over by itself, which ALE would reset by itself.
        self._cut = ~over & (self._elapsed >= self._settings.max_episode_steps)
        self._last = over | self._cut
        worthless = terminated
        if self._settings.life_loss:
            worthless = worthless | self._lost_lives(info["lives"], first)
        self._observation = atari.channels_last(frames)
        return atari.timestep(first, self._last, worthless, reward, self._observation)


def _vector(game: str, num_envs: int, settings: AleSettings) -> Any:
    return import_package("ale-py", "ale_py.vector_env").AtariVectorEnv(
        game,
        num_envs,
        num_threads=settings.num_threads,
        max_num_frames_per_episode=_NO_LIMIT,
        repeat_action_probability=atari.sticky_probability(settings.sticky_actions),
        full_action_space=settings.full_action_space,
        stack_num=settings.stack_num,
        frameskip=atari.FRAMES_PER_STEP,
        maxpool=True,
        grayscale=True,
        img_height=84,
        img_width=84,
        noop_max=settings.noop_max,
        use_fire_reset=settings.use_fire_reset,
        # An episode is a whole game, and its return what the game counted.
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,
    )
