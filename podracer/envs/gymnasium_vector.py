"""Vector environments of Gymnasium, whichever way they reset themselves.

A vector environment steps all its environments at once, and under the contract of host environments one that has ended
spends a step on its reset while the others go on.

| autoreset mode | the step after an end | so it is stepped |
|---|---|---|
| `NEXT_STEP` | resets, and ignores the action | as it is: the contract is the same |
| `SAME_STEP` | is the first of the next episode | one environment at a time: the one that ended has to wait |
| `DISABLED` | is an error before a reset | one environment at a time, for the same reason |

The three give the same rows. `NEXT_STEP` is the fast one. A vector environment of one is stepped as it is in any mode.
"""

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podracer.envs.gymnasium_columns import FIRST, LAST, MID, Columns, Leaf, Rows, checked, flatten, one
from podracer.envs.host import EnvironmentSlice
from podracer.envs.packages import import_package

_NEXT_STEP, _SAME_STEP = "NEXT_STEP", "SAME_STEP"

# The vector environments that were given and have begun to serve, by their ids; one may be given to several factories.
_taken: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_taking = threading.Lock()


def step_as_it_resets(
    make_vector_env: Callable[[EnvironmentSlice], Any], slowness_said: threading.Lock, where: EnvironmentSlice
) -> Any:
    """The environments of a slice with the methods of `Columns`.

    Args:
        make_vector_env: Makes a vector environment of a slice.
        slowness_said: Held as soon as a warning has said that environments are stepped one at a time.
        where: The slice.

    Raises:
        ValueError: What was made is no vector environment, is of another size, or does not say how it resets.
    """
    vector_env = _made(make_vector_env, where)
    try:
        mode = autoreset_mode(vector_env)
    except ValueError:
        vector_env.close()
        raise
    if mode == _NEXT_STEP or where.num_envs == 1:
        return _steps([vector_env], mode, where)
    vector_env.close()
    if slowness_said.acquire(blocking=False):
        warnings.warn(
            f"{type(vector_env).__name__} resets by {mode}, so its environments are made and stepped one at a time, "
            "which is slower; by NEXT_STEP they would be stepped together",
            RuntimeWarning,
            stacklevel=3,
        )
    slices = [dataclasses.replace(where, num_envs=1, first_index=where.first_index + b) for b in range(where.num_envs)]
    singles: list[Any] = []
    try:
        for part in slices:
            singles.append(_made(make_vector_env, part))
    except BaseException:
        for single in singles:
            single.close()
        raise
    return _steps(singles, mode, where)


def _steps(vector_envs: Sequence[Any], mode: str, where: EnvironmentSlice) -> Any:
    """One vector environment in the mode `NEXT_STEP`, or any number of one environment each in another."""
    if mode == _NEXT_STEP:
        return NextStep(vector_envs[0], where.seeds()[0])
    makers = [lambda vector_env=vector_env: One(vector_env, mode) for vector_env in vector_envs]
    return Columns(type(vector_envs[0]).__name__, makers, where.first_index, where.seeds(), None)


def _made(make_vector_env: Callable[[EnvironmentSlice], Any], where: EnvironmentSlice) -> Any:
    vector_env = make_vector_env(where)
    kind = import_package("gymnasium", "gymnasium.vector").VectorEnv
    if not isinstance(vector_env, kind):
        raise ValueError(
            f"make_vector_env returned {'None' if vector_env is None else f'a {type(vector_env).__name__}'}; "
            "a gymnasium.vector.VectorEnv is needed"
        )
    if vector_env.num_envs != where.num_envs:
        size = vector_env.num_envs
        vector_env.close()
        raise ValueError(f"make_vector_env made {size} environments; {where.num_envs} were asked for")
    return vector_env


def autoreset_mode(vector_env: Any) -> str:
    """The name of the `gymnasium.vector.AutoresetMode` that a vector environment declares in its metadata.

    Raises:
        ValueError: It declares none, or one that does not exist.
    """
    modes = import_package("gymnasium", "gymnasium.vector").AutoresetMode
    declared = (vector_env.metadata or {}).get("autoreset_mode")
    # Gymnasium's own classes write into the metadata of the environment's class, where the next one overwrites it.
    own = getattr(vector_env.unwrapped, "autoreset_mode", declared)
    with contextlib.suppress(ValueError):
        return str(modes(own).name)
    what = "does not say how it resets" if own is None else f"says that it resets by {own!r}, which is no such mode"
    raise ValueError(
        f'{type(vector_env).__name__} {what}; metadata["autoreset_mode"] must be a gymnasium.vector.AutoresetMode, '
        f"one of {', '.join(mode.name for mode in modes)}"
    )


