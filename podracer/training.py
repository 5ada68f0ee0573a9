"""A run from beginning to end: train, save, evaluate, draw. One that was stopped goes on where it was."""

import contextlib
import dataclasses
import math
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import PyTree

from podracer import plotting
from podracer.agent import Agent
from podracer.anakin import Anakin, AnakinState, Window, summarize
from podracer.checkpoint import Checkpointer
from podracer.envs.base import Environment
from podracer.evaluate import Evaluation, evaluate, record
from podracer.experiment import Experiment
from podracer.logging import JsonlLogger, Logger, TensorBoardLogger, WandbLogger
from podracer.progress import Progress
from podracer.recording import save_gif
from podracer.rollout import Stream, stream_key
from podracer.run_directory import RunDirectory, identity, write_json


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        run_dir: Where its files are.
        summary: The content of `summary.json`.
        evaluation: Of the last parameters.
        state: After the last update.
        errors: What could not be written, though training went on.
    """

    run_dir: pathlib.Path
    summary: dict[str, Any]
    evaluation: Evaluation
    state: AnakinState
    errors: tuple[Exception, ...] = ()


def train(
    experiment: Experiment,
    run_dir: str | pathlib.Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    wandb_project: str | None = None,
) -> Result:
    """Runs an experiment to its end.

    Args:
        experiment: What to run.
        run_dir: Where to leave `config.json`, `metrics.jsonl`, TensorBoard events, checkpoints, `curve.png`,
            `episode.gif` and `summary.json`; a new directory under `runs/` by default.
        resume: Go on from the newest readable checkpoint in `run_dir`, which must be of the same experiment.
        overwrite: Remove an earlier run in `run_dir`.
        quiet: Show nothing but warnings.
        wandb_project: Log to this project of Weights & Biases as well.

    Raises:
        ValueError: Anything that cannot run, before it is compiled.
        FloatingPointError: A reward, observation or loss was not finite; the quantity and its update are named.
        RuntimeError: Something else went wrong after training had started.
        KeyboardInterrupt: After a checkpoint was saved. A second Ctrl-C does not wait for it.
    """
    anakin = experiment.make_anakin()
    if resume:
        if run_dir is None:
            raise ValueError("to resume a run, name its run directory")
        directory = RunDirectory.existing(run_dir)
    else:
        directory = RunDirectory.default(experiment) if run_dir is None else RunDirectory(pathlib.Path(run_dir))
        directory.create(experiment, overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        run = _Run(experiment, anakin, directory, quiet, wandb_project, stack)
        run.start(resume=resume)
        try:
            run.train()
            return run.finish()
        except ValueError as error:
            # From here on it is not the input that is bad.
            raise RuntimeError(f"the run failed: {error}") from error


@dataclasses.dataclass
class _Counters:
    """What a checkpoint holds besides the state."""

    updates: int = 0
    env_steps: int = 0
    training_seconds: float = 0.0
    compile_seconds: float = 0.0
    wall_seconds: float = 0.0


class _Run:
    """The moving parts of one call of `train`."""

    def __init__(
        self,
        experiment: Experiment,
        anakin: Anakin,
        directory: RunDirectory,
        quiet: bool,
        wandb_project: str | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.experiment, self.anakin, self.directory = experiment, anakin, directory
        self.quiet, self.wandb_project, self.stack = quiet, wandb_project, stack
        self.progress = Progress(experiment.total_steps, quiet=quiet)
        stack.callback(lambda: self.progress.close())
        self.began = time.perf_counter()
        self.counters = _Counters()
        self.checkpointer = Checkpointer(
            directory.checkpoints,
            keep_last=experiment.checkpoints.keep_last,
            keep_best=experiment.checkpoints.keep_best,
            config=identity(experiment),
            report=self._warn,
        )
        stack.callback(self.checkpointer.close)
        self.metrics = JsonlLogger(directory.metrics, report=self._warn)
        self.loggers: list[Logger] = []
        self.errors: list[Exception] = []

    def start(self, *, resume: bool) -> None:
        """Compiles, and makes or restores the state."""
        experiment, anakin = self.experiment, self.anakin
        devices = anakin.mesh.size
        planned = experiment.num_updates * experiment.steps_per_update
        rounded = "" if planned == experiment.total_steps else f" (of {experiment.total_steps:,} asked for)"
        self.progress.message(
            f"{experiment.name}: {planned:,} steps{rounded} in {experiment.num_updates} updates of "
            f"{experiment.architecture.num_envs} environments x {experiment.architecture.rollout_length} steps "
            f"on {devices} {jax.devices()[0].platform.upper()} device{'s' * (devices > 1)}"
        )
        with self.progress.phase("compiling", "compiled") as phase:
            anakin.compile()
            self.state = anakin.init(experiment.seed)
        if resume:
            self._restore()
        self.counters.compile_seconds += phase.seconds
        self.resumed_at = dataclasses.replace(self.counters)
        self._open_loggers()

    def train(self) -> None:
        """All updates that are left. One window is read while the next is computed."""
        experiment, counters = self.experiment, self.counters
        self.window_began = time.perf_counter()
        pending: tuple[int, Window] | None = None
        updates = counters.updates
        best_known: float | None = None
        with _interruptible() as interrupted:
            while updates < experiment.num_updates and not interrupted.is_set():
                number = min(experiment.window, experiment.num_updates - updates)
                self.state, window = self.anakin.run(self.state, number)
                if pending is not None:
                    best_known = self._read(*pending)
                updates += number
                pending = updates, window
                interval = experiment.checkpoint_interval
                if interval and updates % interval == 0 and updates < experiment.num_updates:
                    best_known, pending = self._read(*pending), None
                    self._save(best_known)
            if pending is not None:
                best_known = self._read(*pending)
            if counters.updates > self.resumed_at.updates:
                self._save(best_known)
            self.checkpointer.wait()
            if interrupted.is_set():
                raise KeyboardInterrupt

    def finish(self) -> Result:
        """Evaluates, and leaves the summary, the curve and an episode."""
        experiment, counters = self.experiment, self.counters
        self.progress.close()
        params = policy(self.anakin, self.state)
        key = evaluation_key(experiment, counters.updates)
        with self.progress.phase(f"evaluating {experiment.evaluation_episodes} episodes", "evaluated"):
            evaluation = evaluate(
                self.anakin.agent, self.anakin.environment.environment, params, key, experiment.evaluation_episodes
            )
        if evaluation.unfinished:
            self._warn(f"{evaluation.unfinished} evaluation episodes did not end and are left out")
        summary = {
            "experiment": experiment.name,
            "seed": experiment.seed,
            "env_steps": counters.env_steps,
            "updates": counters.updates,
            "steps_per_second": counters.env_steps / max(counters.training_seconds, 1e-9),
            "compile_seconds": counters.compile_seconds,
            "wall_seconds": self._wall_seconds(),
            "evaluation": evaluation.summary(),
        }
        with self._writing():
            write_json(self.directory.summary, summary)
            plotting.plot_curves([self.directory.path], self.directory.curve)
        with self._writing():
            frames, _ = record(self.anakin.agent, self.anakin.environment.environment, params, key)
            save_gif(frames, self.directory.episode)
        figures = summary["evaluation"]
        self.progress.message(
            f"return {figures['mean']:.4g} +- {figures['std']:.3g} over {figures['episodes']} greedy episodes, "
            f"{summary['steps_per_second']:,.0f} steps/s, {summary['wall_seconds']:.0f} s in all"
        )
        for path in (self.directory.curve, self.directory.episode, self.directory.summary):
            if path.exists():
                self.progress.message(f"  {path}")
        errors = (*self.errors, *self.checkpointer.errors, *self.metrics.errors)
        return Result(self.directory.path, summary, evaluation, self.state, errors)

    def _restore(self) -> None:
        if not self.checkpointer.updates():
            self._warn(f"{self.directory.path} has no checkpoint yet; starting from the beginning")
            self.metrics.truncate_after(0)
            return
        restored = self.checkpointer.restore(self.state)
        self.state = restored.state
        self.counters = _Counters(**restored.metadata)
        self.metrics.truncate_after(self.counters.updates)
        self.progress = Progress(self.experiment.total_steps, initial_steps=self.counters.env_steps, quiet=self.quiet)
        self.progress.message(f"resumed at update {self.counters.updates}, {self.counters.env_steps:,} steps")

    def _open_loggers(self) -> None:
        counters = self.counters
        resumed_at = counters.env_steps if counters.updates else None
        self.loggers = [
            self.metrics,
            TensorBoardLogger(self.directory.tensorboard, resumed_at=resumed_at, report=self._warn),
        ]
        if self.wandb_project is not None:
            config = self.experiment.to_dict()
            self.loggers.append(WandbLogger(self.wandb_project, config=config, directory=self.directory.path))
        for logger in self.loggers:
            self.stack.callback(logger.close)

    def _read(self, updates: int, window: Window) -> float | None:
        """Waits for a window, then logs it. Returns the mean return of its episodes, None if none ended."""
        counters = self.counters
        try:
            metrics = summarize(window)
        except FloatingPointError as error:
            if self.experiment.stop_on_nonfinite:
                saved = self.checkpointer.updates()
                kept = f"the last checkpoint is of update {saved[-1]}" if saved else "there is no checkpoint"
                raise FloatingPointError(f"{error}; {kept}") from None
            self._warn(str(error))
            metrics = summarize(window, allow_nonfinite=True)
        now = time.perf_counter()
        seconds, self.window_began = now - self.window_began, now
        env_steps = int(window.env_steps)
        counters.updates = updates
        counters.env_steps += env_steps
        counters.training_seconds += seconds
        line = {
            "env_steps": counters.env_steps,
            "updates": updates,
            "steps_per_second": env_steps / max(seconds, 1e-9),
            **metrics,
        }
        for logger in self.loggers:
            logger.write(line)
        self.progress.update(counters.env_steps, line)
        value = metrics["episode_return"]
        return None if math.isnan(value) else value

    def _save(self, score: float | None) -> None:
        """Saves the state, which must be that of the last window read."""
        saved = dataclasses.replace(self.counters, wall_seconds=self._wall_seconds())
        self.checkpointer.save(self.counters.updates, self.state, dataclasses.asdict(saved), score)
        # What saving took is not training time.
        self.window_began = time.perf_counter()

    def _wall_seconds(self) -> float:
        return self.counters.wall_seconds + time.perf_counter() - self.began

    def _warn(self, text: str) -> None:
        self.progress.warn(text)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A file that cannot be written must not cost the ones after it."""
        try:
            yield
        except OSError as error:
            self.errors.append(error)
            self._warn(f"could not write: {error}")


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A run's environment and agent, with the parameters to act with from a checkpoint of it."""

    experiment: Experiment
    environment: Environment
    agent: Agent
    params: PyTree
    updates: int


