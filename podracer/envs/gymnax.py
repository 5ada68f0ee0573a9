"""The environments of gymnax (1.0.1 and later), each as a raw `Environment`.

gymnax is imported only when one of its environments is made: it makes arrays while it is imported, which starts JAX.
Its `step` resets by itself and hides the final observation in `info`, so this adapter calls `step_env` and `reset_env`,
and `podracer.envs.Autoreset` does the rest.

gymnax's code promotes dtypes and ranks freely, and with 64-bit mode on some of its environments cannot be traced at
all. So it always runs inside `_relaxed`, whatever the caller's settings: strict promotion elsewhere stays strict, and
the streams are the same, bit for bit, with `JAX_ENABLE_X64` on or off.
"""

import contextlib
import dataclasses
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree, UInt8

from podracer.envs import rendering
from podracer.envs.base import Step
from podracer.envs.names import check_parameters, unknown_name
from podracer.envs.packages import EnvironmentUnavailableError, import_package, installed_version
from podracer.types import ActionSpec, ArraySpec, BoundedSpec, DiscreteSpec, EnvironmentSpec, key_shape

# What gymnax registers in this version, so that names can be listed and corrected without importing it.
_VERSION = "1.0.1"
_NAMES = (
    *("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"),
    *("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar", "SpaceInvaders-MinAtar"),
    *("Catch-bsuite", "DeepSea-bsuite", "MemoryChain-bsuite", "UmbrellaChain-bsuite", "DiscountingChain-bsuite"),
    *("MNISTBandit-bsuite", "SimpleBandit-bsuite", "FourRooms-misc", "MetaMaze-misc", "PointRobot-misc"),
    *("BernoulliBandit-misc", "GaussianBandit-misc", "Reacher-misc", "Swimmer-misc", "Pong-misc", "FrozenLake-misc"),
)
# gymnax declares bounds that these environments leave.
_WRONG_BOUNDS = ("GaussianBandit-misc", "MemoryChain-bsuite")


def names() -> tuple[str, ...]:
    """The environments of the installed gymnax, those registered by users included; of 1.0.1 where there is none.

    Imports gymnax only if it is of another version than 1.0.1.
    """
    # Users register theirs with the imported one.
    if sys.modules.get("gymnax") is None and installed_version("gymnax") in (None, _VERSION):
        return _NAMES
    try:
        return tuple(_gymnax().registered_envs)
    except (EnvironmentUnavailableError, AttributeError):
        return _NAMES


def make(name: str, **parameters: Any) -> "GymnaxEnvironment":
    """A gymnax environment by its own name, for example "CartPole-v1". See `GymnaxEnvironment`."""
    return GymnaxEnvironment(name, tuple(sorted((key, _hashable(value)) for key, value in parameters.items())))


@dataclasses.dataclass(frozen=True)
class GymnaxEnvironment:
    """A gymnax environment as a raw `Environment`.

    Observations are float32 where either gymnax's space or the observation itself is real. A discrete observation
    (FrozenLake) becomes one-hot, since its number means nothing to a network. A continuous action is a vector, reshaped
    here to what the environment takes.

    Args:
        name: As gymnax registers it.
        parameters: Pairs of a name and a value: arguments of the environment's class (`rows` of Catch) and fields of
            its gymnax parameters (`max_steps_in_episode`) alike. Sequences are tuples. A parameter that is a random key
            takes the integer to seed it with. gymnax does not recompute what it derives from a field: CartPole's
            `total_mass` stays when `masspole` changes.

    Raises:
        ValueError: The environment, a parameter or a parameter's value is not valid.
        EnvironmentUnavailableError: gymnax is missing, broken or too old, or the environment's data cannot be had.
    """

    name: str
    parameters: tuple[tuple[str, Any], ...] = ()
    spec: EnvironmentSpec = dataclasses.field(init=False, repr=False, compare=False)
    _environment: Any = dataclasses.field(init=False, repr=False, compare=False)
    _params: Any = dataclasses.field(init=False, repr=False, compare=False)
    _action_shape: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gymnax = _gymnax()
        if not hasattr(import_package("gymnax", "gymnax.environments.environment").Environment, "is_truncated"):
            raise EnvironmentUnavailableError(
                f"gymnax {installed_version('gymnax')} does not tell truncation from termination; "
                "1.0.1 or later is needed: `pip install -U gymnax`"
            )
        if self.name not in gymnax.registered_envs:
            raise unknown_name("gymnax environment", self.name, gymnax.registered_envs)
        with _relaxed():
            environment, params = _construct(gymnax, self.name, dict(self.parameters))
            key = key_shape()
            space = environment.action_space(params)
            emitted, _ = jax.eval_shape(environment.reset_env, key, params)
            spec = EnvironmentSpec(
                observation=_observation_spec(self.name, environment.observation_space(params), emitted),
                action=_action_spec(space),
            )
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "_environment", environment)
        object.__setattr__(self, "_params", params)
        object.__setattr__(self, "_action_shape", tuple(space.shape))

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        with _relaxed():
            observation, state = self._environment.reset_env(key, self._params)
            return jax.tree.map(jnp.asarray, state), self._observation(observation)

    def step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        with _relaxed():
            if isinstance(self.spec.action, BoundedSpec):
                action = jnp.reshape(action, self._action_shape)
            observation, state, reward, terminated, _ = self._environment.step_env(key, state, action, self._params)
            step = Step(
                observation=self._observation(observation),
                reward=jnp.reshape(jnp.asarray(reward, jnp.float32), ()),
                terminated=jnp.reshape(jnp.asarray(terminated, jnp.bool_), ()),
                truncated=jnp.reshape(jnp.asarray(self._environment.is_truncated(state, self._params), jnp.bool_), ()),
            )
            return jax.tree.map(jnp.asarray, state), step

    def render(self, state: PyTree) -> UInt8[np.ndarray, "H W 3"]:
        """A drawing where there is one (classic control), else a picture of the observation."""
        if self.name in rendering.DRAWINGS:
            return rendering.DRAWINGS[self.name](state)
        with _relaxed():
            try:
                observation = self._environment.observe(jax.random.key(0), state, None, self._params)
            except NotImplementedError:  # The image of MNISTBandit is not in its state.
                return rendering.draw_observation(
                    jax.tree.map(lambda spec: np.zeros(spec.shape), self.spec.observation), self.spec.observation
                )
            observation = self._observation(observation)
        return rendering.draw_observation(observation, self.spec.observation)

    def _observation(self, observation: PyTree) -> PyTree:
        def cast(leaf: Any, spec: ArraySpec) -> jax.Array:
            if jnp.shape(leaf) != spec.shape:
                return jax.nn.one_hot(leaf, spec.shape[0], dtype=spec.dtype)
            return jnp.asarray(leaf, spec.dtype)

        return jax.tree.map(cast, observation, self.spec.observation)


