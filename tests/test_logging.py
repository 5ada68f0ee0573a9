import dataclasses
import json
import math
import os
import struct
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter

from podracer.logging import JsonlLogger, TensorBoardLogger, WandbLogger


def lines_of(path):
    def refuse(token):
        raise ValueError(f"{token} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 kB."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]).returncode:
        pytest.skip("mounting a small disk needs privileges")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.write(
        {"env_steps": 2**40, "updates": 1, "loss": np.float32(0.5), "rate": jnp.array(0.25), "count": np.int64(3)}
    )
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"env_steps": 2**40, "updates": 1, "loss": 0.5, "rate": 0.25, "count": 3}
    ]
    logger.write({"updates": 2})
    assert [line["updates"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]
    logger.close()


def test_what_is_no_number_in_json_becomes_null(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.write({"a": math.nan, "b": math.inf, "c": np.float32(-math.inf), "d": 0.0})
    logger.close()
    assert lines_of(tmp_path / "metrics.jsonl") == [{"a": None, "b": None, "c": None, "d": 0.0}]


@pytest.mark.parametrize("value", ["3", None, np.zeros(2), [1.0]])
def test_only_numbers_are_metrics(tmp_path, value):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="metric"):
        logger.write({"updates": 1, "value": value})
    logger.close()
    assert lines_of(tmp_path / "metrics.jsonl") == []


def test_resuming_leaves_every_update_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    for update in range(1, 6):
        logger.write({"updates": update, "value": update})
    logger.close()
    # Killed in the middle of a line; before that, once, in the middle of another.
    path.write_bytes(path.read_bytes()[:-4])
    path.write_bytes(b'{"updates": 0, "val\n[]\n' + path.read_bytes())

    logger = JsonlLogger(path)
    logger.truncate_after(3)
    for update in range(4, 7):
        logger.write({"updates": update, "value": -update})
    logger.close()
    assert [(line["updates"], line["value"]) for line in lines_of(path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, -4),
        (5, -5),
        (6, -6),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_last_line_goes_even_if_its_update_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"updates": 1}\n{"updates": 2}')
    logger = JsonlLogger(path)
    logger.truncate_after(2)
    logger.close()
    assert lines_of(path) == [{"updates": 1}]


def test_truncation_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.write({"updates": 1})
    logger.write({"updates": 2})
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            logger.truncate_after(1)
    assert path.read_bytes() == before
    logger.close()


def test_metrics_on_a_full_disk_are_reported_once_and_never_torn(small_disk):
    path = small_disk / "metrics.jsonl"
    reports: list[str] = []
    logger = JsonlLogger(path, report=reports.append)
    for update in range(3000):
        logger.write({"updates": update, "number": 0.123456789})
    assert reports == [f"could not write to {path}: No space left on device"]
    assert len(logger.errors) == 1
    lines = lines_of(path)
    assert [line["updates"] for line in lines] == list(range(len(lines)))
    assert len(lines) > 1000
    # As soon as there is room again, so is the record.
    os.truncate(path, 0)
    logger.write({"updates": 2000})
    assert lines_of(path) == [{"updates": 2000}]
    for update in range(2001, 6000):
        logger.write({"updates": update, "number": 0.123456789})
    assert len(reports) == 2
    logger.close()


def events_of(directory):
    """The events of a directory's files: each is a length, its checksum, the event, its checksum."""
    events = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            events.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[12 + length + 4 :]
    return events


def test_tensorboard_has_every_finite_number_over_steps(tmp_path):
    logger = TensorBoardLogger(tmp_path / "tensorboard")
    logger.write({"env_steps": 2**40, "updates": 7, "episode_return": math.nan, "loss": 0.5})
    # On disk before the logger is closed.
    (version, event) = events_of(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert event.step == 2**40
    assert {value.tag: value.simple_value for value in event.summary.value} == {"updates": 7, "loss": 0.5}
    logger.close()
    logger.close()


def test_tensorboard_files_have_the_checksums_that_readers_verify(tmp_path):
    logger = TensorBoardLogger(tmp_path / "tensorboard")
    logger.write({"env_steps": 1, "loss": 0.5})
    logger.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    reference = RecordWriter(str(tmp_path / "reference"))
    for event in events_of(tmp_path / "tensorboard"):
        reference.write(event.SerializeToString())
    reference.close()
    assert path.read_bytes() == (tmp_path / "reference").read_bytes()


def test_tensorboard_hides_what_a_resumed_run_repeats(tmp_path):
    for resumed_at in (None, 100):
        logger = TensorBoardLogger(tmp_path, resumed_at=resumed_at)
        logger.write({"env_steps": 200, "loss": 0.5})
        logger.close()
    assert len(list(tmp_path.iterdir())) == 2
    (start,) = [event for event in events_of(tmp_path) if event.HasField("session_log")]
    assert (start.step, start.session_log.status) == (101, event_pb2.SessionLog.START)


def test_tensorboard_on_a_full_disk_is_reported_once_and_does_not_hang(small_disk):
    reports: list[str] = []
    logger = TensorBoardLogger(small_disk / "tensorboard", report=reports.append)
    for step in range(3000):
        logger.write({"env_steps": step, "a_rather_long_name_of_a_metric": 0.5})
    logger.close()
    assert len(reports) == len(logger.errors) == 1
    assert reports[0].startswith("could not write to ")
    assert reports[0].endswith("No space left on device")
    assert [event.step for event in events_of(small_disk / "tensorboard")[1:]][:100] == list(range(100))


def test_wandb_that_is_not_installed_is_an_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="the package wandb is not installed; install it with `pip install wandb`"):
        WandbLogger("project", config={}, directory=tmp_path)


def test_wandb_that_is_broken_is_an_error_that_says_so(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise AttributeError('np.float_ was removed')")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be imported: AttributeError: np.float_ was removed"):
        WandbLogger("project", config={}, directory=tmp_path)


class Wandb(types.ModuleType):
    """W&B as far as it is used: a run goes on only with `resume` and the id that it began with."""

    def __init__(self):
        super().__init__("wandb")
        self.calls, self.runs = [], {}

    def init(self, *, id=None, resume=None, **arguments):
        self.calls.append(arguments)
        id = id or f"random{len(self.calls)}"
        if resume != "allow":
            self.runs[id] = []
        return WandbRun(self.runs.setdefault(id, []))


@dataclasses.dataclass
class WandbRun:
    logged: list

    def log(self, metrics, step):
        self.logged.append((metrics, step))

    def finish(self):
        self.logged.append("finish")


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_finite_numbers_over_steps(tmp_path, wandb):
    logger = WandbLogger("project", config={"seed": 1}, directory=tmp_path)
    logger.write({"env_steps": 10, "loss": 0.5, "episode_return": math.nan})
    logger.close()
    (arguments,) = wandb.calls
    assert arguments == {"project": "project", "config": {"seed": 1}, "dir": str(tmp_path), "name": tmp_path.name}
    assert list(wandb.runs.values()) == [[({"loss": 0.5}, 10), "finish"]]


def test_a_resumed_run_is_the_same_run_at_wandb(tmp_path, wandb):
    for name, steps in (("a", 10), ("b", 10), ("a", 20)):
        (tmp_path / name).mkdir(exist_ok=True)
        logger = WandbLogger("project", config={}, directory=tmp_path / name)
        logger.write({"env_steps": steps, "loss": 0.5})
    assert [[step for _, step in logged] for logged in wandb.runs.values()] == [[10, 20], [10]]


def test_importing_the_module_imports_no_logger():
    script = "import sys, podracer.logging; assert not {'tensorboardX', 'wandb'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
