"""Convolutions that are fast on a CPU, also inside of a loop; docs/design/0005 has the measurements.

XLA's own convolution on a CPU is fast forward, if the dimensions are in the order that its library wants. Gradients
have them in another order, which XLA mends outside of loops, and in a loop over minibatches runs 20 times slower. So on
a CPU gradients are written out here, and all other platforms convolve and differentiate as XLA does.

Three steps: a stride becomes channels, so that only the stride 1 is left; the gradient of the input is a convolution
forward again; the gradient of the kernel is a product of matrices, over blocks of images that stay in the cache.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Padding = Literal["VALID", "SAME"]
Form = Callable[[jax.Array, jax.Array], jax.Array]

# Of the matrices that one block of images becomes, about: as much as stays in the cache. 1 to 4 MiB measured alike.
_BYTES_PER_BLOCK = 2**21
# Below, patches are the smaller matrix; from there on, shifts.
_FEW_CHANNELS = 16


def convolve(
    x: Float[Array, "N H W C"], kernel: Float[Array, "K K C F"], stride: int = 1, padding: Padding = "VALID"
) -> Float[Array, "N rows columns F"]:
    """A 2-D convolution, channels last, whose values and gradients are those of XLA's to rounding.

    It has no forward-mode derivatives; reverse-mode ones of any order are there. Strides cost least where they divide
    the kernel's size: other kernels are filled up with zeros.
    """

    return _convolve(stride, padding, x, kernel)


# Each direction chooses the platform by itself. Differentiating the choice instead would leave the other platforms'
# operations in the program, for XLA to remove.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(stride: int, padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, kernel, **_forms(stride, padding))


def _convolve_forward(
    stride: int, padding: Padding, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(stride, padding, x, kernel), (x, kernel)


def _convolve_backward(
    stride: int, padding: Padding, saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def backward(form: Form, x: jax.Array, kernel: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(form, x, kernel)[1](grad)

    forms = {name: functools.partial(backward, form) for name, form in _forms(stride, padding).items()}
    return jax.lax.platform_dependent(*saved, grad, **forms)


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _forms(stride: int, padding: Padding) -> dict[str, Form]:
    """The convolution as every platform is given it."""

    def on_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
        size = kernel.shape[0]
        if padding == "SAME" and stride == 1 and size % 2:
            return _stride_1(size // 2, x, kernel)
        return _stride_1(0, *_stride_to_channels(x, kernel, stride, padding))

    def elsewhere(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _xla(x, kernel, padding, stride)

    return {"cpu": on_cpu, "default": elsewhere}


def _xla(x: jax.Array, kernel: jax.Array, padding: str | list[tuple[int, int]], stride: int = 1) -> jax.Array:
    """With the dimensions in the only order that is fast on a CPU everywhere."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _stride_to_channels(
    x: Float[Array, "N H W C"], kernel: Float[Array, "K K C F"], stride: int, padding: Padding
) -> tuple[Float[Array, "N h w D"], Float[Array, "M M D F"]]:
    """The same convolution with stride 1 and without padding: squares of `stride` pixels become channels.

    8x8/4 on 84x84x4 is 2x2/1 on 21x21x64.
    """
    images, channels, features = x.shape[0], x.shape[3], kernel.shape[3]
    size = kernel.shape[0]
    blocks = -(-size // stride)
    pads = jax.lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), padding)
    # Exactly what the outputs read, so `after` may cut something off.
    squares, amounts = [], []
    for length, (before, after) in zip(x.shape[1:3], pads, strict=True):
        outputs = (length + before + after - size) // stride + 1
        squares.append(outputs + blocks - 1)
        amounts.append((before, squares[-1] * stride - length - before, 0))
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *amounts, (0, 0, 0)])
    x = x.reshape(images, squares[0], stride, squares[1], stride, channels).transpose(0, 1, 3, 2, 4, 5)
    filled = blocks * stride - size
    kernel = jnp.pad(kernel, ((0, filled), (0, filled), (0, 0), (0, 0)))
    kernel = kernel.reshape(blocks, stride, blocks, stride, channels, features).transpose(0, 2, 1, 3, 4, 5)
    depth = stride**2 * channels
    return x.reshape(images, *squares, depth), kernel.reshape(blocks, blocks, depth, features)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stride_1(pad: int, x: Float[Array, "N H W C"], kernel: Float[Array, "K K C F"]) -> Float[Array, "N h w F"]:
    """With stride 1, and `pad` zeros on every side."""
    return _xla(x, kernel, [(pad, pad)] * 2)


def _stride_1_forward(pad: int, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _stride_1(pad, x, kernel), (x, kernel)


def _stride_1_backward(pad: int, saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    # A pixel is in as many outputs as the kernel has places, at each with the kernel's opposite place.
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    return _stride_1(kernel.shape[0] - 1 - pad, grad, turned), _kernel_gradient(pad, x, grad, kernel.shape[0])


_stride_1.defvjp(_stride_1_forward, _stride_1_backward)


def _kernel_gradient(
    pad: int, x: Float[Array, "N H W C"], grad: Float[Array, "N h w F"], size: int
) -> Float[Array, "K K C F"]:
    """`kernel[i, j]` is the sum of `x[n, a + i, b + j]^T grad[n, a, b]` over images and places."""
    images, channels = x.shape[0], x.shape[3]
    product = _product_of_patches if channels < _FEW_CHANNELS else _product_of_shifts

    def block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, grad = part
        return product(jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0))), grad, size)

    copied = size**2 * channels if channels < _FEW_CHANNELS else size * (channels + grad.shape[3])
    bytes_per_image = x.dtype.itemsize * grad.shape[1] * grad.shape[2] * copied
    length = _largest_divisor(images, _BYTES_PER_BLOCK // bytes_per_image)
    if length == images:
        return block((x, grad))
    parts = jax.tree.map(lambda y: y.reshape(-1, length, *y.shape[1:]), (x, grad))
    return jax.lax.map(block, parts).sum(0)


def _product_of_patches(
    x: Float[Array, "N H W C"], grad: Float[Array, "N h w F"], size: int
) -> Float[Array, "K K C F"]:
    """Every output beside all that it reads: `size ** 2` copies of `x`."""
    _, rows, columns, features = grad.shape
    patches = [x[:, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
    matrix = jnp.concatenate(patches, -1).reshape(-1, size**2 * x.shape[3])
    return (matrix.T @ grad.reshape(-1, features)).reshape(size, size, x.shape[3], features)


def _product_of_shifts(x: Float[Array, "N H W C"], grad: Float[Array, "N h w F"], size: int) -> Float[Array, "K K C F"]:
    """With `grad` shifted by every row, and `x` by every column: `size` copies of each."""
    _, rows, columns, features = grad.shape
    _, height, _, channels = x.shape
    shifted_x = jnp.concatenate([x[:, :, j : j + columns] for j in range(size)], -1)
    below = height - rows
    shifted_grad = jnp.concatenate([jnp.pad(grad, ((0, 0), (i, below - i), (0, 0), (0, 0))) for i in range(size)], -1)
    product = shifted_grad.reshape(-1, size * features).T @ shifted_x.reshape(-1, size * channels)
    return product.reshape(size, features, size, channels).transpose(0, 2, 3, 1)


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`, at least 1."""
    return max((i for i in range(1, min(number, limit) + 1) if number % i == 0), default=1)
