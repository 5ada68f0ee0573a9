"""The conformance suite of host environments must pass what is right and fail what is broken, each by its own test."""

import broken_host_environments as broken
import numpy as np
import pytest

from podracer.envs import EnvironmentSlice
from podracer.envs.child_processes import child_processes
from podracer.envs.host_recording import choose, random_numbers
from podracer.envs.host_testing import HostEnvironmentConformance
from podracer.types import (
    ArraySpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MaskedObservation,
    MultiDiscreteSpec,
)


def suite(environment, **declared):
    """An instance of the suite for a class of environments."""
    methods = {"make": lambda self, where: environment(where), "num_steps": 40, "patience": 1.0}
    return type("Suite", (HostEnvironmentConformance,), {**methods, **declared})()


def outcomes(instance):
    """The tests that fail and those that are skipped, with their messages."""
    failed, skipped = {}, {}
    for name in (name for name in dir(instance) if name.startswith("test_")):
        try:
            getattr(instance, name)()
        except pytest.skip.Exception as reason:
            skipped[name] = str(reason)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed, skipped


def test_a_correct_environment_passes_every_test_that_applies():
    failed, skipped = outcomes(suite(broken.Walks))
    assert failed == {}
    assert skipped == {
        "test_every_mask_leaves_a_legal_action": "observations have no action mask",
        "test_render_gives_a_picture": "the environment has no render",
    }


def test_a_correct_environment_with_masks_passes_as_well():
    failed, skipped = outcomes(suite(broken.Masked))
    assert failed == {}
    assert set(skipped) == {"test_render_gives_a_picture", "test_the_environments_of_a_batch_differ"}


