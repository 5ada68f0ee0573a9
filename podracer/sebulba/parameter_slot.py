"""The parameters that actors wait for. No JAX, and no wait without an end."""

import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")

_TICK = 0.1  # Seconds between two looks at whether the wait is still wanted.


class Stopped(Exception):
    """The run has ended while a thread was waiting."""


class ParameterSlot(Generic[Item]):
    """The versions of the acting parameters that an actor device may still need.

    Version `k` is what the learner has after `k` updates. Kept are the newest and the `max_lag` before it.

    Args:
        max_lag: How many versions behind the newest an actor may act with.
        stop: The run's; set, every wait ends.
    """

    def __init__(self, max_lag: int, stop: threading.Event) -> None:
        self._max_lag, self._stop = max_lag, stop
        self._versions: dict[int, Item] = {}
        self._changed = threading.Condition()

    def publish(self, version: int, params: Item) -> None:
        """Makes a newer version known, and forgets those that no actor may use any more."""
        with self._changed:
            self._versions[version] = params
            for old in [old for old in self._versions if old < version - self._max_lag]:
                del self._versions[old]
            self._changed.notify_all()

    def newest(self) -> tuple[int, Item]:
        """The newest version, with its number."""
        with self._changed:
            version = max(self._versions)
            return version, self._versions[version]

    def for_rollout(self, rollout: int) -> tuple[int, Item]:
        """What rollout `k` acts with, waiting for version `k - max_lag`.

        Up to a lag of 1 exactly that version, though a newer one may be there already: which one would depend on
        timing. Beyond, the newest.

        Raises:
            Stopped: The run has ended.
        """
        with self._changed:
            while True:
                newest, oldest = max(self._versions), min(self._versions)
                # A run begins, or goes on, with fewer versions than it may keep.
                wanted = max(rollout - self._max_lag, oldest)
                if newest >= wanted:
                    version = wanted if self._max_lag <= 1 else newest
                    return version, self._versions[version]
                if self._stop.is_set():
                    raise Stopped
                self._changed.wait(_TICK)
