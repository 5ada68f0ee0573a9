import io
import math

import pytest
from rich.console import Console

from podracer import progress
from podracer.progress import Progress


class Clock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def console_of(**arguments):
    return Console(file=io.StringIO(), width=200, **arguments)


def lines_of(console):
    return console.file.getvalue().splitlines()


def test_compiling_is_announced_before_it_is_spent(clock):
    console = console_of()
    shown = Progress(100, console=console)
    with shown.phase("compiling the training step", "compiled") as phase:
        assert lines_of(console) == ["compiling the training step ..."]
        clock.now += 6.14
    assert lines_of(console)[1:] == ["compiled in 6.1 s"]
    assert phase.seconds == pytest.approx(6.14)


def test_a_phase_that_fails_is_not_done(clock):
    console = console_of()
    shown = Progress(100, console=console)
    with pytest.raises(RuntimeError), shown.phase("compiling"):
        raise RuntimeError
    assert lines_of(console) == ["compiling ..."]


def test_off_a_terminal_there_is_a_line_for_each_twentieth(clock):
    console = console_of()
    shown = Progress(10_000_000, console=console)
    for step in range(0, 10_000_001, 10_000):
        shown.update(step, {"episode_return": 12.345})
        clock.now += 0.05
    shown.close()
    lines = lines_of(console)
    assert len(lines) == 20
    assert lines[0] == "500k of 10M steps (5 %), 200k steps/s, return 12.35, 47 s left"
    assert lines[-1] == "10M of 10M steps (100 %), 200k steps/s, return 12.35, 0.0 s left"


def test_rate_and_time_left_count_what_this_process_trains(clock):
    console = console_of()
    clock.now += 50
    shown = Progress(1000, initial_steps=600, console=console)
    clock.now += 2
    with shown.phase("compiling"):
        clock.now += 100
    clock.now += 8
    shown.update(700, {})
    # 100 steps in 10 seconds; 300 to go.
    assert lines_of(console)[-1] == "700 of 1k steps (70 %), 10 steps/s, 30 s left"


def test_a_resumed_run_repeats_no_line(clock):
    console = console_of()
    shown = Progress(1000, initial_steps=600, console=console)
    clock.now += 1
    shown.update(600, {})
    shown.update(649, {})
    assert lines_of(console) == []
    shown.update(650, {})
    assert len(lines_of(console)) == 1


def test_the_last_return_stands_while_no_episode_ends(clock):
    console = console_of()
    shown = Progress(100, console=console)
    clock.now += 1
    shown.update(5, {"episode_return": math.nan})
    assert "return" not in lines_of(console)[-1]
    shown.update(10, {"episode_return": -3.5})
    shown.update(15, {"episode_return": math.nan})
    shown.update(20, {})
    assert [("return -3.5" in line) for line in lines_of(console)] == [False, True, True, True]


def test_totals_past_two_to_the_31(clock):
    console = console_of()
    shown = Progress(2**40, initial_steps=2**40 - 2**35, console=console)
    clock.now += 3600
    shown.update(2**40, {})
    assert lines_of(console) == ["1100G of 1100G steps (100 %), 9.54M steps/s, 0.0 s left"]


def test_quiet_shows_warnings_only(clock):
    for terminal in (False, True):
        console = console_of(force_terminal=terminal)
        shown = Progress(100, quiet=True, console=console)
        with shown.phase("compiling"):
            clock.now += 1
        shown.update(100, {"episode_return": 1.0})
        shown.message("checkpoint saved")
        assert console.file.getvalue() == ""
        shown.warn("could not save")
        shown.close()
        assert "could not save" in console.file.getvalue()


@pytest.mark.parametrize(
    ("actors", "learner", "words"), [(0.48, 0.02, "actors wait 48%"), (0.1, 0.35, "learner waits 35%")]
)
def test_the_lag_and_the_side_that_waits_longer_are_shown_where_there_are_two(actors, learner, words, clock):
    console = console_of()
    shown = Progress(100, console=console)
    clock.now += 1
    waits = {"actor_time_parameters": actors, "learner_time_trajectories": learner}
    shown.update(50, {"policy_lag": 1.0, **waits})
    assert lines_of(console) == [f"50 of 100 steps (50 %), 50 steps/s, 1.0 s left, lag 1, {words}"]


def test_on_a_terminal_there_is_a_bar(clock):
    console = console_of(force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    shown = Progress(1000, console=console)
    for step in range(0, 1001, 100):
        clock.now += 1
        shown.update(step, {"episode_return": step / 10})
    shown.message("a line of [bold] above the bar")
    shown.close()
    shown.close()
    text = console.file.getvalue()
    assert "━" in text
    assert "500 of 1k steps  83.3 steps/s  return 50  6.0 s left" in text
    assert "a line of [bold] above the bar" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_terminal_that_cannot_draw_gets_lines(clock):
    console = console_of(force_terminal=True, _environ={"TERM": "dumb"})
    shown = Progress(100, console=console)
    clock.now += 1
    shown.update(50, {})
    assert lines_of(console) == ["50 of 100 steps (50 %), 50 steps/s, 1.0 s left"]


def test_drawing_is_not_what_a_fast_loop_spends_its_time_on(clock, monkeypatch):
    refreshed = []
    monkeypatch.setattr(progress.Bar, "refresh", lambda bar: refreshed.append(clock.now))
    shown = Progress(1000, console=console_of(force_terminal=True, _environ={"TERM": "xterm"}))
    for step in range(1000):
        clock.now += 0.001
        shown.update(step, {})
    assert 8 <= len(refreshed) <= 15
    shown.close()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (999.6, "1k"), (12_345, "12.3k"), (999_600, "1M"), (10**7, "10M"), (2.15e9, "2.15G")],
)
def test_numbers_are_short(number, text):
    assert progress._short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_short(seconds, text):
    assert progress._duration(seconds) == text
