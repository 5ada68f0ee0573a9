"""Memory over a long run, compilations of each function, and how long they take."""

import collections
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from rich.table import Table

from benchmarks.contestants import Entry, library_anakin
from benchmarks.machine import resident_megabytes
from benchmarks.report import Section, show, yes_or_no

_UPDATES_PER_CALL = 10  # So few that a leak per call would show.
# Of what is resident: allocators keep a little more or less, a leak grows with the updates.
_FLAT = 0.01
_COMPILE_SECONDS = 10
_COMPILED = "/jax/core/compile/backend_compile_duration"


def measure(quick: bool) -> Section:
    """Each architecture in a process of its own, where nothing else allocates or compiles."""
    updates = 1_000 if quick else 10_000
    runs, tables = {}, []
    for name in ARCHITECTURES:
        show(f"memory: {updates} updates of a small CartPole run under {name}")
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", name, str(updates)],
            cwd=pathlib.Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        runs[name] = json.loads(process.stdout.splitlines()[-1])
        table = Table(title=f"Memory and compilation, {name}", title_justify="left")
        for column in ("what", "measured", "target", "reached"):
            table.add_column(column, justify="right" if column == "measured" else "left")
        for row in rows(runs[name]):
            table.add_row(*row)
        show(table)
        tables.append(table)
    return Section("memory", runs, tables)


def rows(data: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What was measured, how much, what was wanted, and whether that is so."""
    megabytes = dict(data["resident_megabytes"])
    updates = max(megabytes)
    early = updates // 10
    growth = megabytes[updates] - megabytes[early]
    return [
        (f"resident after {early} updates", f"{megabytes[early]:.1f} MB", "", ""),
        (f"resident after {updates} updates", f"{megabytes[updates]:.1f} MB", "", ""),
        (
            "growth between them",
            f"{growth:+.1f} MB",
            f"less than {_FLAT:.0%}",
            yes_or_no(growth < _FLAT * megabytes[early]),
        ),
        *(
            (f"compilations of {name}", str(count), "1", yes_or_no(count == 1))
            for name, count in sorted(data["compilations"].items())
        ),
        (
            f"{data['experiment']}, tracing and compiling all of it",
            f"{data['compile_seconds']:.1f} s",
            f"less than {_COMPILE_SECONDS} s",
            yes_or_no(data["compile_seconds"] < _COMPILE_SECONDS),
        ),
    ]


def _anakin() -> Any:
    return library_anakin(Entry("library", "CartPole-v1", num_envs=8, rollout_length=32))


def _sebulba() -> Any:
    """With more threads than it has use for, and rollouts so short that much is handed over."""
    from podracer import experiments
    from podracer.sebulba import SebulbaConfig

    small = SebulbaConfig(num_envs=8, rollout_length=8)
    return experiments.get("ppo_cartpole_gymnasium", architecture=small).make_architecture()


# What runs long, and the experiment whose compilation is timed.
ARCHITECTURES = {"Anakin": (_anakin, "ppo_cartpole"), "Sebulba": (_sebulba, "ppo_cartpole_gymnasium")}


def long_run(name: str, updates: int) -> dict[str, Any]:
    """Trains in short calls, each of whose results the host reads, as a run with progress and metrics does."""
    import jax

    compilations: collections.Counter[str] = collections.Counter()

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == _COMPILED:
            compilations[str(details.get("fun_name", "an unnamed function"))] += 1

    make, experiment = ARCHITECTURES[name]
    architecture = make()
    jax.monitoring.register_event_duration_secs_listener(listen)
    state = architecture.init(0)
    architecture.compile()  # As training does, to announce how long it takes; the calls below must not compile again.
    resident = []
    for update in range(0, updates, _UPDATES_PER_CALL):
        state, window = architecture.run(state, _UPDATES_PER_CALL)
        window.summarize()
        done = update + _UPDATES_PER_CALL
        if done % (updates // 40) == 0:
            resident.append((done, resident_megabytes()))
    return {
        "resident_megabytes": resident,
        "compilations": dict(compilations),
        "experiment": experiment,
        "compile_seconds": _compile_seconds(experiment),  # Last: it allocates, and its compilations are others.
        "num_envs": architecture.config.num_envs,
        "rollout_length": architecture.config.rollout_length,
        "updates_per_call": _UPDATES_PER_CALL,
    }


def _compile_seconds(name: str) -> float:
    """What a user waits for before the first update of an experiment: all programs, tracing included."""
    import jax

    from podracer import experiments

    experiment = experiments.get(name)
    experiment.make_environment()  # Which imports its package; that is not compiling.
    start = time.perf_counter()
    architecture = experiment.make_architecture()
    jax.block_until_ready(architecture.init(0))
    architecture.compile()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(long_run(sys.argv[1], int(sys.argv[2]))))
