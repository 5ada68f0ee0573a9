"""What Sebulba makes of two cores: stepping, acting and updating, each alone, and all of them together."""

import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from benchmarks.report import Section, show, yes_or_no
from podracer import experiments
from podracer.envs.actions import sample_action
from podracer.envs.host import EnvironmentSlice, HostEnvironment
from podracer.sebulba import Sebulba
from podracer.sebulba.learner import SebulbaState
from podracer.types import StepType, TimeStep

# Experiments, and what is changed of their architecture. In longer rollouts the fixed costs of an update weigh less.
WORKLOADS: tuple[tuple[str, dict[str, int]], ...] = (
    ("impala_pong", {}),
    ("impala_pong", {"rollout_length": 64}),
    ("ppo_pong", {}),
    ("ppo_cartpole_gymnasium", {}),
)
TARGET = 0.9


def measure(quick: bool) -> Section:
    """Each part by itself on all cores, in alternating rounds, and what they come to when they share them."""
    rounds, seconds = (1, 0.5) if quick else (5, 10.0)
    table = Table(title="Sebulba and its parts, environment steps/s", title_justify="left")
    for name in ("experiment", "stepping", "acting", "updating", "shared bound", "Sebulba", "share", "90 %"):
        table.add_column(name, justify="right" if name != "experiment" else "left")
    results = []
    for name, changes in WORKLOADS[-1:] if quick else WORKLOADS:
        experiment = experiments.get(name)
        config = dataclasses.replace(experiment.architecture, **changes)
        label = f"{name}, {config.num_envs} x {config.rollout_length}"
        show(f"{label}: compiling")
        sebulba = dataclasses.replace(experiment, architecture=config).make_architecture()
        assert isinstance(sebulba, Sebulba)
        with sebulba:
            rates = _rates(sebulba, rounds, seconds)
        middle = {part: statistics.median(found) for part, found in rates.items()}
        # A step takes its share of stepping, acting and updating, each of which can use all cores when it is alone.
        bound = 1 / sum(1 / middle[part] for part in ("stepping", "acting", "updating"))
        share = middle["sebulba"] / bound
        results.append(
            {
                "experiment": name,
                "rollout_length": config.rollout_length,
                "rates": rates,
                "shared_bound": bound,
                "share": share,
            }
        )
        figures = [f"{figure:,.0f}" for figure in (*list(middle.values())[:3], bound, middle["sebulba"])]
        table.add_row(label, *figures, f"{share:.2f}", yes_or_no(share >= TARGET))
    show(table)
    return Section("sebulba", {"rounds": rounds, "seconds_per_round": seconds, "experiments": results}, [table])


def _rates(sebulba: Sebulba, rounds: int, seconds: float) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {"stepping": [], "acting": [], "updating": [], "sebulba": []}
    size, state = sebulba.envs_per_thread, sebulba.init(0)
    sebulba.compile()
    environments = [sebulba.environments(EnvironmentSlice(size, i * size)) for i in range(sebulba.num_actors)]
    try:
        updating = _Updating(sebulba, state)
        acting = [_Acting(sebulba, updating.state, environment.reset()) for environment in environments]
        stepping = [_Stepping(environment) for environment in environments]
        for _ in range(rounds):
            rates["stepping"].append(size * _calls_per_second(stepping, seconds))
            rates["acting"].append(size * _calls_per_second(acting, seconds))
            rates["updating"].append(sebulba.steps_per_update * _calls_per_second([updating], seconds))
    finally:
        for environment in environments:
            environment.close()
    state = updating.state
    for _ in range(rounds):
        state, _ = sebulba.run(state, 2)  # What was acted while nothing ran is not counted.
        updates, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            state, _ = sebulba.run(state, 2)
            updates += 2
        rates["sebulba"].append(updates * sebulba.steps_per_update / (time.perf_counter() - began))
    return rates


def _calls_per_second(calls: Sequence[Callable[[], None]], seconds: float) -> float:
    """Of all together, each in a thread of its own until the time is over."""
    counts, until = [0] * len(calls), time.perf_counter() + seconds

    def repeat(i: int) -> None:
        while time.perf_counter() < until:
            calls[i]()
            counts[i] += 1

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(calls))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


class _Stepping:
    """An actor's environments, by random actions that are drawn beforehand."""

    def __init__(self, environment: HostEnvironment) -> None:
        keys = jax.random.split(jax.random.key(0), 16)
        actions = [sample_action(environment.spec, key, environment.num_envs) for key in keys]
        self._environment, self._actions = environment, itertools.cycle(jax.device_get(actions))

    def __call__(self) -> None:
        self._environment.step(next(self._actions))


class _Acting:
    """An actor's part of the device, on one observation again and again."""

    def __init__(self, sebulba: Sebulba, state: SebulbaState, timestep: TimeStep) -> None:
        self._acting, self._timestep = sebulba._acting[0], jax.tree.map(np.array, timestep)
        self._params = jax.device_put(sebulba._learning.actor_params(state), self._acting.device)
        key = jax.device_put(jax.random.key(0), self._acting.device)
        (self._buffers, self._keys), self._state = self._acting.begin(key, 0, 0), self._acting.init_actor()

    def __call__(self) -> None:
        self._buffers, self._state, _ = self._acting.act(
            self._params, self._buffers, self._timestep, self._state, self._keys, 0
        )


class _Updating:
    """The learner, on a batch of noise again and again; `state` is what it has learnt from it."""

    def __init__(self, sebulba: Sebulba, state: SebulbaState) -> None:
        self._learning, self.state = sebulba._learning, state
        self._window = self._learning.empty_window()
        shard, devices = sebulba._acting[0].trajectory, sebulba.split.learners
        parts = [jax.tree.map(_noise, shard) for _ in range(sebulba.num_actors)]
        self._trajectories = self._learning.assemble(
            [[jax.device_put(part, device) for device in devices] for part in parts]
        )

    def __call__(self) -> None:
        self.state, self._window = self._learning.update(self.state, self._window, self._trajectories)
        jax.block_until_ready(self._window)


def _noise(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """Small numbers; among step types no end of an episode."""
    draw = np.random.default_rng(0)
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return draw.normal(size=shape.shape).astype(shape.dtype) / 10
    return draw.integers(StepType.FIRST, StepType.LAST, shape.shape).astype(shape.dtype)
