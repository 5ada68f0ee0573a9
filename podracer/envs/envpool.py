"""The environments of EnvPool (1.2.5 and later): Atari, classic control, Box2D and MuJoCo, stepped by its C++ threads.

EnvPool resets an environment on the step after its last and ignores the action of that step, as our contract asks for.
Three things are seen to here:

- At a time limit EnvPool says truncated, even if the task ended on that very step. So a pool gets a limit that lies one
  step beyond ours. What ends within ours is a termination; what does not is cut, and reset, from here.
- Without seeds all pools are alike, and with one seed pools overlap. Every environment gets its own.
- A synchronous pool waits for all of its environments, an asynchronous one hands them over as they come. Either way
  `step` returns all of them, in their order.

With `batch_size` a pool is asynchronous. Every environment needs the action that the agent chose on its last timestep,
so all of them are sent at once, and none can be ahead of the others. What is gained is that the first timesteps are put
in order while the last environments still step. Overlapping more than that is the work of several actor threads, each
with a pool.
"""

import dataclasses
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree, UInt8

from podracer.envs import atari, rendering
from podracer.envs.atari_scores import REFERENCE_SCORES
from podracer.envs.gymnasium_spaces import Spaces
from podracer.envs.host import EnvironmentSlice
from podracer.envs.names import check_parameters, unknown_name
from podracer.envs.packages import import_package
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, TimeStep