def _gymnax() -> Any:
    with _relaxed():  # Its modules make arrays while they are imported.
        return import_package("gymnax")


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _construct(gymnax: Any, name: str, parameters: dict[str, Any]) -> tuple[Any, Any]:
    """The gymnax environment and its parameters, after checking every name and value in `parameters`."""
    try:
        environment, params = gymnax.make(name)
    except (OSError, EOFError) as error:
        raise EnvironmentUnavailableError(
            f"gymnax:{name} needs a data set that gymnax could neither find nor download: {error}"
        ) from error
    arguments = [
        argument.name
        for argument in inspect.signature(type(environment)).parameters.values()
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    ]
    fields = [field.name for field in dataclasses.fields(params)]
    check_parameters(f"gymnax:{name}", parameters, sorted({*arguments, *fields}))
    given = {key: _seeded(key, value) for key, value in parameters.items() if key in arguments}
    if given:
        environment, params = gymnax.make(name, **given)
    replaced = {
        key: _checked(name, key, value, getattr(params, key)) for key, value in parameters.items() if key in fields
    }
    return environment, dataclasses.replace(params, **replaced)


def _checked(environment: str, name: str, value: Any, default: Any) -> Any:
    """The value of a gymnax parameter, in the type of its default."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, bool):
        valid, rule = isinstance(value, bool), "True or False"
    elif name == "max_steps_in_episode":  # A float in some of gymnax's environments.
        valid, rule = integer and value >= 1, "an integer of 1 or more"
    elif isinstance(default, int):
        valid, rule = integer, "an integer"
    elif isinstance(default, float):
        valid, rule = integer or (isinstance(value, float) and math.isfinite(value)), "a finite number"
    else:
        valid, rule = np.shape(value) == np.shape(default), f"an array of shape {np.shape(default)}"
        value = jnp.asarray(value, jnp.asarray(default).dtype) if valid else value
    if not valid:
        raise ValueError(f"{name} of gymnax:{environment} is {value!r}; it must be {rule} (default {default})")
    # gymnax mixes a field with arrays of its default's type, so 12 for 100.0 has to become 12.0.
    return type(default)(value) if isinstance(default, bool | int | float) else value


def _seeded(name: str, value: Any) -> Any:
    return jax.random.key(value) if name.endswith("_key") and isinstance(value, int) else value


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray | jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = np.asarray(value).tolist()
    return tuple(_hashable(item) for item in value) if isinstance(value, list | tuple) else value


def _observation_spec(name: str, space: Any, emitted: PyTree) -> PyTree:
    """Specs of what is emitted; gymnax's space adds bounds and may say that integers stand for reals."""
    spaces = space.spaces if hasattr(space, "spaces") else None
    if isinstance(spaces, dict) and isinstance(emitted, dict):
        return {key: _observation_spec(name, spaces[key], leaf) for key, leaf in emitted.items()}
    if spaces is not None:
        return jax.tree.map(lambda leaf: ArraySpec(leaf.shape, _dtype(leaf.dtype, leaf.dtype)), emitted)
    if hasattr(space, "n"):
        return ArraySpec((int(space.n),), "float32", 0, 1)
    low, high = (_bound(function, bound) for function, bound in ((np.min, space.low), (np.max, space.high)))
    if name in _WRONG_BOUNDS:
        low = high = None
    return ArraySpec(tuple(emitted.shape), _dtype(emitted.dtype, space.dtype), low, high)


def _dtype(emitted: Any, declared: Any) -> str:
    if jnp.issubdtype(emitted, jnp.floating) or jnp.issubdtype(declared, jnp.floating):
        return "float32"
    return str(emitted)


def _bound(function: Any, bound: Any) -> float | None:
    bounds = np.asarray(bound, np.float64)
    # gymnax writes "unbounded" as the largest float32.
    return float(function(bounds)) if (np.abs(bounds) < np.finfo(np.float32).max).all() else None


def _action_spec(space: Any) -> ActionSpec:
    if hasattr(space, "n"):
        return DiscreteSpec(int(space.n))
    low, high = (
        tuple(float(x) for x in np.broadcast_to(bound, space.shape).ravel()) for bound in (space.low, space.high)
    )
    return BoundedSpec(low, high)
