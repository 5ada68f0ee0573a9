"""Steps per second: the library against the textbook, in alternating rounds on the same machine."""

import contextlib
import dataclasses
import statistics
from typing import Any

from rich.table import Table

from benchmarks.contestants import Entry
from benchmarks.ratios import Ratio, in_units
from benchmarks.report import Section, show, yes_or_no
from benchmarks.worker import Worker
from podracer.machine import cores

# Environment, num_envs, rollout_length, and the experiment whose network is the library's own choice.
WORKLOADS = (
    ("CartPole-v1", 4, 128, "ppo_cartpole"),
    ("CartPole-v1", 64, 128, "ppo_cartpole"),
    ("CartPole-v1", 2048, 64, "ppo_cartpole"),
    ("Breakout-MinAtar", 64, 128, "ppo_breakout_minatar"),
)

# How many times as fast as the textbook the library with its own choices should be.
TARGETS = {("CartPole-v1", 4, 128): 1.0, ("CartPole-v1", 64, 128): 2.0, ("CartPole-v1", 2048, 64): 3.0}


def entries_for(environment: str, num_envs: int, rollout_length: int, experiment: str) -> list[Entry]:
    """The contestants of a workload. The first is what the others are compared with."""
    textbook = Entry("textbook", environment, num_envs, rollout_length, experiment=experiment)
    library = dataclasses.replace(textbook, kind="library")
    entries = [textbook, library]
    usable = cores()
    if usable > 1 and num_envs % usable == 0:
        entries.append(dataclasses.replace(library, devices=usable))
    return [*entries, dataclasses.replace(library, devices=None, network="default")]


def measure(quick: bool) -> Section:
    """Every workload in `rounds` rounds of each contestant, A B C A B C ..."""
    rounds, seconds = (2, 0.3) if quick else (9, 2.0)
    results, tables = [], []
    for workload in WORKLOADS[1:2] if quick else WORKLOADS:
        entries = entries_for(*workload)
        show(f"{workload[0]}, {workload[1]} x {workload[2]}: compiling {len(entries)} contestants")
        with contextlib.ExitStack() as stack:
            workers = []
            for entry in entries:
                # One after the other: what compiles would slow down what calibrates.
                workers.append(stack.enter_context(Worker([entry], seconds)))
                workers[-1].wait_until_ready()
            rates: list[list[float]] = [[] for _ in workers]
            for _ in range(rounds):
                for rate, worker in zip(rates, workers, strict=True):
                    rate.append(worker.race())
            contestants = [
                {**dataclasses.asdict(entry), "label": entry.label, **worker.about[0], "steps_per_second": rate}
                for entry, worker, rate in zip(entries, workers, rates, strict=True)
            ]
        results.append({"workload": list(workload[:3]), "contestants": contestants})
        tables.append(_table(workload, contestants))
        show(tables[-1])
    return Section("speed", {"rounds": rounds, "seconds_per_round": seconds, "workloads": results}, tables)


def _table(workload: tuple[str, int, int, str], contestants: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{workload[0]}, {workload[1]} environments x {workload[2]} steps", title_justify="left")
    for name in ("contestant", "devices", "steps/s (median)", "times the textbook (range)", "target", "first call, s"):
        table.add_column(name, justify="left" if name == "contestant" else "right")
    reference = contestants[0]["steps_per_second"]
    for contestant in contestants:
        rates = contestant["steps_per_second"]
        ratio = Ratio.of(reference, rates)
        table.add_row(
            contestant["label"],
            str(contestant["devices"]),
            in_units(statistics.median(rates)),
            str(ratio),
            verdict(workload[:3], ratio.ratio) if contestant["network"] == "default" else "",
            f"{contestant['compile_seconds']:.1f}",
        )
    return table


def verdict(workload: tuple[str, int, int], ratio: float) -> str:
    """The workload's target and whether it is reached; nothing where it has none."""
    target = TARGETS.get(workload)
    return "" if target is None else f">= {target:g}: {yes_or_no(ratio >= target)}"
