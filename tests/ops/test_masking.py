import jax
import jax.numpy as jnp
import numpy as np

from podracer.ops import zero_masked


def test_masked_rows_are_zero_in_leaves_of_any_rank_and_dtype():
    valid = jnp.array([[True, False, True], [False, True, True]])
    tree = {
        "number": jnp.where(valid, 2.0, jnp.nan).astype(jnp.float32),
        "vector": jnp.full((2, 3, 4), 5, jnp.int32),
        "flag": jnp.ones((2, 3), bool),
        "nothing": (),
    }
    found = zero_masked(tree, valid)
    np.testing.assert_array_equal(found["number"], np.where(valid, 2, 0))
    np.testing.assert_array_equal(found["vector"], np.broadcast_to(np.where(valid, 5, 0)[..., None], (2, 3, 4)))
    np.testing.assert_array_equal(found["flag"], valid)
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [leaf.dtype for leaf in jax.tree.leaves(tree)]


def test_no_gradient_comes_from_what_is_masked():
    valid = jnp.array([[True, False]])

    def total(x):
        return jnp.square(zero_masked(x, valid)).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.array([[3.0, jnp.inf]], jnp.float32)), [[6, 0]])
