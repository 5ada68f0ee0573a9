"""Networks out of modules that a user wrote in Flax NNX or in equinox.

A module is called with an observation, as the environment emits it but without its action mask, and returns
`(policy outputs, value)`: `podracer.ops.num_parameters(spec.action)` outputs, and one value. Casting and scaling, of
uint8 images for instance, are the module's business.

Both libraries keep parameters inside of objects. An adapter makes such an object once without any arrays, keeps that as
the static half of the network, and hands the arrays around as a flat dictionary by path, `{"torso/kernel": array}`,
which optimisers and checkpoints take as they take any other.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from podracer.networks.base import Network
from podracer.ops.distributions import num_parameters
from podracer.types import EnvironmentSpec, split_mask

if TYPE_CHECKING:
    import equinox
    from flax import nnx

_PURE = "a network is a pure function of float parameters"


def from_nnx(make_module: "Callable[[nnx.Rngs], nnx.Module]", spec: EnvironmentSpec) -> Network:
    """The network of a Flax NNX module, which takes a batch of observations `[B, ...]`.

    Args:
        make_module: Makes the module. All its variables are `nnx.Param`: batch statistics or the random state of a
            dropout have no place in a pure function.
        spec: The environment's.

    Raises:
        ValueError: The module has other arrays than float parameters, or returns anything else than outputs and values
            for this environment.
    """
    # Here and not above: NNX takes as long to import as all the rest of Flax.
    from flax import nnx

    def split(key: jax.Array) -> Any:
        return nnx.split(make_module(nnx.Rngs(key)))

    graph, state = jax.eval_shape(split, jax.random.key(0))
    try:
        hash(graph)
    except TypeError as error:
        raise ValueError(
            f"the module has an attribute that is not static and not an nnx.Param: {error}; {_PURE}"
        ) from error
    variables = {_join(path): (path, variable) for path, variable in nnx.to_flat_state(state)}
    for name, (_, variable) in variables.items():
        if not isinstance(variable, nnx.Param):
            raise ValueError(f"the module's {name} is a {type(variable).__name__} and not an nnx.Param; {_PURE}")
        _check_float(name, variable.get_value())

    def init(key: jax.Array, observation: PyTree) -> dict[str, jax.Array]:
        return {_join(path): variable.get_value() for path, variable in nnx.to_flat_state(split(key)[1])}

    def apply(params: dict[str, jax.Array], observation: PyTree) -> Any:
        flat = {path: variable.replace(params[name]) for name, (path, variable) in variables.items()}
        return nnx.merge(graph, nnx.from_flat_state(flat))(observation)

    return _network(init, apply, spec)


def from_equinox(make_module: "Callable[[jax.Array], equinox.Module]", spec: EnvironmentSpec) -> Network:
    """The network of an equinox module, which takes a single observation, as is the custom there.

    Args:
        make_module: Makes the module from a key. All its arrays are floats and, as equinox has it, all are trained,
            NumPy's as well; a constant is a static field, or goes through `jax.lax.stop_gradient`.
        spec: The environment's.

    Raises:
        ImportError: equinox is not installed.
        ValueError: The module has arrays that are not floats, or returns anything else than outputs and a value for
            this environment.
    """
    try:
        import equinox
    except ImportError as error:
        raise ImportError("from_equinox needs the package equinox: pip install -e '.[equinox]'") from error

    abstract = equinox.filter_eval_shape(make_module, jax.random.key(0))
    found, structure = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)}
    for name, leaf in arrays.items():
        _check_float(name, leaf)

    def init(key: jax.Array, observation: PyTree) -> dict[str, jax.Array]:
        made = dict(zip(leaves, jax.tree.leaves(make_module(key)), strict=True))
        return {name: jnp.asarray(made[name]) for name in arrays}

    def apply(params: dict[str, jax.Array], observation: PyTree) -> Any:
        module = jax.tree.unflatten(structure, [params.get(name, leaf) for name, leaf in leaves.items()])
        return jax.vmap(module)(observation)

    return _network(init, apply, spec)


def _network(init: Callable[..., Any], apply_batch: Callable[..., Any], spec: EnvironmentSpec) -> Network:
    """The network of an `apply` that takes exactly one leading axis, tried on shapes alone."""
    observation_spec, _ = split_mask(spec.observation)
    example = jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), observation_spec)
    params = jax.eval_shape(init, jax.random.key(0), example)
    _check_outputs(jax.eval_shape(apply_batch, params, example), num_parameters(spec.action))

    def apply(params: PyTree, observation: PyTree) -> Any:
        leaf, leaf_spec = jax.tree.leaves(observation)[0], jax.tree.leaves(observation_spec)[0]
        lead = leaf.shape[: leaf.ndim - len(leaf_spec.shape)]
        if len(lead) == 1:
            return apply_batch(params, observation)
        rows = math.prod(lead)
        outputs = apply_batch(params, jax.tree.map(lambda x: x.reshape(rows, *x.shape[len(lead) :]), observation))
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), outputs)

    return Network(init, apply)


def _check_outputs(outputs: Any, num_outputs: int) -> None:
    """Of a batch of one observation."""
    expected = f"(policy outputs [{num_outputs}], value []) of each observation"
    if not isinstance(outputs, tuple) or len(outputs) != 2:
        raise ValueError(f"the module returns a {type(outputs).__name__}; it must return {expected}")
    for name, output, shape in zip(("policy outputs", "value"), outputs, ((num_outputs,), ()), strict=True):
        found = getattr(output, "shape", None)
        if found != (1, *shape):
            what = f"of shape {found[1:]}" if found else f"a {type(output).__name__}"
            raise ValueError(f"the module's {name} are {what}; it must return {expected}")


def _check_float(name: str, leaf: Any) -> None:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(f"the module's {name} is an array of {leaf.dtype}; {_PURE}")


def _join(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
