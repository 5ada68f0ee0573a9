"""Where the time of a Sebulba run goes, and how far its policies lag behind."""

import collections
import dataclasses
from typing import Any

import jax
import numpy as np

from podracer.sebulba.actor import STEPPING, Rollout
from podracer.window import Window

LEARNER_ACTIVITIES = ("other", "trajectories", "update", "publish")


@dataclasses.dataclass
class SebulbaWindow:
    """What came of a few updates.

    Attributes:
        sums: Over all replicas, without episodes; on the device.
        updates: Their number.
        episodes: That finished: their number, and the sums of their returns and lengths.
        lag: How many rows were acted by parameters of so many updates before those that learnt from them.
        actor_shares: Of the time of all actors, by activity.
        learner_shares: Of the time of the learner.
        failures: Of environments that were made anew after it, a line each.
        discarded_rows: Rows lost to them.
    """

    sums: Window
    updates: int
    episodes: tuple[int, float, int]
    lag: dict[int, int]
    actor_shares: dict[str, float]
    learner_shares: dict[str, float]
    failures: tuple[str, ...] = ()
    discarded_rows: int = 0

    @property
    def env_steps(self) -> jax.Array:
        """Real transitions; rows on which an environment reset itself are not counted."""
        return self.sums.env_steps

    def summarize(self, *, allow_nonfinite: bool = False) -> dict[str, float]:
        """As `Window.summarize`, with shares of time, the lag and its histogram, and what was lost.

        Raises:
            FloatingPointError: Something was not finite; the earliest is named, with its update.
        """
        count, return_sum, length_sum = self.episodes
        whole: Any = dataclasses.replace(
            self.sums,
            episodes=np.int64(count),  # type: ignore[arg-type]
            return_sum=np.float64(return_sum),  # type: ignore[arg-type]
            length_sum=np.float64(length_sum),  # type: ignore[arg-type]
        )
        summary = whole.summarize(allow_nonfinite=allow_nonfinite)
        rows = max(1, sum(self.lag.values()))
        summary["policy_lag"] = sum(lag * count for lag, count in self.lag.items()) / rows
        summary |= {f"policy_lag_{lag}": count / rows for lag, count in sorted(self.lag.items())}
        summary |= {f"actor_time_{name}": share for name, share in self.actor_shares.items()}
        summary |= {f"learner_time_{name}": share for name, share in self.learner_shares.items()}
        return summary | {"discarded_rows": self.discarded_rows, "environment_restarts": len(self.failures)}


@dataclasses.dataclass
class Tally:
    """What the learner adds up on the host while it learns."""

    updates: int = 0
    episodes: tuple[int, float, int] = (0, 0.0, 0)
    lag: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    discarded_rows: int = 0

    def add(self, update: int, rollouts: list[Rollout], envs_per_actor: int) -> None:
        """One update's rollouts."""
        self.updates += 1
        for rollout in rollouts:
            count, return_sum, length_sum = rollout.episodes
            before = self.episodes
            self.episodes = before[0] + count, before[1] + return_sum, before[2] + length_sum
            for lag, rows in zip(*np.unique(update - rollout.versions, return_counts=True), strict=True):
                self.lag[int(lag)] += int(rows) * envs_per_actor
            self.discarded_rows += rollout.discarded


def shares(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of the time between two readings, by activity."""
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    total = sum(spent.values())
    return {name: seconds / total if total > 0 else 0.0 for name, seconds in spent.items()}


def bottleneck(actor: dict[str, float], learner: dict[str, float]) -> str:
    """Which side the other waits for, in words.

    Args:
        actor: Shares of the time of all actors.
        learner: Shares of the learner's.
    """
    actors_wait, learner_waits = actor["parameters"], learner["trajectories"]
    if max(actors_wait, learner_waits) < 0.1:
        return f"balanced: actors wait {actors_wait:.0%} of their time, the learner {learner_waits:.0%}"
    if learner_waits >= actors_wait:
        busy = max((STEPPING, "act", "transfer"), key=lambda name: actor[name])
        what = {STEPPING: "stepping environments", "act": "acting", "transfer": "sending trajectories"}[busy]
        return f"the actors: the learner waits {learner_waits:.0%} of its time, and they spend {actor[busy]:.0%} {what}"
    return f"the learner: actors wait {actors_wait:.0%} of their time, and it spends {learner['update']:.0%} updating"


class TimeBudget:
    """Where the time of a whole run went, out of its windows."""

    def __init__(self) -> None:
        self._actors: collections.Counter[str] = collections.Counter()
        self._learner: collections.Counter[str] = collections.Counter()

    def add(self, window: SebulbaWindow, seconds: float) -> None:
        """A window that took so many seconds."""
        for total, part in ((self._actors, window.actor_shares), (self._learner, window.learner_shares)):
            total.update({name: share * seconds for name, share in part.items()})

    def shares(self) -> dict[str, dict[str, float]]:
        """Of the time of actors and of the learner, by activity; empty where nothing ran."""
        named = {"actors": self._actors, "learner": self._learner}
        return {name: shares({}, dict(total)) for name, total in named.items() if total}

    def lines(self) -> list[str]:
        """The shares and the bottleneck in words, for a person to read; empty where nothing ran."""
        lines = []
        for side, found in self.shares().items():
            largest = sorted(found.items(), key=lambda item: -item[1])
            parts = [f"{name} {share:.0%}" for name, share in largest if share >= 0.005]
            lines.append(f"time of the {side}: {', '.join(parts)}")
        return lines + [f"bottleneck: {self.bottleneck()}"] * bool(lines)

    def bottleneck(self) -> str | None:
        """Which side the other waited for, in words; None where nothing ran."""
        found = self.shares()
        return bottleneck(found["actors"], found["learner"]) if found else None
