"""Advantages against values worked out by hand, and against a twin in NumPy that sums forwards where ours recurs."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from podracer.ops import generalized_advantages
from podracer.types import StepType, TimeStep, Trajectory, valid_mask

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
# Compiled once per shape: gamma and lambda may be arrays.
estimate = jax.jit(generalized_advantages)


def test_shapes_are_checked_in_tests():
    """By `conftest.py`: outside of tests one column of values would be broadcast."""
    trajectory = make_trajectory([[FIRST] * 2, [MID] * 2], [[0.0] * 2] * 2, [[1.0] * 2] * 2)
    with pytest.raises(jaxtyping.TypeCheckError, match="values"):
        generalized_advantages(trajectory, jnp.zeros(2, jnp.float32), 0.9, 0.9)


def make_trajectory(step_type, reward, discount):
    """A trajectory of `[T + 1]` or `[T + 1, B]` rows whose observations, actions and extras do not matter."""
    columns = [np.asarray(x, np.float32) for x in (step_type, reward, discount)]
    step_type, reward, discount = (x[:, None] if x.ndim == 1 else x for x in columns)
    timestep = TimeStep(jnp.asarray(step_type, jnp.int8), jnp.asarray(reward), jnp.asarray(discount), ())
    return Trajectory(timestep, (), (), ())


def advantages(step_type, reward, discount, values, gamma, lambda_):
    """Of one stream, as a list."""
    trajectory = make_trajectory(step_type, reward, discount)
    column = jnp.asarray(values, jnp.float32)[:, None]
    return np.asarray(estimate(trajectory, column, gamma, lambda_))[:, 0]


def random_stream(seed, length, batch_size):
    """Episodes of random lengths, ended by termination or by truncation, and random values `[T + 1, B]`."""
    generator = np.random.default_rng(seed)
    step_type = np.zeros((length + 1, batch_size), np.int8)
    discount = np.ones((length + 1, batch_size), np.float32)
    reward = generator.normal(size=(length + 1, batch_size)).astype(np.float32)
    values = generator.normal(size=(length + 1, batch_size)).astype(np.float32)
    for b in range(batch_size):
        # The window may begin anywhere in an episode.
        previous = generator.choice([FIRST, MID, LAST])
        step_type[0, b] = previous
        for t in range(1, length + 1):
            ends = LAST if generator.random() < 0.3 else MID
            now = FIRST if previous == LAST else ends
            if now == LAST and generator.random() < 0.5:
                discount[t, b] = 0
            if now == FIRST:
                reward[t, b] = 0
            step_type[t, b] = previous = now
    return step_type, reward, discount, values


def twin(step_type, reward, discount, values, gamma, lambda_):
    """GAE by its definition: a weighted sum of the TD errors from each step to the end of its episode or window."""
    length, batch_size = step_type.shape[0] - 1, step_type.shape[1]
    result = np.zeros((length, batch_size))
    for b in range(batch_size):
        for t in range(length):
            if step_type[t, b] == LAST:
                continue
            weight = 1.0
            for k in range(t, length):
                error = reward[k + 1, b] + gamma * discount[k + 1, b] * values[k + 1, b] - values[k, b]
                result[t, b] += weight * error
                if step_type[k + 1, b] == LAST:
                    break
                weight *= gamma * lambda_
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lambda_"), [(0.9, 0.8), (1.0, 1.0), (0.99, 0.0), (0.0, 0.95), (1.0, 0.5)])
def test_equals_the_numpy_twin_on_random_episodes(seed, gamma, lambda_):
    step_type, reward, discount, values = random_stream(seed, 25, 6)
    assert (step_type == LAST).sum() > 10
    assert 0 < (discount[step_type == LAST] == 0).mean() < 1
    trajectory = make_trajectory(step_type, reward, discount)
    found = estimate(trajectory, jnp.asarray(values), gamma, lambda_)
    expected = twin(step_type, reward, discount, values, gamma, lambda_)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_truncation_bootstraps_from_the_final_observation():
    # Two steps, the second one truncated at an observation worth 20, the reset, and one step of the next episode.
    found = advantages([FIRST, MID, LAST, FIRST, MID], [0, 1, 1, 0, 1], [1] * 5, [10, 10, 20, 10, 10], 0.9, 1.0)
    # Backwards: 1 + 0.9 x 20 - 10 = 9, then (1 + 0.9 x 10 - 10) + 0.9 x 9. From the reset's value it would be 0.
    np.testing.assert_allclose(found, [8.1, 9, 0, 0], atol=1e-5)


def test_a_termination_bootstraps_from_nothing():
    discount = [1, 1, 0, 1, 1]
    found = advantages([FIRST, MID, LAST, FIRST, MID], [0, 1, 1, 0, 1], discount, [10, 10, 20, 10, 10], 0.9, 1.0)
    np.testing.assert_allclose(found, [-8.1, -9, 0, 0], atol=1e-5)


def test_the_step_that_ends_an_episode_is_the_one_before_last():
    # A reward of 1 on the third step, which terminates, reaches all three steps and nothing after. Reading the end one
    # row too early would leave [0, 0, 1].
    step_type, discount = [FIRST, MID, MID, LAST, FIRST, MID], [1, 1, 1, 0, 1, 1]
    found = advantages(step_type, [0, 0, 0, 1, 0, 0], discount, [0] * 6, 1.0, 1.0)
    np.testing.assert_array_equal(found, [1, 1, 1, 0, 0])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_lambda_one_is_the_bootstrapped_return(gamma):
    generator = np.random.default_rng(0)
    length = 12
    reward, values = generator.normal(size=(2, length + 1)).astype(np.float32)
    found = advantages([MID] * (length + 1), reward, [1] * (length + 1), values, gamma, 1.0)
    for t in range(length):
        later = sum(gamma**i * reward[t + 1 + i] for i in range(length - t))
        # The window's last value counts once, whatever it is.
        assert found[t] + values[t] == pytest.approx(later + gamma ** (length - t) * values[-1], abs=1e-4)


def test_lambda_zero_is_the_td_error():
    step_type, reward, discount, values = random_stream(7, 20, 5)
    found = estimate(make_trajectory(step_type, reward, discount), jnp.asarray(values), 0.9, 0.0)
    error = reward[1:] + 0.9 * discount[1:] * values[1:] - values[:-1]
    np.testing.assert_allclose(found, np.where(step_type[:-1] == LAST, 0, error), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ending", "final_value", "last_target"), [(0, 5, 1), (1, 5, 1 + 0.9 * 5)])
def test_lambda_zero_on_a_chain_that_ends(ending, final_value, last_target):
    # Three states, a reward of 1 on the end, values 2 and 3 before it.
    values = [2, 3, 4, final_value]
    found = advantages([FIRST, MID, MID, LAST], [0, 0, 0, 1], [1, 1, 1, ending], values, 0.9, 0.0)
    np.testing.assert_allclose(found + np.asarray(values[:-1]), [0.9 * 3, 0.9 * 4, last_target], rtol=1e-6)


@pytest.mark.parametrize(("ending", "target"), [(MID, 1 + 0.9 * 7), (LAST, 1.0)])
def test_the_last_step_of_the_window_keeps_its_reward(ending, target):
    discount = [1, 1, 1, 0 if ending == LAST else 1]
    found = advantages([FIRST, MID, MID, ending], [0, 0, 0, 1], discount, [0, 0, 0, 7], 0.9, 0.95)
    assert found.shape == (3,)
    assert found[-1] == pytest.approx(target)
    assert found[0] == pytest.approx((0.9 * 0.95) ** 2 * target)


def test_advantages_plus_values_are_lambda_returns():
    # The recursion of TD(lambda), in which values are mixed and no TD error appears.
    step_type, reward, discount, values = random_stream(3, 20, 5)
    gamma, lambda_ = 0.97, 0.8
    found = estimate(make_trajectory(step_type, reward, discount), jnp.asarray(values), gamma, lambda_)
    targets = np.asarray(found) + values[:-1]
    following = values[-1].astype(np.float64)
    for t in reversed(range(20)):
        mixed = np.where(step_type[t + 1] == LAST, values[t + 1], (1 - lambda_) * values[t + 1] + lambda_ * following)
        following = reward[t + 1] + gamma * discount[t + 1] * mixed
        following = np.where(step_type[t] == LAST, values[t], following)
        np.testing.assert_allclose(targets[t], following, rtol=1e-4, atol=1e-5)


def test_without_discount_the_target_is_the_reward():
    step_type, reward, discount, values = random_stream(11, 15, 4)
    found = estimate(make_trajectory(step_type, reward, discount), jnp.asarray(values), 0.0, 0.95)
    targets = np.asarray(found) + values[:-1]
    valid = step_type[:-1] != LAST
    np.testing.assert_allclose(targets[valid], reward[1:][valid], rtol=1e-5, atol=1e-6)


def test_an_endless_environment_without_discount_or_reward_is_finite():
    length = 500
    found = advantages([MID] * (length + 1), [0] * (length + 1), [1] * (length + 1), [3] * (length + 1), 1.0, 1.0)
    np.testing.assert_array_equal(found, np.zeros(length))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_garbage_on_the_reset_row_changes_nothing(garbage):
    step_type, reward, discount, values = random_stream(5, 20, 5)
    first = step_type == FIRST
    first[0] = False
    assert first.any()
    clean = make_trajectory(step_type, reward, discount)
    dirty = make_trajectory(step_type, np.where(first, garbage, reward), np.where(first, garbage, discount))
    dirty = dataclasses.replace(dirty, extras=jnp.full((20, 5), garbage, jnp.float32))

    def values_and_gradient(trajectory):
        def total(values):
            return jnp.square(estimate(trajectory, values, 0.9, 0.8)).sum()

        return estimate(trajectory, jnp.asarray(values), 0.9, 0.8), jax.grad(total)(jnp.asarray(values))

    for found, expected in zip(values_and_gradient(dirty), values_and_gradient(clean), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_masked_rows_are_those_on_which_the_environment_resets():
    trajectory = make_trajectory([LAST, FIRST, MID, LAST, FIRST, LAST], [0] * 6, [1] * 6)
    np.testing.assert_array_equal(valid_mask(trajectory)[:, 0], [False, True, True, False, True])
