"""Random actions over whole action spaces, and the masks that these spaces allow.

That only legal actions are drawn is tested with the agent that draws them.
"""

import jax
import numpy as np
import pytest

from podracer import envs
from podracer.types import ArraySpec, BoundedSpec, DiscreteSpec, EnvironmentSpec, MaskedObservation, MultiDiscreteSpec


@pytest.mark.parametrize(
    ("action", "low", "high", "dtype"),
    [
        (DiscreteSpec(3, start=5), [5], [7], "int32"),
        (MultiDiscreteSpec((2, 4)), [0, 0], [1, 3], "int32"),
        (BoundedSpec((-1.0, 5.0), (1.0, 6.0)), [-1, 5], [1, 6], "float32"),
    ],
)
def test_random_actions_fill_their_space(action, low, high, dtype):
    spec = EnvironmentSpec(ArraySpec((1,)), action)
    drawn = np.asarray(envs.sample_action(spec, jax.random.key(0), 500))
    assert drawn.dtype == dtype
    np.testing.assert_allclose(drawn.reshape(500, -1).min(0), low, atol=0.05)
    np.testing.assert_allclose(drawn.reshape(500, -1).max(0), high, atol=0.05)


@pytest.mark.parametrize(
    ("action", "mask", "expected"),
    [
        (DiscreteSpec(3), ArraySpec((4,), "bool"), ("shape=(4,)", "shape (3,) and dtype bool")),
        (DiscreteSpec(3), ArraySpec((1,), "bool"), ("shape=(1,)", "shape (3,)")),
        (DiscreteSpec(3), ArraySpec((1, 3), "bool"), ("shape=(1, 3)", "shape (3,)")),
        (DiscreteSpec(3), ArraySpec((3,), "float32"), ("dtype='float32'", "dtype bool")),
        (DiscreteSpec(3), (3,), ("the action mask is (3,)", "shape (3,)")),
        (MultiDiscreteSpec((2, 3)), ArraySpec((2, 3), "bool"), ("shape=(2, 3)", "shape (5,)")),
        (BoundedSpec((0.0, 0.0), (1.0, 1.0)), ArraySpec((2,), "bool"), ("shape=(2,)", "real have none")),
    ],
)
def test_a_mask_that_does_not_fit_its_actions_is_refused(action, mask, expected):
    with pytest.raises(ValueError, match="action mask") as error:
        EnvironmentSpec(MaskedObservation(ArraySpec((2,)), mask), action)
    for part in expected:
        assert part in str(error.value)


@pytest.mark.parametrize(("action", "size"), [(DiscreteSpec(3, start=7), 3), (MultiDiscreteSpec((2, 3)), 5)])
def test_a_mask_has_an_element_for_each_action_of_each_component(action, size):
    spec = EnvironmentSpec(MaskedObservation(ArraySpec((2,)), ArraySpec((size,), "bool", 0, 1)), action)
    assert hash(spec) == hash(spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiscreteSpec(0), "num_actions is 0"),
        (lambda: MultiDiscreteSpec(()), r"num_actions is \(\)"),
        (lambda: MultiDiscreteSpec((2, 0)), r"num_actions is \(2, 0\)"),
        (lambda: BoundedSpec((0.0,), (float("inf"),)), "finite bounds"),
        (lambda: BoundedSpec((0.0, 1.0), (1.0, 1.0)), "low < high"),
    ],
)
def test_spaces_without_actions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
