"""Modules from an observation to features."""

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from podracer.networks.convolution import Padding, convolve
from podracer.networks.pooling import max_pool

Images = Float[Array, "*B H W C"] | UInt8[Array, "*B H W C"]  # Bytes are learnt from as their intensities.
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
    """A 2-D convolution on `[*B, H, W, C]`, with orthogonal weights and zero bias."""

    features: int
    size: int
    stride: int = 1
    padding: Padding = "VALID"
    scale: float = math.sqrt(2)

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "*B h w F"]:
        lead, channels = x.shape[:-3], x.shape[-1]
        shape = (self.size, self.size, channels, self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        y = convolve(x.reshape(-1, *x.shape[-3:]), kernel, self.stride, self.padding) + bias.reshape(1, 1, 1, -1)
        return y.reshape(*lead, *y.shape[1:])


class CNN(nn.Module):
    """Convolutions without padding, then dense layers, each followed by the activation.

    Attributes:
        channels: Of each convolution.
        hidden_sizes: Of the dense layers.
        activation: After every layer.
        kernels: Size and stride of each convolution; 3x3 with stride 1 where there are none, for small images such as
            MinAtar's 10x10.
    """

    channels: Sequence[int]
    hidden_sizes: Sequence[int]
    activation: Activation
    kernels: Sequence[tuple[int, int]] = ()

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "*B D"]:
        kernels = self.kernels or [(3, 1)] * len(self.channels)
        for features, (size, stride) in zip(self.channels, kernels, strict=True):
            x = self.activation(Conv(features, size, stride)(x))
        return MLP(self.hidden_sizes, self.activation)(x.reshape(*x.shape[:-3], -1))


def smallest_image(kernels: Sequence[tuple[int, int]]) -> int:
    """How wide and high an image has to be for a `CNN` of these sizes and strides."""
    length = 1
    for size, stride in reversed(kernels):
        length = (length - 1) * stride + size
    return length


class ResidualBlock(nn.Module):
    """Two convolutions 3x3, each after the activation, added to their input."""

    activation: Activation

    @nn.compact
    def __call__(self, x: Float[Array, "*B H W C"]) -> Float[Array, "*B H W C"]:
        y = x
        for _ in range(2):
            y = Conv(x.shape[-1], 3, padding="SAME", scale=1.0)(self.activation(y))
        return x + y


class ResidualCNN(nn.Module):
    """The deep network of IMPALA (Espeholt et al. 2018, figure 3), without its LSTM.

    Each section is a convolution 3x3, max-pooling that halves the image, and two residual blocks. Convolutions begin
    with the scale 1 and not the root of 2, for their outputs add up.
    """

    channels: Sequence[int]
    hidden_sizes: Sequence[int]
    activation: Activation

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "*B D"]:
        lead = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:])
        for features in self.channels:
            x = max_pool(Conv(features, 3, padding="SAME", scale=1.0)(x))
            for _ in range(2):
                x = ResidualBlock(self.activation)(x)
        return MLP(self.hidden_sizes, self.activation)(self.activation(x).reshape(*lead, -1))
