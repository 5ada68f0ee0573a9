"""What the user sees of a run while it lasts."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from podracer.logging import Metrics


@dataclasses.dataclass
class Phase:
    """A part of a run that takes its time before training shows progress; `seconds` is set when it ends."""

    seconds: float = math.nan


class Progress:
    """Tells the user how a run is getting on.

    On a terminal this is a live bar; elsewhere a line for each twentieth of the run; with `quiet` only warnings. Rate
    and time left count what this process does, without its phases.

    Args:
        total_steps: Environment steps of the whole run.
        initial_steps: Environment steps that a resumed run starts at.
        frames_per_step: An emulator's frames per step, shown beside them where there is more than one.
        quiet: Whether to show nothing but warnings.
        console: Where to show it, standard error by default.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        initial_steps: int = 0,
        frames_per_step: int = 1,
        quiet: bool = False,
        console: Console | None = None,
    ):
        self._console = console or Console(stderr=True)
        self._total, self._initial = total_steps, initial_steps
        self._frames_per_step = frames_per_step
        self._quiet = quiet
        self._start = time.perf_counter()
        self._phases = 0.0
        self._episode_return = math.nan
        self._metrics: Metrics = {}
        self._lines = self._twentieths(initial_steps)
        self._shown_at = -math.inf
        self._bar: Bar | None = None

    @contextlib.contextmanager
    def phase(self, doing: str, done: str | None = None) -> Iterator[Phase]:
        """Announces work before it starts, and says afterwards how long it took.

        Args:
            doing: As in "compiling the training step".
            done: As in "compiled"; `doing` again by default.
        """
        phase = Phase()
        start = time.perf_counter()
        self.message(f"{doing} ...")
        try:
            yield phase
        finally:
            phase.seconds = time.perf_counter() - start
            self._phases += phase.seconds
        self.message(f"{done or doing} in {_duration(phase.seconds)}")

    def update(self, env_steps: int, metrics: Metrics) -> None:
        """Shows where the run stands: steps, steps per second, the last return, time left.

        Under Sebulba also how far policies lag behind, and how long the side waits that waits longer.
        """
        self._metrics = metrics
        episode_return = metrics.get("episode_return", math.nan)
        if math.isfinite(episode_return):
            self._episode_return = episode_return
        if self._quiet:
            return
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._update_bar(env_steps)
        elif self._twentieths(env_steps) > self._lines:
            self._lines = self._twentieths(env_steps)
            percent = 100 * env_steps // max(self._total, 1)
            steps = f"{_short(env_steps)} of {_short(self._total)} steps ({percent} %)"
            self.message(", ".join([steps, *self._figures(env_steps)]))

    def message(self, text: str) -> None:
        """A line, above the bar where there is one."""
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that is shown with `quiet` too."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True, style="yellow")

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar = None

    def _twentieths(self, env_steps: int) -> int:
        return 20 * env_steps // max(self._total, 1)

    def _figures(self, env_steps: int) -> list[str]:
        seconds = time.perf_counter() - self._start - self._phases
        rate = (env_steps - self._initial) / max(seconds, 1e-9)
        figures = [f"{_short(rate)} steps/s"]
        if self._frames_per_step > 1:
            figures.append(f"{_short(rate * self._frames_per_step)} frames/s")
        if math.isfinite(self._episode_return):
            figures.append(f"return {self._episode_return:.4g}")
        if rate > 0:
            figures.append(f"{_duration(max(self._total - env_steps, 0) / rate)} left")
        if (lag := self._metrics.get("policy_lag")) is not None:
            waits = {"actors wait": "actor_time_parameters", "learner waits": "learner_time_trajectories"}
            longest = max(waits, key=lambda side: self._metrics[waits[side]])
            figures += [f"lag {lag:.3g}", f"{longest} {self._metrics[waits[longest]]:.0%}"]
        return figures

    def _update_bar(self, env_steps: int) -> None:
        if self._bar is None:
            columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}"))
            # Drawn by `update` itself: a thread that redraws takes turns from the training loop.
            self._bar = Bar(*columns, console=self._console, auto_refresh=False)
            self._bar.add_task("", total=max(self._total, 1))
            self._bar.start()
        steps = f"{_short(env_steps)} of {_short(self._total)} steps"
        description = "  ".join([steps, *self._figures(env_steps)])
        self._bar.update(self._bar.task_ids[0], completed=env_steps, description=description)
        if time.perf_counter() - self._shown_at > 0.1:
            self._bar.refresh()
            self._shown_at = time.perf_counter()


def _short(number: float) -> str:
    """Three significant digits: 950, 12.3k, 10M, 2.15G."""
    for unit in ("", "k", "M"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G" if number < 999.5 else f"{number:.0f}G"


def _duration(seconds: float) -> str:
    """6.1 s, 42 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
