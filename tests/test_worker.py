"""Calls that may hang."""

import threading
import time

import pytest

from podracer.worker import Worker


def test_calls_run_in_one_other_thread_and_give_what_they_return():
    worker = Worker("worker under test")
    threads = {worker.call("looking", threading.current_thread, 5) for _ in range(3)}
    assert {thread.name for thread in threads} == {"worker under test"}
    worker.end()
    threads.pop().join(5)


def test_an_exception_is_raised_where_the_call_was_made():
    worker = Worker("worker")

    def fail():
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError, match="no"):
        worker.call("failing", fail, 5)
    assert worker.call("going on", lambda: 3, 5) == 3
    worker.end()


def test_a_call_that_hangs_is_named_in_time():
    worker, release = Worker("worker"), threading.Event()
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"worker: waiting has not come back for 0.1 s"):
        worker.call("waiting", lambda: release.wait(30), 0.1)
    assert time.perf_counter() - began < 2
    assert worker.hangs
    release.set()
    worker.end()
