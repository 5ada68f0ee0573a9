"""What an architecture reports of a few updates: sums on the device, and the numbers that they come to on the host."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from podracer import parallel
from podracer.types import Trajectory, valid_mask

# So that the sums of a window cannot overflow int32.
MAX_ROWS_PER_CALL = 2**30
_NEVER = np.int32(2**31 - 1)
_FROM_ENVIRONMENT = ("reward", "observation")
# What a line of metrics and the watch over what is finite have besides the agent's metrics.
RESERVED = (
    *_FROM_ENVIRONMENT,
    "acting_parameters",
    "env_steps",
    "updates",
    "steps_per_second",
    "frames",
    "frames_per_second",
    "policy_lag",
    "discarded_rows",
    "environment_restarts",
    "episodes",
    "episode_return",
    "episode_length",
)
_RESERVED_BEGINNINGS = ("policy_lag_", "actor_time_", "learner_time_")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Sums over a few updates, on the device.

    Attributes:
        updates: Their number.
        env_steps: Real transitions; rows on which an environment reset itself are not counted.
        metrics: The agent's metrics.
        episodes: Episodes that finished.
        return_sum: Over those.
        length_sum: Over those; a float, since many long episodes can have more steps than int32 counts.
        nonfinite: For each quantity, the first update at which it was NaN or infinite, counted from 1. The acting
            parameters, which may have infinities of their own, are searched for NaN, once, after the last update.
    """

    updates: Int[Array, ""]
    env_steps: Int[Array, ""]
    metrics: dict[str, jax.Array]
    episodes: Int[Array, ""]
    return_sum: Float[Array, ""]
    length_sum: Float[Array, ""]
    nonfinite: dict[str, Int[Array, ""]]

    @classmethod
    def of_update(cls, trajectory: Trajectory, metrics: dict[str, Any], update: Int[Array, ""]) -> "Window":
        """One update's share, in which no episode is counted yet.

        Args:
            trajectory: What was learnt from.
            metrics: The agent's.
            update: The update's number, counted from 1.

        Raises:
            ValueError: The agent uses a reserved name for a metric.
        """
        if taken := sorted(name for name in metrics if name in RESERVED or name.startswith(_RESERVED_BEGINNINGS)):
            reserved = ", ".join((*RESERVED, *(f"{beginning}..." for beginning in _RESERVED_BEGINNINGS)))
            raise ValueError(f"the agent names a metric {taken[0]!r}; reserved are {reserved}")
        watched = {name: getattr(trajectory.timestep, name) for name in _FROM_ENVIRONMENT} | metrics
        nonfinite = {name: _when_any(_is_nonfinite, x, update) for name, x in watched.items()}
        return cls(
            updates=jnp.int32(1),
            env_steps=valid_mask(trajectory).sum(dtype=jnp.int32),
            metrics=metrics,
            episodes=jnp.int32(0),
            return_sum=jnp.float32(0),
            length_sum=jnp.float32(0),
            nonfinite=nonfinite,
        )

    @staticmethod
    def zero(like: "Window") -> "Window":
        """Of no update, with the metrics of `like`, which may be shapes."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return dataclasses.replace(zeros, nonfinite=dict.fromkeys(like.nonfinite, jnp.int32(_NEVER)))

    @staticmethod
    def of_parts(parts: "Window") -> "Window":
        """Of one update that was made in several parts `[parts, ...]`: sums of counts, means of metrics."""
        total = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), parts)
        return dataclasses.replace(
            total,
            updates=parts.updates[0],
            metrics=jax.tree.map(lambda x: x.mean(0), parts.metrics),
            nonfinite=jax.tree.map(lambda x: x.min(0), parts.nonfinite),
        )

    def add(self, more: "Window") -> "Window":
        """Both together."""
        total = jax.tree.map(jnp.add, self, more)
        return dataclasses.replace(total, nonfinite=jax.tree.map(jnp.minimum, self.nonfinite, more.nonfinite))

    def watch_parameters(self, actor_params: PyTree, update: Int[Array, ""]) -> "Window":
        """With the acting parameters after the last update searched for NaN.

        The last gradient step may spoil them, which no metric shows before the next update, and a checkpoint keeps.
        """
        found = {"acting_parameters": _when_any(jnp.isnan, actor_params, update)}
        return dataclasses.replace(self, nonfinite=self.nonfinite | found)

    def over_replicas(self, axis: str | None) -> "Window":
        """Sums of counts, means of metrics."""
        if axis is None:
            return self
        total = jax.tree.map(lambda x: jax.lax.psum(x, axis), self)
        return dataclasses.replace(
            total,
            updates=self.updates,
            metrics=parallel.mean_over_replicas(self.metrics, axis),
            nonfinite=jax.tree.map(lambda x: jax.lax.pmin(x, axis), self.nonfinite),
        )

    def summarize(self, *, allow_nonfinite: bool = False) -> dict[str, float]:
        """Numbers on the host: mean metrics, mean return and length of the episodes that finished.

        Waits for the device.

        Args:
            allow_nonfinite: Give NaN back as it is.

        Raises:
            FloatingPointError: Something was not finite; the earliest is named, with its update.
        """
        host = jax.device_get(self)
        updates, episodes = int(host.updates), int(host.episodes)
        first = min(host.nonfinite.values())
        if first != _NEVER and not allow_nonfinite:
            names = [name for name, update in host.nonfinite.items() if update == first]
            # What came from the environment is the cause of what came out of the agent.
            cause = min(names, key=lambda name: (*_FROM_ENVIRONMENT, name).index(name))
            raise FloatingPointError(f"{cause} was not finite at update {first}")
        summary = {name: float(value) / updates if updates else math.nan for name, value in host.metrics.items()}
        summary["episodes"] = episodes
        summary["episode_return"] = float(host.return_sum) / episodes if episodes else math.nan
        summary["episode_length"] = float(host.length_sum) / episodes if episodes else math.nan
        return summary


def check_num_updates(num_updates: int, rows_per_update: int) -> None:
    """Whether one window can count so many updates.

    Raises:
        ValueError: `num_updates` is no integer from 1 to what it can count.
    """
    limit = MAX_ROWS_PER_CALL // rows_per_update
    if not isinstance(num_updates, int | np.integer) or not 1 <= num_updates <= limit:
        raise ValueError(f"num_updates is {num_updates!r}; one call makes 1 to {limit} updates")


def _is_nonfinite(x: jax.Array) -> jax.Array:
    return ~jnp.isfinite(x)


def _when_any(is_bad: Callable[[jax.Array], jax.Array], tree: PyTree, update: jax.Array) -> Int[Array, ""]:
    """The update's number if a float in the tree is bad, else never."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    bad = [is_bad(x).any() for x in floats]
    return jnp.where(jnp.array(bad, bool).any(), update, _NEVER)
