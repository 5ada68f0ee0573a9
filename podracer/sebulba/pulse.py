"""What a thread is doing."""

import time


class Pulse:
    """What a thread is doing, since when, and how long it has spent on what. Written by one thread, read by others."""

    def __init__(self, activities: tuple[str, ...]) -> None:
        self.seconds = dict.fromkeys(activities, 0.0)
        self._now = activities[0], time.perf_counter()

    def enter(self, activity: str) -> None:
        """Ends what the thread was doing, and begins something else."""
        before, since = self._now
        now = time.perf_counter()
        self.seconds[before] += now - since
        self._now = activity, now

    def current(self) -> tuple[str, float]:
        """What the thread is doing, and since when, on the clock of `time.perf_counter`."""
        return self._now
