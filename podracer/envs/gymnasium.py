"""The environments of Gymnasium (1.3 and later), and vector environments of anyone's, as host environments.

Gymnasium is imported only when one of its environments is made. Those that are made by name are not put into one of
Gymnasium's vector environments: each is stepped by itself, here or in a process, which is the contract of host
environments without anything in between. `podracer.envs.gymnasium_spaces` says what spaces become.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree, UInt8

from podracer.envs.gymnasium_columns import Columns
from podracer.envs.gymnasium_processes import Processes
from podracer.envs.gymnasium_spaces import Spaces
from podracer.envs.gymnasium_vector import Given, mode_of_given, step_as_it_resets
from podracer.envs.host import EnvironmentSlice, HostEnvironment
from podracer.envs.names import check_parameters, unknown_name
from podracer.envs.packages import EnvironmentUnavailableError, import_package, installed_version
from podracer.envs.rendering import draw_observation, is_frame
from podracer.machine import cores
from podracer.rules import COUNT
from podracer.types import EnvironmentSpec, TimeStep

# What Gymnasium registers in this version, so that names can be listed and corrected without importing it.
_VERSION = "1.3.0"
_MUJOCO = {
    "Ant": "2345",
    "HalfCheetah": "2345",
    "Hopper": "2345",
    "Humanoid": "2345",
    "HumanoidStandup": "245",
    "InvertedDoublePendulum": "245",
    "InvertedPendulum": "245",
    "Pusher": "245",
    "Reacher": "245",
    "Swimmer": "2345",
    "Walker2d": "2345",
}
_NAMES = (
    *("CartPole-v0", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1"),
    *("phys2d/CartPole-v0", "phys2d/CartPole-v1", "phys2d/Pendulum-v0", "tabular/Blackjack-v0"),
    *("tabular/CliffWalking-v0", "LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3"),
    *("BipedalWalkerHardcore-v3", "CarRacing-v3", "Blackjack-v1", "FrozenLake-v1", "FrozenLake8x8-v1"),
    *("CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4", "GymV21Environment-v0", "GymV26Environment-v0"),
    *(f"{name}-v{version}" for name, versions in _MUJOCO.items() for version in versions),
)
_GRACE = 1.0  # Seconds that `close` waits for a step to end.


def names() -> tuple[str, ...]:
    """The environments registered with Gymnasium, by users too if it is imported; of 1.3.0 where there is none.

    Imports Gymnasium only if it is of another version.
    """
    if sys.modules.get("gymnasium") is None and installed_version("gymnasium") in (None, _VERSION):
        return _NAMES
    try:
        return tuple(import_package("gymnasium").registry)
    except (EnvironmentUnavailableError, AttributeError):
        return _NAMES


def make(
    name: str,
    *,
    vectorization: str = "sync",
    num_processes: int | None = None,
    reset_options: dict[str, Any] | None = None,
    **parameters: Any,
) -> Callable[[EnvironmentSlice], HostEnvironment]:
    """What makes batches of an environment that is registered with Gymnasium.

    Environment `i` of a run is seeded by `EnvironmentSlice.seeds()` on its first reset; later resets continue its own
    random numbers. Gymnasium's checker of environments is off unless `disable_env_checker=False`: it warns of what is
    an error here.

    Args:
        name: The id, for example "CartPole-v1".
        vectorization: "sync" steps the environments one after the other in the thread that calls; "async" divides them
            among processes. Both give the same rows.
        num_processes: Of a batch, with "async". One for each core, and at most one for each environment, where None.
        reset_options: The `options` of every reset, the later ones included.
        parameters: What `gymnasium.make` takes: `max_episode_steps`, `render_mode`, the environment's own. With
            `render_mode="rgb_array"`, recordings show the environment's own pictures.

    Raises:
        ValueError: The environment, a parameter or a value is not valid; the nearest are named. Where the environment
            alone can tell, the function that is returned raises it, as for spaces that no agent takes.
        EnvironmentUnavailableError: Gymnasium, or a package that the environment needs, is missing or broken.
    """
    if vectorization not in ("sync", "async"):
        raise unknown_name("vectorization of gymnasium", str(vectorization), ("sync", "async"))
    if num_processes is not None and (vectorization != "async" or not COUNT.holds(num_processes)):
        raise ValueError(f'num_processes is {num_processes!r}; it must be {COUNT.says}, with vectorization="async"')
    if reset_options is not None and not isinstance(reset_options, dict):
        raise ValueError(f"reset_options is {reset_options!r}; it must be a dict")
    gymnasium = import_package("gymnasium")
    full_name = f"gymnasium:{name}"
    try:
        spec = gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:  # A name may begin with a module that registers it.
        raise unknown_name("gymnasium environment", name, tuple(gymnasium.registry)) from error
    creator = _create(full_name, lambda: _creator(gymnasium, spec))
    check_parameters(full_name, parameters, _parameters(creator, parameters))
    maker = functools.partial(gymnasium.make, spec, **{"disable_env_checker": True, **parameters})

    def make_slice(where: EnvironmentSlice) -> HostEnvironment:
        arguments = full_name, [maker] * where.num_envs, where.first_index, where.seeds(), reset_options
        if vectorization == "sync":
            steps: Any = _create(full_name, lambda: Columns(*arguments))
        else:
            steps = _create(full_name, lambda: Processes(*arguments, num_processes or cores()))
        return GymnasiumEnvironment(full_name, steps, where.num_envs)

    return make_slice


def from_vector_env(make_vector_env: Any) -> Callable[[EnvironmentSlice], HostEnvironment]:
    """What makes batches of a vector environment of your own.

    It may reset itself in any of Gymnasium's modes, which `metadata["autoreset_mode"]` must declare; it is never
    guessed. `podracer.envs.gymnasium_vector` says what becomes of each. In the modes `SAME_STEP` and `DISABLED` a batch
    cannot be stepped while one of its environments waits, so `make_vector_env` is called for one environment at a time,
    with a warning: where that is slow, use `NEXT_STEP`.

    The seed of the first environment is that of the whole, `reset(seed=where.seeds()[0])`, from which Gymnasium's
    classes count upwards. An `AsyncVectorEnv` should have `context="spawn"` or "forkserver": a fork of a program that
    uses JAX may hang.

    Args:
        make_vector_env: A function of an `EnvironmentSlice` that makes a `gymnasium.vector.VectorEnv` of its `num_envs`
            environments. Or a vector environment itself, of the mode `NEXT_STEP` or of one environment: it serves one
            batch of its own size, the first that is reset, and is closed with it. Evaluation, with which experiments
            end, restarts and several threads make environments of their own, and so need the function.

    Raises:
        ValueError: `make_vector_env` is neither, or is a vector environment that cannot be stepped as it is. By the
            function that is returned, if what was made is no vector environment, of another size, does not declare its
            mode, or has spaces that no agent takes, or if the vector environment that was given has served already.
        EnvironmentUnavailableError: Gymnasium is missing or broken.
    """
    kind = type(make_vector_env).__name__
    make_steps: Callable[[EnvironmentSlice], Any]
    if isinstance(make_vector_env, import_package("gymnasium", "gymnasium.vector").VectorEnv):
        name = f"the vector environment {kind}"
        make_steps = functools.partial(Given, make_vector_env, mode_of_given(make_vector_env))
    elif callable(make_vector_env):
        name = f"the vector environment of {getattr(make_vector_env, '__name__', kind)}"
        make_steps = functools.partial(step_as_it_resets, make_vector_env, threading.Lock())
    else:
        raise ValueError(
            f"make_vector_env is {make_vector_env!r}; it must be a function that makes a gymnasium.vector.VectorEnv, "
            "or a VectorEnv"
        )
    return lambda where: GymnasiumEnvironment(name, make_steps(where), where.num_envs)


class GymnasiumEnvironment:
    """Environments of Gymnasium as a host environment; made by `make` and `from_vector_env`.

    Args:
        name: What errors call it.
        steps: `Columns`, or another class with its methods.
        num_envs: B.

    Raises:
        ValueError: A space is of a kind that no agent takes.
    """

    def __init__(self, name: str, steps: Any, num_envs: int) -> None:
        self._name, self._steps, self._num_envs = name, steps, num_envs
        self._stepping, self._closing, self._closed = threading.Lock(), threading.Lock(), False
        self._timestep: Any = None
        try:
            self._spaces = Spaces(name, steps.observation_space, steps.action_space)
            self._spec = self._spaces.spec
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> EnvironmentSpec:
        return self._spec

    @property
    def num_envs(self) -> int:
        return self._num_envs

    def reset(self) -> TimeStep:
        self._timestep = self._spaces.timestep(self._call(self._steps.reset, self._spaces.leaves))
        return self._timestep

    def step(self, action: PyTree) -> TimeStep:
        """The next timesteps `[B]`.

        Raises:
            ValueError: There is not one action of the spec per environment, or an environment emits what its spaces do
                not have.
            RuntimeError: A process of the environments died, or the environments are closed.
            Exception: Whatever an environment raises, with a note that says which.
        """
        actions = self._spaces.actions(action, self._num_envs)
        self._timestep = self._spaces.timestep(self._call(self._steps.step, actions))
        return self._timestep

    def render(self) -> UInt8[np.ndarray, "H W 3"]:
        """A picture of the first environment: its own if made with `render_mode="rgb_array"`, else its observation.

        Raises:
            ValueError: The environment's own picture is not uint8 `[H, W, 3]`.
        """
        frame = self._call(self._steps.frame)
        if frame is None:
            first = jax.tree.map(lambda x: x[0], self._timestep.observation)
            return draw_observation(first, self._spec.observation)
        frame = np.asarray(frame)
        if not is_frame(frame):
            raise ValueError(f"{self._name} renders {frame.dtype}{list(frame.shape)}; a picture is uint8 [H, W, 3]")
        return frame

    def close(self) -> None:
        """Closes the environments and ends their processes, also while another thread waits for a step of theirs.

        An environment of "sync" that hangs in a step is left as it is, since nothing can end a thread.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            idle = self._stepping.acquire(timeout=_GRACE)
            try:
                self._steps.close(idle)
            finally:
                if idle:
                    self._stepping.release()

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        with self._stepping:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            try:
                return method(*arguments)
            except Exception as error:
                if self._closed:
                    raise RuntimeError(f"{self._name} was closed during a step") from error
                raise