# Of the other families that EnvPool registers none has been checked against the contract.
_ATARI = {"".join(word.capitalize() for word in game.split("_")) + "-v5": game for game in atari.GAMES}
_CLASSIC_CONTROL = (
    *("Acrobot-v1", "CartPole-v0", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v0"),
    "Pendulum-v1",
)
_BOX2D = (
    *("BipedalWalker-v3", "BipedalWalkerHardcore-v3", "CarRacing-v2", "CarRacing-v3", "LunarLander-v2"),
    *("LunarLander-v3", "LunarLanderContinuous-v2", "LunarLanderContinuous-v3"),
)
_MUJOCO = (
    *(
        f"{name}-v{i}"
        for name in ("Ant", "HalfCheetah", "Hopper", "Humanoid", "Swimmer", "Walker2d")
        for i in (3, 4, 5)
    ),
    *(
        f"{name}-v{i}"
        for name in ("HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum", "Pusher", "Reacher")
        for i in (2, 4, 5)
    ),
)
_NAMES = (*_ATARI, *_CLASSIC_CONTROL, *_BOX2D, *_MUJOCO)

# What a run decides, or this adapter.
_REFUSED = {
    **dict.fromkeys(("seed", "env_seed"), "every environment is seeded by the run"),
    **dict.fromkeys(("num_envs", "max_num_players"), "the run says how many environments there are"),
    "episodic_life": "an episode is a whole game; with life_loss=True a lost life is a discount of 0",
    "zero_discount_on_life_loss": "it is life_loss=True",
    "reward_clip": "environments never clip rewards; agents do, in their loss",
    "repeat_action_probability": "it is sticky_actions",
    "task": "it is the name of the environment",
    **dict.fromkeys(("base_path", "gym_reset_return_info"), "it is EnvPool's own"),
}

# Numbers of something, and how many there are at least; without a no-op EnvPool draws from an empty range.
_LEAST = {"max_episode_steps": 1, "batch_size": 0, "num_threads": 0, "noop_max": 1, "frame_skip": 1, "stack_num": 1}

_warnings = threading.Lock()


def names() -> tuple[str, ...]:
    """The environments of the four families, those of EnvPool 1.2.5. Imports nothing."""
    return _NAMES


def make(name: str, **parameters: Any) -> Callable[[EnvironmentSlice], "EnvPoolEnvironment"]:
    """What makes batches of an environment, for example "Pong-v5", "CartPole-v1" or "HalfCheetah-v4".

    Args:
        name: As EnvPool registers it.
        parameters: What EnvPool has for this environment, such as `num_threads`, and

            - `max_episode_steps`: Steps after which an episode is cut.
            - `batch_size`: Makes the pool asynchronous: so many environments are received at a time. Their greatest
              common divisor with the number of environments is used, since all of them are received in every step.
            - `sticky_actions`, `life_loss`: For Atari, as in `podracer.envs.atari`.

    Raises:
        ValueError: The environment or a parameter is unknown (the nearest are named), or its value is not allowed.
        EnvironmentUnavailableError: EnvPool is missing or broken.
    """
    if name not in _NAMES:
        raise unknown_name("environment", f"envpool:{name}", [f"envpool:{known}" for known in _NAMES])
    package = import_package("envpool")
    game, defaults = _ATARI.get(name), _defaults(name)
    ours: dict[str, Any] = {} if game is None else {"life_loss": True, "sticky_actions": False}
    for key in parameters:
        if key in _REFUSED and key in defaults:
            raise ValueError(f"{key} is no parameter of envpool:{name}: {_REFUSED[key]}")
    check_parameters(f"envpool:{name}", parameters, {*defaults, *ours} - {*_REFUSED})
    for key, value in parameters.items():
        if key in _LEAST:
            atari.check_whole_number(key, value, _LEAST[key])
        elif key != "sticky_actions":
            _check_kind(key, value, {**defaults, **ours}[key])
    settings = {"batch_size": 0, "max_episode_steps": defaults["max_episode_steps"], **ours, **parameters}
    limit, batch_size, life_loss = (settings.pop(key, None) for key in ("max_episode_steps", "batch_size", "life_loss"))
    if game is not None:
        settings["repeat_action_probability"] = atari.sticky_probability(settings.pop("sticky_actions"))

    def make_batch(where: EnvironmentSlice) -> EnvPoolEnvironment:
        pool = package.make_gymnasium(
            name,
            **settings,
            max_episode_steps=limit + 1,
            num_envs=where.num_envs,
            batch_size=math.gcd(batch_size, where.num_envs),
            seed=where.seeds(),
            **({} if name in _MUJOCO else {"render_mode": "rgb_array"}),
        )
        return EnvPoolEnvironment(name, pool, limit, game=game, life_loss=bool(life_loss))

    return make_batch


@functools.cache  # For Atari it starts an emulator.
def _defaults(name: str) -> dict[str, Any]:
    return import_package("envpool").make_spec(name).config._asdict()


def _check_kind(name: str, value: Any, default: Any) -> None:
    """Refuses a value of another kind than EnvPool's own, where EnvPool would only list its C++ constructors."""
    kinds: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
    allowed = kinds.get(type(default), (object,))
    if not isinstance(value, allowed) or (isinstance(value, bool) and not isinstance(default, bool)):
        rule = "True or False" if isinstance(default, bool) else f"of the kind {type(default).__name__}"
        raise ValueError(f"{name} is {value!r}; it must be {rule} (default {default!r})")


class _Rows(NamedTuple):
    """What a pool says of some environments, `[n, ...]` each.

    `lives` and `game_over` are None where it says nothing of them.
    """

    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    elapsed: np.ndarray
    lives: np.ndarray | None
    game_over: np.ndarray | None


class EnvPoolEnvironment:
    """A pool under the contract of `podracer.envs.HostEnvironment`.

    Args:
        name: What errors call it.
        pool: By `envpool.make_gymnasium`, with a limit beyond `max_episode_steps`.
        max_episode_steps: Where episodes are cut.
        game: The Atari game by its name in ALE, None for other environments.
        life_loss: For Atari: a lost life is a discount of 0.

    Attributes:
        spec: Reals of 64 bits are emitted as reals of 32.
        frames_per_step: Of an Atari game; 1 for other environments.
        reference_scores: The returns of a random player and of a human in the 57 games that have them, else None.
    """

    def __init__(
        self, name: str, pool: Any, max_episode_steps: int, *, game: str | None = None, life_loss: bool = True
    ) -> None:
        self._name, self._pool, self._limit, self._game = name, pool, max_episode_steps, game
        self.num_envs = int(pool.config["num_envs"])
        self.frames_per_step = 1 if game is None else int(pool.config["frame_skip"])
        self.reference_scores = None if game is None else REFERENCE_SCORES.get(game)
        self._is_async = pool.config["batch_size"] not in (0, self.num_envs)
        with _quiet():  # The pool makes them now, and keeps them.
            self._spaces = Spaces(f"envpool:{name}", pool.observation_space, pool.action_space)
        self.spec = EnvironmentSpec(self._observation_spec(), self._spaces.spec.action)
        self._lost_lives = atari.LostLives(self.num_envs) if game is not None and life_loss else None
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._last = np.ones(self.num_envs, np.bool_)
        self._cut = np.zeros(self.num_envs, np.bool_)
        self._observation: Any = None

    def reset(self) -> TimeStep:
        pool = self._open()
        self._last[:] = True
        pool.async_reset()
        return self._emit(self._receive(pool))

    def step(self, action: PyTree) -> TimeStep:
        pool = self._open()
        action = self._spaces.actions(action, self.num_envs)
        if self._game is not None and isinstance(self.spec.action, DiscreteSpec):
            atari.check_buttons(action, self.spec.action.num_actions)
        if not self._cut.any():
            pool.send(action, self._all)
            return self._emit(self._receive(pool))
        stepped, cut = self._all[~self._cut], self._all[self._cut]
        parts = []
        if len(stepped):
            pool.send(action[stepped], stepped)
            if not self._is_async:  # A synchronous pool puts rows where they are in their request, so one at a time.
                parts.append(_read(pool))
        pool._reset(cut)
        return self._emit(self._receive(pool, parts))

    def render(self) -> UInt8[np.ndarray, "H W 3"]:
        """The screen of the first environment, or where EnvPool would need OpenGL (MuJoCo) its observation, drawn."""
        if self._name in _MUJOCO:
            return rendering.draw_observation(self._observation[0], self.spec.observation)
        return np.asarray(self._open().render(0))[0]

    def close(self) -> None:
        # Its threads end with the last reference to it, which a step in another thread may hold.
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _open(self) -> Any:
        pool = self._pool
        if pool is None:
            raise RuntimeError(f"the environments of envpool:{self._name} are closed")
        return pool

    def _observation_spec(self) -> ArraySpec:
        spec: Any = self._spaces.spec.observation
        if self._game is not None:
            return atari.observation_spec(*spec.shape)
        # EnvPool's Box2D has the smallest positive number for minus infinity.
        wrong = spec.minimum is not None and 0 < spec.minimum <= np.finfo(np.float32).tiny
        return dataclasses.replace(spec, minimum=None) if wrong else spec

    def _receive(self, pool: Any, parts: Any = ()) -> _Rows:
        """The rows of all environments in their order, some of which may have been read already."""
        rows: Any = None
        missing = self.num_envs
        waiting = iter([*parts])
        while missing:
            ids, part = next(waiting, None) or _read(pool)
            missing -= len(ids)
            if len(ids) == self.num_envs and np.array_equal(ids, self._all):
                return part
            if rows is None:
                empty: Any = (x if x is None else np.empty((self.num_envs, *x.shape[1:]), x.dtype) for x in part)
                rows = _Rows(*empty)
            for array, values in zip(rows, part, strict=True):
                if array is not None:
                    array[ids] = values
        return rows

    def _emit(self, rows: _Rows) -> TimeStep:
        first = self._last
        self._check_elapsed(rows, np.where(first, 0, self._elapsed + 1))
        self._elapsed = rows.elapsed
        over = (rows.terminated | rows.truncated) & ~first
        terminated = rows.terminated & ~first
        if rows.game_over is not None:
            self._check_explained(rows, over)
            terminated = over & (rows.game_over != 0)  # Also if the game was over where it was cut.
        # Where the pool goes on, unlike where it ends an episode and resets by itself.
        self._cut = ~over & (rows.elapsed >= self._limit)
        self._last = over | self._cut
        worthless = terminated
        if self._lost_lives is not None and rows.lives is not None:
            worthless = worthless | self._lost_lives(rows.lives, first)
        observation = rows.observation
        self._observation = (
            observation.astype(self.spec.observation.dtype, copy=False)
            if self._game is None
            else atari.channels_last(observation)
        )
        return atari.timestep(first, self._last, worthless, rows.reward, self._observation)

    def _check_elapsed(self, rows: _Rows, expected: np.ndarray) -> None:
        wrong = np.flatnonzero(rows.elapsed != expected)
        if wrong.size:
            b = wrong[0]
            raise RuntimeError(
                f"environment {b} of envpool:{self._name} is at step {rows.elapsed[b]} of its episode, "
                f"{expected[b]} is due: the pool began or ended an episode without saying so"
            )

    def _check_explained(self, rows: _Rows, over: np.ndarray) -> None:
        wrong = np.flatnonzero(over & (rows.game_over == 0) & ~rows.truncated & (rows.elapsed < self._limit))
        if wrong.size:
            b = wrong[0]
            raise RuntimeError(
                f"environment {b} of envpool:{self._name} ended an episode at step {rows.elapsed[b]}, which is neither "
                f"the end of the game nor the limit of {self._limit} steps"
            )


def _read(pool: Any) -> tuple[np.ndarray, _Rows]:
    """What the pool has next, and of which environments."""
    observation, reward, terminated, truncated, info = pool.recv()
    return info["env_id"], _Rows(
        *(observation, reward, terminated, truncated, info["elapsed_step"], info.get("lives"), info.get("terminated"))
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Gymnasium's warnings of bounds that EnvPool rounds."""
    # What is ignored is a setting of the process, so one thread at a time.
    with _warnings, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting", category=UserWarning)
        yield
