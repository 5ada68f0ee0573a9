"""Convolutions on this JAX: XLA's own and podracer's, in a loop over minibatches and outside it.

XLA's convolutions on a CPU depend on the version of jaxlib more than on anything else, and on whether they are inside a
loop. This decides which version the repository pins: run it under each candidate (any JAX from 0.10.1 on).
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks.ratios import in_units
from benchmarks.report import Section, show
from podracer.networks.torsos import Conv


@dataclasses.dataclass(frozen=True)
class Shape:
    """A convolutional torso, and how many observations a step of the loop has.

    Attributes:
        name: In tables.
        observation: `(H, W, C)`.
        layers: `(features, size, stride)` each.
        batch: Observations per step.
        steps: Of the loop.
    """

    name: str
    observation: tuple[int, int, int]
    layers: tuple[tuple[int, int, int], ...]
    batch: int
    steps: int


SHAPES = (
    Shape("MinAtar 10x10x4, 16@3x3", (10, 10, 4), ((16, 3, 1),), batch=1024, steps=8),
    Shape("Nature 84x84x4", (84, 84, 4), ((32, 8, 4), (64, 4, 2), (64, 3, 1)), batch=64, steps=4),
)


class XLAConv(nn.Module):
    """JAX's convolution, as `flax.linen.Conv` calls it."""

    features: int
    size: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Conv(self.features, (self.size, self.size), self.stride, padding="VALID")(x)


class Torso(nn.Module):
    convolution: Callable[..., nn.Module]
    layers: tuple[tuple[int, int, int], ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nn.relu(self.convolution(*layer)(x))
        return x.reshape(x.shape[0], -1)


def variants(shape: Shape, convolution: Callable[..., nn.Module]) -> tuple[Any, dict[str, Callable[[Any, Any], Any]]]:
    """Parameters, and functions of `(params, x [steps, batch, H, W, C])`; "outside" uses only the first step."""
    torso = Torso(convolution, shape.layers)
    params = torso.init(jax.random.key(0), jnp.zeros((1, *shape.observation)))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.square(torso.apply(params, x)).mean()

    def forward(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return params, loss(params, x)

    def learn(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value

    functions = {"forward": forward, "forward+backward": learn}
    outside = {f"{name}, outside": lambda p, x, f=f: f(p, x[0]) for name, f in functions.items()}
    inside = {f"{name}, in scan": lambda p, x, f=f: jax.lax.scan(f, p, x) for name, f in functions.items()}
    return params, {name: jax.jit(f) for name, f in (outside | inside).items()}


def measure(quick: bool) -> Section:
    """Observations per second."""
    rounds = 1 if quick else 5
    table = Table(title=f"Convolutions on jax {jax.__version__}, observations/s", title_justify="left")
    for name in ("torso", "what", "XLA", "podracer", "times as fast"):
        table.add_column(name, justify="left" if name in ("torso", "what") else "right")
    results = []
    for shape in SHAPES[:1] if quick else SHAPES:
        x = jax.random.uniform(jax.random.key(1), (shape.steps, shape.batch, *shape.observation))
        contestants = [variants(shape, convolution) for convolution in (XLAConv, Conv)]
        for what in contestants[0][1]:
            observations = shape.batch * (shape.steps if "scan" in what else 1)
            rates = _race([(functions[what], params) for params, functions in contestants], x, observations, rounds)
            results.append({**dataclasses.asdict(shape), "what": what, "xla": rates[0], "podracer": rates[1]})
            medians = [statistics.median(rate) for rate in rates]
            table.add_row(shape.name, what, *map(in_units, medians), f"{medians[1] / medians[0]:.2f}")
    show(table)
    return Section("convolutions", {"jax": jax.__version__, "rounds": rounds, "workloads": results}, [table])


def _race(functions: list[tuple[Callable, Any]], x: jax.Array, observations: int, rounds: int) -> list[list[float]]:
    """Observations per second of each function, in alternating rounds of about half a second."""
    repetitions = []
    for function, params in functions:
        jax.block_until_ready(function(params, x))
        start = time.perf_counter()
        jax.block_until_ready(function(params, x))
        repetitions.append(max(1, math.ceil(0.5 / (time.perf_counter() - start))))
    rates: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for (function, params), repetition, rate in zip(functions, repetitions, rates, strict=True):
            start = time.perf_counter()
            for _ in range(repetition):
                output = function(params, x)
            jax.block_until_ready(output)
            rate.append(repetition * observations / (time.perf_counter() - start))
    return rates
