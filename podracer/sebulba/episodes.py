"""Returns and lengths of episodes on the host."""

import dataclasses

import numpy as np

from podracer.types import StepType, TimeStep


@dataclasses.dataclass
class HostEpisodes:
    """Returns and lengths of episodes on the host, as `podracer.rollout.EpisodeStatistics` are on the device."""

    running_return: np.ndarray
    running_length: np.ndarray
    count: int = 0
    return_sum: float = 0.0
    length_sum: int = 0

    @classmethod
    def zero(cls, batch_size: int) -> "HostEpisodes":
        """At the start of an episode in each environment."""
        return cls(np.zeros(batch_size, np.float64), np.zeros(batch_size, np.int64))

    def add(self, timestep: TimeStep) -> None:
        """After one more timestep `[B]`."""
        self.running_return += timestep.reward
        self.running_length += 1
        first, last = timestep.step_type == StepType.FIRST, timestep.step_type == StepType.LAST
        # Asked first: most timesteps are neither, and this is done at every step.
        if first.any():
            self.running_return[first] = self.running_length[first] = 0
        if last.any():
            self.count += int(last.sum())
            self.return_sum += float(self.running_return[last].sum())
            self.length_sum += int(self.running_length[last].sum())

    def take_finished(self) -> tuple[int, float, int]:
        """Number, returns and lengths of those that finished since the last call."""
        finished = self.count, self.return_sum, self.length_sum
        self.count, self.return_sum, self.length_sum = 0, 0.0, 0
        return finished
