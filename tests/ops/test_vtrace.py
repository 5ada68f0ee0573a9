"""V-trace against values worked out by hand, and against a twin in NumPy that sums forwards where ours recurs."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from test_advantages import FIRST, LAST, MID, make_trajectory, random_stream

from podracer.ops import generalized_advantages, vtrace

# Compiled once per shape: every number may be an array.
correct = jax.jit(vtrace)


def corrected(step_type, reward, discount, values, ratios, *, gamma=0.9, lambda_=1.0, rho_clip=1.0, c_clip=1.0):
    """Of one stream: targets and advantages as lists."""
    trajectory = make_trajectory(step_type, reward, discount)
    values, ratios = (jnp.asarray(x, jnp.float32)[:, None] for x in (values, ratios))
    result = correct(trajectory, values, jnp.log(ratios), gamma, lambda_, rho_clip, c_clip)
    return np.asarray(result.target)[:, 0], np.asarray(result.advantage)[:, 0]


def twin(step_type, reward, discount, values, ratios, *, gamma, lambda_, rho_clip, c_clip):
    """Equation 1 of the paper: from each step to the end of its episode or window, TD errors times products of `c`."""
    length, batch_size = step_type.shape[0] - 1, step_type.shape[1]
    rho, c = np.minimum(rho_clip, ratios), lambda_ * np.minimum(c_clip, ratios)
    target, advantage = values[:-1].astype(np.float64), np.zeros((length, batch_size))
    for b in range(batch_size):
        valid = [t for t in range(length) if step_type[t, b] != LAST]
        for s in valid:
            product = 1.0
            for t in range(s, length):
                following = gamma * discount[t + 1, b]
                target[s, b] += product * rho[t, b] * (reward[t + 1, b] + following * values[t + 1, b] - values[t, b])
                product *= following * c[t, b]
                if step_type[t + 1, b] == LAST:
                    break
        for s in valid:
            # The last row of the window or of an episode bootstraps from its value; all others from a mixture.
            inside = s + 1 < length and step_type[s + 1, b] != LAST
            corrected = target[s + 1, b] if inside else values[s + 1, b]
            bootstrap = lambda_ * corrected + (1 - lambda_) * values[s + 1, b]
            q = reward[s + 1, b] + gamma * discount[s + 1, b] * bootstrap
            advantage[s, b] = rho[s, b] * (q - values[s, b])
    return target, advantage


def random_ratios(seed, length, batch_size):
    """Above and below 1, by as much as one order of magnitude."""
    return np.exp(np.random.default_rng(seed + 100).normal(size=(length, batch_size))).astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("gamma", "lambda_", "rho_clip", "c_clip"),
    [(0.9, 1.0, 1.0, 1.0), (1.0, 0.8, 2.0, 1.5), (0.99, 0.0, 1.0, 0.5), (0.97, 0.9, 1e9, 1e9), (0.0, 1.0, 0.3, 0.1)],
)
def test_equals_the_numpy_twin_on_random_episodes(seed, gamma, lambda_, rho_clip, c_clip):
    step_type, reward, discount, values = random_stream(seed, 25, 6)
    assert (step_type == LAST).sum() > 10
    assert 0 < (discount[step_type == LAST] == 0).mean() < 1
    # Some lives are lost: no value from there on, though the episode goes on.
    discount[(step_type == MID) & (np.random.default_rng(seed).random(step_type.shape) < 0.1)] = 0
    assert (discount[step_type == MID] == 0).any()
    ratios = random_ratios(seed, 25, 6)
    numbers = {"gamma": gamma, "lambda_": lambda_, "rho_clip": rho_clip, "c_clip": c_clip}
    trajectory = make_trajectory(step_type, reward, discount)
    found = correct(trajectory, jnp.asarray(values), jnp.log(jnp.asarray(ratios)), *numbers.values())
    target, advantage = twin(step_type, reward, discount, values, ratios, **numbers)
    scale = np.abs(target).max()
    np.testing.assert_allclose(found.target, target, rtol=1e-4, atol=2e-5 * scale)
    np.testing.assert_allclose(found.advantage, advantage, rtol=1e-4, atol=2e-5 * scale)
    weight = np.where(step_type[:-1] == LAST, 0, np.minimum(rho_clip, ratios))
    np.testing.assert_allclose(found.rho, weight, rtol=1e-5)


def test_by_hand_with_every_clip_in_use():
    # Ratios 4, 0.5 and 3; rho is 2, 0.5, 2 and c is 1, 0.5, 1. TD errors without discount, of values 1, 2, 3 and 4:
    # 1 + 2 - 1 = 2, 0 + 3 - 2 = 1 and 2 + 4 - 3 = 3.
    target, advantage = corrected(
        [MID] * 4, [0, 1, 0, 2], [1] * 4, [1, 2, 3, 4], [4, 0.5, 3], gamma=1.0, rho_clip=2.0, c_clip=1.0
    )
    # Backwards: 3 + 2 x 3 = 9, 2 + 0.5 x 1 + 0.5 x 6 = 5.5, and 1 + 2 x 2 + 1 x 3.5 = 8.5.
    np.testing.assert_allclose(target, [8.5, 5.5, 9])
    # 2 (1 + 5.5 - 1), 0.5 (0 + 9 - 2) and 2 (2 + 4 - 3).
    np.testing.assert_allclose(advantage, [11, 3.5, 6])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_on_policy_targets_are_bootstrapped_returns(gamma):
    generator = np.random.default_rng(0)
    length = 12
    reward, values = generator.normal(size=(2, length + 1)).astype(np.float32)
    target, advantage = corrected(
        [MID] * (length + 1), reward, [1] * (length + 1), values, np.ones(length), gamma=gamma
    )
    for t in range(length):
        # The window's last value counts once, whatever it is.
        known = sum(gamma**i * reward[t + 1 + i] for i in range(length - t)) + gamma ** (length - t) * values[-1]
        assert target[t] == pytest.approx(known, abs=1e-4)
        assert advantage[t] == pytest.approx(known - values[t], abs=1e-4)


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_on_policy_advantages_are_gae(lambda_):
    step_type, reward, discount, values = random_stream(3, 20, 5)
    trajectory = make_trajectory(step_type, reward, discount)
    found = correct(trajectory, jnp.asarray(values), jnp.zeros((20, 5), jnp.float32), 0.97, lambda_, 1.0, 1.0)
    expected = jax.jit(generalized_advantages)(trajectory, jnp.asarray(values), 0.97, lambda_)
    np.testing.assert_allclose(found.advantage, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.target, expected + values[:-1], rtol=1e-4, atol=1e-5)


def test_a_truncation_bootstraps_from_the_final_observation():
    # Two steps, the second one truncated at an observation worth 20, the reset, and one step of the next episode.
    step_type, values = [FIRST, MID, LAST, FIRST, MID], [10, 10, 20, 10, 10]
    target, advantage = corrected(step_type, [0, 1, 1, 0, 1], [1] * 5, values, [0.5, 1, 7, 1])
    # Backwards: 1 + 0.9 x 20 = 19, 10 + 0.5 (1 + 0.9 x 19 - 10) = 14.05; the reset's row keeps its value, and is
    # neither target nor bootstrap; the last is 1 + 0.9 x 10.
    np.testing.assert_allclose(target, [14.05, 19, 20, 10], rtol=1e-6)
    np.testing.assert_allclose(advantage, [0.5 * (1 + 0.9 * 19 - 10), 9, 0, 0], atol=1e-5)


def test_a_termination_bootstraps_from_nothing():
    step_type, values = [FIRST, MID, LAST, FIRST, MID], [10, 10, 20, 10, 10]
    target, advantage = corrected(step_type, [0, 1, 1, 0, 1], [1, 1, 0, 1, 1], values, [0.5, 1, 7, 1])
    np.testing.assert_allclose(target, [10 + 0.5 * (1 + 0.9 * 1 - 10), 1, 20, 10], rtol=1e-6)
    np.testing.assert_allclose(advantage, [0.5 * (1 + 0.9 * 1 - 10), -9, 0, 0], atol=1e-5)


@pytest.mark.parametrize("lambda_", [1.0, 0.5])
def test_a_lost_life_ends_the_value_and_not_the_episode(lambda_):
    # No discount on row 2, which is neither LAST nor followed by a reset: what comes later is worth nothing before it,
    # the row itself is no masked one, and the steps after it count as ever.
    step_type, reward, discount = [FIRST, MID, MID, MID, MID], [0, 1, 2, 3, 4], [1, 1, 0, 1, 1]
    values = [5, 6, 7, 8, 9]
    target, advantage = corrected(step_type, reward, discount, values, np.ones(4), lambda_=lambda_)
    errors = np.array([1 + 0.9 * 6 - 5, 2 - 6, 3 + 0.9 * 8 - 7, 4 + 0.9 * 9 - 8])
    expected = errors + 0.9 * lambda_ * np.array([errors[1], 0, errors[3], 0])
    np.testing.assert_allclose(advantage, expected, rtol=1e-5)
    np.testing.assert_allclose(target, expected + values[:-1], rtol=1e-5)
    trajectory, column = make_trajectory(step_type, reward, discount), jnp.asarray(values, jnp.float32)[:, None]
    gae = jax.jit(generalized_advantages)(trajectory, column, 0.9, lambda_)
    np.testing.assert_allclose(gae[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(("ending", "final_value", "last_target"), [(0, 5, 1), (1, 5, 1 + 0.9 * 5)])
def test_lambda_zero_on_a_chain_that_ends(ending, final_value, last_target):
    # Three states, a reward of 1 on the end, values 2, 3 and 4 before it.
    values = [2, 3, 4, final_value]
    target, advantage = corrected([FIRST, MID, MID, LAST], [0, 0, 0, 1], [1, 1, 1, ending], values, [1] * 3, lambda_=0)
    np.testing.assert_allclose(target, [0.9 * 3, 0.9 * 4, last_target], rtol=1e-6)
    np.testing.assert_allclose(advantage, target - values[:-1], rtol=1e-5)


@pytest.mark.parametrize(("ending", "target"), [(MID, 1 + 0.9 * 7), (LAST, 1.0)])
def test_the_last_step_of_the_window_keeps_its_reward(ending, target):
    discount = [1, 1, 1, 0 if ending == LAST else 1]
    targets, advantages = corrected([FIRST, MID, MID, ending], [0, 0, 0, 1], discount, [0, 0, 0, 7], [1] * 3)
    assert targets.shape == (3,)
    np.testing.assert_allclose(targets, [0.81 * target, 0.9 * target, target], rtol=1e-6)
    assert advantages[-1] == pytest.approx(target)


def test_windows_of_one_step():
    target, advantage = corrected([FIRST, MID], [0, 1], [1, 1], [2, 10], [0.5])
    np.testing.assert_allclose(target, [2 + 0.5 * (1 + 9 - 2)])
    np.testing.assert_allclose(advantage, [0.5 * (1 + 9 - 2)])


def test_an_action_that_the_learner_never_takes_teaches_nothing():
    # Nor does anything that came after it: its target is its value, and its weight is 0.
    target, advantage = corrected([MID] * 3, [0, 5, 5], [1] * 3, [1, 2, 3], [0, 1])
    np.testing.assert_allclose(target, [1, 5 + 0.9 * 3])
    assert advantage[0] == 0


def test_ratios_that_overflow_are_clipped_and_differentiable():
    trajectory = make_trajectory([MID] * 3, [0, 1, 1], [1] * 3)
    values, log_ratios = jnp.ones((3, 1), jnp.float32), jnp.full((2, 1), 1e4, jnp.float32)

    def total(log_ratios):
        return vtrace(trajectory, values, log_ratios, 0.9, 1.0, 2.0, 1.0).target.sum()

    assert np.isfinite(total(log_ratios))
    np.testing.assert_array_equal(jax.grad(total)(log_ratios), 0)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_garbage_on_the_reset_row_changes_nothing(garbage):
    step_type, reward, discount, values = random_stream(5, 20, 5)
    first, last = step_type == FIRST, step_type[:-1] == LAST
    first[0] = False
    assert first.any()
    assert last.any()
    log_ratios = np.log(random_ratios(5, 20, 5))
    clean = make_trajectory(step_type, reward, discount), jnp.asarray(log_ratios)
    dirty = make_trajectory(step_type, np.where(first, garbage, reward), np.where(first, garbage, discount))
    dirty = dirty, jnp.asarray(np.where(last, garbage, log_ratios))

    def results_and_gradient(trajectory, log_ratios):
        def total(values, log_ratios):
            result = correct(trajectory, values, log_ratios, 0.9, 0.8, 1.5, 1.0)
            return jnp.square(result.target).sum() + jnp.square(result.advantage).sum()

        result = correct(trajectory, jnp.asarray(values), log_ratios, 0.9, 0.8, 1.5, 1.0)
        gradients = jax.grad(total, (0, 1))(jnp.asarray(values), log_ratios)
        return result.target, result.advantage, result.rho, *gradients

    for found, expected in zip(results_and_gradient(*dirty), results_and_gradient(*clean), strict=True):
        np.testing.assert_array_equal(found, expected)
    target, advantage, rho = results_and_gradient(*clean)[:3]
    np.testing.assert_array_equal(target[last], values[:-1][last])
    np.testing.assert_array_equal(advantage[last], 0)
    np.testing.assert_array_equal(rho[last], 0)


def test_shapes_are_checked_in_tests():
    """By `conftest.py`: outside of tests one column of ratios would be broadcast."""
    trajectory = make_trajectory([[FIRST] * 2, [MID] * 2], [[0.0] * 2] * 2, [[1.0] * 2] * 2)
    with pytest.raises(jaxtyping.TypeCheckError, match="log_ratios"):
        vtrace(trajectory, jnp.zeros((2, 2), jnp.float32), jnp.zeros(2, jnp.float32), 0.9, 0.9, 1.0, 1.0)
