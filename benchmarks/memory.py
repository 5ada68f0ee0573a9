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
from benchmarks.report import Section, show

_UPDATES_PER_CALL = 10  # So few that a leak per call would show.
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
    megabytes = dict(data["resident_megabytes"])
    table = Table(title="Memory and compilation", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    early = updates // 10
    table.add_row(f"resident after {early} updates", f"{megabytes[early]:.1f} MB")
    table.add_row(f"resident after {updates} updates", f"{megabytes[updates]:.1f} MB")
    table.add_row("growth between them", f"{megabytes[updates] - megabytes[early]:+.1f} MB")
    for name, count in sorted(data["compilations"].items()):
        table.add_row(f"compilations of {name}", str(count))
    table.add_row("ppo_cartpole, compiling init and run", f"{data['compile_seconds']:.1f} s")
    show(table)
    return Section("memory", data, [table])


def long_run(updates: int) -> dict[str, Any]:
    """Trains in short calls, each of whose results the host reads, as a run with progress and metrics does."""
    import jax

    from podracer.anakin import summarize

    compilations: collections.Counter[str] = collections.Counter()

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == _COMPILED:
            compilations[str(details.get("fun_name", "an unnamed function"))] += 1

    compile_seconds = _compile_seconds()
    anakin = library_anakin(Entry("library", "CartPole-v1", num_envs=8, rollout_length=32))
    jax.monitoring.register_event_duration_secs_listener(listen)
    state = anakin.init(0)
    anakin.compile()  # As training does, to announce how long it takes; the calls below must not compile again.
    resident = []
    for update in range(0, updates, _UPDATES_PER_CALL):
        state, window = anakin.run(state, _UPDATES_PER_CALL)
        summarize(window)
        done = update + _UPDATES_PER_CALL
        if done % (updates // 40) == 0:
            resident.append((done, resident_megabytes()))
    return {
        "resident_megabytes": resident,
        "compilations": compilations,
        "compile_seconds": compile_seconds,
        "num_envs": 8,
        "rollout_length": 32,
        "updates_per_call": _UPDATES_PER_CALL,
    }


def _compile_seconds() -> float:
    """What a user waits for before the first update of `ppo_cartpole`: both programs, tracing included."""
    import jax

    from podracer import experiments

    anakin = experiments.get("ppo_cartpole").make_anakin()
    start = time.perf_counter()
    jax.block_until_ready(anakin.init(0))
    anakin.compile()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(long_run(int(sys.argv[1]))))