@pytest.mark.parametrize(
    ("environment", "test", "message"),
    [
        (broken.UnequalSpecs, "spec_is_valid_and_hashable", "must be equal"),
        (broken.SpecOfItsSize, "spec_is_valid_and_hashable", "whatever the slice"),
        (broken.WrongSize, "spec_is_valid_and_hashable", "num_envs is 5; the slice has 4"),
        (
            broken.WrongShape,
            "emitted_shapes_and_dtypes_are_those_of_the_spec",
            "reset emits float32[4, 1] at .observation",
        ),
        (broken.WrongType, "emitted_shapes_and_dtypes_are_those_of_the_spec", "step emits float64[4] at .reward"),
        (broken.NoArray, "emitted_shapes_and_dtypes_are_those_of_the_spec", "reset emits a float at .discount"),
        (broken.WrongBounds, "observations_stay_within_the_bounds_of_the_spec", "the spec says -1 to 6"),
        (broken.NotFinite, "emissions_are_finite", ".reward is not finite"),
        (broken.EmptyMask, "every_mask_leaves_a_legal_action", "no legal action"),
        (broken.NeverEnds, "an_episode_ends", "no episode ended within num_steps = 40"),
        (broken.NoFirst, "first_comes_from_reset_and_after_last_only", "not FIRST"),
        (
            broken.FirstTooEarly,
            "first_comes_from_reset_and_after_last_only",
            "FIRST must come after LAST and only there",
        ),
        (broken.RewardOnFirst, "first_has_reward_0_and_discount_1", "rewards on FIRST must be 0"),
        (broken.DiscountOnFirst, "first_has_reward_0_and_discount_1", "discounts on FIRST must be 1"),
        (broken.Discounts, "discounts_are_0_or_1_and_0_where_an_episode_ends", "discounts must be 0 or 1; got"),
        (broken.LosesLives, "discounts_are_0_or_1_and_0_where_an_episode_ends", "discount_zero_within_episodes = True"),
        (broken.ActsOnLast, "the_action_on_last_is_ignored", "must ignore it and return FIRST: at t ="),
        (broken.StepsOnLast, "the_action_on_last_is_ignored", "must ignore it and return FIRST: at t ="),
        (broken.SameStart, "episodes_start_as_differently_as_declared", "declare deterministic_reset = True"),
        (broken.SeedsEveryReset, "later_episodes_do_not_repeat_the_first", "seed on the first reset only"),
        (broken.HidesTheEnd, "last_shows_the_final_observation", "LAST must have the true final one"),
        (broken.GlobalRandomness, "the_same_slice_gives_the_same_stream", "another stream; draw from where.seeds()"),
        (broken.ignoring("seed"), "every_field_of_the_slice_changes_the_stream", "with another seed"),
        (broken.ignoring("first_index"), "every_field_of_the_slice_changes_the_stream", "with another first_index"),
        (broken.ignoring("start"), "every_field_of_the_slice_changes_the_stream", "with another start"),
        (broken.ignoring("attempt"), "every_field_of_the_slice_changes_the_stream", "with another attempt"),
        (broken.OneSeed, "the_environments_of_a_batch_differ", "environments 0 and 1 of a batch give the same stream"),
        (broken.SeedsByPlace, "an_environment_alone_gives_its_column_of_the_batch", "made alone with first_index = 1"),
        (broken.SharedRandomness, "an_environment_alone_gives_its_column_of_the_batch", "share nothing"),
        (broken.SharedRandomness, "environments_do_not_affect_each_other", "with random numbers of its own"),
        (broken.ChangesColumns, "environments_do_not_affect_each_other", "the same environment at every step"),
        (broken.Blocks, "a_wrong_number_of_actions_is_refused_at_once", "has not returned after 1.0 seconds"),
        (
            broken.Accepts,
            "a_wrong_number_of_actions_is_refused_at_once",
            "it returned. podracer.envs.host.check_actions",
        ),
        (broken.RaisesAnother, "a_wrong_number_of_actions_is_refused_at_once", "it raised IndexError: 3"),
        (
            broken.ClosesOnce,
            "close_may_be_called_twice_and_from_another_thread",
            "close raised RuntimeError: closed already",
        ),
        (
            broken.ClosesInItsOwnThread,
            "close_may_be_called_twice_and_from_another_thread",
            "RuntimeError: another thread",
        ),
        (broken.HangsInClose, "close_may_be_called_twice_and_from_another_thread", "close from another thread has not"),
        (broken.BadPicture, "render_gives_a_picture", "got float32[8, 8]"),
    ],
)
def test_a_broken_environment_fails_the_test_named_for_its_fault(environment, test, message):
    with pytest.raises(AssertionError) as error:
        getattr(suite(environment), f"test_{test}")()
    assert message in str(error.value)


def test_processes_that_are_left_fail():
    try:
        with pytest.raises(AssertionError, match=r"after close 1 child processes still run: \[\d+\]"):
            suite(broken.LeavesProcesses).test_close_leaves_no_process()
        assert {process.pid for process in broken.LeavesProcesses.left} <= child_processes()
    finally:
        for process in broken.LeavesProcesses.left:
            process.communicate(b"\n")


def test_where_there_is_no_proc_the_children_of_multiprocessing_are_seen(monkeypatch):
    monkeypatch.setattr("pathlib.Path.exists", lambda self: False)
    child = type("Child", (), {"pid": 12})
    monkeypatch.setattr("multiprocessing.active_children", lambda: [child])
    assert child_processes() == {12}


def test_a_false_declaration_fails():
    with pytest.raises(AssertionError, match="although the test declares"):
        suite(broken.Walks, deterministic_reset=True).test_episodes_start_as_differently_as_declared()


def test_an_exception_for_no_test_fails():
    instance = suite(broken.Walks, exceptions={"test_of_nothing": "none"})
    with pytest.raises(AssertionError, match="exceptions names test_of_nothing, which is no test of the suite"):
        instance._skip_exception("test_emissions_are_finite")


