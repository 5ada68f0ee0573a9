"""Minibatches: a permutation of all samples and a gather of single rows, against `MinibatchGrid`."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks.ratios import Ratio
from benchmarks.report import Section, show
from podracer.ops import MinibatchGrid

# T, B and the observation's shape.
WORKLOADS = ((128, 4, (4,)), (128, 64, (4,)), (64, 2048, (4,)), (128, 64, (10, 10, 4)), (8, 1024, (4,)))
NUM_MINIBATCHES = 8
_SAMPLES_PER_CALL = 2**20


def _batch(length: int, batch_size: int, observation: tuple[int, ...]) -> dict[str, jax.Array]:
    """What PPO's loss reads: an observation and seven numbers per sample."""
    batch = {"observation": jnp.ones((length, batch_size, *observation), jnp.float32)}
    return batch | {f"number_{i}": jnp.ones((length, batch_size), jnp.float32) for i in range(7)}


def _consume(minibatch: Any) -> jax.Array:
    """Reads all of a minibatch, or nothing would be moved."""
    return sum((leaf.sum() for leaf in jax.tree.leaves(minibatch)), jnp.float32(0))


def textbook(batch: Any, key: jax.Array) -> jax.Array:
    """One epoch: `jax.random.permutation`, a gather of rows, a scan over the minibatches."""
    length, batch_size = batch["number_0"].shape
    order = jax.random.permutation(key, length * batch_size)

    def shuffled(x: jax.Array) -> jax.Array:
        x = x.reshape(length * batch_size, *x.shape[2:])[order]
        return x.reshape(NUM_MINIBATCHES, -1, *x.shape[1:])

    def step(total: jax.Array, minibatch: Any) -> tuple[jax.Array, None]:
        return total + _consume(minibatch), None

    return jax.lax.scan(step, jnp.float32(0), jax.tree.map(shuffled, batch))[0]


def grid(batch: Any, key: jax.Array) -> jax.Array:
    """One epoch of `MinibatchGrid`, which takes each minibatch when it is due."""
    cells = MinibatchGrid.create(*batch["number_0"].shape, NUM_MINIBATCHES)

    def step(total: jax.Array, indices: Any) -> tuple[jax.Array, None]:
        return total + _consume(cells.take(batch, *indices)), None

    return jax.lax.scan(step, jnp.float32(0), cells.shuffle(key))[0]


def _repeated(epoch: Callable[[Any, jax.Array], jax.Array], epochs: int) -> Callable[[Any, jax.Array], jax.Array]:
    def run(batch: Any, key: jax.Array) -> jax.Array:
        return jax.lax.map(lambda key: epoch(batch, key), jax.random.split(key, epochs)).sum()

    return jax.jit(run)


def measure(quick: bool) -> Section:
    """Nanoseconds per sample and epoch, in alternating rounds. Both include reading the minibatches."""
    rounds = 2 if quick else 15
    table = Table(title=f"Shuffling into {NUM_MINIBATCHES} minibatches, ns per sample and epoch", title_justify="left")
    for name in ("T x B", "observation", "permutation", "MinibatchGrid", "times as fast (range)"):
        table.add_column(name, justify="right")
    results = []
    for length, batch_size, observation in WORKLOADS[:2] if quick else WORKLOADS:
        batch = _batch(length, batch_size, observation)
        size = length * batch_size
        epochs = max(1, _SAMPLES_PER_CALL // (size * max(1, math.prod(observation) // 40)))
        functions = [_repeated(epoch, epochs) for epoch in (textbook, grid)]
        for function in functions:
            jax.block_until_ready(function(batch, jax.random.key(0)))
        nanoseconds: list[list[float]] = [[], []]
        for i in range(rounds):
            for function, measured in zip(functions, nanoseconds, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(function(batch, jax.random.key(i)))
                measured.append((time.perf_counter() - start) / (size * epochs) * 1e9)
        results.append(
            {
                "length": length,
                "batch_size": batch_size,
                "observation": list(observation),
                "permutation_ns": nanoseconds[0],
                "grid_ns": nanoseconds[1],
            }
        )
        medians = [f"{statistics.median(measured):.0f}" for measured in nanoseconds]
        ratio = Ratio.of(nanoseconds[1], nanoseconds[0])
        table.add_row(f"{length} x {batch_size}", str(observation), *medians, str(ratio))
    show(table)
    return Section("shuffle", {"rounds": rounds, "minibatches": NUM_MINIBATCHES, "workloads": results}, [table])
