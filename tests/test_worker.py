"""Calls that may hang."""

import signal
import subprocess
import sys
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


def test_time_for_which_the_process_is_stopped_is_not_the_calls():
    script = (
        "import time; from podracer.worker import Worker; print(flush=True); "
        "Worker('worker').call('working', lambda: [time.sleep(0.1) for _ in range(15)], 2.0)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0


def test_a_call_that_was_not_waited_for_is_not_answered_by_the_next():
    worker, release = Worker("worker"), threading.Event()
    # To the thread that waits, as a terminal's Ctrl-C comes.
    threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        worker.call("waiting", lambda: release.wait(30), 30)
    assert worker.hangs
    release.set()
    worker.end()


def test_a_call_cannot_end_the_program():
    worker = Worker("worker")
    with pytest.raises(RuntimeError, match="worker: leaving raised SystemExit: 0"):
        worker.call("leaving", lambda: sys.exit(0), 5)
    assert worker.call("going on", lambda: 3, 5) == 3
    worker.end()


def test_without_a_limit_a_call_is_made_by_the_caller():
    worker = Worker("a worker without a thread")
    assert worker.call("looking", threading.current_thread, None) is threading.current_thread()
    assert worker._name not in {thread.name for thread in threading.enumerate()}


def test_a_last_call_is_made_when_what_hung_has_come_back():
    worker, release, done = Worker("worker"), threading.Event(), threading.Event()
    with pytest.raises(TimeoutError):
        worker.call("waiting", lambda: release.wait(30), 0.1)
    worker.end(done.set)
    assert not done.wait(0.1)
    release.set()
    assert done.wait(5)
