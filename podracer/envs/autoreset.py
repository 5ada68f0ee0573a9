"""From one raw environment to the batched stream of timesteps that architectures consume."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from podracer.envs.actions import sample_action
from podracer.envs.base import Environment, Step
from podracer.types import ArraySpec, EnvironmentSpec, StepType, TimeStep, key_shape, leaf_name


@dataclasses.dataclass(frozen=True, eq=False)  # By identity: what is compiled is found by it, hashable or not.
class Autoreset:
    """A batch of one environment, resetting itself on the step after LAST.

    The step after LAST ignores the action and returns FIRST of a fresh episode, with reward 0 and discount 1. So the
    final observation is a row like any other, and a truncated episode can bootstrap from it.

    Python scalars and weak types in the environment's state and observations are given the dtype that both `reset` and
    `step` fit in, once, here.

    Args:
        environment: The raw environment.

    Raises:
        ValueError: The environment's emissions differ from its spec or between `reset` and `step`; the leaf is named.
    """

    environment: Environment
    _state: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_state", _state_shape(self.environment))

    @property
    def spec(self) -> EnvironmentSpec:
        return self.environment.spec

    def reset(self, keys: jax.Array) -> tuple[PyTree, TimeStep]:
        """Fresh episodes, one per key: the state to hand to `step`, and FIRST timesteps `[B]`."""
        return jax.vmap(self._reset)(keys)

    def step(self, state: PyTree, action: PyTree, keys: jax.Array) -> tuple[PyTree, TimeStep]:
        """The next timesteps `[B]` after `action [B, ...]`, drawing from one key per environment."""
        return jax.vmap(self._step)(state, action, keys)

    def _cast(self, inner: PyTree, observation: PyTree) -> tuple[PyTree, PyTree]:
        inner = jax.tree.map(lambda x, like: _as_dtype(x, like.dtype), inner, self._state)
        observation = jax.tree.map(lambda x, spec: _as_dtype(x, spec.dtype), observation, self.spec.observation)
        return inner, observation

    def _reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        inner, observation = self._cast(*self.environment.reset(key))
        timestep = TimeStep(jnp.int8(StepType.FIRST), jnp.float32(0), jnp.float32(1), observation)
        return (inner, timestep.step_type), timestep

    def _step(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, TimeStep]:
        inner, previous = state
        step_key, reset_key = jax.random.split(key)
        reset = self._reset(reset_key)
        inner, raw = self.environment.step(inner, action, step_key)
        inner, observation = self._cast(inner, raw.observation)
        terminated, truncated = (jnp.reshape(flag, ()).astype(bool) for flag in (raw.terminated, raw.truncated))
        stepped = TimeStep(
            step_type=jnp.where(terminated | truncated, StepType.LAST, StepType.MID).astype(jnp.int8),
            reward=jnp.reshape(raw.reward, ()).astype(jnp.float32),
            discount=1 - terminated.astype(jnp.float32),
            observation=observation,
        )
        resets = previous == StepType.LAST
        return jax.tree.map(lambda a, b: _select(resets, a, b), reset, ((inner, stepped.step_type), stepped))


def _as_dtype(x: Any, dtype: Any) -> jax.Array:
    """`x` as a strongly typed array; typed random keys, which convert to nothing else, stay as they are."""
    return x if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.asarray(x, dtype)


def _select(condition: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        # JAX's check for reused keys takes a key that was selected for a used one.
        data = jnp.where(condition, jax.random.key_data(a), jax.random.key_data(b))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(a))
    return jnp.where(condition, a, b)


def _state_shape(environment: Environment) -> PyTree:
    """The state's leaves with the dtypes that hold what both `reset` and `step` return, after checking both."""
    name = type(environment).__name__
    key = key_shape()
    state, first = jax.eval_shape(environment.reset, key)
    action = jax.eval_shape(lambda k: sample_action(environment.spec, k, 1)[0], key)
    stepped, step = jax.eval_shape(environment.step, state, action, key)
    if not isinstance(step, Step):
        raise ValueError(f"{name}.step must return (state, podracer.envs.Step); got {type(step).__name__} for the Step")
    _check_same_structure(name, "state", state, stepped)
    for method, observation in (("reset", first), ("step", step.observation)):
        _check_observation(name, method, environment.spec.observation, observation)
    for field in ("reward", "terminated", "truncated"):
        shape = getattr(step, field).shape
        if np.prod(shape, dtype=int) != 1:
            raise ValueError(f"{name}.step returns a {field} of shape {shape}; a scalar is needed")

    def promote(path: Any, a: Any, b: Any) -> jax.ShapeDtypeStruct:
        if a.shape != b.shape:
            raise ValueError(
                f"the state of {name} changes shape at {leaf_name(path)}: {a.shape} from reset, {b.shape} from step"
            )
        if a.dtype == b.dtype:
            return jax.ShapeDtypeStruct(a.shape, a.dtype)
        # JAX's rules: a weak type, that of a Python number, yields to a strong one, but a real not to an integer.
        kinds = [np.zeros((), x.dtype).item() if x.weak_type else x.dtype for x in (a, b)]
        try:
            with jax.numpy_dtype_promotion("standard"):
                return jax.ShapeDtypeStruct(a.shape, jnp.result_type(*kinds))
        except (TypeError, ValueError) as error:  # JAX raises either.
            raise ValueError(
                f"the state of {name} changes type at {leaf_name(path)}: {a.dtype} from reset, {b.dtype} from step"
            ) from error

    return jax.tree_util.tree_map_with_path(promote, state, stepped)


def _check_same_structure(name: str, what: str, a: PyTree, b: PyTree) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (a, b)]
    if structures[0] != structures[1]:
        paths = [{leaf_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(t)} for t in (a, b)]
        differing = sorted(paths[0] ^ paths[1]) or [f"{structures[0]} against {structures[1]}"]
        raise ValueError(f"the {what} of {name} differs between reset and step at {', '.join(differing)}")


def _check_observation(name: str, method: str, specs: PyTree, emitted: PyTree) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (specs, emitted)]
    if structures[0] != structures[1]:
        raise ValueError(f"{name}.{method} emits an observation {structures[1]}, its spec says {structures[0]}")

    def check(path: Any, spec: ArraySpec, leaf: Any) -> None:
        if spec.shape != leaf.shape:
            raise ValueError(
                f"{name}.{method} emits the observation leaf {leaf_name(path)} "
                f"of shape {leaf.shape}, its spec says {spec.shape}"
            )

    jax.tree_util.tree_map_with_path(check, specs, emitted)
