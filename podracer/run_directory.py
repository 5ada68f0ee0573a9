"""What a run leaves on disk, and where."""

import dataclasses
import datetime
import json
import math
import pathlib
import shutil
from typing import Any

from podracer.experiment import Experiment
from podracer.fields import differences

# What may differ between a run and its continuation without making it another run.
_FREE = (
    *("devices", "evaluation_episodes", "evaluation_greedy", "checkpoints", "stop_on_nonfinite"),
    "updates_per_window",
)
_FREE_IN_ARCHITECTURE = (
    *("actor_devices", "learner_devices", "threads_per_actor_device"),
    *("start_timeout", "step_timeout", "device_timeout", "max_restarts", "serial"),
)


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    path: pathlib.Path

    @property
    def config(self) -> pathlib.Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> pathlib.Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    @property
    def curve(self) -> pathlib.Path:
        return self.path / "curve.png"

    @property
    def episode(self) -> pathlib.Path:
        return self.path / "episode.gif"

    @property
    def summary(self) -> pathlib.Path:
        return self.path / "summary.json"

    @property
    def wandb_id(self) -> pathlib.Path:
        return self.path / "wandb_id"

    @classmethod
    def default(cls, experiment: Experiment) -> "RunDirectory":
        """A new place under `runs/`, named by experiment, seed and time.

        Microseconds, because a script may start many runs at once.
        """
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        return cls(pathlib.Path("runs") / f"{experiment.name}-seed{experiment.seed}-{now}")

    @classmethod
    def existing(cls, path: str | pathlib.Path) -> "RunDirectory":
        """The directory of a run that was started.

        Raises:
            ValueError: There is none.
        """
        directory = cls(pathlib.Path(path))
        if not directory.config.is_file():
            raise ValueError(f"{path} is not a run directory: it has no config.json")
        return directory

    def check_free(self, *, overwrite: bool) -> None:
        """Whether a new run may begin here.

        Raises:
            ValueError: Something is there already and may not be overwritten.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; a run needs a directory")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if not overwrite:
            raise ValueError(f"{self.path} is not empty; choose another run directory, or --resume or --overwrite")
        if not self.config.is_file():
            raise ValueError(f"{self.path} is not empty and not a run directory; it will not be overwritten")
        self.experiment()  # A config.json of something else is no run's.

    def create(self, experiment: Experiment, *, overwrite: bool) -> None:
        """Makes the directory with its `config.json`.

        Of a run that is overwritten, what a run leaves is removed, and nothing else that lies beside it.

        Raises:
            ValueError: Something is there already and may not be overwritten, or the directory cannot be made.
        """
        self.check_free(overwrite=overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for file in (self.metrics, self.curve, self.episode, self.summary, self.wandb_id):
                file.unlink(missing_ok=True)
            for directory in (self.tensorboard, self.checkpoints):
                if directory.exists():
                    shutil.rmtree(directory)
            write_json(self.config, experiment.to_dict())
        except OSError as error:
            raise ValueError(f"cannot make the run directory {self.path}: {error.strerror}") from error

    def check_same(self, experiment: Experiment) -> None:
        """Whether the run is of this experiment, so that it may be resumed as it.

        Raises:
            ValueError: It is of another; the fields are named.
        """
        if differing := list(differences(identity(self.experiment()), identity(experiment))):
            raise ValueError(f"{self.path} is a run of another experiment: {', '.join(differing)}")

    def experiment(self) -> Experiment:
        """The experiment that the run is of.

        Raises:
            ValueError: `config.json` cannot be read.
        """
        try:
            return Experiment.from_dict(json.loads(self.config.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{self.config} is not readable: {error}") from error


def identity(experiment: Experiment) -> dict[str, Any]:
    """The part of a configuration that a checkpoint must agree with: all but where it runs and what is saved."""
    values = {name: value for name, value in experiment.to_dict().items() if name not in _FREE}
    architecture = values["architecture"].items()
    values["architecture"] = {name: value for name, value in architecture if name not in _FREE_IN_ARCHITECTURE}
    return values


def write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    """Writes a file that is whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json_text(values, indent=2) + "\n")
    temporary.replace(path)


def json_text(values: dict[str, Any], *, indent: int | None = None) -> str:
    """Strict JSON, which has no NaN and no infinity: both become null."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
