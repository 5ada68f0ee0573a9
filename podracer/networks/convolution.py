"""Convolutions that are fast on a CPU, also inside of a loop; docs/design/0005 has the measurements.

XLA's own convolution on a CPU is fast forward, if the dimensions are in the order that its library wants. Gradients
have them in another order, which XLA mends outside of loops, and in a loop over minibatches runs 20 times slower. So on
a CPU gradients are written out here, and all other platforms convolve and differentiate as XLA does.

Three steps: a stride becomes channels, so that only the stride 1 is left; the gradient of the input is a convolution
forward again; the gradient of the kernel is a product of matrices. What would be larger than all else in a network is
made for one block of images after the other, which stays in the cache: those matrices, and bytes as numbers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

Padding = Literal["VALID", "SAME"]
Images = Float[Array, "N H W C"] | UInt8[Array, "N H W C"]
Gradients = tuple[jax.Array | None, jax.Array]
ShapeDtype = jax.Array | jax.ShapeDtypeStruct

# Of the matrices that one block of images becomes, about: as much as stays in the cache. 1 to 4 MiB measured alike.
_BYTES_PER_BLOCK = 2**21


def intensities(pixels: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """From 0 to 1 instead of 255."""
    return pixels.astype(jnp.float32) / 255


def convolve(
    x: Images, kernel: Float[Array, "K K C F"], stride: int = 1, padding: Padding = "VALID"
) -> Float[Array, "N rows columns F"]:
    """A 2-D convolution, channels last, whose values and gradients are those of XLA's to rounding.

    Of bytes it takes the `intensities`, and keeps the bytes for the backward pass. It has no forward-mode derivatives;
    reverse-mode ones of any order are there. Strides cost least where they divide the kernel's size: other kernels are
    filled up with zeros.
    """
    return _convolve(stride, padding, x, kernel)


# Each direction chooses the platform by itself. Differentiating the choice instead would leave the other platforms'
# operations in the program, for XLA to remove.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(stride: int, padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    on_cpu, elsewhere = (functools.partial(form, stride, padding) for form in (_on_cpu, _elsewhere))
    return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, default=elsewhere)


def _convolve_forward(
    stride: int, padding: Padding, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(stride, padding, x, kernel), (x, kernel)


def _convolve_backward(stride: int, padding: Padding, saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> Gradients:
    on_cpu, elsewhere = (functools.partial(form, stride, padding) for form in (_gradients_on_cpu, _gradients_elsewhere))
    return jax.lax.platform_dependent(*saved, grad, cpu=on_cpu, default=elsewhere)


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _elsewhere(stride: int, padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _xla(_numbers(x), kernel, padding, stride)


def _gradients_elsewhere(stride: int, padding: Padding, x: jax.Array, kernel: jax.Array, grad: jax.Array) -> Gradients:
    of_x, of_kernel = jax.vjp(lambda x, kernel: _xla(x, kernel, padding, stride), _numbers(x), kernel)[1](grad)
    return None if _is_bytes(x) else of_x, of_kernel


def _on_cpu(stride: int, padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    layout = _Layout.of(x, kernel, stride, padding)

    def block(x: jax.Array) -> jax.Array:
        return _xla(layout.images(_numbers(x)), layout.kernel(kernel), layout.pads)

    if not _is_bytes(x) or stride == 1:  # Without a stride nothing is laid out anew, and blocks gain nothing.
        return block(x)
    outputs = jax.eval_shape(block, x)
    # The blocks of the backward pass, or XLA would lay out the images once for each.
    _, bytes_per_image = _product(jax.eval_shape(layout.kernel, kernel), outputs)
    y = _map_blocks(block, x, bytes_per_image)
    return y.reshape(outputs.shape)


def _gradients_on_cpu(stride: int, padding: Padding, x: jax.Array, kernel: jax.Array, grad: jax.Array) -> Gradients:
    layout = _Layout.of(x, kernel, stride, padding)
    arranged, kernel_back = jax.vjp(layout.kernel, kernel)
    product, bytes_per_image = _product(arranged, grad)
    size = arranged.shape[0]

    def block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, grad = part
        return product(jnp.pad(layout.images(_numbers(x)), [(0, 0), *layout.pads, (0, 0)]), grad, size)

    (of_kernel,) = kernel_back(_map_blocks(block, (x, grad), bytes_per_image).sum(0))
    if _is_bytes(x):
        return None, of_kernel
    # A pixel is in as many outputs as the kernel has places, at each with the kernel's opposite place.
    turned = arranged[::-1, ::-1].swapaxes(2, 3)
    pads = [(size - 1 - before, size - 1 - after) for before, after in layout.pads]
    (of_x,) = jax.vjp(layout.images, x)[1](_xla(grad, turned, pads))
    return of_x, of_kernel


def _is_bytes(x: Images) -> bool:
    return x.dtype == jnp.uint8


def _numbers(x: Images) -> Float[Array, "N H W C"]:
    return intensities(x) if _is_bytes(x) else x


def _xla(x: jax.Array, kernel: jax.Array, padding: str | list[tuple[int, int]], stride: int = 1) -> jax.Array:
    """With the dimensions in the only order that is fast on a CPU everywhere."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The same convolution with stride 1: squares of `stride` pixels become channels.

    8x8/4 on 84x84x4 is 2x2/1 on 21x21x64.

    Attributes:
        stride: Of the convolution that it replaces.
        size: K, of that one's kernel.
        amounts: Pixels to add on each side of the images, or with a negative number to cut off.
        pads: Of the convolution with stride 1.
    """

    stride: int
    size: int
    amounts: list[tuple[int, int]]
    pads: list[tuple[int, int]]

    @staticmethod
    def of(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> "_Layout":
        """For images and a kernel of these shapes."""
        size = kernel.shape[0]
        pads = jax.lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), padding)
        if stride == 1:
            return _Layout(1, size, [(0, 0), (0, 0)], pads)
        amounts = []
        for length, (before, after) in zip(x.shape[1:3], pads, strict=True):
            outputs = (length + before + after - size) // stride + 1
            # Exactly what the outputs read.
            squares = outputs + -(-size // stride) - 1
            amounts.append((before, squares * stride - length - before))
        return _Layout(stride, size, amounts, [(0, 0), (0, 0)])

    def images(self, x: Float[Array, "N H W C"]) -> Float[Array, "N h w D"]:
        """As they are convolved."""
        if self.stride == 1:
            return x
        x = jax.lax.pad(
            x, jnp.zeros((), x.dtype), [(before, after, 0) for before, after in [(0, 0), *self.amounts, (0, 0)]]
        )
        images, height, width, channels = x.shape
        x = x.reshape(images, height // self.stride, self.stride, width // self.stride, self.stride, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(*x.shape[:3], -1)

    def kernel(self, kernel: Float[Array, "K K C F"]) -> Float[Array, "M M D F"]:
        """As it is applied to them."""
        if self.stride == 1:
            return kernel
        squares = -(-self.size // self.stride)
        filled = squares * self.stride - self.size
        kernel = jnp.pad(kernel, ((0, filled), (0, filled), (0, 0), (0, 0)))
        kernel = kernel.reshape(squares, self.stride, squares, self.stride, *kernel.shape[2:])
        kernel = kernel.transpose(0, 2, 1, 3, 4, 5)
        return kernel.reshape(squares, squares, -1, kernel.shape[-1])


def _map_blocks(function: Callable[[Any], jax.Array], images: Any, bytes_per_image: int) -> Shaped[Array, "blocks ..."]:
    """A function of each block of images, whose matrices take so many bytes per image."""
    number = jax.tree.leaves(images)[0].shape[0]
    length = _largest_divisor(number, _BYTES_PER_BLOCK // bytes_per_image)
    if length == number:
        return function(images)[None]
    return jax.lax.map(function, jax.tree.map(lambda x: x.reshape(-1, length, *x.shape[1:]), images))


# The gradient of a kernel with stride 1. `kernel[i, j]` is the sum of `x[n, a + i, b + j]^T grad[n, a, b]` over images
# and places: products of matrices, between images or gradients or both that are copied for every `i` and `j`.
def _product(kernel: ShapeDtype, grad: ShapeDtype) -> tuple[Callable[..., jax.Array], int]:
    """The product that copies least, and the bytes of its matrices for each image."""
    size, _, channels, features = kernel.shape
    numbers = {
        _product_of_patches: size**2 * channels + features,
        _product_of_shifts: size * (channels + features),
        _product_of_gradients: channels + size**2 * features,
    }
    product = min(numbers, key=lambda name: numbers[name])
    return product, numbers[product] * grad.shape[1] * grad.shape[2] * grad.dtype.itemsize


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


def _product_of_gradients(
    x: Float[Array, "N H W C"], grad: Float[Array, "N h w F"], size: int
) -> Float[Array, "K K C F"]:
    """Every pixel beside the gradients of all that read it: `size ** 2` copies of `grad`."""
    _, rows, columns, features = grad.shape
    _, height, width, channels = x.shape
    shifts = [
        jnp.pad(grad, ((0, 0), (i, height - rows - i), (j, width - columns - j), (0, 0)))
        for i in range(size)
        for j in range(size)
    ]
    product = x.reshape(-1, channels).T @ jnp.concatenate(shifts, -1).reshape(-1, size**2 * features)
    return product.reshape(channels, size, size, features).transpose(1, 2, 0, 3)


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`, at least 1."""
    return max((i for i in range(1, min(number, limit) + 1) if number % i == 0), default=1)
