"""Modules from an observation to features."""

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activation] = {"tanh": jnp.tanh, "relu": nn.relu, "silu": nn.silu}


def dense(features: int, scale: float = math.sqrt(2)) -> nn.Dense:
    """A linear layer with orthogonal weights (Saxe et al. 2014) and zero bias."""
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale))


class MLP(nn.Module):
    """Dense layers, each followed by the activation."""

    hidden_sizes: Sequence[int]
    activation: Activation

    @nn.compact
    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B D"]:
        for size in self.hidden_sizes:
            x = self.activation(dense(size)(x))
        return x


class Conv(nn.Module):
    """A 2-D convolution without padding, on `[*B, H, W, C]`.

    XLA's convolution on a CPU is some 25 times slower inside the loop over minibatches than outside it, so there the
    patches are cut out and multiplied as one matrix. Other platforms convolve.
    """

    features: int
    size: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*B H W C"]) -> Float[Array, "*B h w F"]:
        lead, (height, width, channels) = x.shape[:-3], x.shape[-3:]
        shape = (self.size, self.size, channels, self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(math.sqrt(2)), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        rows = (height - self.size) // self.stride + 1
        columns = (width - self.size) // self.stride + 1

        def as_matrix(x: jax.Array, kernel: jax.Array) -> jax.Array:
            patches = [
                x[:, i : i + rows * self.stride : self.stride, j : j + columns * self.stride : self.stride]
                for i in range(self.size)
                for j in range(self.size)
            ]
            matrix = jnp.concatenate(patches, -1).reshape(-1, self.size**2 * channels)
            return (matrix @ kernel.reshape(-1, self.features)).reshape(-1, rows, columns, self.features)

        def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
            strides = (self.stride, self.stride)
            return jax.lax.conv_general_dilated(x, kernel, strides, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        x = x.reshape(-1, height, width, channels)
        y = jax.lax.platform_dependent(x, kernel, cpu=as_matrix, default=convolve)
        y = y + bias.reshape(1, 1, 1, -1)
        return y.reshape(*lead, rows, columns, self.features)


class CNN(nn.Module):
    """Convolutions 3x3 and dense layers, for small images such as MinAtar's 10x10."""

    channels: Sequence[int]
    hidden_sizes: Sequence[int]
    activation: Activation

    @nn.compact
    def __call__(self, x: Float[Array, "*B H W C"]) -> Float[Array, "*B D"]:
        for features in self.channels:
            x = self.activation(Conv(features, 3)(x))
        return MLP(self.hidden_sizes, self.activation)(x.reshape(*x.shape[:-3], -1))
