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
    """In a process of its own, where nothing else allocates or compiles."""
    updates = 1_000 if quick else 10_000
    show(f"memory: {updates} updates of a small CartPole run")
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", str(updates)],
        cwd=pathlib.Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    data = json.loads(process.stdout.splitlines()[-1])
    table = Table(title="Memory and compilation", title_justify="left")
    for name in ("what", "measured", "target", "reached"):
        table.add_column(name, justify="right" if name == "measured" else "left")
    for row in rows(data):
        table.add_row(*row)
    show(table)
    return Section("memory", data, [table])


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
            "ppo_cartpole, tracing and compiling init and run",
            f"{data['compile_seconds']:.1f} s",
            f"less than {_COMPILE_SECONDS} s",
            yes_or_no(data["compile_seconds"] < _COMPILE_SECONDS),
        ),
    ]


def long_run(updates: int) -> dict[str, Any]:
    """Trains in short calls, each of whose results the host reads, as a run with progress and metrics does."""
    import jax

    compilations: collections.Counter[str] = collections.Counter()

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == _COMPILED:
            compilations[str(details.get("fun_name", "an unnamed function"))] += 1

    anakin = library_anakin(Entry("library", "CartPole-v1", num_envs=8, rollout_length=32))
    jax.monitoring.register_event_duration_secs_listener(listen)
    state = anakin.init(0)
    anakin.compile()  # As training does, to announce how long it takes; the calls below must not compile again.
    resident = []
    for update in range(0, updates, _UPDATES_PER_CALL):
        state, window = anakin.run(state, _UPDATES_PER_CALL)
        window.summarize()
        done = update + _UPDATES_PER_CALL
        if done % (updates // 40) == 0:
            resident.append((done, resident_megabytes()))
    return {
        "resident_megabytes": resident,
        "compilations": dict(compilations),
        "compile_seconds": _compile_seconds(),  # Last: it allocates, and its compilations are others.
        "num_envs": 8,
        "rollout_length": 32,
        "updates_per_call": _UPDATES_PER_CALL,
    }


def _compile_seconds() -> float:
    """What a user waits for before the first update of `ppo_cartpole`: both programs, tracing included."""
    import jax

    from podracer import envs, experiments

    experiment = experiments.get("ppo_cartpole")
    envs.make(experiment.env)  # Which imports its package; that is not compiling.
    start = time.perf_counter()
    anakin = experiment.make_architecture()
    jax.block_until_ready(anakin.init(0))
    anakin.compile()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(long_run(int(sys.argv[1]))))
