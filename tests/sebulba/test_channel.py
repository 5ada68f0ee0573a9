"""What passes between threads."""

import threading
import time

import pytest

from podracer.sebulba.channel import Channel, ParameterSlot, Pulse, Stopped


def test_a_channel_gives_items_in_order_and_none_after_the_time_out():
    channel = Channel(2, threading.Event())
    channel.put("a")
    channel.put("b")
    began = time.perf_counter()
    assert [channel.get(1), channel.get(1), channel.get(0.05)] == ["a", "b", None]
    assert time.perf_counter() - began < 0.5


def test_a_full_channel_waits_for_room_and_ends_with_the_run():
    stop = threading.Event()
    channel = Channel(1, stop)
    channel.put("a")
    ended = []

    def put():
        channel.put("b")
        with pytest.raises(Stopped):
            channel.put("c")
        ended.append(True)

    thread = threading.Thread(target=put)
    thread.start()
    assert channel.get(1) == "a"
    time.sleep(0.05)
    assert not ended
    stop.set()
    thread.join(1)
    assert ended == [True]
    assert channel.get(0) == "b"


@pytest.mark.parametrize(("max_lag", "expected"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2])])
def test_up_to_a_lag_of_1_a_rollout_has_one_version_whatever_is_there(max_lag, expected):
    slot = ParameterSlot(max_lag, threading.Event())
    found = []
    for rollout in range(4):
        slot.publish(rollout, f"params {rollout}")  # As late actors find it: the newest that there can be.
        found.append(slot.for_rollout(rollout))
    assert found == [(version, f"params {version}") for version in expected]
    assert slot.newest() == (3, "params 3")


def test_with_a_larger_lag_a_rollout_has_the_newest():
    slot = ParameterSlot(2, threading.Event())
    slot.publish(0, "old")
    assert slot.for_rollout(2) == (0, "old")
    slot.publish(1, "new")
    assert slot.for_rollout(2) == (1, "new")


def test_no_more_versions_are_kept_than_may_be_used():
    slot = ParameterSlot(1, threading.Event())
    for version in range(5):
        slot.publish(version, version)
    assert sorted(slot._versions) == [3, 4]


def test_a_rollout_waits_for_its_version_and_ends_with_the_run():
    stop = threading.Event()
    slot = ParameterSlot(1, stop)
    slot.publish(0, "a")
    found = []

    def act():
        found.append(slot.for_rollout(2))
        with pytest.raises(Stopped):
            slot.for_rollout(3)
        found.append("stopped")

    thread = threading.Thread(target=act)
    thread.start()
    time.sleep(0.05)
    assert not found
    slot.publish(1, "b")
    time.sleep(0.2)
    assert found == [(1, "b")]
    stop.set()
    thread.join(1)
    assert found == [(1, "b"), "stopped"]


def test_a_pulse_adds_up_what_time_went_to():
    pulse = Pulse(("rest", "work"))
    time.sleep(0.02)
    pulse.enter("work")
    time.sleep(0.05)
    assert pulse.current()[0] == "work"
    assert pulse.current()[1] == pytest.approx(0.05, abs=0.03)
    pulse.enter("rest")
    assert pulse.seconds["rest"] == pytest.approx(0.02, abs=0.02)
    assert pulse.seconds["work"] == pytest.approx(0.05, abs=0.03)