def _creator(gymnasium: Any, spec: Any) -> Any:
    """The class or function of an environment."""
    if spec.entry_point is None:
        raise ValueError(f"gymnasium:{spec.id} exists as a vector environment only; see from_vector_env")
    return (
        spec.entry_point
        if callable(spec.entry_point)
        else gymnasium.envs.registration.load_env_creator(spec.entry_point)
    )


def _parameters(creator: Any, given: dict[str, Any]) -> set[str]:
    """What `gymnasium.make` takes for an environment; whatever is given where its class takes anything."""
    try:
        parameters = inspect.signature(creator).parameters.values()
    except (TypeError, ValueError):  # Not written in Python.
        return set(given)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set(given)
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return names | {"max_episode_steps", "disable_env_checker"}


def _create(name: str, create: Callable[[], Any]) -> Any:
    """What `create` returns, with Gymnasium's errors as podracer's."""
    error_types = import_package("gymnasium").error
    try:
        return create()
    except (ImportError, error_types.DependencyNotInstalled) as error:
        # Gymnasium's own say so in their error, except where they import a package without looking.
        hint = '; MuJoCo\'s environments need `pip install "gymnasium[mujoco]"`' if "imageio" in str(error) else ""
        raise EnvironmentUnavailableError(f"{name} needs a package that cannot be imported: {error}{hint}") from error
    except (TypeError, AssertionError, error_types.Error) as error:
        raise ValueError(f"{name} cannot be made as asked: {error}") from error
