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


@pytest.mark.parametrize(
    ("body", "presses"),
    [
        (BLOCK, 1),
        (f"with interrupted_between_steps(): {BLOCK}", 1),
        # The first waits for what is being saved; the second means it.
        (f"with interrupted_between_steps(), saving(): {BLOCK}", 2),
    ],
    ids=["nothing to save", "a step that is long", "saving"],
)
def test_a_process_that_cannot_hear_ends(body, presses):
    script = f"""
        import hashlib, signal
        from podracer.interrupts import exits_within, interrupted_between_steps, saving
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with exits_within(1):
            print("begun", flush=True)
            {body}
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    for press in range(presses):
        process.send_signal(signal.SIGINT)
        if press + 1 < presses:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
    _, error = process.communicate(timeout=30)
    message = "podracer: interrupted before what was under way had ended; what was saved is kept\n"
    assert (process.returncode, error) == (130, message)
