"""What a checkpoint stores of each leaf of a state, and how the leaf is put back.

Leaves are stored by their path, such as `learner/params/torso/kernel`, so that a checkpoint says what it holds without
the classes of the state, and nothing needs pickle. Keys are stored as their data. Leaves without elements are not
stored at all: Orbax refuses them, and their template says everything.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree


def by_path(tree: PyTree, prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree by path.

    Raises:
        ValueError: If two have the same path, as `{"a": {"b": x}, "a/b": y}` has.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = "/".join(filter(None, [prefix, jax.tree_util.keystr(path, simple=True, separator="/")]))
        if name in leaves:
            raise ValueError(f"two leaves of the state have the path {name!r}")
        leaves[name] = leaf
    return leaves


def describe(path: str, leaf: Any) -> str:
    """The type of a leaf, the same for an array and its template: `float32[8, 16]`, `key<fry>[8]`, `int`.

    Raises:
        ValueError: For a leaf that is neither an array nor a number.
    """
    if _is_python_number(leaf):
        return type(leaf).__name__
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        raise ValueError(f"{path} is a {type(leaf).__name__}; a checkpoint holds arrays and numbers")
    return f"{leaf.dtype}{list(leaf.shape)}"


def key_impls(leaves: dict[str, Any]) -> dict[str, str]:
    """The generator of each leaf that is an array of keys."""
    return {path: str(jax.random.key_impl(leaf)) for path, leaf in leaves.items() if _is_key(leaf)}


def snapshot(leaves: dict[str, Any]) -> dict[str, Any]:
    """The arrays to write, which do not change or vanish when the leaves are donated.

    On a CPU these are copies in buffers of their own, as Orbax reads such an array in place while it writes. Of other
    devices it copies the arrays to the host before `save` returns, and a second copy would only take their memory.
    """
    arrays: dict[str, Any] = {path: np.array(leaf) for path, leaf in leaves.items() if not isinstance(leaf, jax.Array)}
    # One program takes only arrays that are all on the same devices.
    groups: dict[frozenset[jax.Device], dict[str, jax.Array]] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.Array):
            if leaf.is_fully_replicated and leaf.is_fully_addressable:
                # Of equal copies one is enough. Orbax would cut them up for every device to write a piece.
                leaf = leaf.addressable_data(0)
            groups.setdefault(frozenset(leaf.sharding.device_set), {})[path] = leaf
    for devices, group in groups.items():
        on_cpu = all(device.platform == "cpu" for device in devices)
        arrays |= _copied(group) if on_cpu else _data(group)
    return {path: array for path, array in arrays.items() if array.size}


def restore_args(templates: dict[str, Any]) -> dict[str, ocp.RestoreArgs]:
    """What to ask of Orbax for each leaf that is stored."""
    args: dict[str, ocp.RestoreArgs] = {}
    for path, template in templates.items():
        sharding = _sharding(template)
        if not np.prod(getattr(template, "shape", ())):
            continue
        # The sharding of keys is one of their data too, whose extra axis is the last and not split.
        on_host = sharding is None
        args[path] = ocp.RestoreArgs(restore_type=np.ndarray) if on_host else ocp.ArrayRestoreArgs(sharding=sharding)
    return args


def rebuild(array: Any, template: Any, key_impl: str | None) -> Any:
    """The leaf of a template, with the value of the array that was stored for it; None where none was."""
    if _is_python_number(template):
        return array.item()
    if array is None:
        data = jax.random.key_data(jax.random.key(0, impl=key_impl)) if key_impl else np.empty((), template.dtype)
        array = np.empty((*template.shape, *data.shape), data.dtype)
    if isinstance(template, np.generic):
        return array[()]
    if isinstance(template, np.ndarray):
        return array
    if not isinstance(array, jax.Array):
        sharding = _sharding(template)
        array = jnp.array(array) if sharding is None else jax.device_put(array, sharding)
    return jax.random.wrap_key_data(array, impl=key_impl) if key_impl else array


def _data(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jax.random.key_data(array) if _is_key(array) else array for path, array in arrays.items()}


@jax.jit
def _copied(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.copy(array) for path, array in _data(arrays).items()}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def _is_python_number(leaf: Any) -> bool:
    # np.float64 is a float too.
    return isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic)


def _sharding(template: Any) -> jax.sharding.Sharding | None:
    """Where to restore a leaf; None for the default device without being committed to it, and for the host."""
    if isinstance(template, jax.Array) and not template.committed:
        return None
    return getattr(template, "sharding", None)
