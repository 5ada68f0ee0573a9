"""Minibatches hold every sample once an epoch, and are refused where they cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.ops import MinibatchGrid

GRIDS = [
    # T, B, minibatches, time_parts, batch_parts
    (16, 8, 4, 4, 1),
    (16, 8, 1, 1, 1),
    (16, 8, 128, 16, 8),
    (16, 8, 32, 16, 2),
    (5, 8, 4, 1, 4),
    (6, 4, 4, 2, 2),
    (6, 10, 15, 3, 5),
    (1, 1, 1, 1, 1),
    (1, 12, 6, 1, 6),
    (12, 1, 6, 6, 1),
]


def sample_numbers(length, batch_size):
    """A number of its own for every sample."""
    return np.arange(length * batch_size, dtype=np.int32).reshape(length, batch_size)


def take_each(grid, batch, rows, columns):
    """All minibatches, `[M, t, b, ...]`, in NumPy."""
    take = jax.jit(jax.vmap(grid.take, (None, 0, 0)))
    return jax.tree.map(np.asarray, take(jax.tree.map(jnp.asarray, batch), rows, columns))


@pytest.mark.parametrize(("length", "batch_size", "num", "time_parts", "batch_parts"), GRIDS)
def test_every_sample_once_an_epoch(length, batch_size, num, time_parts, batch_parts):
    grid = MinibatchGrid.create(length, batch_size, num)
    assert (grid.time_parts, grid.batch_parts) == (time_parts, batch_parts)
    rows, columns = jax.jit(grid.shuffle)(jax.random.key(0))
    assert rows.shape == (num, length // time_parts)
    assert columns.shape == (num, batch_size // batch_parts)
    parts = take_each(grid, sample_numbers(length, batch_size), rows, columns)
    assert parts.shape == (num, length // time_parts, batch_size // batch_parts)
    np.testing.assert_array_equal(np.sort(parts.reshape(-1)), np.arange(length * batch_size))


def test_another_key_gives_other_minibatches():
    grid = MinibatchGrid.create(64, 16, 128)
    assert grid.batch_parts > 1
    shuffle = jax.jit(grid.shuffle)
    one, same, other = (jax.tree.map(np.asarray, shuffle(jax.random.key(seed))) for seed in (0, 0, 1))
    for a, b, c in zip(one, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
    rows, columns = one[0][:: grid.batch_parts].reshape(-1), one[1][: grid.batch_parts].reshape(-1)
    for order in (rows, columns):
        np.testing.assert_array_equal(np.sort(order), np.arange(order.size))
        assert (order != np.arange(order.size)).any()


def test_every_sample_visits_every_minibatch():
    grid = MinibatchGrid.create(4, 3, 2)
    shuffle = jax.jit(grid.shuffle)
    first = np.zeros(4)
    for seed in range(200):
        rows, _ = shuffle(jax.random.key(seed))
        first[np.asarray(rows[0])] += 1
    # Each of the four steps is in the first of two halves half of the time; 200 draws, so a deviation of 7.
    np.testing.assert_allclose(first, 100, atol=28)


@pytest.mark.parametrize(("length", "batch_size", "num"), [(16, 8, 4), (3, 8, 8), (5, 6, 1)])
def test_sequences_keep_time_whole(length, batch_size, num):
    grid = MinibatchGrid.create(length, batch_size, num, sequences=True)
    rows, columns = jax.jit(grid.shuffle)(jax.random.key(0))
    numbers = sample_numbers(length, batch_size)
    parts = take_each(grid, numbers, rows, columns)
    # What belongs to an environment and not to a step has to go to the same minibatch.
    states = jax.jit(jax.vmap(grid.take_columns, (None, 0)))(jnp.asarray(numbers[0]), columns)
    assert parts.shape == (num, length, batch_size // num)
    for part, state, chosen in zip(parts, states, np.asarray(columns), strict=True):
        np.testing.assert_array_equal(part, numbers[:, chosen])
        np.testing.assert_array_equal(state, part[0])


def test_a_minibatch_of_a_pytree_takes_the_same_samples_of_every_leaf():
    grid = MinibatchGrid.create(6, 4, 4)
    numbers = sample_numbers(6, 4)
    batch = {"a": numbers, "b": (np.stack([numbers, -numbers], -1),)}
    parts = take_each(grid, batch, *jax.jit(grid.shuffle)(jax.random.key(3)))
    np.testing.assert_array_equal(parts["b"][0], np.stack([parts["a"], -parts["a"]], -1))


@pytest.mark.parametrize(
    ("length", "batch_size", "num", "sequences", "parts"),
    [
        (8, 3, 5, False, ["num_minibatches is 5", "8 steps x 3 environments = 24", "4 or 6"]),
        (5, 8, 3, False, ["num_minibatches is 3", "5 steps x 8 environments = 40", "2 or 4"]),
        (16, 8, 3, True, ["num_minibatches is 3", "8 environments = 8", "2 or 4"]),
        (16, 8, 16, True, ["num_minibatches is 16", "8 environments = 8", "4 or 8"]),
        (4, 4, 100, False, ["num_minibatches is 100", "= 16", "8 or 16"]),
        (4, 4, 0, False, ["num_minibatches is 0", "nearest valid: 1 or 2"]),
        (4, 4, -2, False, ["num_minibatches is -2", "nearest valid: 1 or 2"]),
        (1, 1, 2, False, ["num_minibatches is 2", "nearest valid: 1"]),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_do(length, batch_size, num, sequences, parts):
    with pytest.raises(ValueError, match="num_minibatches") as error:
        MinibatchGrid.create(length, batch_size, num, sequences=sequences)
    for part in parts:
        assert part in str(error.value)
