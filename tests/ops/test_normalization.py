"""Running moments against NumPy's, over any number of devices, masked, and where float32 runs out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import parallel
from podracer.ops import Moments, merge_moments, normalize

# Compiled, as agents use them, and once per shape.
merge = jax.jit(merge_moments)
normalized = jax.jit(normalize, static_argnames="clip")


def moments_of(batches, masks=None):
    """After each batch in turn."""
    moments = Moments.zero(jax.tree.map(lambda x: x[0], batches[0]))
    for i, batch in enumerate(batches):
        rows = jax.tree.leaves(batch)[0].shape[0]
        mask = jnp.ones(rows, bool) if masks is None else masks[i]
        moments = merge(moments, batch, mask)
    return moments


def test_equal_numpy_over_all_batches_together():
    generator = np.random.default_rng(0)
    batches = [generator.normal(3 * i, 1 + i, (n, 4)).astype(np.float32) for i, n in enumerate((1, 7, 50, 2))]
    moments = moments_of([jnp.asarray(batch) for batch in batches])
    together = np.concatenate(batches)
    assert moments.count == 60
    np.testing.assert_allclose(moments.mean, together.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, together.var(0), rtol=1e-5)


def test_pytrees_of_any_shape_and_dtype():
    generator = np.random.default_rng(1)
    batch = {
        "image": generator.integers(0, 256, (5, 6, 3, 2), np.uint8),
        "vector": (generator.normal(size=(5, 6, 4)).astype(np.float32),),
        "scalar": generator.normal(size=(5, 6)).astype(np.float32),
        "flag": generator.random((5, 6, 2)) < 0.5,
    }
    batch = jax.tree.map(jnp.asarray, batch)
    zero = Moments.zero(jax.tree.map(lambda x: x[0, 0], batch))
    mask = jnp.asarray(generator.random((5, 6)) < 0.7)
    moments = merge(zero, batch, mask)
    for name, x, mean, variance in zip(
        ("flag", "image", "scalar", "vector"),
        *(jax.tree.leaves(tree) for tree in (batch, moments.mean, moments.variance)),
        strict=True,
    ):
        kept = np.asarray(x, np.float64)[np.asarray(mask)]
        assert mean.dtype == variance.dtype == jnp.float32, name
        np.testing.assert_allclose(mean, kept.mean(0), rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(variance, kept.var(0), rtol=1e-4, atol=1e-6, err_msg=name)
    normal = normalized(batch, moments)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), normal) == jax.tree.map(
        lambda x: (x.shape, jnp.dtype("float32")), batch
    )


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_masked_rows_are_ignored(garbage):
    generator = np.random.default_rng(2)
    rows = generator.normal(size=(40, 3)).astype(np.float32)
    mask = generator.random(40) < 0.6
    dirty = np.where(mask[:, None], rows, np.float32(garbage))
    moments = moments_of(
        [jnp.asarray(dirty[:25]), jnp.asarray(dirty[25:])], [jnp.asarray(m) for m in (mask[:25], mask[25:])]
    )
    assert int(moments.count) == mask.sum()
    np.testing.assert_allclose(moments.mean, rows[mask].mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moments.variance, rows[mask].var(0), rtol=1e-4)


def test_a_batch_without_valid_rows_changes_nothing():
    before = moments_of([jnp.asarray([[1.0, 2.0], [3.0, 5.0]])])
    after = merge(before, jnp.full((4, 2), jnp.nan), jnp.zeros(4, bool))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    empty = Moments.zero(jnp.zeros(2, jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, merge(empty, jnp.zeros((4, 2)), jnp.zeros(4, bool)), empty)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_equal_on_any_number_of_devices(devices):
    generator = np.random.default_rng(3)
    batch = generator.normal(5, 2, (3, 16, 4)).astype(np.float32)
    # Uneven on purpose: the first replica of eight has no valid row at all.
    uneven = generator.random((3, 16)) < np.linspace(0, 1, 16)[None]
    uneven[:, :2] = False
    # Fewer rows than replicas, as a rollout of one step has on a device with one environment.
    few = np.zeros((3, 16), bool)
    few[1, [3, 9]] = True
    mesh = parallel.make_mesh(jax.devices()[:devices])
    columns = jax.sharding.PartitionSpec(None, parallel.AXIS)

    def replica(moments, batch, mask):
        return merge_moments(moments, batch, mask, parallel.axis_name(mesh))

    specs = (parallel.REPLICATED, columns, columns)
    merge_sharded = jax.jit(parallel.run_on_replicas(replica, mesh, specs, parallel.REPLICATED))
    for mask in (uneven, few):
        moments = Moments.zero(jnp.zeros(4, jnp.float32))
        for _ in range(2):
            moments = merge_sharded(moments, jnp.asarray(batch), jnp.asarray(mask))
        assert int(moments.count) == 2 * mask.sum()
        np.testing.assert_allclose(moments.mean, batch[mask].mean(0), rtol=1e-5)
        np.testing.assert_allclose(moments.variance, batch[mask].var(0), rtol=1e-4)


def test_nothing_seen_normalises_to_itself():
    x = jnp.asarray([[1.5, -2.0]])
    np.testing.assert_array_equal(normalized(x, Moments.zero(x[0])), x)


def test_normalised_data_has_mean_zero_and_variance_one():
    x = jnp.asarray(np.random.default_rng(4).normal(7, 3, (500, 2)), jnp.float32)
    normal = normalized(x, moments_of([x]))
    np.testing.assert_allclose(normal.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(normal.var(0), 1, rtol=1e-4)


@pytest.mark.parametrize("clip", [10.0, 2.0])
def test_outliers_are_clipped(clip):
    moments = Moments(jnp.float32(10), jnp.float32(1), jnp.float32(4))
    x = jnp.asarray([1e6, -1e6, 2.0])
    np.testing.assert_allclose(normalized(x, moments, clip=clip), [clip, -clip, 0.5])


@pytest.mark.parametrize("rows", [1, 7, 4096, 100_000])
def test_constant_components_become_zero(rows):
    values = np.asarray([0.0, 0.1, -3.7, 1e-6, 1e4, 1e8, 16777217.0], np.float32)
    x = np.concatenate([np.tile(values, (rows, 1)), np.arange(rows, dtype=np.float32)[:, None]], -1)
    # Several updates, so that the merging of equal means is tried as well.
    moments = moments_of([jnp.asarray(x)] * 3)
    normal = np.asarray(normalized(jnp.asarray(x), moments))
    assert np.isfinite(normal).all()
    np.testing.assert_allclose(normal[:, :-1], 0, atol=1e-6)


def test_the_first_update_with_one_sample_is_finite():
    x = jnp.asarray([[3.0, -1e5, 0.0]])
    moments = moments_of([x])
    np.testing.assert_array_equal(normalized(x, moments), np.zeros((1, 3)))
    assert np.isfinite(normalized(jnp.asarray([[1e9, 2.0, -3.0]]), moments)).all()


@pytest.mark.parametrize("value", [0.0, 0.3, -250.0])
@pytest.mark.parametrize("shape", [(1, 1), (4, 6), (128, 64)])
def test_equal_advantages_normalise_to_zero(value, shape):
    # A constant reward under a critic that begins at 0, or a batch of a single sample.
    advantage = jnp.full(shape, value, jnp.float32)
    moments = merge(Moments.zero(jnp.float32(0)), advantage, jnp.ones(shape, bool))
    normal = normalized(advantage, moments, clip=jnp.inf)
    np.testing.assert_allclose(normal, 0, atol=1e-6)


@pytest.mark.parametrize("mean", [1e3, -1e4])
@pytest.mark.parametrize("rows", [1000, 200_000])
def test_a_large_mean_does_not_drown_the_variance(mean, rows):
    x = np.random.default_rng(5).normal(mean, 1, (rows, 2)).astype(np.float32)
    moments = moments_of([jnp.asarray(x[: rows // 2]), jnp.asarray(x[rows // 2 :])])
    np.testing.assert_allclose(moments.mean, x.mean(0, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(moments.variance, x.var(0, dtype=np.float64), rtol=1e-2)


def test_many_small_updates_do_not_drift():
    x = np.random.default_rng(6).normal(100, 2, (3000, 4)).astype(np.float32)

    def step(moments, row):
        return merge(moments, row[None], jnp.ones(1, bool)), None

    moments, _ = jax.lax.scan(step, Moments.zero(jnp.zeros(4, jnp.float32)), jnp.asarray(x))
    assert moments.count == 3000
    np.testing.assert_allclose(moments.mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, x.var(0), rtol=2e-3)


def test_a_full_count_becomes_an_exponential_average():
    full = Moments(jnp.float32(2.0**24), jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32))
    moments = full
    for _ in range(3):
        moments = merge(moments, jnp.full((2**20, 1), 5.0), jnp.ones(2**20, bool))
        assert moments.count == 2.0**24
    share = 1 - (16 / 17) ** 3
    np.testing.assert_allclose(moments.mean, [5 * share], rtol=1e-3)