def mode_of_given(vector_env: Any) -> str:
    """The autoreset mode of a vector environment that is to be stepped as it is.

    Raises:
        ValueError: It does not declare it, or cannot be stepped as it is.
    """
    mode = autoreset_mode(vector_env)
    if mode != _NEXT_STEP and vector_env.num_envs > 1:
        raise ValueError(
            f"{type(vector_env).__name__} resets by {mode} and has {vector_env.num_envs} environments, which cannot go "
            "on while one that ended waits a step for its reset; pass a function that makes such a vector environment "
            "of any size, or one that resets by NEXT_STEP"
        )
    return mode


class Given:
    """A vector environment that exists already, with the methods of `Columns`. The first to be reset has it, for good.

    Those that are made only to be asked for their spec, for one environment, are not reset, and leave it as it is.

    Args:
        vector_env: The vector environment.
        mode: What `mode_of_given` says of it.
        where: The slice that it is to be.

    Raises:
        ValueError: It has served already, or is of another size; of one environment, as asked for, only at its reset.
    """

    def __init__(self, vector_env: Any, mode: str, where: EnvironmentSlice) -> None:
        self._vector_env, self._num_envs, self._is_mine = vector_env, where.num_envs, False
        self._check_free()
        if where.num_envs > 1:
            self._check_size()
        self._steps = _steps([vector_env], mode, where)
        self.observation_space, self.action_space = self._steps.observation_space, self._steps.action_space
        self.step, self.frame = self._steps.step, self._steps.frame

    def reset(self, leaves: Sequence[Leaf]) -> Rows:
        self._check_size()
        with _taking:
            self._check_free()
            _taken[id(self._vector_env.unwrapped)] = self._vector_env.unwrapped
        self._is_mine = True
        return self._steps.reset(leaves)

    def close(self, idle: bool = True) -> None:
        if self._is_mine:
            self._steps.close(idle)

    def _check_free(self) -> None:
        if id(self._vector_env.unwrapped) in _taken:
            raise ValueError(
                f"this {type(self._vector_env).__name__} has been used, and is closed with the run that used it; pass "
                "a function that makes one: evaluation, restarts and several threads make environments of their own"
            )

    def _check_size(self) -> None:
        size = self._vector_env.num_envs
        if size != self._num_envs:
            raise ValueError(
                f"this {type(self._vector_env).__name__} has {size} environments; {self._num_envs} were asked for: set "
                f"num_envs of the configuration to {size} and threads_per_actor_device to 1, or pass a function that "
                "makes one of any size"
            )


class Watched:
    """A vector environment that is closed in the way that it still can be."""

    def __init__(self, vector_env: Any) -> None:
        self._vector_env, self._failed = vector_env, False
        self.name = type(vector_env).__name__
        self.observation_space = vector_env.single_observation_space
        self.action_space = vector_env.single_action_space
        self.render_mode = getattr(vector_env, "render_mode", None)

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            return getattr(self._vector_env, method)(*arguments, **keywords)
        except BaseException:
            self._failed = True
            raise

    def close(self, idle: bool) -> None:
        """Closes it; if it hangs or has failed, ends the processes that it shows, as Gymnasium's does.

        Gymnasium's would wait for answers that never come.
        """
        processes = getattr(self._vector_env.unwrapped, "processes", None) or []
        if idle and not (self._failed and processes):
            self._vector_env.close()
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        self._vector_env.unwrapped.closed = True  # Otherwise it would close itself again when it is forgotten.

    def frame(self) -> Any:
        """A picture of the first environment, None if it was made without `rgb_array`."""
        frames = self._vector_env.render() if self.render_mode == "rgb_array" else None
        return None if frames is None else frames[0]


