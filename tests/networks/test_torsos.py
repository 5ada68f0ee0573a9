"""Layers and torsos: how they begin, and what they compute."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.networks.torsos import CNN, MLP, Conv, ResidualCNN, dense, smallest_image

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


def plain(params, x, stride=1, padding="VALID"):
    """A convolution by XLA."""
    y = jax.lax.conv_general_dilated(
        x, params["kernel"], (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + params["bias"].reshape(1, 1, 1, -1)


def scaled(params):
    """Smaller, so that a deep network of normal parameters does not overflow its tolerance."""
    return jax.tree.map(lambda x: 0.1 * x, params)


def test_kernels_have_the_sizes_and_strides_given(random_params):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 22, 25, 3)), jnp.float32)
    cnn = CNN((4, 5), (6,), nn.relu, ((8, 4), (2, 1)))
    params = scaled(random_params(cnn.init, x))

    def by_hand(params, x):
        x = nn.relu(plain(params["Conv_0"], x, 4))
        x = nn.relu(plain(params["Conv_1"], x)).reshape(2, -1)
        return nn.relu(x @ params["MLP_0"]["Dense_0"]["kernel"] + params["MLP_0"]["Dense_0"]["bias"].reshape(1, -1))

    found, expected = jax.jit(lambda: (cnn.apply(params, x), by_hand(params["params"], x)))()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="zip"):
        CNN((4,), (6,), nn.relu, ((8, 4), (2, 1))).init(jax.random.key(0), x)


@pytest.mark.parametrize(
    ("kernels", "smallest"), [((), 1), ([(3, 1)] * 3, 7), (((8, 4), (4, 2), (3, 1)), 36), (((8, 4), (4, 2)), 20)]
)
def test_the_smallest_image_leaves_one_pixel(kernels, smallest):
    assert smallest_image(kernels) == smallest
    cnn = CNN((1,) * len(kernels), (), nn.relu, kernels)

    def features(size):
        x = jax.ShapeDtypeStruct((1, size, size, 1), jnp.float32)
        return jax.eval_shape(lambda x: cnn.init_with_output(jax.random.key(0), x)[0], x).shape[-1]

    assert features(smallest) == 1
    if kernels:
        assert features(smallest - 1) == 0


def test_the_residual_network_is_what_it_says(random_params):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 9, 10, 2)), jnp.float32)
    network = ResidualCNN((3, 4), (5,), nn.relu)
    params = scaled(random_params(network.init, x))

    def by_hand(params, x):
        x = x.reshape(6, 9, 10, 2)
        for section in range(2):
            x = plain(params[f"Conv_{section}"], x, padding="SAME")
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
            for block in range(2):
                layers = params[f"ResidualBlock_{2 * section + block}"]
                y = plain(layers["Conv_0"], nn.relu(x), padding="SAME")
                x = x + plain(layers["Conv_1"], nn.relu(y), padding="SAME")
        # Halved twice, rounded up, 3 x 3 are left.
        x = nn.relu(x).reshape(3, 2, 3 * 3 * 4)
        layer = params["MLP_0"]["Dense_0"]
        return nn.relu(x @ layer["kernel"] + layer["bias"].reshape(1, 1, -1))

    found, expected = jax.jit(lambda: (network.apply(params, x), by_hand(params["params"], x)))()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_residual_branches_begin_smaller():
    network = ResidualCNN((4,), (), nn.relu)
    params = jax.jit(network.init)(jax.random.key(0), jnp.ones((1, 2, 2, 3)))["params"]
    for layer in (params["Conv_0"], params["ResidualBlock_0"]["Conv_0"], params["ResidualBlock_1"]["Conv_1"]):
        assert_orthogonal(layer["kernel"], 1)
