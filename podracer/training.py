"""A run from beginning to end: train, save, evaluate, draw. One that was stopped goes on where it was."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import PyTree

from podracer import plotting
from podracer.anakin import Anakin, AnakinState
from podracer.checkpoint import Checkpointer
from podracer.envs.packages import import_package
from podracer.evaluate import Evaluation, evaluate, record
from podracer.experiment import Experiment
from podracer.interrupts import interrupted_between_steps, worth_waiting_for
from podracer.loading import evaluation_key
from podracer.logging import JsonlLogger, Logger, TensorBoardLogger, WandbLogger
from podracer.progress import Progress
from podracer.recording import save_gif
from podracer.run_directory import RunDirectory, identity, write_json
from podracer.sebulba import Sebulba, SebulbaState, SebulbaWindow
from podracer.sebulba.report import TimeBudget
from podracer.window import Window

AnyWindow = Window | SebulbaWindow


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
    state: AnakinState | SebulbaState
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
        resume: Go on from the newest readable checkpoint in `run_dir`, which must be of the same experiment. Of a run
            that is finished nothing is trained; its evaluation, curve, episode and summary are made afresh.
        overwrite: Remove an earlier run in `run_dir`.
        quiet: Show nothing but warnings.
        wandb_project: Log to this project of Weights & Biases as well.

    Raises:
        ValueError: Anything that cannot run, before it is compiled.
        FloatingPointError: A reward, observation, loss or parameter was not finite; the quantity and its update are
            named.
        RuntimeError: Something else went wrong after training had started.
        KeyboardInterrupt: After a checkpoint was saved. A second Ctrl-C does not wait for it.
    """
    if resume:
        if run_dir is None or overwrite:
            raise ValueError("to resume a run, name its run directory, which is not to be overwritten")
        directory = RunDirectory.existing(run_dir)
        directory.check_same(experiment)
    else:
        directory = RunDirectory.default(experiment) if run_dir is None else RunDirectory(pathlib.Path(run_dir))
        directory.check_free(overwrite=overwrite)
        experiment.check_can_be_saved()
    if wandb_project is not None:
        import_package("wandb")
    began = time.perf_counter()
    architecture = experiment.make_architecture()
    if not resume:
        directory.create(experiment, overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        run = _Run(experiment, architecture, directory, quiet, wandb_project, stack, began)
        if resume:
            run.restore()
        try:
            run.start()
            run.train()
            return run.finish()
        except (ValueError, BrokenPipeError) as error:
            # From here on it is not the input that is bad, and no reader of standard output that has seen enough.
            failure = RuntimeError(f"the run failed: {error}")
            for note in getattr(error, "__notes__", ()):
                failure.add_note(note)
            raise failure from error


@dataclasses.dataclass
class _Counters:
    """How far a run is; a checkpoint holds it besides the state."""

    updates: int = 0
    env_steps: int = 0
    training_seconds: float = 0.0
    compile_seconds: float = 0.0
    wall_seconds: float = 0.0
    environment_restarts: int = 0
    discarded_rows: int = 0


class _Run:
    """The moving parts of one call of `train`."""

    def __init__(
        self,
        experiment: Experiment,
        architecture: Anakin | Sebulba,
        directory: RunDirectory,
        quiet: bool,
        wandb_project: str | None,
        stack: contextlib.ExitStack,
        began: float,
    ) -> None:
        self.experiment, self.architecture, self.directory = experiment, architecture, directory
        self.quiet, self.wandb_project, self.stack = quiet, wandb_project, stack
        self.began, self.tracing_seconds = began, time.perf_counter() - began
        self.frames_per_step = 1
        if isinstance(architecture, Sebulba):
            self.frames_per_step = architecture.environments.frames_per_step
            stack.callback(self._end_actors, architecture)
        self.progress = self._progress(0)
        stack.callback(lambda: self.progress.close())
        self.counters = _Counters()
        self.resumed_at: int | None = None
        self.state: Any
        self.time_budget = TimeBudget()
        self.is_restored = self.is_nonfinite = False
        self.errors: list[Exception] = []
        self.checkpointer = Checkpointer(
            directory.checkpoints,
            keep_last=experiment.checkpoints.keep_last,
            keep_best=experiment.checkpoints.keep_best,
            config=identity(experiment),
            report=self._warn,
        )
        stack.callback(self.checkpointer.close)
        self.loggers: list[Logger] = []

    def restore(self) -> None:
        """Takes the state from the newest checkpoint, if there is one.

        Raises:
            ValueError: None of those that there are can be read.
        """
        self.resumed_at = 0
        if not self.checkpointer.updates():
            self._warn(f"{self.directory.path} has no checkpoint yet; starting from the beginning")
            return
        restored = self.checkpointer.restore(self.architecture.shapes)
        self.state, self.is_restored = restored.state, True
        metadata = dict(restored.metadata)
        now = self.architecture.mesh.size
        devices = metadata.pop("devices", now)
        if devices != now and isinstance(self.architecture, Anakin):
            self._warn(
                f"the run was on {devices} device{'s' * (devices > 1)} and goes on with {now}: right, but not bit for "
                f"bit what it would have been; --devices {devices} makes it so"
            )
        self.counters = _Counters(**metadata)
        if isinstance(self.architecture, Sebulba):
            self.architecture.seed_environments(self.experiment.seed)
            self._warn("the environments begin new episodes: what they were in the middle of is not in a checkpoint")
        self.resumed_at = self.counters.env_steps
        self.progress = self._progress(self.counters.updates)
        self.progress.message(f"resumed at update {self.counters.updates}, {self.counters.env_steps:,} steps")

    def start(self) -> None:
        """Opens the logs, compiles, and makes the state if it was not restored."""
        experiment, architecture, counters = self.experiment, self.architecture, self.counters
        self._open_loggers()
        planned = experiment.num_updates * experiment.steps_per_update
        rounded = "" if planned == experiment.total_steps else f" (of {experiment.total_steps:,} asked for)"
        self.progress.message(
            f"{experiment.name}: {planned:,} steps{rounded} in {experiment.num_updates} updates of "
            f"{experiment.architecture.num_envs} environments x {experiment.architecture.rollout_length} steps "
            f"{architecture.placement}"
        )
        if counters.updates == experiment.num_updates:
            return
        with self.progress.phase("compiling", "compiled") as phase:
            architecture.compile()
            if not self.is_restored:
                self.state = architecture.init(experiment.seed)
        counters.compile_seconds += self.tracing_seconds + phase.seconds

    def train(self) -> None:
        """All updates that are left; at the end, whatever it is, where the time went."""
        try:
            self._update()
        finally:
            for line in self.time_budget.lines():
                self.progress.message(line)

    def _update(self) -> None:
        """Updates, windows and checkpoints. Under Anakin one window is read while the next is computed."""
        experiment, counters = self.experiment, self.counters
        interval = experiment.checkpoint_interval
        self.window_began = time.perf_counter()
        pending: tuple[int, AnyWindow] | None = None
        updates = started_at = counters.updates
        score: float | None = None
        # Under Anakin nobody looks before a window has ended, and what was learnt in it is worth waiting for.
        waiting = contextlib.nullcontext() if isinstance(self.architecture, Sebulba) else worth_waiting_for()
        with interrupted_between_steps() as interrupted, waiting:
            while updates < experiment.num_updates and not interrupted.is_set():
                number = min(experiment.window, experiment.num_updates - updates)
                window: AnyWindow
                if isinstance(self.architecture, Sebulba):
                    self.state, window = self.architecture.run(self.state, number, stop=interrupted)
                    number = window.updates
                    if not number:
                        break
                else:
                    self.state, window = self.architecture.run(self.state, number)
                if pending is not None:
                    score = self._read(*pending)
                updates += number
                pending = updates, window
                if isinstance(window, SebulbaWindow):  # It has been computed: `run` waits.
                    score, pending = self._read(updates, window), None
                # Whole intervals that were passed, and not multiples: a resumed run may have other windows.
                is_due = interval and updates // interval > (updates - number) // interval
                if is_due and updates < experiment.num_updates:
                    if pending is not None:
                        score, pending = self._read(*pending), None
                    self._save(score)
            if pending is not None:
                score = self._read(*pending)
            with worth_waiting_for():
                if updates > started_at:
                    self._save(score)
                self.checkpointer.wait()
            if interrupted.is_set():
                self._warn(f"stopped after update {updates}; `podracer resume {self.directory.path}` goes on")

    def finish(self) -> Result:
        """Evaluates, and leaves the summary, the curve and an episode."""
        experiment, counters = self.experiment, self.counters
        self.progress.close()
        if isinstance(self.architecture, Sebulba):
            self._end_actors(self.architecture)
        environment = experiment.make_environment()
        params = policy(self.architecture, self.state)
        key = evaluation_key(experiment, counters.updates)
        with self.progress.phase(f"evaluating {experiment.evaluation_episodes} episodes", "evaluated"):
            evaluation = evaluate(
                self.architecture.agent,
                environment,
                params,
                key,
                experiment.evaluation_episodes,
                greedy=experiment.evaluation_greedy,
            )
        if evaluation.unfinished:
            self._warn(f"{evaluation.unfinished} evaluation episodes did not end and are left out")
        rate = counters.env_steps / max(counters.training_seconds, 1e-9)
        summary = {
            "experiment": experiment.name,
            "seed": experiment.seed,
            "env_steps": counters.env_steps,
            "updates": counters.updates,
            "steps_per_second": rate,
            **self._frames(counters.env_steps, rate),
            "compile_seconds": counters.compile_seconds,
            "wall_seconds": self._wall_seconds(),
            "evaluation": evaluation.summary(),
        }
        if isinstance(self.architecture, Sebulba):
            summary |= {name: getattr(counters, name) for name in ("environment_restarts", "discarded_rows")}
        if (slower := self.time_budget.bottleneck()) is not None:
            summary |= {"bottleneck": slower, "time": self.time_budget.shares()}
        directory = self.directory
        with self._writing(directory.summary):
            write_json(directory.summary, summary)
        with self._writing(directory.curve):
            try:
                plotting.plot_curves([directory.path], directory.curve)
            except ValueError as error:
                self.progress.message(f"no curve: {error}")
        with self._writing(directory.episode):
            key = evaluation_key(experiment, counters.updates, recording=True)
            with self.progress.phase("recording an episode", "recorded"):
                frames, _ = record(
                    self.architecture.agent, environment, params, key, greedy=experiment.evaluation_greedy
                )
                save_gif(frames, directory.episode)
        self.progress.message(f"{evaluation}, {rate:,.0f} steps/s, {summary['wall_seconds']:.0f} s in all")
        for path in (directory.curve, directory.episode, directory.summary):
            if path.exists():
                self.progress.message(f"  {path}")
        logged = [error for logger in self.loggers for error in getattr(logger, "errors", ())]
        errors = (*self.checkpointer.errors, *logged, *self.errors)
        return Result(directory.path, summary, evaluation, self.state, errors)

    def _progress(self, updates: int) -> Progress:
        # In rows of the plan: the steps among them are not known before the last episode has ended.
        rows = self.experiment.steps_per_update
        return Progress(
            self.experiment.num_updates * rows,
            initial_steps=updates * rows,
            frames_per_step=self.frames_per_step,
            quiet=self.quiet,
        )

    def _frames(self, env_steps: int, steps_per_second: float) -> dict[str, float]:
        """Frames and their rate, where a step is several of an emulator's frames."""
        factor = self.frames_per_step
        return {"frames": env_steps * factor, "frames_per_second": steps_per_second * factor} if factor > 1 else {}

    def _open_loggers(self) -> None:
        def opened(logger: Any) -> Any:
            self.stack.callback(logger.close)
            self.loggers.append(logger)
            return logger

        directory = self.directory
        metrics = opened(JsonlLogger(directory.metrics, report=self._warn))
        if self.resumed_at is not None:
            metrics.truncate_after(self.counters.updates)
        opened(TensorBoardLogger(directory.tensorboard, resumed_at=self.resumed_at, report=self._warn))
        if self.wandb_project is not None:
            opened(WandbLogger(self.wandb_project, config=self.experiment.to_dict(), directory=directory.path))

    def _read(self, updates: int, window: AnyWindow) -> float | None:
        """Waits for a window, then logs it. Returns the mean return of its episodes, None if none ended."""
        counters = self.counters
        try:
            metrics = window.summarize()
        except FloatingPointError as error:
            if self.experiment.stop_on_nonfinite:
                self.checkpointer.wait()
                saved = self.checkpointer.updates()
                kept = f"the last checkpoint is of update {saved[-1]}" if saved else "there is no checkpoint"
                raise FloatingPointError(f"{error}; {kept}") from None
            if not self.is_nonfinite:  # Once: what is NaN tends to stay NaN.
                self._warn(f"{error}; going on")
            self.is_nonfinite = True
            metrics = window.summarize(allow_nonfinite=True)
        now = time.perf_counter()
        seconds, self.window_began = now - self.window_began, now
        env_steps = int(window.env_steps)
        counters.updates = updates
        counters.env_steps += env_steps
        counters.training_seconds += seconds
        rate = env_steps / max(seconds, 1e-9)
        line = {
            "env_steps": counters.env_steps,
            "updates": updates,
            "steps_per_second": rate,
            **self._frames(counters.env_steps, rate),
            **metrics,
        }
        if isinstance(window, SebulbaWindow):
            self.time_budget.add(window, seconds)
            counters.environment_restarts += len(window.failures)
            counters.discarded_rows += window.discarded_rows
            for failure in window.failures:
                self._warn(failure)
        for logger in self.loggers:
            logger.write(line)
        self.progress.update(updates * self.experiment.steps_per_update, line)
        value = metrics["episode_return"]
        return None if math.isnan(value) else value

    def _save(self, score: float | None) -> None:
        """Saves the state, which must be that of the last window read."""
        saved = dataclasses.replace(self.counters, wall_seconds=self._wall_seconds())
        metadata = dataclasses.asdict(saved) | {"devices": self.architecture.mesh.size}
        self.checkpointer.save(self.counters.updates, self.state, metadata, score)
        # What saving took is not training time.
        self.window_began = time.perf_counter()

    def _wall_seconds(self) -> float:
        return self.counters.wall_seconds + time.perf_counter() - self.began

    def _end_actors(self, sebulba: Sebulba) -> None:
        for complaint in sebulba.close():
            self._warn(complaint)

    def _warn(self, text: str) -> None:
        self.progress.warn(text)

    @contextlib.contextmanager
    def _writing(self, path: pathlib.Path) -> Iterator[None]:
        """A file that cannot be written must not cost the ones after it."""
        try:
            yield
        except OSError as error:
            self.errors.append(error)
            self._warn(f"could not write {path}: {error.strerror or error}")


def policy(architecture: Anakin | Sebulba, state: Any) -> PyTree:
    """The acting parameters on one device."""
    return jax.device_put(architecture.agent.actor_params(state.learner), architecture.mesh.devices.flat[0])
