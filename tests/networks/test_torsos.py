"""Layers: how they begin, and that the convolution made for CPUs is a convolution."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.networks.torsos import CNN, MLP, Conv, dense

SQUARE_ROOT_OF_2 = math.sqrt(2)


def assert_orthogonal(kernel, scale):
    """The shorter side's vectors are orthogonal, and as long as `scale`."""
    matrix = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
    gram = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    np.testing.assert_allclose(gram, scale**2 * np.eye(len(gram)), atol=1e-5)


def test_layers_begin_orthogonal():
    # Wider than their inputs and narrower.
    scales = {"wide": (dense(9, 0.01), 0.01), "narrow": (dense(2), SQUARE_ROOT_OF_2)}
    scales["convolution"] = (Conv(4, 3), SQUARE_ROOT_OF_2)

    def init(key):
        keys = jax.random.split(key, len(scales))
        inputs = [
            jnp.ones((1, 5, 5, 2)) if isinstance(layer, Conv) else jnp.ones((1, 5)) for layer, _ in scales.values()
        ]
        layers = zip(scales.items(), keys, inputs, strict=True)
        return {name: layer.init(key, x)["params"] for (name, (layer, _)), key, x in layers}

    for name, params in jax.jit(init)(jax.random.key(0)).items():
        assert_orthogonal(params["kernel"], scales[name][1])
        np.testing.assert_array_equal(params["bias"], 0)


def convolve(params, x, stride):
    """The same layer by XLA's own convolution."""
    y = jax.lax.conv_general_dilated(
        x, params["kernel"], (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + params["bias"].reshape(1, 1, 1, -1)


@pytest.mark.parametrize(
    ("height", "width", "size", "stride"),
    [(10, 10, 3, 1), (7, 9, 3, 2), (8, 6, 4, 3), (11, 13, 2, 4), (3, 3, 3, 1), (5, 6, 1, 2), (12, 12, 8, 4)],
)
def test_the_convolution_for_cpus_equals_xlas(random_params, height, width, size, stride):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, height, width, 3)), jnp.float32)
    layer = Conv(4, size, stride)
    params = random_params(layer.init, x)["params"]

    def ours(params, x):
        return layer.apply({"params": params}, x)

    def theirs(params, x):
        return convolve(params, x, stride)

    def everything(function):
        y = function(params, x)
        # Weighted, so that a transposed gradient would show.
        weight = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape) / y.size
        return y, jax.grad(lambda p, x: (weight * jnp.square(function(p, x))).sum(), (0, 1))(params, x)

    found, expected = jax.jit(lambda: everything(ours))(), jax.jit(lambda: everything(theirs))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_a_cpu_does_not_convolve(random_params):
    layer, x = Conv(4, 3), jnp.ones((2, 6, 6, 1))
    params = random_params(layer.init, x)
    assert "convolution" in jax.jit(lambda x: convolve(params["params"], x, 1)).lower(x).as_text()
    assert "convolution" not in jax.jit(layer.apply).lower(params, x).compile().as_text()


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_torsos_keep_any_leading_axes(random_params, lead):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(*lead, 7, 8, 2)), jnp.float32)
    cnn = CNN((4, 5), (6,), nn.relu)
    params = random_params(cnn.init, x)
    shapes = jax.tree.map(jnp.shape, params["params"])
    assert shapes["Conv_0"]["kernel"] == (3, 3, 2, 4)
    assert shapes["Conv_1"]["kernel"] == (3, 3, 4, 5)
    # Two convolutions leave 3 x 4 of 7 x 8.
    assert shapes["MLP_0"]["Dense_0"]["kernel"] == (3 * 4 * 5, 6)
    y = jax.jit(cnn.apply)(params, x)
    assert y.shape == (*lead, 6)
    flat = jax.jit(cnn.apply)(params, x.reshape(-1, 7, 8, 2))
    np.testing.assert_allclose(y.reshape(-1, 6), flat, rtol=1e-4, atol=1e-4)


def test_an_mlp_is_what_it_says(random_params):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4)), jnp.float32)
    mlp = MLP((5, 6), jnp.tanh)
    params = random_params(mlp.init, x)
    expected = np.asarray(x)
    for name in ("Dense_0", "Dense_1"):
        layer = jax.tree.map(np.asarray, params["params"][name])
        expected = np.tanh(expected @ layer["kernel"] + layer["bias"])
    np.testing.assert_allclose(jax.jit(mlp.apply)(params, x), expected, rtol=1e-5, atol=1e-6)
