"""Networks of convolutions on this JAX: XLA's own and podracer's, in a loop over minibatches and outside it.

XLA's convolutions on a CPU depend on the version of jaxlib more than on anything else, and their gradients on whether
they are inside a loop. This decides which version the repository pins: run it under each candidate (any JAX from 0.10.1
on). Every torso is the library's; "XLA" is the same with plain convolutions and plain max-pooling.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks.ratios import in_units
from benchmarks.report import Section, show
from podracer.networks import NetworkConfig, torsos
from podracer.networks.convolution import intensities


@dataclasses.dataclass(frozen=True)
class Workload:
    """A torso on uint8 images, and how many observations a call has.

    Attributes:
        name: In tables.
        config: The torso's.
        observation: `(H, W, C)`.
        acting: Batches of the forward pass.
        learning: Batches of the forward and backward pass outside of a loop.
        looping: The same inside of a loop of two steps, which XLA's own does so slowly that there is one only.
    """

    name: str
    config: NetworkConfig
    observation: tuple[int, int, int]
    acting: tuple[int, ...]
    learning: tuple[int, ...]
    looping: int


ATARI = {"observation": (84, 84, 4), "acting": (16, 32, 64, 128)}
WORKLOADS = (
    Workload("MinAtar, 16@3x3", NetworkConfig("cnn"), (10, 10, 4), acting=(64, 1024), learning=(1024,), looping=1024),
    Workload("IMPALA, shallow", NetworkConfig("impala"), **ATARI, learning=(256, 640, 2560), looping=256),
    Workload("Nature", NetworkConfig("nature"), **ATARI, learning=(256, 640, 2560), looping=256),
    Workload("IMPALA, deep", NetworkConfig("impala_deep"), **ATARI, learning=(256, 640), looping=32),
)
STEPS = 2  # Of the loop.


def plain_convolution(x: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    """As `flax.linen.Conv` calls it, on pixels as numbers."""
    x = intensities(x) if x.dtype == jnp.uint8 else x
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def plain_max_pool(x: jax.Array) -> jax.Array:
    """As `flax.linen.max_pool` calls it."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """What is traced in here has XLA's own convolutions and max-pooling."""
    with mock.patch.multiple(torsos, convolve=plain_convolution, max_pool=plain_max_pool):
        yield


CONTESTANTS: dict[str, Callable[[], Any]] = {"XLA": plain, "podracer": contextlib.nullcontext}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        what: In the table.
        function: `(params, x)`; compiled by whoever times it.
        x: uint8 `[N, H, W, C]`, in a loop `[STEPS, N, H, W, C]`.
    """

    what: str
    function: Callable[[Any, jax.Array], Any]
    x: jax.Array

    @property
    def observations(self) -> int:
        """Of one call."""
        return math.prod(self.x.shape[:-3])


def initial_params(workload: Workload) -> Any:
    """Parameters of a torso, the same for every contestant."""
    torso = workload.config.torso_module("torso")
    return torso.init(jax.random.key(0), jnp.zeros((1, *workload.observation)))


def cases(workload: Workload) -> list[Case]:
    """What to time of a torso."""
    torso = workload.config.torso_module("torso")

    def forward(params: Any, x: jax.Array) -> jax.Array:
        return torso.apply(params, x)

    def learn(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda p: jnp.square(forward(p, x)).mean())(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value

    def learn_in_loop(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return jax.lax.scan(learn, params, x)

    def images(*lead: int) -> jax.Array:
        return jax.random.randint(jax.random.key(1), (*lead, *workload.observation), 0, 256, jnp.uint8)

    found = [Case(f"forward, {n}", forward, images(n)) for n in workload.acting]
    found += [Case(f"forward+backward, {n}", learn, images(n)) for n in workload.learning]
    found.append(
        Case(f"forward+backward, {workload.looping}, in a loop", learn_in_loop, images(STEPS, workload.looping))
    )
    return found


def measure(quick: bool) -> Section:
    """Observations per second."""
    rounds = 1 if quick else 5
    table = Table(title=f"Convolutions on jax {jax.__version__}, observations/s", title_justify="left")
    for name in ("torso", "what", *CONTESTANTS, "times as fast"):
        table.add_column(name, justify="left" if name in ("torso", "what") else "right")
    results = []
    for workload in WORKLOADS[:1] if quick else WORKLOADS:
        params = initial_params(workload)
        # Traced functions are each contestant's own, for JAX remembers the body of a loop by its function.
        for entries in zip(*(cases(workload) for _ in CONTESTANTS), strict=True):
            case = entries[0]
            compiled = {
                name: compile_in(context, entry, params)
                for (name, context), entry in zip(CONTESTANTS.items(), entries, strict=True)
            }
            rates = _race(compiled, case, params, rounds)
            results.append({**dataclasses.asdict(workload), "what": case.what, "observations_per_second": rates})
            medians = [statistics.median(rates[name]) for name in CONTESTANTS]
            table.add_row(workload.name, case.what, *map(in_units, medians), f"{medians[1] / medians[0]:.2f}")
    show(table)
    return Section("convolutions", {"jax": jax.__version__, "rounds": rounds, "workloads": results}, [table])


def compile_in(context: Callable[[], Any], case: Case, params: Any) -> Callable[[Any, jax.Array], Any]:
    """A case with one contestant's convolutions."""
    with context():
        return jax.jit(case.function).lower(params, case.x).compile()


def _race(compiled: dict[str, Callable], case: Case, params: Any, rounds: int) -> dict[str, list[float]]:
    """Observations per second of each contestant, in alternating rounds of about half a second."""
    repetitions = {}
    for name, function in compiled.items():
        jax.block_until_ready(function(params, case.x))
        start = time.perf_counter()
        jax.block_until_ready(function(params, case.x))
        repetitions[name] = max(1, math.ceil(0.5 / (time.perf_counter() - start)))
    rates: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, function in compiled.items():
            start = time.perf_counter()
            for _ in range(repetitions[name]):
                # One at a time, as in training: calls that are under way together fight for the same threads.
                jax.block_until_ready(function(params, case.x))
            rates[name].append(repetitions[name] * case.observations / (time.perf_counter() - start))
    return rates
