"""Running moments of a stream of batches, and normalising by them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from podracer import parallel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean and variance of what was seen so far, of pytrees of floats `[...]`."""

    count: Float[Array, ""]
    mean: PyTree
    variance: PyTree

    @classmethod
    def zero(cls, example: PyTree) -> "Moments":
        """Before anything was seen: mean 0 and variance 1, so that normalising changes nothing."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), example)
        return cls(jnp.float32(0), zeros, jax.tree.map(jnp.ones_like, zeros))


def merge_moments(moments: Moments, batch: PyTree, mask: Bool[Array, "*N"], axis: str | None = None) -> Moments:
    """The moments after a batch `[*N, ...]` as well, of all replicas on `axis` (Chan et al. 1979's parallel update).

    Only rows where `mask` is true count. The count stops at 2^24, the last integer that float32 counts to by ones; from
    there on the moments are an exponential average over the last 2^24 rows or so.
    """
    rows = mask.ndim

    def masked(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = mask.reshape(mask.shape + (1,) * (x.ndim - rows))
        return jnp.where(weight, x.astype(jnp.float32), 0), weight

    def total(x: jax.Array) -> jax.Array:
        return masked(x)[0].sum(tuple(range(rows)))

    def squares(x: jax.Array, mean: jax.Array) -> jax.Array:
        kept, weight = masked(x)
        return jnp.where(weight, jnp.square(kept - mean[(None,) * rows]), 0).sum(tuple(range(rows)))

    count, totals = parallel.mean_over_replicas((mask.sum().astype(jnp.float32), jax.tree.map(total, batch)), axis)
    # The count of the average replica, which is below 1 where most have no valid row.
    safe = jnp.where(count > 0, count, 1)
    mean = jax.tree.map(lambda t: t / safe, totals)
    spread = parallel.mean_over_replicas(jax.tree.map(squares, batch, mean), axis)
    replicas = 1 if axis is None else jax.lax.axis_size(axis)
    seen = count * replicas
    fraction = seen / jnp.maximum(moments.count + seen, 1)

    def merged_mean(old: jax.Array, new: jax.Array) -> jax.Array:
        return old + fraction * (new - old)

    def merged_variance(old: jax.Array, old_mean: jax.Array, new_mean: jax.Array, sq: jax.Array) -> jax.Array:
        within = (1 - fraction) * old + fraction * (sq / safe)
        return within + fraction * (1 - fraction) * jnp.square(new_mean - old_mean)

    return Moments(
        count=jnp.minimum(moments.count + seen, 2.0**24),
        mean=jax.tree.map(merged_mean, moments.mean, mean),
        variance=jax.tree.map(merged_variance, moments.variance, moments.mean, mean, spread),
    )


def normalize(x: PyTree, moments: Moments, clip: float = 10.0) -> PyTree:
    """`x` with mean 0 and variance 1, within `[-clip, clip]`; a constant component becomes 0."""

    def leaf(x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
        shape = (1,) * (x.ndim - mean.ndim) + mean.shape
        # Where the spread is so small beside the mean, what would be scaled up may be float32's rounding.
        constant = variance <= 1e-10 * jnp.square(mean)
        scale = jnp.where(constant, 0, jax.lax.rsqrt(jnp.where(constant, 1, variance)))
        return jnp.clip((x.astype(jnp.float32) - mean.reshape(shape)) * scale.reshape(shape), -clip, clip)

    return jax.tree.map(leaf, x, moments.mean, moments.variance)
