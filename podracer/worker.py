"""Calls of code that may hang, each with a time in which it has to come back."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Returned = TypeVar("Returned")


class Worker:
    """A thread that runs one call after the other.

    Args:
        name: What errors call it.

    Attributes:
        hangs: Whether a call did not come back in its time.
    """

    def __init__(self, name: str) -> None:
        self._name, self.hangs = name, False
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        # A daemon: if it hangs, the process ends all the same.
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def call(self, what: str, function: Callable[[], Returned], timeout: float) -> Returned:
        """What the function returns.

        Args:
            what: What it does, for the error.
            function: Without arguments.
            timeout: Seconds. After it nothing more may be called.

        Raises:
            TimeoutError: It has not come back.
            Exception: What it raises.
        """
        self._calls.put(function)
        try:
            result, error = self._results.get(timeout=timeout)
        except queue.Empty:
            self.hangs = True
            raise TimeoutError(f"{self._name}: {what} has not come back for {timeout:g} s") from None
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Ends the thread once it has come back from what it does."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._results.put((call(), None))
            except BaseException as error:
                self._results.put((None, error))
