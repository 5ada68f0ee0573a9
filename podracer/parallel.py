"""Replicas: the mesh, the only use of `shard_map`, and averaging over the mapped axis.

Averaging under `shard_map` has a trap. With `check_vma=True`, the default, differentiating with respect to a
replicated value already sums the gradient over the axis, and a `pmean` after it leaves the gradient N times too large,
which Adam hides. `run_on_replicas` turns the check off, so that `grad` is always this replica's own gradient and
`mean_over_replicas` of it is the gradient of the mean loss. It also lets environments start loops from constants.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from podracer.types import Trajectory

AXIS = "replica"
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(AXIS)
_COLUMNS = PartitionSpec(None, AXIS)
# A trajectory whose environments are divided among the replicas.
BY_ENVIRONMENT: Any = Trajectory(
    timestep=_COLUMNS,  # type: ignore[arg-type]
    action=_COLUMNS,
    extras=_COLUMNS,
    actor_state=SHARDED,
)

Tree = TypeVar("Tree")


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """One axis of replicas, one device each."""
    return Mesh(devices, (AXIS,))


def axis_name(mesh: Mesh) -> str | None:
    """The axis to average over: None on one device, where averaging would only cost time."""
    return AXIS if mesh.size > 1 else None


def run_on_replicas(
    function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """`function` on every replica at once: `SHARDED` arguments by their first axis, `REPLICATED` ones whole."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """The `NamedSharding`s of a (prefix) pytree of partition specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def with_shardings(shapes: Tree, places: PyTree) -> Tree:
    """Shapes that know where their arrays are, `places` being a prefix of their structure."""

    def leaf(sharding: NamedSharding, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, jax.tree.broadcast(places, shapes), shapes)


def replica_index(axis: str | None) -> jax.Array:
    """This replica's place on the axis."""
    return jnp.int32(0) if axis is None else jax.lax.axis_index(axis)


def mean_over_replicas(tree: Tree, axis: str | None) -> Tree:
    """The mean of every leaf over the axis, in one collective per dtype.

    The latency of an all-reduce, not its size, is what small networks pay for, so the leaves travel as one vector.
    """
    if axis is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    means: list[Any] = [None] * len(leaves)
    for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
        chosen = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        vector = jax.lax.pmean(jnp.concatenate([leaves[i].reshape(-1) for i in chosen]), axis)
        start = 0
        for i in chosen:
            means[i] = vector[start : start + leaves[i].size].reshape(leaves[i].shape)
            start += leaves[i].size
    return jax.tree.unflatten(structure, means)


def shared_key(key: jax.Array, axis: str | None) -> jax.Array:
    """The first replica's key, on every replica: for draws on which the replicas have to agree."""
    if axis is None:
        return key
    data = jax.random.key_data(key)
    first = jax.lax.psum(jnp.where(jax.lax.axis_index(axis) == 0, data, jnp.zeros_like(data)), axis)
    return jax.random.wrap_key_data(first, impl=jax.random.key_impl(key))
