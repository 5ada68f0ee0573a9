"""Max-pooling, whose gradient XLA computes slowly on a CPU; docs/design/0005 has the measurements."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def max_pool(x: Float[Array, "N H W C"]) -> Float[Array, "N h w C"]:
    """The maximum of 3x3 pixels at every second one, padded to `ceil(H / 2)` rows and `ceil(W / 2)` columns.

    Where several pixels are the largest, the first of them, row by row, has the gradient, on every platform. Large even
    areas, in which all are equal, are what games are drawn of.
    """

    return _max_pool(x)


# Each direction chooses the platform by itself, as in `convolution`.
@jax.custom_vjp
def _max_pool(x: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, cpu=_on_cpu, default=_elsewhere)


def _max_pool_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _max_pool(x), x


def _max_pool_backward(x: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    def backward(form: Callable[[jax.Array], jax.Array], x: jax.Array, grad: jax.Array) -> jax.Array:
        return jax.vjp(form, x)[1](grad)[0]

    forms = {"cpu": functools.partial(backward, _on_cpu), "default": functools.partial(backward, _elsewhere)}
    return (jax.lax.platform_dependent(x, grad, **forms),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def _elsewhere(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def _on_cpu(x: jax.Array) -> jax.Array:
    # Without the barrier both directions become one loop, in which every maximum is computed three times.
    return _along(1, jax.lax.optimization_barrier(_along(2, x)))


def _along(axis: int, x: Float[Array, "N H W C"]) -> Float[Array, "N h w C"]:
    """The maximum of three at every second place of one axis."""
    length = x.shape[axis]
    outputs = -(-length // 2)
    # As "SAME" has it: one place before an odd length, none before an even one.
    before = length % 2
    amounts = [(0, 0, 0)] * 4
    amounts[axis] = (before, 2 * (outputs + 1) - length - before, 0)
    x = jax.lax.pad(x, jnp.array(-jnp.inf, x.dtype), amounts)
    pairs = x.reshape(*x.shape[:axis], outputs + 1, 2, *x.shape[axis + 1 :])
    left, right = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in range(2))
    first, second = (jax.lax.slice_in_dim(side, 0, outputs, axis=axis) for side in (left, right))
    third = jax.lax.slice_in_dim(left, 1, outputs + 1, axis=axis)
    return _earlier_maximum(_earlier_maximum(first, second), third)


def _earlier_maximum(a: jax.Array, b: jax.Array) -> jax.Array:
    """Unlike `jnp.maximum`, which gives each half of the gradient where they are equal. A NaN stays one."""
    return jnp.where((a >= b) | jnp.isnan(a), a, b)
