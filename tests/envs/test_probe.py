"""The probes, Catch and Countdown have exactly the returns and values that their docstrings state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.envs import probe
from podracer.envs.testing import EnvironmentConformance
from podracer.types import split_mask


def play(environment, policy, discount=1.0, batch_size=1024):
    """Plays `batch_size` episodes side by side, which all have the same length.

    Returns:
        The discounted returns `[B]`, and `(observation, action, reward)` of each step with leaves `[B, ...]`.
    """
    reset, step = jax.jit(jax.vmap(environment.reset)), jax.jit(jax.vmap(environment.step))
    act = jax.jit(policy)
    state, observation = reset(jax.random.split(jax.random.key(0), batch_size))
    total, steps, memory, over = np.zeros(batch_size), [], None, False
    while not over:
        action, memory = act(observation, memory, jax.random.key(100 + len(steps)))
        state, following = step(state, action, jax.random.split(jax.random.key(200 + len(steps)), batch_size))
        reward = np.asarray(following.reward)
        total += discount ** len(steps) * reward
        steps.append(jax.tree.map(np.asarray, (observation, action, reward)))
        ended = np.asarray(following.terminated | following.truncated)
        assert ended.all() or not ended.any()
        observation, over = following.observation, ended.all()
    return total, steps


def uniform(environment):
    return lambda observation, memory, key: (envs.sample_action(environment.spec, key, 1024), memory)


def remember(observation, memory, key):
    memory = observation[:, 0] if memory is None else memory
    return (memory > 0).astype(jnp.int32), memory


def scale(observation, memory, key):
    return jnp.asarray([[1, 5]], jnp.float32) + observation * jnp.asarray([[2, 5]], jnp.float32), memory


def read_goal(observation, memory, key):
    return jnp.stack([observation[:, :2].argmax(-1), observation[:, 2:].argmax(-1)], -1).astype(jnp.int32), memory


def highest_legal(observation, memory, key):
    mask = split_mask(observation)[1]
    return (3 - mask[:, ::-1].argmax(-1)).astype(jnp.int32), memory


def follow(start=0):
    return lambda observation, memory, key: ((observation[:, 0] > 0).astype(jnp.int32) + start, memory)


def always(action):
    return lambda observation, memory, key: (jnp.full(1024, action, jnp.int32), memory)


def catch_ball(observation, memory, key):
    ball, paddle = observation[:, :-1].max(1).argmax(-1), observation[:, -1].argmax(-1)
    return (jnp.sign(ball - paddle) + 1).astype(jnp.int32), memory


@pytest.mark.parametrize(
    ("environment", "policy", "value"),
    [
        (probe.ProbeConstantReward(), None, 1.0),
        (probe.ProbeDelayedReward(1), None, 1.0),
        (probe.ProbeDelayedReward(3), None, 0.9**2),
        (probe.ProbeActionMatters(), follow(), 1.0),
        (probe.ProbeActionMatters(start=3), follow(3), 1.0),
        (probe.ProbeMemory(1), remember, 0.9),
        (probe.ProbeMemory(5), remember, 0.9**5),
        (probe.ProbeContinuous(), scale, 1.0),
        (probe.ProbeMultiDiscrete(), read_goal, 1.0),
        (probe.ProbeMasked(), highest_legal, 1.0),
        (envs.Catch(), catch_ball, 0.9**8),
        (envs.Catch(rows=3, columns=5), catch_ball, 0.9),
        (envs.Countdown(4), None, 1 + 0.9 + 0.9**2 + 0.9**3),
    ],
)
def test_the_best_policy_gets_exactly_the_stated_value(environment, policy, value):
    finished, _ = play(environment, policy or uniform(environment), discount=0.9)
    np.testing.assert_allclose(finished, value, rtol=1e-5)


@pytest.mark.parametrize(
    ("environment", "mean"),
    [
        (probe.ProbeObservationReward(), 0.0),
        (probe.ProbeActionMatters(), 0.0),
        (probe.ProbeMemory(2), 0.0),
        (probe.ProbeContinuous(), 1 / 3),
        (probe.ProbeMultiDiscrete(), 5 / 12),
    ],
)
def test_a_random_policy_gets_the_stated_mean(environment, mean):
    finished, _ = play(environment, uniform(environment))
    assert finished.mean() == pytest.approx(mean, abs=5 * finished.std() / len(finished) ** 0.5)


def test_a_random_legal_policy_gets_the_stated_mean():
    def legal(observation, memory, key):
        mask = split_mask(observation)[1]
        return jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf)).astype(jnp.int32), memory

    finished, _ = play(probe.ProbeMasked(), legal)
    assert set(finished) == {0.0, 1.0}
    assert finished.mean() == pytest.approx(103 / 180, abs=5 * finished.std() / len(finished) ** 0.5)


def test_an_illegal_action_costs_one():
    _, [(observation, _, reward)] = play(probe.ProbeMasked(), always(0))
    mask = observation.action_mask
    assert mask.any(-1).all()
    assert len(np.unique(mask, axis=0)) == 15
    np.testing.assert_array_equal(reward, np.where(mask[:, 0], np.where(mask.sum(-1) == 1, 1, 0), -1))


def test_memory_shows_the_cue_once_and_then_nothing():
    _, steps = play(probe.ProbeMemory(3), remember)
    assert len(steps) == 4
    assert set(steps[0][0][:, 0]) == {-1.0, 1.0}
    assert all((observation[:, 0] == 0).all() for observation, _, _ in steps[1:])
    assert [observation[0, 1] for observation, _, _ in steps] == [0, 0, 0, 1]
    assert all((reward == 0).all() for _, _, reward in steps[:-1])


def test_the_value_of_the_observation_is_the_observation():
    finished, [(observation, _, _)] = play(probe.ProbeObservationReward(), always(0))
    np.testing.assert_array_equal(finished, observation[:, 0])
    assert set(finished) == {-1.0, 1.0}


def test_catch_misses_are_punished():
    finished, steps = play(envs.Catch(), always(0))
    assert len(steps) == 9
    assert set(finished) == {-1.0, 1.0}
    assert finished.mean() == pytest.approx(-0.6, abs=0.15)
    starts = np.unique(steps[0][0].reshape(1024, -1), axis=0)
    assert len(starts) == 5


_DETERMINISTIC = (probe.ProbeConstantReward, probe.ProbeDelayedReward)
for _probe in probe.PROBES:
    _declared = {"deterministic": _probe in _DETERMINISTIC, "ends_where_it_starts": True, "num_steps": 30}
    globals()[f"Test{_probe.__name__}"] = type(
        f"Test{_probe.__name__}", (EnvironmentConformance,), {"make": lambda self, cls=_probe: cls(), **_declared}
    )


class TestCatch(EnvironmentConformance):
    num_steps = 40

    def make(self):
        return envs.Catch()


class TestCountdown(EnvironmentConformance):
    num_steps = 20
    deterministic = True

    def make(self):
        return envs.Countdown(3, "truncation")
