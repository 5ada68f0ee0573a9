"""Where a run's numbers go: a JSON Lines file, TensorBoard, Weights & Biases.

`metrics.jsonl` is the record that resuming and plotting rely on; the others are views. None of them may stop training:
a disk that is full is reported and recorded in `errors`.
"""

import contextlib
import errno
import json
import math
import os
import pathlib
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from podracer.envs.packages import import_package

Metrics = Mapping[str, float | int]


class Logger(Protocol):
    """A place that metrics are written to, once per window of training.

    Metrics hold `env_steps` and `updates`, and scalars by name. A number that does not exist in this window, such as
    the return where no episode ended, is left out or NaN.
    """

    def write(self, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON object a line, with the system when `write` returns: it survives `kill -9`, not a power cut.

    The lines are strict JSON, which has no NaN and no infinity: both become null. Write a window's metrics before
    saving the checkpoint of its last update; then `truncate_after` and resuming leave every update in the file once.

    Args:
        path: The file to append to.
        report: Called with one line when writing starts to fail.
    """

    def __init__(self, path: str | pathlib.Path, *, report: Callable[[str], None] = lambda message: None):
        self._file = _Record(pathlib.Path(path), report)
        self.errors = self._file.errors

    def write(self, metrics: Metrics) -> None:
        """Appends a line. One that cannot be written whole is taken back, reported and recorded in `errors`.

        Raises:
            ValueError: For a value that is not a number.
        """
        values = {name: _as_number(name, value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.append(json.dumps(finite, allow_nan=False).encode() + b"\n")

    def truncate_after(self, updates: int) -> None:
        """Drops the lines of later updates and those that a killed process left torn, all at once or not at all."""
        path = self._file.path
        temporary = path.with_name(path.name + ".tmp")
        with path.open("rb") as lines, temporary.open("wb") as kept:
            for line in lines:
                try:
                    is_kept = line.endswith(b"\n") and json.loads(line)["updates"] <= updates
                except (ValueError, KeyError, TypeError):
                    is_kept = False
                if is_kept:
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        temporary.replace(path)
        self._file.reopen()

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger:
    """TensorBoard events over `env_steps`.

    This thread writes them. `tensorboardX.SummaryWriter` hands each number to a thread of its own, which dies when the
    disk is full; then its queue fills and training hangs.

    Args:
        directory: Where the event file goes.
        resumed_at: Environment steps that a resumed run starts at; TensorBoard then hides the events after them that
            an earlier process wrote.
        report: Called with one line when writing starts to fail.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        resumed_at: int | None = None,
        report: Callable[[str], None] = lambda message: None,
    ):
        # Imported late: many uses of the library need no TensorBoard.
        from tensorboardX.crc32c import crc32c
        from tensorboardX.proto import event_pb2, summary_pb2

        self._crc32c: Callable[[bytes], int] = crc32c
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        # Nanoseconds, because a run can be resumed within a second of being killed.
        path = pathlib.Path(directory, f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}")
        self._file = _Record(path, report)
        self.errors = self._file.errors
        self._append(file_version="brain.Event:2")
        if resumed_at is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(step=resumed_at + 1, session_log=start)

    def write(self, metrics: Metrics) -> None:
        """Writes every finite number but `env_steps`, which is the axis.

        Raises:
            ValueError: For a value that is not a number.
        """
        numbers = {name: _as_number(name, value) for name, value in metrics.items()}
        steps = int(numbers.pop("env_steps"))
        values = [
            self._summary.Value(tag=name, simple_value=number)
            for name, number in numbers.items()
            if math.isfinite(number)
        ]
        self._append(step=steps, summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _append(self, **fields: Any) -> None:
        """Adds a record in the format of TensorFlow: length, its checksum, event, its checksum."""
        event = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        self._file.append(length + self._checksum(length) + event + self._checksum(event))

    def _checksum(self, data: bytes) -> bytes:
        """The format's masked CRC-32C."""
        crc = self._crc32c(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class WandbLogger:
    """Weights & Biases, over `env_steps`.

    Steps that a resumed run repeats are there already; W&B ignores them.

    Args:
        project: The project's name.
        config: The run's configuration.
        directory: The run's directory. The file `wandb_id` in it is the run's identity at W&B, written by its first
            logger and read by those after it, so that a resumed run goes on in the same curves.

    Raises:
        ValueError: If wandb is not installed (names the command) or cannot be imported.
    """

    def __init__(self, project: str, *, config: dict[str, Any], directory: str | pathlib.Path):
        wandb = import_package("wandb")
        directory = pathlib.Path(directory).absolute()
        identity = directory / "wandb_id"
        if not identity.is_file():
            identity.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=project,
            config=config,
            dir=str(directory),
            name=directory.name,
            id=identity.read_text(),
            resume="allow",
        )

    def write(self, metrics: Metrics) -> None:
        numbers = {name: _as_number(name, value) for name, value in metrics.items()}
        steps = int(numbers.pop("env_steps"))
        self._run.log({name: number for name, number in numbers.items() if math.isfinite(number)}, step=steps)

    def close(self) -> None:
        self._run.finish()


class _Record:
    """A file of records, each of which is there whole or not at all, as far as a running process can see to it."""

    def __init__(self, path: pathlib.Path, report: Callable[[str], None]):
        self.path = path
        self.errors: list[OSError] = []
        self._report = report
        self._is_failing = False
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Writes a record; takes back the part of one that did not fit and tries again with the next record."""
        start = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._is_failing = False
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            if not self._is_failing:
                self._is_failing = True
                self.errors.append(error)
                self._report(f"could not write to {self.path}: {error.strerror or error}")

    def reopen(self) -> None:
        """Goes on with the file that now has the path."""
        self._file.close()
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()


def _as_number(name: str, value: Any) -> float | int:
    """A Python number of a Python, NumPy or JAX scalar."""
    number = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(number, int | float):
        raise ValueError(f"the metric {name} is {value!r}; metrics are numbers")
    return number
