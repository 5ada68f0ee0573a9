"""What a thread's time goes to."""

import time

from podracer.sebulba.pulse import Pulse


def test_a_pulse_adds_up_what_time_went_to(monkeypatch):
    now = iter([10.0, 12.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    pulse = Pulse(("rest", "work"))
    pulse.enter("work")
    assert pulse.current() == ("work", 12.0)
    pulse.enter("rest")
    assert pulse.seconds == {"rest": 2.0, "work": 8.0}
