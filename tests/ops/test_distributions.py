"""Distributions against SciPy, at the edges of float32, and under masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from podracer.ops import distribution_for, num_parameters
from podracer.types import BoundedSpec, DiscreteSpec, MultiDiscreteSpec


@functools.partial(jax.jit, static_argnames=("spec", "count"))
def draw(spec, outputs, count, mask=None, seed=0):
    """`count` samples `[count, ...]`."""
    return jax.vmap(distribution_for(spec, outputs, mask).sample)(jax.random.split(jax.random.key(seed), count))


@functools.partial(jax.jit, static_argnames="spec")
def log_prob(spec, outputs, sample, mask=None):
    return distribution_for(spec, outputs, mask).log_prob(sample)


@functools.partial(jax.jit, static_argnames="spec")
def mode_and_entropy(spec, outputs, mask=None):
    distribution = distribution_for(spec, outputs, mask)
    return distribution.mode(), distribution.entropy()


@functools.partial(jax.jit, static_argnames="spec")
def to_action(spec, outputs, sample):
    return distribution_for(spec, outputs).to_action(sample)


def outputs_for(spec, *lead, seed=0):
    """What a network might give."""
    outputs = np.random.default_rng(seed).normal(size=(*lead, num_parameters(spec)))
    return jnp.asarray(outputs, jnp.float32)


SPECS = {
    "discrete": (DiscreteSpec(5, start=-2), 5, (), jnp.int32),
    "bytes": (DiscreteSpec(3, dtype="int8"), 3, (), jnp.int8),
    "multi": (MultiDiscreteSpec((2, 3, 4)), 9, (3,), jnp.int32),
    "small multi": (MultiDiscreteSpec((1, 2), dtype="uint8"), 3, (2,), jnp.uint8),
    "bounded": (BoundedSpec((-1.0, 0.1), (1.0, 0.3)), 4, (2,), jnp.float32),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("lead", [(), (7,), (2, 3)])
def test_shapes_and_dtypes(name, lead):
    spec, parameters, shape, dtype = SPECS[name]
    assert num_parameters(spec) == parameters

    def everything(outputs, key):
        distribution = distribution_for(spec, outputs)
        samples = [distribution.sample(key), distribution.mode()]
        actions = [distribution.to_action(sample) for sample in samples]
        return samples + actions, [distribution.log_prob(sample) for sample in samples] + [distribution.entropy()]

    samples, numbers = jax.eval_shape(everything, outputs_for(spec, *lead), jax.random.key(0))
    assert {(x.shape, x.dtype) for x in samples} == {((*lead, *shape), jnp.dtype(dtype))}
    assert {(x.shape, x.dtype) for x in numbers} == {(lead, jnp.dtype("float32"))}


def test_categorical_equals_scipy():
    spec = DiscreteSpec(6)
    logits = 3 * outputs_for(spec, 4)
    log_probs = scipy.special.log_softmax(np.asarray(logits, np.float64), -1)
    for action in range(6):
        np.testing.assert_allclose(log_prob(spec, logits, jnp.full(4, action)), log_probs[:, action], rtol=1e-5)
    mode, entropy = mode_and_entropy(spec, logits)
    np.testing.assert_allclose(entropy, scipy.stats.entropy(np.exp(log_probs), axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(mode, log_probs.argmax(-1))


def test_categorical_gradient_is_the_score():
    spec, sample = DiscreteSpec(5), jnp.asarray([0, 4, 2])
    logits = outputs_for(spec, 3)
    found = jax.jit(jax.grad(lambda x: log_prob(spec, x, sample).sum()))(logits)
    expected = np.eye(5)[np.asarray(sample)] - scipy.special.softmax(np.asarray(logits), -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_multi_categorical_is_the_product_of_its_components():
    spec = MultiDiscreteSpec((2, 3, 4))
    logits = outputs_for(spec, 5)
    parts = [scipy.special.log_softmax(np.asarray(logits[:, a:b]), -1) for a, b in ((0, 2), (2, 5), (5, 9))]
    sample = np.asarray([[0, 2, 1], [1, 0, 3], [0, 1, 0], [1, 1, 2], [1, 2, 3]], np.int32)
    expected = sum(part[np.arange(5), sample[:, i]] for i, part in enumerate(parts))
    np.testing.assert_allclose(log_prob(spec, logits, jnp.asarray(sample)), expected, rtol=1e-5)
    mode, entropy = mode_and_entropy(spec, logits)
    np.testing.assert_allclose(entropy, sum(scipy.stats.entropy(np.exp(part), axis=-1) for part in parts), rtol=1e-5)
    np.testing.assert_array_equal(mode, np.stack([part.argmax(-1) for part in parts], -1))


def test_categorical_samples_as_often_as_it_says():
    probabilities = np.asarray([0.5, 0.3, 0.15, 0.05])
    samples = draw(DiscreteSpec(4, start=3), jnp.asarray(np.log(probabilities), jnp.float32), 20_000)
    counts = np.bincount(samples, minlength=4)
    assert scipy.stats.chisquare(counts, 20_000 * probabilities).pvalue > 1e-3


def test_multi_categorical_components_are_independent():
    samples = np.asarray(draw(MultiDiscreteSpec((2, 2)), jnp.zeros(4, jnp.float32), 20_000))
    counts = np.bincount(2 * samples[:, 0] + samples[:, 1], minlength=4)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_actions_begin_at_the_start_of_their_space():
    spec, logits = DiscreteSpec(3, start=-1), jnp.zeros(3, jnp.float32)
    samples = draw(spec, logits, 100)
    assert set(np.asarray(samples)) == {0, 1, 2}
    assert set(np.asarray(to_action(spec, logits, samples))) == {-1, 0, 1}
    # The remembered sample, and not the action, is what log-probabilities are taken of.
    np.testing.assert_allclose(log_prob(spec, jnp.zeros((100, 3), jnp.float32), samples), -np.log(3), rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_illegal_actions_have_probability_zero(scale):
    spec = DiscreteSpec(4)
    legal = np.asarray([[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]], bool)
    # The network prefers what is illegal.
    outputs = np.where(legal, -scale, scale).astype(np.float32) + np.asarray(outputs_for(spec, 3))
    repeated_outputs, repeated_mask = (jnp.asarray(np.repeat(x[:, None], 4, 1)) for x in (outputs, legal))
    actions = jnp.asarray(np.tile(np.arange(4, dtype=np.int32), (3, 1)))
    probabilities = np.exp(log_prob(spec, repeated_outputs, actions, repeated_mask))
    assert (probabilities[~legal] == 0).all()
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
    samples = np.asarray(draw(spec, jnp.asarray(outputs), 500, jnp.asarray(legal)))
    modes = np.asarray(mode_and_entropy(spec, jnp.asarray(outputs), jnp.asarray(legal))[0])
    for i in range(3):
        assert legal[i, samples[:, i]].all()
        assert legal[i, modes[i]]


def test_masks_of_components_lie_side_by_side():
    spec = MultiDiscreteSpec((2, 3))
    mask = jnp.asarray([True, False, False, True, True])
    outputs = jnp.asarray([0.0, 9.0, 9.0, 0.0, 1.0])
    samples = np.asarray(draw(spec, outputs, 500, mask))
    assert set(samples[:, 0]) == {0}
    assert set(samples[:, 1]) == {1, 2}
    pairs = jnp.asarray([(i, j) for i in range(2) for j in range(3)])
    tiled_outputs, tiled_mask = (jnp.asarray(np.tile(x, (6, 1))) for x in (outputs, mask))
    probabilities = np.exp(log_prob(spec, tiled_outputs, pairs, tiled_mask))
    second = scipy.special.softmax([0.0, 1.0])
    np.testing.assert_allclose(probabilities, [0, *second, 0, 0, 0], rtol=1e-6)


def test_masked_entropy_is_that_of_the_legal_actions():
    spec, mask = DiscreteSpec(5), jnp.asarray([True, False, True, True, False])
    logits = outputs_for(spec)
    legal = scipy.special.log_softmax(np.asarray(logits)[[0, 2, 3]])
    np.testing.assert_allclose(mode_and_entropy(spec, logits, mask)[1], scipy.stats.entropy(np.exp(legal)), rtol=1e-5)
    np.testing.assert_allclose(log_prob(spec, logits, jnp.asarray(2), mask), legal[1], rtol=1e-5)


def test_one_legal_action_is_certain():
    spec, mask = DiscreteSpec(4), jnp.asarray(np.eye(4)[[2, 0]], bool)
    outputs = outputs_for(spec, 2)
    np.testing.assert_array_equal(draw(spec, outputs, 50, mask), np.tile([2, 0], (50, 1)))
    np.testing.assert_array_equal(log_prob(spec, outputs, jnp.asarray([2, 0]), mask), [0, 0])
    np.testing.assert_array_equal(mode_and_entropy(spec, outputs, mask), [[2, 0], [0, 0]])


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_masked_values_and_gradients_are_finite(scale):
    spec = DiscreteSpec(4)
    # All legal, one legal, and none, as on padding after the end of a game.
    mask = np.asarray([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)

    def total(outputs):
        distribution = distribution_for(spec, outputs, jnp.asarray(mask))
        return (distribution.log_prob(distribution.mode()) + distribution.entropy()).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(scale * outputs_for(spec, 3))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    # What is illegal does not learn.
    assert (np.asarray(gradient)[1][~mask[1]] == 0).all()


def test_a_row_without_legal_actions_counts_as_all_legal():
    spec, sample = DiscreteSpec(3), jnp.asarray([1, 0])
    outputs = outputs_for(spec, 2)
    masked = log_prob(spec, outputs, sample, jnp.asarray([[False, False, False], [True, False, True]]))
    free = log_prob(spec, outputs, sample)
    assert masked[0] == free[0]
    # Its neighbour's mask still holds.
    assert masked[1] > free[1]


BOUNDS = {
    "unit": BoundedSpec((-1.0,), (1.0,)),
    "torque": BoundedSpec((-2.0,), (2.0,)),
    "rounding": BoundedSpec((0.1,), (0.3,)),
    "thirds": BoundedSpec((-1 / 3,), (0.7,)),
    "large": BoundedSpec((-1000.0,), (3000.0,)),
}


@pytest.mark.parametrize("name", ["unit", "rounding", "large"])
def test_tanh_normal_density_is_that_of_the_action(name):
    spec = BOUNDS[name]
    low, high = spec.low[0], spec.high[0]
    # In float64, so that only the library's rounding is measured, and spaced by samples, to resolve the ends.
    sample = np.linspace(-9, 9, 20_001)
    action = low + (high - low) * (np.tanh(sample) + 1) / 2
    for loc, log_scale in ((0.0, -1.0), (0.7, 0.0), (-1.0, 0.5)):
        outputs = jnp.asarray(np.tile(np.float32([loc, log_scale]), (len(action), 1)))
        density = np.exp(log_prob(spec, outputs, jnp.asarray(sample, jnp.float32)[:, None]))
        assert np.trapezoid(density, action) == pytest.approx(1, abs=1e-3)
        # Probability of an interval, against the normal that was squashed.
        below = action < low + 0.4 * (high - low)
        expected = scipy.stats.norm(loc, np.exp(log_scale)).cdf(sample[below][-1])
        assert np.trapezoid(density[below], action[below]) == pytest.approx(expected, abs=1e-3)


def test_tanh_normal_of_several_components_sums_their_log_densities():
    spec = BoundedSpec((-2.0, 0.0), (2.0, 10.0))
    outputs = 0.5 * outputs_for(spec, 5)
    loc, log_scale = np.split(np.asarray(outputs, np.float64), 2, -1)
    sample = draw(spec, outputs, 1)[0]
    x = np.asarray(sample, np.float64)
    normal, half = scipy.stats.norm(loc, np.exp(log_scale)), np.asarray([2.0, 5.0])
    # The action is half the width times tanh of the sample, so its density is divided by the slope.
    expected = normal.logpdf(x) - np.log(half * (1 - np.tanh(x) ** 2))
    np.testing.assert_allclose(log_prob(spec, outputs, sample), expected.sum(-1), rtol=1e-4)
    mode, entropy = mode_and_entropy(spec, outputs)
    # Before the squashing: entropy has a closed form there, and tanh of the mode is the action's median.
    np.testing.assert_allclose(entropy, normal.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(mode, loc)
    action = np.asarray([0.0, 5.0]) + half * np.tanh(x)
    np.testing.assert_allclose(to_action(spec, outputs, sample), action, rtol=1e-5, atol=1e-5)


def test_log_standard_deviations_are_kept_within_bounds():
    spec = BOUNDS["unit"]
    outputs = jnp.asarray([[0.0, -10.0], [0.0, -1000.0], [0.0, 2.0], [0.0, 1000.0]])
    _, entropy = mode_and_entropy(spec, outputs)
    assert entropy[0] == entropy[1] < entropy[2] == entropy[3]


def test_tanh_normal_is_finite_at_the_extremes():
    spec = BOUNDS["rounding"]
    # A scale of e^10 about 0, one of e^-100 about -8.51, where tanh saturates, and worse.
    extremes = [(0, 10), (-8.51, -100), (8.51, -100), (0, 1e30), (1e6, 0), (-1e6, 100), (0, -1e30)]
    outputs = jnp.asarray(extremes, jnp.float32)
    own = draw(spec, outputs, 1)[0]
    samples = jnp.stack([own, *(jnp.full_like(own, x) for x in (0.0, -20.0, 20.0))])
    tiled = jnp.tile(outputs[None], (len(samples), 1, 1))
    value, gradient = jax.jit(jax.value_and_grad(lambda x: log_prob(spec, x, samples).sum()))(tiled)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    # The sample, and not the action, is remembered: the action may be exactly a bound, whose density is no number.
    assert np.isin(np.asarray(to_action(spec, outputs, own)), np.float32([spec.low, spec.high])).any()


@pytest.mark.parametrize("name", BOUNDS)
def test_continuous_actions_are_within_their_bounds(name):
    spec = BOUNDS[name]
    outputs = jnp.asarray([0.0, 2.0])
    samples = np.concatenate([np.linspace(-20, 20, 2001), [-1e9, -50.0, 0.0, 50.0, 1e9]])
    actions = np.asarray(to_action(spec, outputs, jnp.asarray(samples, jnp.float32)[:, None]))
    # As an environment with float32 bounds checks it.
    low, high = np.float32(spec.low[0]), np.float32(spec.high[0])
    assert (actions >= low).all()
    assert (actions <= high).all()
    np.testing.assert_array_equal(actions[[-5, -1], 0], [low, high])
    np.testing.assert_allclose(actions[-3, 0], (low + high) / 2, rtol=1e-6)


def test_tanh_normal_samples_are_normal():
    samples = np.asarray(draw(BOUNDS["unit"], jnp.asarray([0.5, -0.7]), 20_000))[:, 0]
    assert scipy.stats.kstest(samples, scipy.stats.norm(0.5, np.exp(-0.7)).cdf).pvalue > 1e-3
