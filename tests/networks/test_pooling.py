"""Max-pooling for CPUs is max-pooling, also where several pixels are the largest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.networks.pooling import max_pool


def plain(x):
    """XLA's own."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def value_and_gradient(function, x):
    def loss(x):
        y = function(x)
        return (jnp.arange(1, y.size + 1, dtype=jnp.float32).reshape(y.shape) * y).sum(), y

    (_, y), gradient = jax.value_and_grad(loss, has_aux=True)(x)
    return y, gradient


@pytest.mark.parametrize(("height", "width"), [(84, 84), (7, 7), (8, 5), (11, 6), (2, 3), (1, 1), (1, 4)])
def test_values_and_gradients_are_xlas(height, width):
    generator = np.random.default_rng(0)
    shape = (2, height, width, 3)
    # Any numbers, few different ones, and all equal, below the zeros that padding must not be.
    kinds = [generator.normal(size=shape), generator.integers(-2, 0, shape), np.full(shape, -7)]
    x = jnp.asarray(np.concatenate(kinds), jnp.float32)
    found, expected = jax.jit(lambda x: [value_and_gradient(f, x) for f in (max_pool, plain)])(x)
    assert found[0].shape == (6, -(-height // 2), -(-width // 2), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_a_nan_stays_wherever_it_is():
    x = jnp.zeros((9, 3, 3, 1)).at[jnp.arange(9), jnp.arange(9) // 3, jnp.arange(9) % 3].set(jnp.nan)
    np.testing.assert_array_equal(jnp.isnan(max_pool(x)), jnp.isnan(plain(x)))
    assert bool(jnp.isnan(max_pool(x)).any((1, 2, 3)).all())


def test_only_other_platforms_select_and_scatter():
    function = jax.jit(jax.grad(lambda x: max_pool(x).sum()))

    def operations(platform):
        text = str(jax.export.export(function, platforms=[platform])(jnp.ones((2, 8, 8, 3))).mlir_module())
        return {name for name in ("select_and_scatter", "optimization_barrier") if f"stablehlo.{name}" in text}

    assert operations("cpu") == {"optimization_barrier"}
    assert operations("cuda") == operations("tpu") == {"select_and_scatter"}


def test_mapped_over_members_of_a_population():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 5, 6, 2)), jnp.float32)
    found = jax.jit(jax.vmap(lambda x: value_and_gradient(max_pool, x)))(x)
    expected = jax.jit(jax.vmap(lambda x: value_and_gradient(plain, x)))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
