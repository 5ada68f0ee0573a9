"""What the library costs over the same mathematics written by hand, in one process."""

import dataclasses
import statistics

from rich.table import Table

from benchmarks.contestants import Entry
from benchmarks.ratios import Ratio, in_units
from benchmarks.report import Section, show, yes_or_no
from benchmarks.worker import Worker

WORKLOADS = ((4, 128), (64, 128), (2048, 64))
TARGET = 0.97


def measure(quick: bool) -> Section:
    """`Anakin.run` and `examples/anakin_in_one_file.py` in alternating rounds; who goes first alternates too."""
    # Many short rounds: a neighbour on the machine disturbs a few of them, and the median leaves those out.
    rounds, seconds = (2, 0.3) if quick else (40, 0.25)
    table = Table(title="Anakin.run against the one-file example, CartPole-v1, 1 device", title_justify="left")
    for name in ("environments x steps", "one file, steps/s", "library, steps/s", "ratio (range)", "within 3 %"):
        table.add_column(name, justify="right")
    results = []
    for num_envs, rollout_length in WORKLOADS[1:2] if quick else WORKLOADS:
        entries = [Entry(kind, "CartPole-v1", num_envs, rollout_length) for kind in ("one_file", "library")]
        show(f"CartPole-v1, {num_envs} x {rollout_length}: compiling the one file and the library")
        rates: list[list[float]] = [[], []]
        with Worker(entries, seconds) as worker:
            worker.wait_until_ready()
            for i in range(rounds):
                for index in (0, 1) if i % 2 == 0 else (1, 0):
                    rates[index].append(worker.race(index))
            contestants = [
                {**dataclasses.asdict(entry), "label": entry.label, **about, "steps_per_second": rate}
                for entry, about, rate in zip(entries, worker.about, rates, strict=True)
            ]
        ratio = Ratio.of(*rates)
        results.append({"workload": [num_envs, rollout_length], "contestants": contestants, "ratio": ratio.ratio})
        middle = [in_units(statistics.median(rate)) for rate in rates]
        within = yes_or_no(ratio.ratio >= TARGET)
        table.add_row(f"{num_envs} x {rollout_length}", *middle, str(ratio), within)
    show(table)
    return Section("overhead", {"rounds": rounds, "seconds_per_round": seconds, "workloads": results}, [table])
