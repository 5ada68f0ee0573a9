import jax.numpy as jnp
import numpy as np

from podracer.ops import clip_rewards
from podracer.types import TimeStep


def timesteps():
    reward = jnp.asarray([[-7.0, -0.5], [0.0, 0.25], [1.5, 7.0]], jnp.float32)
    return TimeStep(jnp.ones((3, 2), jnp.int8), reward, jnp.ones((3, 2), jnp.float32), {"position": reward})


def test_rewards_are_clipped_to_both_sides_and_nothing_else_is():
    found = clip_rewards(timesteps(), 1.0)
    np.testing.assert_array_equal(found.reward, [[-1, -0.5], [0, 0.25], [1, 1]])
    np.testing.assert_array_equal(found.observation["position"], timesteps().reward)
    assert found.reward.dtype == jnp.float32
    np.testing.assert_array_equal(clip_rewards(timesteps(), 2.0).reward, [[-2, -0.5], [0, 0.25], [1.5, 2]])


def test_without_a_limit_they_stay():
    np.testing.assert_array_equal(clip_rewards(timesteps(), None).reward, timesteps().reward)
