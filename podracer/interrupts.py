"""Ctrl-C: a run ends in order, and a process that cannot hear it ends all the same."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

_LOOK = 0.1  # Seconds between two looks at the time, after Ctrl-C.
# Set while something goes on that Ctrl-C has to wait for.
_is_waited_for = threading.Event()


@contextlib.contextmanager
def worth_waiting_for() -> Iterator[None]:
    """For what takes as long as it takes, such as saving: `exits_within` does not count it until Ctrl-C comes again."""
    was_waited_for = _is_waited_for.is_set()
    _is_waited_for.set()
    try:
        yield
    finally:
        if not was_waited_for:
            _is_waited_for.clear()


@contextlib.contextmanager
def interrupted_between_steps() -> Iterator[threading.Event]:
    """Ctrl-C sets an event, for a loop to leave off where its state is whole.

    That there is something to wait for is said at once. When the block ends, however late the event was set, it ends
    with KeyboardInterrupt. A second Ctrl-C interrupts at once. Outside the main thread, and where Ctrl-C is ignored,
    the event is never set.

    Raises:
        KeyboardInterrupt: At the end of the block, after Ctrl-C.
    """
    event = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
        yield event
        return

    def handle(number: int, frame: Any) -> None:
        event.set()
        os.write(2, b"\nstopping after the updates that are under way, and saving; Ctrl-C again does not wait\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
    if event.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def exits_within(seconds: float) -> Iterator[None]:
    """Ends the process with code 130 if Ctrl-C has not done so after some time, without that in `worth_waiting_for`.

    Python runs signal handlers between bytecodes of the main thread, so that a compilation of minutes would be finished
    first. A thread hears the signal at once. To be used by a program, not by a library.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        interrupts, left, looked = 0, seconds, 0.0
        while left > 0:
            if select.select([reader], [], [], _LOOK if interrupts else None)[0]:
                if not (number := os.read(reader, 1)):
                    return
                if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                    continue
                interrupts += 1
                looked = looked or time.monotonic()
            before, looked = looked, time.monotonic()
            if interrupts > 1 or not _is_waited_for.is_set():
                left -= looked - before
        os.write(2, b"podracer: interrupted before what was under way had ended; what was saved is kept\n")
        os._exit(130)

    watcher = threading.Thread(target=watch, name="ctrl-c", daemon=True)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)
        watcher.join()
        os.close(reader)
