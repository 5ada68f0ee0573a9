"""Calls of code that may hang, each with a time in which it has to come back."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Returned = TypeVar("Returned")

_LOOK = 0.1  # Seconds between two looks at how long a call has taken.


class Worker:
    """A thread that runs one call after the other, from the first that has a limit on.

    Args:
        name: What errors call it.

    Attributes:
        hangs: Whether a call did not come back in its time, or was not waited for.
    """

    def __init__(self, name: str) -> None:
        self._name, self.hangs = name, False
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, what: str, function: Callable[[], Returned], timeout: float | None) -> Returned:
        """What the function returns.

        Args:
            what: What it does, for the error.
            function: Without arguments.
            timeout: Seconds, after which nothing more may be called. With None it may take for ever, and the caller
                runs it.

        Raises:
            TimeoutError: It has not come back.
            Exception: What it raises.
        """
        if timeout is None:
            return function()
        if self._thread is None:
            # A daemon: if it hangs, the process ends all the same.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(function)
        try:
            result, error = self._wait(timeout)
        except queue.Empty:
            self.hangs = True
            raise TimeoutError(f"{self._name}: {what} has not come back for {timeout:g} s") from None
        except BaseException:
            self.hangs = True  # Whoever waits no longer must not be given this call's result for the next one.
            raise
        if isinstance(error, Exception):
            raise error
        if error is not None:
            # Such as SystemExit, which would end this program as its own.
            raise RuntimeError(f"{self._name}: {what} raised {type(error).__name__}: {error}") from error
        return result

    def end(self, last: Callable[[], Any] | None = None) -> None:
        """Ends the thread once it has come back from what it does, after a last call that nobody waits for."""
        if last is not None:
            self._calls.put(last)
        self._calls.put(None)

    def _wait(self, timeout: float) -> tuple[Any, BaseException | None]:
        """The oldest result.

        Raises:
            queue.Empty: There is none in this time.
        """
        # Look by look: of the time for which the process is stopped (Ctrl-Z), and the call with it, one counts at most.
        while timeout > _LOOK:
            with contextlib.suppress(queue.Empty):
                return self._results.get(timeout=_LOOK)
            timeout -= _LOOK
        return self._results.get(timeout=timeout)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._results.put((call(), None))
            except BaseException as error:
                self._results.put((None, error))
