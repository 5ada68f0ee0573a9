"""The convolution made for CPUs is a convolution, and XLA gets only what it does fast there."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.networks import convolution
from podracer.networks.convolution import convolve


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain(x, kernel, stride, padding):
    """XLA's own."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def value_and_gradients(function, x, kernel, stride, padding):
    """Of a loss in which every output has another weight, so that a transposed gradient would show."""

    def loss(x, kernel):
        y = function(x, kernel, stride, padding)
        weight = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape) / y.size
        return (weight * jnp.square(y)).sum(), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, kernel)
    return y, gradients


def assert_same(found, expected):
    """To rounding: of the largest number, for gradients are sums of thousands."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, np.abs(b).max()))


# Height, width, channels, kernel size, stride, padding.
SHAPES = [
    (10, 10, 4, 3, 1, "VALID"),
    (9, 10, 16, 3, 1, "SAME"),
    (7, 9, 3, 3, 2, "VALID"),
    (7, 8, 3, 3, 2, "SAME"),
    (8, 6, 1, 4, 3, "VALID"),
    (11, 13, 2, 2, 4, "SAME"),
    (3, 3, 3, 3, 1, "VALID"),
    (5, 6, 4, 1, 1, "SAME"),
    (5, 6, 4, 1, 2, "VALID"),
    (9, 9, 2, 2, 1, "SAME"),
    (20, 20, 4, 8, 4, "VALID"),
    (22, 23, 1, 8, 4, "VALID"),
    (22, 21, 2, 8, 4, "SAME"),
    (5, 6, 20, 3, 1, "SAME"),
]


@pytest.mark.parametrize(("height", "width", "channels", "size", "stride", "padding"), SHAPES)
def test_values_and_gradients_are_xlas(height, width, channels, size, stride, padding):
    x, kernel = random(2, height, width, channels), random(size, size, channels, 5, seed=1)
    found, expected = jax.jit(
        lambda x, kernel: [value_and_gradients(f, x, kernel, stride, padding) for f in (convolve, plain)]
    )(x, kernel)
    assert_same(found, expected)


@pytest.mark.parametrize(("size", "stride", "padding"), [(8, 4, "VALID"), (3, 1, "SAME"), (3, 2, "SAME")])
@pytest.mark.parametrize("bytes_per_block", [1, 2**14, 2**21])  # One image, some, and all.
def test_of_bytes_the_intensities_are_convolved(monkeypatch, size, stride, padding, bytes_per_block):
    monkeypatch.setattr(convolution, "_BYTES_PER_BLOCK", bytes_per_block)
    pixels = jnp.asarray(np.random.default_rng(0).integers(0, 256, (6, 20, 17, 3)), jnp.uint8)
    kernel = random(size, size, 3, 5, seed=1)

    def value_and_gradient(function):
        def loss(kernel):
            y = function(kernel)
            return (jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape) / y.size * jnp.square(y)).sum(), y

        (_, y), gradient = jax.value_and_grad(loss, has_aux=True)(kernel)
        return y, gradient

    fractions = jnp.asarray(np.asarray(pixels, np.float64) / 255, jnp.float32)
    found = jax.jit(lambda: value_and_gradient(lambda kernel: convolve(pixels, kernel, stride, padding)))()
    expected = jax.jit(lambda: value_and_gradient(lambda kernel: plain(fractions, kernel, stride, padding)))()
    assert_same(found, expected)


def test_no_batch_of_bytes_becomes_floats_at_once():
    pixels, kernel = jnp.zeros((64, 84, 84, 4), jnp.uint8), random(8, 8, 4, 16)
    gradient = jax.jit(jax.grad(lambda kernel: jnp.square(convolve(pixels, kernel, 4)).sum()))
    floats = re.findall(r"f32\[([\d,]+)\]", gradient.lower(kernel).compile().as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in floats)
    assert 64 * 20 * 20 * 16 <= largest < pixels.size / 2


@pytest.mark.parametrize(("images", "limit"), [(6, 1), (6, 4), (7, 2), (4, 4), (1, 2)])
def test_blocks_of_images_do_not_change_the_gradient(monkeypatch, images, limit):
    x, kernel = random(images, 6, 7, 2), random(3, 3, 2, 4, seed=1)
    bytes_per_image = 6 * 7 * 3 * 3 * 2 * 4  # Rows x columns x patches x channels x float32.
    monkeypatch.setattr(convolution, "_BYTES_PER_BLOCK", limit * bytes_per_image)
    blocks = images // max(i for i in range(1, limit + 1) if images % i == 0)
    jaxpr = str(jax.make_jaxpr(lambda: value_and_gradients(convolve, x, kernel, 1, "SAME"))())
    assert (f"length={blocks}\n" in jaxpr) == (blocks > 1)
    found, expected = jax.jit(
        lambda x, kernel: [value_and_gradients(f, x, kernel, 1, "SAME") for f in (convolve, plain)]
    )(x, kernel)
    assert_same(found, expected)


def convolutions_in(function, *args):
    """The orders of dimensions of all convolutions in the compiled program."""
    return re.findall(r"dim_labels=(\S+?)[,\s]", jax.jit(function).lower(*args).compile().as_text())


@pytest.mark.parametrize(("size", "stride", "padding"), [(8, 4, "VALID"), (3, 1, "SAME"), (3, 1, "VALID")])
def test_a_cpu_gets_only_the_order_that_is_fast_in_a_loop(size, stride, padding):
    x, kernel = random(2, 20, 20, 4), random(size, size, 4, 6, seed=1)

    def learn(function):
        def step(kernel, x):
            return kernel - jax.grad(lambda k, x: jnp.square(function(k, x)).sum())(kernel, x), None

        return lambda kernel, x: jax.lax.scan(step, kernel, x)[0]

    def twice(convolution):
        """So that the gradient of an input is needed, too."""

        def function(kernel, x):
            y = convolution(x, kernel, stride, padding)
            return convolution(jnp.tanh(y[..., :4]), kernel[:2, :2], 1, "VALID")

        return function

    fast = "b01f_01io->b01f"
    ours = convolutions_in(learn(twice(convolve)), kernel, x[None])
    # Two forward, and one for the input of the second.
    assert ours == [fast] * 3
    assert set(convolutions_in(learn(twice(plain)), kernel, x[None])) > {fast}


def test_other_platforms_convolve_and_differentiate_as_xla_does():
    x, kernel = random(2, 20, 20, 4), random(8, 8, 4, 6, seed=1)

    def gradients(convolution):
        return jax.jit(jax.grad(lambda x, k: jnp.square(convolution(x, k, 4, "VALID")).sum(), (0, 1)))

    def operations(convolution, platform):
        exported = jax.export.export(gradients(convolution), platforms=[platform])(x, kernel)
        text = str(exported.mlir_module())
        return sorted(
            re.findall(r"stablehlo\.(?:convolution\(.*?\)|dot_general)( dim_numbers.*?window = \{[^}]*\})?", text)
        )

    for platform in ("cuda", "tpu"):
        assert operations(convolve, platform) == operations(plain, platform)
    assert operations(convolve, "cpu") != operations(plain, "cpu")


def test_gradients_of_gradients():
    x, kernel = random(2, 9, 9, 2), random(4, 4, 2, 3, seed=1)

    def curvature(convolution):
        def norm(x, kernel):
            gradients = jax.grad(lambda x, k: jnp.tanh(convolution(x, k, 2, "SAME")).sum(), (0, 1))(x, kernel)
            return sum(jnp.square(gradient).sum() for gradient in gradients)

        return jax.grad(norm, (0, 1))(x, kernel)

    assert_same(*jax.jit(lambda: (curvature(convolve), curvature(plain)))())


def test_mapped_over_members_of_a_population():
    x, kernels = random(3, 2, 8, 8, 2), random(3, 4, 4, 2, 3, seed=1)

    def over_members(convolution):
        return jax.vmap(lambda x, kernel: value_and_gradients(convolution, x, kernel, 2, "VALID"))(x, kernels)

    assert_same(*jax.jit(lambda: (over_members(convolve), over_members(plain)))())
