"""Gymnasium environments in processes of their own.

The processes are new programs, not forks: JAX has threads, and a fork of a program with threads may hang. They run
`podracer.envs.gymnasium_columns` alone, so the module that was started as the main one is not imported again either,
and needs no `if __name__ == "__main__"`.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podracer.envs import gymnasium_columns
from podracer.envs.gymnasium_columns import Leaf, Rows
from podracer.envs.packages import import_package

_GRACE = 2.0  # Seconds that an environment has to close.

# By its path, since importing it by name would import podracer, whose `gymnasium` is not the package.
_PROGRAM = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("gymnasium_columns", sys.argv[1])
module = sys.modules["gymnasium_columns"] = module_from_spec(spec)
spec.loader.exec_module(module)
module.serve(int(sys.argv[2]))
"""


class Processes:
    """As `podracer.envs.gymnasium_columns.Columns`, with the environments divided among processes.

    Args:
        name: What errors call the kind of environment.
        makers: One for each environment. Sent pickled, by cloudpickle.
        first_index: The index of the first in the run.
        seeds: One for each.
        options: The `options` of every reset.
        num_processes: At most one for each environment.

    Raises:
        RuntimeError: A process died.
        Exception: Whatever making an environment raises.
    """

    def __init__(
        self,
        name: str,
        makers: Sequence[Callable[[], Any]],
        first_index: int,
        seeds: Sequence[int],
        options: dict[str, Any] | None,
        num_processes: int,
    ) -> None:
        self._name, self._broken = name, False
        parts = [part for part in np.array_split(np.arange(len(makers)), num_processes) if len(part)]
        self._parts = [(int(part[0]), int(part[-1]) + 1) for part in parts]
        self._first_index = first_index
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Any] = []
        # Also when it is forgotten, and when the program ends without closing it.
        self._end = weakref.finalize(self, _end, self._processes)
        cloudpickle = import_package("cloudpickle")
        try:
            for _ in self._parts:
                self._start()
            pickled = [
                cloudpickle.dumps((name, makers[a:b], first_index + a, seeds[a:b], options)) for a, b in self._parts
            ]
            spaces = self._ask("make", [(sys.path, data) for data in pickled])
            self.observation_space, self.action_space = spaces[0]
        except BaseException:
            self.close(True)
            raise

    def reset(self, leaves: Sequence[Leaf]) -> Rows:
        return self._join(self._ask("reset", [([tuple(leaf) for leaf in leaves],)] * len(self._parts)))

    def step(self, actions: np.ndarray) -> Rows:
        return self._join(self._ask("step", [(actions[a:b],) for a, b in self._parts]))

    def frame(self) -> Any:
        return self._ask("frame", [()])[0]

    def close(self, idle: bool = True) -> None:
        """Ends the processes, those that hang as well."""
        self._broken = True
        self._end()
        if idle:  # Otherwise another thread is about to find the other end closed.
            for connection in self._connections:
                connection.close()

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._connections.append(ours)
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-c", _PROGRAM, gymnasium_columns.__file__, str(descriptor)]
            # An environment written in JAX must not take an accelerator that the agent has.
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            process = subprocess.Popen(command, pass_fds=[descriptor], env=environment, stdin=subprocess.DEVNULL)
        self._processes.append(process)

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers of the first processes, as many as there are arguments."""
        if self._broken:
            raise RuntimeError(f"the processes of {self._name} have failed or were closed")
        self._broken = True  # Until all have answered: an answer left behind would be taken for the next one.
        pending: dict[Any, int] = {}
        for k, values in enumerate(arguments):
            try:
                self._connections[k].send((method, values))
            except OSError as error:
                raise self._died(k) from error
            pending[self._connections[k]] = k
        answers: list[Any] = [None] * len(arguments)
        while pending:
            # All of them at once, so that one that dies is seen while another one hangs.
            for connection in multiprocessing.connection.wait(list(pending)):
                k = pending.pop(connection)
                try:
                    done, answer = self._connections[k].recv()
                except (EOFError, OSError) as error:
                    raise self._died(k) from error
                if not done:
                    raise _unpack(answer)
                answers[k] = answer
        self._broken = False
        return answers

    def _join(self, parts: list[Rows]) -> Rows:
        numbers = [np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:3]]
        leaves = [np.concatenate(arrays) for arrays in zip(*(part[3] for part in parts), strict=True)]
        return Rows(numbers[0], numbers[1], numbers[2], leaves)

    def _died(self, k: int) -> RuntimeError:
        process, (a, b) = self._processes[k], self._parts[k]
        indices = (
            f"{self._first_index + a}" if b == a + 1 else f"{self._first_index + a} to {self._first_index + b - 1}"
        )
        try:
            code = process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return RuntimeError(f"process {process.pid} of {self._name}, which held environment {indices}, {how}")


def _unpack(answer: tuple[bytes | None, str]) -> Exception:
    pickled, text = answer
    error: Any = None
    if pickled is not None:
        with contextlib.suppress(Exception):  # Its class may exist in the process only.
            error = pickle.loads(pickled)
    if not isinstance(error, Exception):
        error = RuntimeError("an environment raised in its process")
    error.add_note(f"The traceback of its process:\n{text}")
    return error


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