@pytest.mark.parametrize(
    ("declared", "environment", "test"),
    [
        (
            {"discount_zero_within_episodes": True},
            broken.LosesLives,
            "discounts_are_0_or_1_and_0_where_an_episode_ends",
        ),
        ({"deterministic_reset": True}, broken.SameStart, "episodes_start_as_differently_as_declared"),
    ],
)
def test_declarations_allow_what_they_name(declared, environment, test):
    getattr(suite(environment, **declared), f"test_{test}")()


@pytest.mark.parametrize(
    ("declared", "skipped"),
    [
        ({"num_steps": 2, "ends": False}, "an_episode_ends"),
        ({"num_steps": 2}, "the_action_on_last_is_ignored"),
        ({"num_steps": 2}, "last_shows_the_final_observation"),
        ({"num_steps": 2}, "later_episodes_do_not_repeat_the_first"),
        ({"ends_where_it_starts": True}, "last_shows_the_final_observation"),
        ({"deterministic_reset": True}, "later_episodes_do_not_repeat_the_first"),
        ({"deterministic": True}, "every_field_of_the_slice_changes_the_stream"),
        ({"deterministic": True}, "the_environments_of_a_batch_differ"),
    ],
)
def test_a_test_with_nothing_to_look_at_is_skipped(declared, skipped):
    with pytest.raises(pytest.skip.Exception):
        getattr(suite(broken.Walks, **declared), f"test_{skipped}")()


def test_make_must_be_overridden():
    with pytest.raises(NotImplementedError, match=r"must override make\(where\)"):
        HostEnvironmentConformance().test_spec_is_valid_and_hashable()


class TestExceptions(HostEnvironmentConformance):
    """What a package cannot do is skipped with its reason, and everything else is tested."""

    exceptions = {"test_environments_do_not_affect_each_other": "one generator for all"}  # noqa: RUF012

    def make(self, where):
        return broken.Walks(where)

    def test_environments_do_not_affect_each_other(self):
        raise AssertionError("not skipped")


# Random actions.


@pytest.mark.parametrize(
    ("action", "low", "high"),
    [
        (DiscreteSpec(3, start=2), [2], [4]),
        (MultiDiscreteSpec((2, 4)), [0, 0], [1, 3]),
        (BoundedSpec((-1.0, 0.0), (1.0, 0.1)), [-1, 0], [1, 0.1]),
    ],
)
def test_random_actions_cover_the_space(action, low, high):
    spec = EnvironmentSpec(ArraySpec(()), action)
    numbers = random_numbers(spec, 1, 500)[0]
    chosen = choose(spec, np.zeros(500), numbers)
    assert chosen.dtype == ("float32" if isinstance(action, BoundedSpec) else "int32")
    assert chosen.shape == ((500,) if isinstance(action, DiscreteSpec) else (500, 2))
    np.testing.assert_allclose(chosen.reshape(500, -1).min(0), low, atol=0.02)
    np.testing.assert_allclose(chosen.reshape(500, -1).max(0), high, atol=0.02)


def test_random_actions_are_legal_and_uniform():
    spec = EnvironmentSpec(MaskedObservation(ArraySpec(()), ArraySpec((5,), "bool")), MultiDiscreteSpec((2, 3)))
    mask = np.tile([False, True, True, False, True], (4000, 1))
    mask[0, 2:] = False  # No legal action: any.
    chosen = choose(spec, MaskedObservation(np.zeros(4000), mask), random_numbers(spec, 1, 4000)[0])
    assert (chosen[:, 0] == 1).all()
    counts = np.bincount(chosen[1:, 1], minlength=3)
    assert counts[1] == 0
    assert abs(counts[0] - 2000) < 150


def test_slices_of_one_environment_get_the_actions_of_their_column():
    numbers = random_numbers(broken.Walks.spec, 3, 4)
    assert numbers.shape == (3, 4, 1)
    alone = choose(broken.Walks.spec, None, numbers[0, 2:3])
    assert alone == choose(broken.Walks.spec, None, numbers[0])[2]
    assert EnvironmentSlice(4).seeds()[2:3] == EnvironmentSlice(1, 2).seeds()
