"""The comparisons that the agent conformance suite makes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from podracer.envs.actions import split_components
from podracer.envs.recording import to_numpy
from podracer.types import (
    ActionSpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MultiDiscreteSpec,
    TimeStep,
    Trajectory,
    leaf_name,
    split_mask,
)


def check_strong(what: str, tree: PyTree) -> None:
    """No leaf is weakly typed or of double precision: either would compile everything twice, or change a carry."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert not getattr(leaf, "weak_type", False), (
            f"{what} gives {leaf_name(path)} with a weak type, as of a Python number; make it jnp.float32(...) or "
            "jnp.int32(...)"
        )
        assert str(leaf.dtype) not in ("float64", "int64"), f"{what} gives {leaf_name(path)} as {leaf.dtype}"


def check_same(what: str, before: PyTree, after: PyTree) -> None:
    """Both have the same structure, shapes and dtypes, as a loop's carry must."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    assert structures[0] == structures[1], f"the {what} changes its structure from {structures[0]} to {structures[1]}"
    leaves = jax.tree_util.tree_leaves_with_path(before)
    for (path, a), b in zip(leaves, jax.tree.leaves(after), strict=True):
        kept = (tuple(a.shape), a.dtype) == (tuple(b.shape), b.dtype)
        assert kept, (
            f"the {what} changes at {leaf_name(path)} from {a.dtype}{list(a.shape)} to {b.dtype}{list(b.shape)}"
        )


def relative_difference(tree: PyTree, expected: PyTree, tolerance: float) -> str | None:
    """Where two pytrees differ by more than `tolerance` of the expected array's largest number, or None."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(expected), strict=True):
        a, b = (to_numpy(x).astype(np.float64) for x in (a, b))
        largest = np.abs(b).max(initial=0)
        apart = np.abs(a - b).max(initial=0)
        if not apart <= tolerance * largest:
            return f"{leaf_name(path)} by {apart:.3g}, where its largest number is {largest:.3g}"
    return None


def action_shape(spec: ActionSpec, batch_size: int) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a batch of actions."""
    match spec:
        case DiscreteSpec():
            return (batch_size,), spec.dtype
        case MultiDiscreteSpec():
            return (batch_size, len(spec.num_actions)), spec.dtype
        case BoundedSpec():
            return (batch_size, len(spec.low)), "float32"


def illegal_rows(spec: EnvironmentSpec, observation: PyTree, action: np.ndarray) -> Int[np.ndarray, "rows"]:
    """The rows of a batch whose action is out of range or masked."""
    if isinstance(spec.action, BoundedSpec):
        low, high = np.asarray(spec.action.low, np.float32), np.asarray(spec.action.high, np.float32)
        return np.flatnonzero(~((low <= action) & (action <= high)).all(-1))
    sizes: tuple[int, ...]
    if isinstance(spec.action, DiscreteSpec):
        sizes, places = (spec.action.num_actions,), (action - spec.action.start)[:, None]
    else:
        sizes, places = spec.action.num_actions, action
    mask: Any = split_mask(observation)[1]
    masks = split_components(spec, jnp.ones((len(action), sum(sizes)), bool) if mask is None else mask)
    wrong = np.zeros(len(action), bool)
    for place, size, legal in zip(places.T, sizes, masks, strict=True):
        within = (place >= 0) & (place < size)
        wrong |= ~within | ~np.asarray(legal)[np.arange(len(action)), np.where(within, place, 0)]
    return np.flatnonzero(wrong)


def values_of_what_followed(
    timestep: TimeStep, following: TimeStep, values: Float[np.ndarray, "T B"], discount: float
) -> Float[np.ndarray, "T B"]:
    """The discounted rewards up to the end of each row's episode, plus the value of the final one if truncated.

    Args:
        timestep: Rows `[T, B]`.
        following: The rows after them.
        values: The agent's, of `timestep`.
        discount: gamma.

    Returns:
        NaN on LAST rows and on those whose episode does not end within the rows.
    """
    unknown = np.full(values.shape[1:], np.nan)
    known: Any = unknown
    result = np.full(values.shape, np.nan)
    for t in reversed(range(len(values))):
        final = values[t + 1] if t + 1 < len(values) else unknown
        ahead = np.where(following.last()[t], np.where(following.discount[t] == 0, 0, final), known)
        known = following.reward[t] + discount * ahead
        result[t] = np.where(timestep.last()[t], np.nan, known)
    return result


def soil(tree: PyTree, rows: Any, garbage: float) -> PyTree:
    """`tree` with garbage in the rows `[T, B]`: the number, or where only integers fit, a large one."""

    def leaf(x: np.ndarray) -> np.ndarray:
        x = np.array(x)
        if np.issubdtype(x.dtype, np.floating):
            x[rows] = garbage
        elif x.dtype == bool:
            x[rows] = ~x[rows]
        else:
            x[rows] = np.iinfo(x.dtype).max if garbage > 0 else np.iinfo(x.dtype).min
        return x

    return jax.tree.map(leaf, tree)


def shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def row(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda x: np.asarray(x)[index].tolist(), tree)


def columns_of(trajectory: Trajectory, columns: slice) -> Trajectory:
    """The trajectory of some of its environments."""
    rows = jax.tree.map(lambda x: x[:, columns], dataclasses.replace(trajectory, actor_state=()))
    return dataclasses.replace(rows, actor_state=jax.tree.map(lambda x: x[columns], trajectory.actor_state))
