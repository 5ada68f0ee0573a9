"""Where a run's numbers go: a JSON Lines file, TensorBoard, Weights & Biases.

`metrics.jsonl` is the record that resuming and plotting rely on; the others are views. None of them may stop training:
a disk that is full is reported and recorded in `errors`.
"""

import contextlib
import errno
import importlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Metrics = Mapping[str, float | int]


class Logger(Protocol):
    """A place that metrics are written to, once per window of training.

    Metrics hold `env_steps` and `updates`, and scalars by name. A number that does not exist in this window, such as
    the return where no episode ended, is left out or NaN.
    """

    def write(self, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON object a line, on disk when `write` returns.

    The lines are strict JSON, which has no NaN and no infinity: both become null. Write a window's metrics before
    saving the checkpoint of its last update; then `truncate_after` and resuming leave every update in the file once.

    Args:
        path: The file to append to.
        report: Called with one line when writing starts to fail.
    """

    def __init__(self, path: str | pathlib.Path, *, report: Callable[[str], None] = lambda message: None):
        self.errors: list[OSError] = []
        self._path = pathlib.Path(path)
        self._report = report
        self._is_failing = False
        self._file = self._path.open("ab", buffering=0)

    def write(self, metrics: Metrics) -> None:
        """Appends a line. One that cannot be written whole is taken back, reported and recorded in `errors`.

        Raises:
            ValueError: For a value that is not a number.
        """
        values = {name: _as_number(name, value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._is_failing = False
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            if not self._is_failing:
                self._is_failing = True
                self.errors.append(error)
                self._report(f"could not write to {self._path}: {error}")

    def truncate_after(self, updates: int) -> None:
        """Drops the lines of later updates and those that a killed process left torn, all at once or not at all."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        with self._path.open("rb") as lines, temporary.open("wb") as kept:
            for line in lines:
                try:
                    is_kept = line.endswith(b"\n") and json.loads(line)["updates"] <= updates
                except (ValueError, KeyError, TypeError):
                    is_kept = False
                if is_kept:
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        self._file.close()
        temporary.replace(self._path)
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger:
    """TensorBoard events over `env_steps`.

    The events are written by this thread: `tensorboardX.SummaryWriter` hands them to a thread that dies when the disk
    is full, after which its queue fills and training hangs.

    Args:
        directory: Where the event file goes.
        resumed_at: Environment steps that a resumed run starts at; TensorBoard then hides the events after them that
            an earlier process wrote.
        report: Called with one line when writing fails. Nothing more is written then.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        resumed_at: int | None = None,
        report: Callable[[str], None] = lambda message: None,
    ):
        # Imported late: many uses of the library need no TensorBoard.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self.errors: list[OSError] = []
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._report = report
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        # The default name has seconds only: a run resumed within one would overwrite its own file.
        self._writer: Any = EventsWriter(str(pathlib.Path(directory, "events")), f".{time.time_ns()}")
        if resumed_at is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=resumed_at + 1, session_log=start))

    def write(self, metrics: Metrics) -> None:
        """Writes every finite number but `env_steps`, which is the axis."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if name != "env_steps" and math.isfinite(_as_number(name, value))
        ]
        self._write(self._event(wall_time=time.time(), step=metrics["env_steps"], summary=self._summary(value=values)))

    def close(self) -> None:
        if self._writer is not None:
            self._guard(self._writer.close)
            self._writer = None

    def _write(self, event: Any) -> None:
        if self._writer is not None:
            self._guard(lambda: (self._writer.write_event(event), self._writer.flush()))

    def _guard(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except OSError as error:
            self._writer = None
            self.errors.append(error)
            self._report(f"no more TensorBoard events are written: {error}")


class WandbLogger:
    """Weights & Biases, over `env_steps`.

    Args:
        project: The project's name.
        config: The run's configuration.
        directory: The run's directory; also its identity, so that a resumed run goes on in the same curves.

    Raises:
        ValueError: If wandb is not installed (names the command) or cannot be imported.
    """

    def __init__(self, project: str, *, config: dict[str, Any], directory: str | pathlib.Path):
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ValueError("logging to W&B needs the package wandb: pip install 'podracer-rl[wandb]'") from error
        except Exception as error:
            raise ValueError(f"the installed wandb cannot be imported: {type(error).__name__}: {error}") from error
        directory = pathlib.Path(directory).absolute()
        self._run = wandb.init(project=project, config=config, dir=str(directory), name=directory.name, resume="allow")

    def write(self, metrics: Metrics) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(_as_number(name, value))}
        self._run.log(finite, step=metrics["env_steps"])

    def close(self) -> None:
        self._run.finish()


def _as_number(name: str, value: Any) -> float | int:
    """A Python number of a Python, NumPy or JAX scalar."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float):
        raise ValueError(f"the metric {name} is {value!r}; metrics are numbers")
    return value
