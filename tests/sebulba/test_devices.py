"""Which devices act and learn, and what is refused before anything is compiled."""

import pytest

from podracer.sebulba.config import SebulbaConfig
from podracer.sebulba.devices import DeviceSplit, check_shares

EIGHT = tuple("abcdefgh")


@pytest.mark.parametrize(
    ("count", "config", "actors", "learners"),
    [
        (1, {}, "a", "a"),
        (2, {}, "a", "b"),
        (4, {}, "a", "bcd"),
        (8, {}, "ab", "cdefgh"),
        (8, {"actor_devices": (0,), "learner_devices": (1, 2, 3)}, "a", "bcd"),
        (8, {"actor_devices": (3, 1), "learner_devices": (6, 0)}, "db", "ga"),
        (8, {"actor_devices": (2, 5), "learner_devices": (2, 5)}, "cf", "cf"),
        (8, {"actor_devices": (7,), "num_envs": 112}, "h", "abcdefg"),
        # Nobody asked for more than the environments can be divided among.
        (8, {"num_envs": 64}, "ab", "cdef"),
        (4, {"num_envs": 16}, "a", "bc"),
        (8, {"num_envs": 48, "batch_splits": 8}, "ab", "cdefgh"),
        (8, {"num_envs": 32, "batch_splits": 8}, "ab", "cdef"),
        (8, {"num_envs": 7}, "ab", "cdefgh"),
        (8, {"learner_devices": (1, 2, 3, 4, 5, 6, 7)}, "a", "bcdefgh"),
        (1, {"learner_devices": (0,)}, "a", "a"),
        (1, {"actor_devices": (0,)}, "a", "a"),
    ],
)
def test_the_split(count, config, actors, learners):
    split = DeviceSplit.of(SebulbaConfig(**config), EIGHT[:count])
    assert ("".join(split.actors), "".join(split.learners)) == (actors, learners)


def test_a_place_that_the_machine_does_not_have_is_named():
    with pytest.raises(ValueError, match="learner_devices has 4; this machine has 4 devices, 0 to 3"):
        DeviceSplit.of(SebulbaConfig(learner_devices=(0, 4)), EIGHT[:4])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_envs": 128}, "num_envs is 128, .* 2 actor threads .1 device x 2., 3 learner .*: 126 or 132$"),
        ({"num_envs": 18, "batch_splits": 4}, "and 4 batch_splits; nearest valid: 12 or 24"),
        ({"num_envs": 2}, "nearest valid: 6$"),
    ],
)
def test_environments_that_cannot_be_shared_are_refused_with_the_nearest(config, message):
    split = DeviceSplit(EIGHT[:1], EIGHT[1:4])
    check_shares(SebulbaConfig(num_envs=6), split)
    with pytest.raises(ValueError, match=message):
        check_shares(SebulbaConfig(**config), split)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_envs", 0, "an integer of at least 1"),
        ("rollout_length", 1.5, "an integer of at least 1"),
        ("threads_per_actor_device", True, "an integer of at least 1"),
        ("actor_devices", (), "different places"),
        ("learner_devices", (1, 1), "different places"),
        ("learner_devices", [1], "a tuple"),
        ("max_lag", -1, "at least 0"),
        ("refresh", "never", "one of rollout, step"),
        ("batch_splits", 0, "at least 1"),
        ("step_timeout", 0.0, "a positive number of seconds"),
        ("start_timeout", float("nan"), "a positive number of seconds"),
        ("max_restarts", -1, "at least 0"),
        ("serial", 1, "True or False"),
    ],
)
def test_a_field_out_of_range_is_named(field, value, rule):
    with pytest.raises(ValueError, match=f"{field} is .*{rule}"):
        SebulbaConfig(**{field: value})
