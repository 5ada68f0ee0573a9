"""Random keys by counter.

Every random draw has a key made from counters, `fold_in(fold_in(root, stream), step)`, never from a chain of splits. So
a run resumes anywhere, and environments with equal global indices see equal streams whatever the device count and the
architecture.
"""

import enum

import jax
from jaxtyping import Array, Int


class Stream(enum.IntEnum):
    """What a key is for. Each has its own stream under the run's root key."""

    INIT = 0
    RESET = 1
    ENVIRONMENT = 2
    ACT = 3
    UPDATE = 4
    EVALUATE = 5


def stream_key(root: jax.Array, stream: Stream, *counters: int | jax.Array) -> jax.Array:
    """The key of a stream at a place in it."""
    key = jax.random.fold_in(root, stream)
    for counter in counters:
        key = jax.random.fold_in(key, counter)
    return key


def fold_in_each(keys: jax.Array, data: Int[Array, ""]) -> jax.Array:
    """`fold_in` of one number into each key `[B]`."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, data)


def key_of_each(key: jax.Array, numbers: Int[Array, "B"]) -> jax.Array:
    """One key for each of several numbers, `[B]`: the `fold_in` of it into the key."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
