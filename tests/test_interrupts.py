import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from podracer.interrupts import exits_within, interrupted_between_steps


@pytest.fixture(autouse=True)
def ctrl_c():
    """Shells have background jobs, such as these tests may be, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


def test_a_loop_ends_where_its_state_is_whole(capfd):
    done = []

    def loop():
        with interrupted_between_steps() as interrupted:
            for step in range(5):
                if interrupted.is_set():
                    break
                if step == 2:
                    press()
                done.append(step)
            done.append("saved")

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert done == [0, 1, 2, "saved"]
    assert "saving; Ctrl-C again does not wait" in capfd.readouterr().err


def test_ctrl_c_after_the_last_look_is_not_lost():
    with pytest.raises(KeyboardInterrupt), interrupted_between_steps():
        press()


def test_a_second_ctrl_c_interrupts_at_once():
    done = []

    def press_twice():
        with interrupted_between_steps():
            press()
            done.append("first")
            press()
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert done == ["first"]


def test_another_error_is_not_hidden():
    def fail():
        with interrupted_between_steps():
            press()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_the_handler_is_as_it_was(handler):
    signal.signal(signal.SIGINT, handler)
    with interrupted_between_steps():
        pass
    assert signal.getsignal(signal.SIGINT) == handler


def test_where_ctrl_c_is_ignored_it_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with exits_within(0.01), interrupted_between_steps() as interrupted:
        press()
        time.sleep(0.1)
    assert not interrupted.is_set()


def test_other_threads_have_no_part_in_it():
    seen = []

    def work():
        with exits_within(1), interrupted_between_steps() as interrupted:
            seen.append(interrupted.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_program_that_ends_in_time_is_left_alone():
    files, threads = os.listdir("/proc/self/fd"), threading.active_count()
    with pytest.raises(KeyboardInterrupt), exits_within(60):
        press()
    assert threading.active_count() == threads
    assert os.listdir("/proc/self/fd") == files


# A call of C that no signal interrupts, as a compilation is.
BLOCK = 'hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)'
SAVING_LATE = f"""\
with interrupted_between_steps():
    time.sleep(1.2)
    with worth_waiting_for():
        time.sleep(1)
    {BLOCK}
"""


@pytest.mark.parametrize(
    ("body", "presses", "between", "least", "most"),
    [
        (BLOCK, 1, 0, 1, 3),
        # Whoever presses on and on does not wait any longer for it.
        (BLOCK, 8, 0.5, 1, 3),
        (f"with interrupted_between_steps(): {BLOCK}", 1, 0, 1, 3),
        # The first waits for what is being saved; the second means it.
        (f"with interrupted_between_steps(), worth_waiting_for(): {BLOCK}", 2, 2, 3, 5),
        # 0.7 s, 1 that does not count, and 0.3 more.
        (SAVING_LATE, 1, 0, 1.9, 2.6),
    ],
    ids=["nothing to save", "many times", "a step that is long", "saving", "saving in between"],
)
def test_a_process_that_cannot_hear_ends(body, presses, between, least, most):
    """Of a patience of 1 s, from the first Ctrl-C on, half a second after it has begun."""
    script = f"""\
import hashlib, signal, time
from podracer.interrupts import exits_within, interrupted_between_steps, worth_waiting_for
signal.signal(signal.SIGINT, signal.default_int_handler)
with exits_within(1):
    print("begun", flush=True)
{textwrap.indent(body, "    ")}
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", script], text=True, **pipes)
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    began = time.monotonic()
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(between)
    _, error = process.communicate(timeout=30)
    assert error.splitlines()[-1] == "podracer: interrupted before what was under way had ended; what was saved is kept"
    assert process.returncode == 130
    assert least <= time.monotonic() - began < most
