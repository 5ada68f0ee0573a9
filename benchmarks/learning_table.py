"""What was learnt, as a Markdown table."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """What an experiment should reach.

    Attributes:
        experiment: Its name.
        value: Of the mean return of the evaluation.
        seeds: How many to train.
        needed: The share of seeds that have to reach the value, each by itself; None asks it of their mean.
        reference: Where the value comes from.
    """

    experiment: str
    value: float
    seeds: int = 3
    needed: float | None = None
    reference: str = ""

    def rule(self, seeds: int) -> str:
        """In words, for that many seeds."""
        if self.needed is None:
            return f"mean >= {self.value:g}"
        return f">= {self.value:g} in {self._needed(seeds)} of {seeds}"

    def reached(self, returns: Sequence[float]) -> bool:
        """Whether the seeds' returns meet it."""
        if not returns:
            return False
        if self.needed is None:
            return statistics.fmean(returns) >= self.value
        return sum(value >= self.value for value in returns) >= self._needed(len(returns))

    def _needed(self, seeds: int) -> int:
        return math.ceil((self.needed or 0) * seeds - 1e-9)


COLUMNS = ("experiment", "env steps", "mean ± std", "each seed", "target", "", "reference", "steps/s", "wall time")


def markdown(targets: Sequence[Target], summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The table. Figures are mean returns of each seed's evaluation; the deviation is that of the seeds.

    Args:
        targets: Its rows.
        summaries: Per experiment the `summary.json` of each finished seed, in the order of seeds.
    """
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    for target in targets:
        lines.append(_line(_row(target, summaries.get(target.experiment, ()))))
    return "\n".join(lines) + "\n"


def _row(target: Target, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    returns = [run["evaluation"]["mean"] for run in runs]
    if not returns:
        return [target.experiment, "", "", "", target.rule(target.seeds), "not run", target.reference, "", ""]
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    return [
        target.experiment,
        f"{max(run['env_steps'] for run in runs):,}",
        f"{statistics.fmean(returns):.4g} ± {spread:.2g}",
        ", ".join(f"{value:.4g}" for value in returns),
        target.rule(len(returns)),
        "reached" if target.reached(returns) else "**missed**",
        target.reference,
        f"{statistics.median(run['steps_per_second'] for run in runs):,.0f}",
        _duration(statistics.median(run["wall_seconds"] for run in runs)) + " a seed",
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