class NextStep:
    """A vector environment in the mode `NEXT_STEP`, with the methods of `Columns`.

    Args:
        vector_env: The vector environment.
        seed: Of its first environment; the others' follow, as Gymnasium counts.
    """

    def __init__(self, vector_env: Any, seed: int) -> None:
        self._vector_env, self._seed = Watched(vector_env), seed
        self.observation_space, self.action_space = self._vector_env.observation_space, self._vector_env.action_space
        self._leaves: Sequence[Leaf] = ()
        self._last = np.zeros(vector_env.num_envs, np.bool_)

    def reset(self, leaves: Sequence[Leaf]) -> Rows:
        self._leaves, n = leaves, len(self._last)
        observation, _ = self._vector_env.call("reset", seed=self._seed)
        numbers = np.full(n, FIRST, np.int8), np.zeros(n, np.float32), np.ones(n, np.float32)
        return Rows(*numbers, self._arrays(observation))

    def step(self, actions: np.ndarray) -> Rows:
        observation, *numbers, _ = self._vector_env.call("step", actions)
        names = ("reward", "terminated", "truncated")
        reward, terminated, truncated = (self._each(x, name) for x, name in zip(numbers, names, strict=True))
        first, over = self._last, (terminated != 0) | (truncated != 0)
        if (first & over).any():
            raise ValueError(
                f"{self._vector_env.name} declares NEXT_STEP but ended episodes on the step that resets "
                f"them, in environments {np.flatnonzero(first & over).tolist()}"
            )
        self._last = over
        return Rows(
            np.where(first, FIRST, np.where(over, LAST, MID)).astype(np.int8),
            np.where(first, 0, reward).astype(np.float32),
            np.where(terminated != 0, 0, 1).astype(np.float32),
            self._arrays(observation),
        )

    def frame(self) -> Any:
        return self._vector_env.frame()

    def close(self, idle: bool = True) -> None:
        self._vector_env.close(idle)

    def _arrays(self, observation: Any) -> list[np.ndarray]:
        values, n = flatten(self.observation_space, observation), len(self._last)
        pairs = zip(self._leaves, values, strict=True)
        return [checked(leaf, value, (n, *leaf.shape)).astype(leaf.dtype) for leaf, value in pairs]

    def _each(self, values: Any, what: str) -> np.ndarray:
        array = np.asarray(values)
        if array.size != len(self._last) or array.dtype.kind not in "biuf":
            raise ValueError(
                f"{self._vector_env.name}.step returned a {what} of {array.dtype}{list(array.shape)}; "
                f"one number for each of {len(self._last)} environments is needed"
            )
        return array.reshape(-1)


class One:
    """A vector environment of one, in the mode `SAME_STEP` or `DISABLED`, as an environment."""

    def __init__(self, vector_env: Any, mode: str) -> None:
        self._vector_env, self._mode = Watched(vector_env), mode
        self.observation_space, self.action_space = self._vector_env.observation_space, self._vector_env.action_space
        self.render_mode = self._vector_env.render_mode
        self._following: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if self._following is not None:  # In the same step it has begun the episode already.
            (observation,), self._following = self._following, None
            return observation, {}
        observation, infos = self._vector_env.call("reset", seed=seed)
        return _only(self.observation_space, observation), infos

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, terminated, truncated, infos = self._vector_env.call("step", np.asarray(action)[None])
        observation = _only(self.observation_space, observation)
        if self._mode == _SAME_STEP and (one(terminated, "terminated") or one(truncated, "truncated")):
            self._following, observation = (observation,), self._final(infos)
        return observation, reward, terminated, truncated, infos

    def render(self) -> Any:
        return self._vector_env.frame()

    def close(self) -> None:
        self._vector_env.close(True)

    def kill(self) -> None:
        self._vector_env.close(False)

    def _final(self, infos: Any) -> Any:
        final = infos.get("final_obs")
        if final is None:
            raise ValueError(
                f"{self._vector_env.name} resets in the same step but gives no final observation: "
                'infos["final_obs"] is missing'
            )
        # Gymnasium's own classes give an array of objects, others a batch like every other.
        if isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype.kind == "O"):
            return final[0]
        return _only(self.observation_space, final)


def _only(space: Any, observation: Any) -> Any:
    """The observation of the only environment."""
    spaces = getattr(space, "spaces", None)
    if spaces is None:
        return observation[0]
    if isinstance(spaces, dict):
        return {key: _only(inner, observation[key]) for key, inner in spaces.items()}
    return tuple(_only(inner, part) for inner, part in zip(spaces, observation, strict=True))