def load_policy(run_dir: str | pathlib.Path, report: Callable[[str], None] = lambda message: None) -> LoadedPolicy:
    """The newest readable checkpoint of a run, on one device; of the state only the learner is read.

    Args:
        run_dir: The run directory.
        report: Called with one line for every checkpoint that was skipped.

    Raises:
        ValueError: It is not a run directory, or no checkpoint in it can be read.
    """
    directory = RunDirectory.existing(run_dir)
    experiment = directory.experiment()
    environment, agent = experiment.make()
    template = jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)))
    checkpointer = Checkpointer(directory.checkpoints, config=identity(experiment), report=report)
    with contextlib.closing(checkpointer):
        restored = checkpointer.restore(template, only="learner")
    return LoadedPolicy(experiment, environment, agent, agent.actor_params(restored.state), restored.update)


def policy(anakin: Anakin, state: AnakinState) -> PyTree:
    """The acting parameters on one device."""
    return jax.device_put(anakin.agent.actor_params(state.learner), anakin.mesh.devices.flat[0])


def evaluation_key(experiment: Experiment, updates: int) -> jax.Array:
    """Evaluation draws from a stream of its own, so that evaluating changes nothing in training."""
    return stream_key(jax.random.key(experiment.seed), Stream.EVALUATE, updates)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets an event, for the loop to end between two windows; a second one interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
