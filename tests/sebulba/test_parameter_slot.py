"""Which parameters a rollout acts with."""

import threading
import time

import pytest

from podracer.sebulba.parameter_slot import ParameterSlot, Stopped


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
