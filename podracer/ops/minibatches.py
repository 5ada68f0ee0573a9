"""Shuffled minibatches of a trajectory, for the price of copying them.

Permuting all `T x B` samples (`jax.random.permutation`, then a gather of single rows) costs more than the forward and
backward pass of a small network on a CPU. Permuting the `T` time steps, and the `B` environments where time alone does
not divide, draws minibatches that are stratified over environments and moves whole rows. Where only time is cut, a key
that the replicas share gives the same minibatches on any number of devices; where environments are cut, each replica
cuts its own. Measured in docs/design/0002-minibatches.md.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree


@dataclasses.dataclass(frozen=True)
class MinibatchGrid:
    """Time cut into `time_parts` and environments into `batch_parts`; a minibatch is one cell.

    Attributes:
        length: T.
        batch_size: B of one replica.
        time_parts: Divides `length`.
        batch_parts: Divides `batch_size`.
    """

    length: int
    batch_size: int
    time_parts: int
    batch_parts: int

    @classmethod
    def create(cls, length: int, batch_size: int, num_minibatches: int, *, sequences: bool = False) -> "MinibatchGrid":
        """The grid of `num_minibatches` cells that cuts time as far as it divides.

        Args:
            length: T.
            batch_size: B of one replica.
            num_minibatches: Number of cells.
            sequences: Leave time whole, as recurrent agents need it.

        Raises:
            ValueError: `num_minibatches` does not divide the samples; the nearest valid numbers are named.
        """
        samples = batch_size if sequences else length * batch_size
        if num_minibatches < 1 or samples % num_minibatches:
            valid = [n for n in range(1, samples + 1) if samples % n == 0]
            nearest = sorted(sorted(valid, key=lambda n: abs(n - num_minibatches))[:2])
            what = f"{batch_size} environments" if sequences else f"{length} steps x {batch_size} environments"
            raise ValueError(
                f"num_minibatches is {num_minibatches}, which does not divide {what} = {samples} on each device; "
                f"nearest valid: {' or '.join(map(str, nearest))}"
            )
        time_parts = 1 if sequences else math.gcd(num_minibatches, length)
        return cls(length, batch_size, time_parts, num_minibatches // time_parts)

    def shuffle(self, key: jax.Array) -> tuple[Int[Array, "M t"], Int[Array, "M b"]]:
        """The time steps and environments of each of the `M` minibatches, which together are every sample once."""
        time_key, batch_key = jax.random.split(key)
        rows = self._cut(time_key, self.length, self.time_parts)
        columns = self._cut(batch_key, self.batch_size, self.batch_parts)
        return jnp.repeat(rows, self.batch_parts, axis=0), jnp.tile(columns, (self.time_parts, 1))

    def take(self, batch: PyTree, rows: Int[Array, "t"], columns: Int[Array, "b"]) -> PyTree:
        """The minibatch `[t, b, ...]` of `batch [T, B, ...]`."""

        def leaf(x: jax.Array) -> jax.Array:
            if self.time_parts > 1:
                x = x[rows]
            return x if self.batch_parts == 1 else x[:, columns]

        return jax.tree.map(leaf, batch)

    def take_columns(self, batch: PyTree, columns: Int[Array, "b"]) -> PyTree:
        """The environments `[b, ...]` of a batch without time, `[B, ...]`."""
        return batch if self.batch_parts == 1 else jax.tree.map(lambda x: x[columns], batch)

    def _cut(self, key: jax.Array, size: int, parts: int) -> jax.Array:
        # The order of what is not cut does not matter to a mean.
        order = jnp.arange(size) if parts == 1 else jax.random.permutation(key, size)
        return order.reshape(parts, size // parts)
