"""From an observation of any structure to the float array that a torso takes."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt8

from podracer.networks.convolution import intensities
from podracer.types import ArraySpec, leaf_name

ScaledBytes = Literal["images", "all", "none"]


def to_float(x: jax.Array, spec: ArraySpec, scaled_bytes: ScaledBytes = "images") -> Float[Array, "*B"]:
    """As float32. Bytes that are to be scaled are as their intensities, from 0 to 1.

    The dtype that arrives decides, and not the spec's: an image that the agent has normalised is float32 by now.

    Args:
        x: `[*B, *spec.shape]`.
        spec: Of the leaf.
        scaled_bytes: Which uint8 leaves are scaled: images, which have two axes or more, all, or none.
    """
    return intensities(x) if _is_scaled(x, spec, scaled_bytes) else x.astype(jnp.float32)


def flattener(spec: PyTree, scaled_bytes: ScaledBytes = "images") -> Callable[[PyTree], Float[Array, "*B D"]]:
    """A function that joins all leaves of an observation into one vector, after any leading axes.

    Args:
        spec: The observation's.
        scaled_bytes: As for `to_float`.

    Raises:
        ValueError: A leaf is not a number; it is named.
    """
    _check_numbers(spec)

    def leaf(x: jax.Array, spec: ArraySpec) -> jax.Array:
        lead = x.shape[: x.ndim - len(spec.shape)]
        return to_float(x, spec, scaled_bytes).reshape(*lead, math.prod(spec.shape))

    return lambda observation: jnp.concatenate(jax.tree.leaves(jax.tree.map(leaf, observation, spec)), -1)


def image(
    spec: PyTree, smallest: int, torso: str, scaled_bytes: ScaledBytes = "images"
) -> Callable[[jax.Array], Float[Array, "*B H W C"] | UInt8[Array, "*B H W C"]]:
    """A function that takes an observation which is one image `[H, W, C]`, at least `smallest` wide and high.

    Bytes that are to be scaled stay bytes, for `convolve` takes them as their intensities where that costs least.

    Args:
        spec: The observation's.
        smallest: Width and height that the torso needs.
        torso: Its name, for errors.
        scaled_bytes: As for `to_float`.

    Raises:
        ValueError: The observation is anything else; its leaves are named.
    """
    _check_numbers(spec)
    shape = getattr(spec, "shape", None)
    if shape is None or len(shape) != 3 or min(shape[:2]) < smallest:
        leaves = jax.tree_util.tree_leaves_with_path(spec)
        found = ", ".join(f"{leaf_name(path)} of shape {leaf.shape}" for path, leaf in leaves)
        raise ValueError(
            f"torso {torso!r} takes one image [H, W, C] of at least {smallest} x {smallest}; the observation is "
            f"{found}; use torso 'mlp'"
        )

    def leaf(x: jax.Array) -> jax.Array:
        return x if _is_scaled(x, spec, scaled_bytes) else x.astype(jnp.float32)

    return leaf


def _is_scaled(x: jax.Array, spec: ArraySpec, scaled_bytes: ScaledBytes) -> bool:
    return x.dtype == jnp.uint8 and (scaled_bytes == "all" or (scaled_bytes == "images" and len(spec.shape) > 1))


def _check_numbers(spec: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        if not isinstance(leaf, ArraySpec) or np.dtype(leaf.dtype).kind not in "buif":
            raise ValueError(f"the observation leaf {leaf_name(path)} is {leaf}; networks take arrays of real numbers")
