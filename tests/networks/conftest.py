"""Parameters without compiling an initialisation, which takes longer than all that is tested with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(scope="session")
def random_params():
    """A function from `init` and its arguments after the key to normal parameters of the shapes that it makes."""

    def make(init, *args, seed=0):
        generator = np.random.default_rng(seed)
        shapes = jax.eval_shape(init, jax.random.key(0), *args)
        return jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype), shapes)

    return make
