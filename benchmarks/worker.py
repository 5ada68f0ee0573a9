"""A process of its own for contestants that alternate with those of other processes.

Each process compiles once and then waits for its turn, so that rounds of all contestants alternate on the same machine
under the same load, while each has the device count it needs and a clean state. What it says to its parent is one JSON
object a line.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.contestants import Entry, build


class WorkerError(RuntimeError):
    """A worker ended before it answered."""


class Worker:
    """The parent's side. A context manager that ends the process.

    Args:
        entries: The contestants that share the process, and so the number of devices.
        seconds: Of each of their rounds.

    Attributes:
        about: Per contestant: `compile_seconds`, `steps_per_call` and `devices`.
    """

    def __init__(self, entries: Sequence[Entry], seconds: float) -> None:
        request = json.dumps({"entries": [dataclasses.asdict(entry) for entry in entries], "seconds": seconds})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", request],
            cwd=pathlib.Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about: list[dict[str, Any]] = []

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def wait_until_ready(self) -> None:
        """Until everything is compiled and calibrated. Call it for one worker at a time, as compiling disturbs others.

        Raises:
            WorkerError: It failed; it has said why on stderr.
        """
        self.about = self._read()

    def race(self, index: int = 0) -> float:
        """One round of one contestant: environment steps per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        return self.about[index]["steps_per_call"] / self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"a benchmark's process ended with exit code {self._process.wait()}")
        return json.loads(line)


def main(request: str) -> None:
    """The worker's side: compiles, then runs a round whenever a line on stdin names a contestant."""
    # Whatever a library prints must not reach the parent as an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    parameters = json.loads(request)
    entries = [Entry(**entry) for entry in parameters["entries"]]
    most = max(entry.devices or 1 for entry in entries)
    if most > 1:
        import jax

        jax.config.update("jax_num_cpu_devices", most)
    contestants = [build(entry) for entry in entries]
    for contestant in contestants:
        contestant.calibrate(parameters["seconds"])
    about = ("compile_seconds", "steps_per_call", "devices")
    print(json.dumps([{name: getattr(c, name) for name in about} for c in contestants]), file=answers, flush=True)
    for line in sys.stdin:
        print(contestants[int(line)].race(), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
