"""Zeros in the rows that are no experience."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree


def zero_masked(tree: PyTree, valid: Bool[Array, "T B"]) -> PyTree:
    """`tree [T, B, ...]` with zeros where `valid` is False.

    What was remembered of an ignored action may be anything, and 0 * NaN is NaN: a weight of 0 is not enough.
    """

    def leaf(x: jax.Array) -> jax.Array:
        return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)), x, jnp.zeros_like(x))

    return jax.tree.map(leaf, tree)
