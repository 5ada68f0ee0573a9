"""Learning curves of finished and running experiments, from their `metrics.jsonl`."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from podracer.fields import flatten

_POINTS = 400
# What may differ between runs whose mean is drawn: it does not change what is learnt, or at random only. The number of
# devices is not among these, as an agent may divide its batches by it.
_FREE = (
    *("name", "seed", "evaluation_episodes", "evaluation_greedy", "checkpoints", "stop_on_nonfinite"),
    "updates_per_window",
)
# Distinguishable with the common colour deficiencies (Okabe and Ito's set, its yellow and black left out).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run's returns: `episode_return[i]` is the mean over the episodes that ended in the window up to `steps[i]`.

    Attributes:
        label: The experiment's name, which runs with other settings may have too.
        steps: `[N]` environment steps, increasing.
        episode_return: `[N]`.
        settings: What the run is of besides, `{"agent.discount": 0.99}`; equal for runs that differ in their seed only.
    """

    label: str
    steps: Float[np.ndarray, "N"]
    episode_return: Float[np.ndarray, "N"]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def plot_curves(
    run_dirs: Sequence[str | pathlib.Path], out: str | pathlib.Path, *, title: str | None = None
) -> pathlib.Path:
    """Draws the return over environment steps.

    Runs that differ in their seed only share a colour: each is a thin line, their mean a thick one with a band of one
    standard deviation, over the steps that all of them have reached. These are moving means over a fiftieth of the run.
    Of an experiment's only run the thin line is the windows as they were. Where runs of one name have other settings,
    the settings that differ are named with it.

    Args:
        run_dirs: Directories with a `metrics.jsonl`, and a `config.json` that says what they are of.
        out: The picture to write; its suffix says in what format.
        title: Above the picture; by default the experiment, or "learning curves" where there are several.

    Returns:
        The path of the picture.

    Raises:
        ValueError: If there is no run, or one without metrics or without a finished episode.
    """
    if not run_dirs:
        raise ValueError("no runs to plot; name at least one run directory")
    read = [read_curve(run_dir) for run_dir in run_dirs]
    groups: dict[str, list[Curve]] = {}
    for curve in read:
        groups.setdefault(_told_apart(curve, read), []).append(curve)
    experiments = {curve.label for curve in read}

    # Imported late, as it takes long; and without pyplot, whose figures are global and never freed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.2, 4.5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (label, curves) in enumerate(groups.items()):
        _draw(axes, label, curves, _COLOURS[index % len(_COLOURS)])
    axes.set_title(title or ("learning curves" if len(experiments) > 1 else read[0].label), loc="left", weight="bold")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("episode return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.6")
    axes.tick_params(color="0.6", labelcolor="0.25")
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    if len(groups) > 1 or len(next(iter(groups.values()))) > 1:
        axes.legend(frameon=False, loc="best")
    out = pathlib.Path(out)
    figure.savefig(out)
    return out


def read_curve(run_dir: str | pathlib.Path) -> Curve:
    """Reads a run's returns.

    Windows in which no episode ended are left out, and so is a last line that is still being written.

    Raises:
        ValueError: If the run has no metrics, unreadable ones, or no finished episode.
    """
    run_dir = pathlib.Path(run_dir)
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run_dir} is not a run: it has no metrics.jsonl")
    steps, returns = [], []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            metrics = json.loads(line)
            if metrics.get("episode_return") is not None:
                steps.append(float(metrics["env_steps"]))
                returns.append(float(metrics["episode_return"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} of {path} is not a line of metrics") from error
    if not steps:
        raise ValueError(f"{path} has no finished episode to plot in its {len(lines)} lines")
    config = _config(run_dir)
    # The experiment's name; failing that its environment, failing that the directory's name.
    names = [config[name] for name in ("name", "experiment", "env") if isinstance(config.get(name), str)]
    label = names[0] if names else run_dir.resolve().name
    settings = flatten({name: value for name, value in config.items() if name not in _FREE})
    return Curve(label, np.array(steps), np.array(returns), settings)


def _config(run_dir: pathlib.Path) -> dict[str, Any]:
    """What the run was configured with; nothing where that cannot be read."""
    try:
        config = json.loads((run_dir / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _told_apart(curve: Curve, curves: Iterable[Curve]) -> str:
    """A curve's label, with those of its settings that others of the label do not have."""
    others = [other.settings for other in curves if other.label == curve.label]
    differing = [
        f"{name} {value}" for name, value in curve.settings.items() if any(other.get(name) != value for other in others)
    ]
    return ", ".join([curve.label, *differing])


def _draw(axes: Any, label: str, curves: list[Curve], colour: str) -> None:
    if len(curves) == 1:
        (curve,) = curves
        steps, smooth = _grid(curves), _smoothed(curve.episode_return)
        axes.plot(curve.steps, curve.episode_return, color=colour, linewidth=0.7, alpha=0.3)
        axes.plot(steps, np.interp(steps, curve.steps, smooth), color=colour, linewidth=1.9, label=label)
        return
    steps = _grid(curves)
    rows = np.stack([np.interp(steps, curve.steps, _smoothed(curve.episode_return)) for curve in curves])
    mean, spread = rows.mean(0), rows.std(0)
    for row in rows:
        axes.plot(steps, row, color=colour, linewidth=0.6, alpha=0.4)
    axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
    axes.plot(steps, mean, color=colour, linewidth=2.1, label=f"{label}, mean of {len(curves)} runs ± 1 std")


def _grid(curves: list[Curve]) -> Float[np.ndarray, "P"]:
    """Steps that every run has reached, so that no part of a mean is of fewer runs than the rest."""
    first = max(curve.steps[0] for curve in curves)
    last = max(first, min(curve.steps[-1] for curve in curves))
    return np.linspace(first, last, _POINTS)


def _smoothed(values: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """A moving mean over a fiftieth of the run, over the part of it that there is at the run's ends."""
    half = len(values) // 100
    index = np.arange(len(values))
    first, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[end] - sums[first]) / (end - first)
