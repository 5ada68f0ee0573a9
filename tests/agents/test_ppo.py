"""PPO: the properties of every agent, and its own numbers by hand."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agent import Agent
from podracer.agents import PPO, PPOConfig
from podracer.agents.ppo import PPOActorState, PPOExtras, PPOLearner
from podracer.agents.testing import AgentConformance
from podracer.agents.testing.environments import Patchwork
from podracer.anakin import Anakin, AnakinConfig
from podracer.envs import Autoreset
from podracer.networks import Network, NetworkConfig
from podracer.ops import num_parameters
from podracer.rollout import RolloutState, start_rollout, unroll
from podracer.types import (
    ActionSpec,
    ArraySpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MaskedObservation,
    MultiDiscreteSpec,
    StepType,
    TimeStep,
    Trajectory,
    split_mask,
)

CONFIG = PPOConfig(
    network=NetworkConfig(hidden_sizes=(16,), shared=True),
    learning_rate=0.02,
    discount=0.9,
    entropy_coefficient=0.001,
    num_epochs=4,
    num_minibatches=2,
    value_clip=None,
    max_grad_norm=5.0,
)


class TestFeedForward(AgentConformance):
    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent:
        return CONFIG.make(spec, num_updates)


class TestNormalized(AgentConformance):
    """Everything that is optional at once. Its values are of scaled rewards, so the probes are left to the others."""

    feed_forward_probes = False
    actions = (BoundedSpec((-1.0,), (2.0,)),)

    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent:
        config = dataclasses.replace(
            CONFIG,
            network=NetworkConfig(hidden_sizes=(16,), activation="silu"),
            normalize_observations=True,
            scale_rewards=True,
            target_kl=0.05,
            value_clip=0.2,
            entropy_coefficient_end=0.0,
        )
        return config.make(spec, num_updates)


class TestRecurrent(AgentConformance):
    feed_forward_probes = False
    remembers = True
    actions = (DiscreteSpec(2),)
    rollout_length = 7  # No multiple of the 4 rows of a memory episode, so that windows cut episodes.

    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent:
        # Sequences stay whole, so with one environment on each of 8 devices there is one minibatch.
        network = NetworkConfig(hidden_sizes=(16,), recurrent_size=16)
        return dataclasses.replace(CONFIG, network=network, num_minibatches=1).make(spec, num_updates)


class TestGRU(TestRecurrent):
    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent:
        network = NetworkConfig(hidden_sizes=(16,), recurrent_size=16, recurrent_cell="gru")
        return dataclasses.replace(CONFIG, network=network, num_minibatches=1).make(spec, num_updates)


def test_without_a_memory_the_probe_of_memory_is_not_solved() -> None:
    class Forgetful(TestFeedForward):
        remembers = True

    with pytest.raises(AssertionError, match=r"the mean return on ProbeMemory is -?0\.\d+, not 1\.0"):
        Forgetful().test_solves_memory()


# By hand, with a network that is one matrix.


def linear_network(policy: Any = 0.0, value: Any = 0.0) -> Callable[[EnvironmentSpec], Network]:
    """Outputs that are linear in the observation, so that a gradient can be had from finite differences."""

    def for_spec(spec: EnvironmentSpec) -> Network:
        observation, _ = split_mask(spec.observation)
        outputs, inputs = num_parameters(spec.action), observation.shape[0]
        params = {
            "policy": jnp.broadcast_to(jnp.asarray(policy, jnp.float32), (inputs, outputs)),
            "value": jnp.broadcast_to(jnp.asarray(value, jnp.float32), (inputs,)),
        }
        return Network(lambda key, x: params, lambda params, x: (x @ params["policy"], x @ params["value"]))

    return for_spec


def linear_ppo(
    spec: EnvironmentSpec, *, policy: Any = 0.0, value: Any = 0.0, num_updates: int = 10, **config: Any
) -> PPO:
    # With so large an epsilon Adam's first step is proportional to the gradient: lr * g / (|g| + eps).
    numbers = {"num_epochs": 1, "num_minibatches": 1, "learning_rate": 1e4, "adam_epsilon": 1e4, "max_grad_norm": None}
    return PPO(spec, linear_network(policy, value)(spec), PPOConfig(**(numbers | config)), num_updates)


F, M, L = (np.int8(step_type) for step_type in StepType)
STEP_TYPES = np.array([[F, M], [M, L], [L, F], [F, M], [M, M]])
DISCOUNTS = np.array([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]], np.float32)  # Column 0 truncates, column 1 terminates.
REWARDS = np.array([[0, 9], [1, -1], [2, 0], [0, 3], [0.5, -2]], np.float32)
MASKED_SPEC = EnvironmentSpec(MaskedObservation(ArraySpec((2,)), ArraySpec((3,), "bool")), DiscreteSpec(3))


def hand_made_trajectory() -> Trajectory:
    """4 steps of 2 environments, acted by another policy than the learner's."""
    generator = np.random.default_rng(0)
    observation = generator.normal(size=(5, 2, 2)).astype(np.float32)
    mask = generator.random((5, 2, 3)) < 0.6
    action = np.array([[0, 1], [2, 2], [1, 0], [0, 2]], np.int32)
    np.put_along_axis(mask[:4], action[..., None], True, -1)
    extras = PPOExtras(
        sample=action,
        log_prob=np.log(generator.uniform(0.2, 0.9, (4, 2))).astype(np.float32),
        value=generator.normal(size=(4, 2)).astype(np.float32),
        discounted_return=(),
    )
    timestep = TimeStep(STEP_TYPES, REWARDS, DISCOUNTS, MaskedObservation(observation, mask))
    return jax.tree.map(jnp.asarray, Trajectory(timestep, action, extras, PPOActorState((), ())))


def paper_loss(params: dict[str, np.ndarray], trajectory: Trajectory, config: PPOConfig) -> dict[str, float]:
    """The paper's equation 9, one sample at a time, in double precision.

    The advantages are those of equation 11 with the values of acting, except the last row's, which `params` give.
    """
    t = jax.tree.map(lambda x: np.asarray(x, np.float64), trajectory)
    observation, legal = t.timestep.observation.observation, np.asarray(trajectory.timestep.observation.action_mask)
    length, batch_size = t.action.shape
    bootstrap = observation[-1] @ params["bootstrap"]
    advantage, samples = np.zeros((length, batch_size)), []
    for b in range(batch_size):
        for start in range(length):
            if STEP_TYPES[start, b] == L:
                continue
            samples.append((start, b))
            weight = 1.0
            for k in range(start, length):
                following = t.extras.value[k + 1, b] if k + 1 < length else bootstrap[b]
                following *= config.discount * t.timestep.discount[k + 1, b]
                advantage[start, b] += weight * (t.timestep.reward[k + 1, b] + following - t.extras.value[k, b])
                weight *= config.discount * config.gae_lambda
                if STEP_TYPES[k + 1, b] == L:
                    break
    target = advantage + t.extras.value
    if config.normalize_advantages:
        valid = np.array([advantage[i] for i in samples])
        advantage = (advantage - valid.mean()) / valid.std()
    totals = dict.fromkeys(("policy_loss", "value_loss", "entropy", "clip_fraction"), 0.0)
    for i in samples:
        logits = observation[i] @ params["policy"]
        exponentials = np.where(legal[i], np.exp(logits), 0)
        p = exponentials / exponentials.sum()
        ratio = p[trajectory.action[i]] / np.exp(t.extras.log_prob[i])
        low, high = 1 - config.clip_epsilon, 1 + config.clip_epsilon
        totals["policy_loss"] -= min(ratio * advantage[i], min(max(ratio, low), high) * advantage[i])
        value, old = observation[i] @ params["value"], t.extras.value[i]
        losses = [(value - target[i]) ** 2]
        if config.value_clip is not None:
            near = min(max(value, old - config.value_clip), old + config.value_clip)
            losses.append((near - target[i]) ** 2)
        totals["value_loss"] += 0.5 * max(losses)
        totals["entropy"] -= sum(x * np.log(x) for x in p if x > 0)
        totals["clip_fraction"] += not low <= ratio <= high
    means = {name: total / len(samples) for name, total in totals.items()}
    loss = means["policy_loss"] + config.value_coefficient * means["value_loss"]
    return means | {"loss": loss - config.entropy_coefficient * means["entropy"]}


@pytest.mark.parametrize(
    "numbers",
    [{"value_clip": 0.3, "entropy_coefficient": 0.2}, {"value_clip": None, "normalize_advantages": False}],
    ids=["all clipped", "plain"],
)
def test_a_gradient_step_is_that_of_the_papers_loss(numbers: dict[str, Any]) -> None:
    weights = np.random.default_rng(1)
    policy, value = weights.normal(size=(2, 3)), weights.normal(size=2)
    numbers = {"discount": 0.8, "gae_lambda": 0.7, "value_coefficient": 0.6, "learning_rate_end": 1e4} | numbers
    agent = linear_ppo(MASKED_SPEC, policy=policy, value=value, **numbers)
    learner, trajectory = agent.init(jax.random.key(0)), hand_made_trajectory()
    after, _, metrics = jax.jit(agent.update)(learner, (), trajectory, jax.random.key(1))

    start = {"policy": policy, "value": value, "bootstrap": value}
    expected = paper_loss(start, trajectory, agent.config)
    assert {name: float(metrics[name]) for name in expected if name != "loss"} == pytest.approx(
        {name: number for name, number in expected.items() if name != "loss"}, rel=1e-4
    )
    assert 0 < expected["clip_fraction"] < 1
    for name in ("policy", "value"):
        gradient = np.zeros_like(start[name])
        for index in np.ndindex(gradient.shape):
            losses = []
            for sign in (1, -1):
                moved = start[name].copy()
                moved[index] += sign * 1e-6
                losses.append(paper_loss(start | {name: moved}, trajectory, agent.config)["loss"])
            gradient[index] = (losses[0] - losses[1]) / 2e-6
        step = np.asarray(learner.params[name] - after.params[name])
        np.testing.assert_allclose(step, gradient, rtol=2e-3, atol=2e-4)
        assert np.abs(gradient).max() > 0.05


def test_gradients_are_clipped_to_their_global_norm() -> None:
    agent = linear_ppo(MASKED_SPEC, max_grad_norm=1e-2, learning_rate_end=1e4)
    learner = agent.init(jax.random.key(0))
    after, _, _ = jax.jit(agent.update)(learner, (), hand_made_trajectory(), jax.random.key(1))
    steps = [np.asarray(learner.params[name] - after.params[name]).ravel() for name in ("policy", "value")]
    assert np.linalg.norm(np.concatenate(steps)) == pytest.approx(1e-2, rel=1e-3)


def test_equal_advantages_and_minibatches_of_one_sample_move_no_policy() -> None:
    # Without a discount and with values of 0 every advantage is the reward, 1; so normalised it is 0, and never NaN.
    agent = linear_ppo(MASKED_SPEC, num_minibatches=8, num_epochs=2, discount=0.0, entropy_coefficient=0.0)
    trajectory = hand_made_trajectory()
    timestep = dataclasses.replace(trajectory.timestep, reward=jnp.ones((5, 2), jnp.float32))
    extras = dataclasses.replace(trajectory.extras, value=jnp.zeros((4, 2), jnp.float32))
    trajectory = dataclasses.replace(trajectory, timestep=timestep, extras=extras)
    learner = agent.init(jax.random.key(0))
    after, _, metrics = jax.jit(agent.update)(learner, (), trajectory, jax.random.key(1))
    np.testing.assert_array_equal(after.params["policy"], learner.params["policy"])
    assert np.isfinite(after.params["value"]).all()
    assert np.abs(after.params["value"]).max() > 0
    assert all(np.isfinite(metric) for metric in metrics.values())


@pytest.fixture(scope="module")
def scheduled() -> Callable[[int], tuple[PPOLearner, PPOLearner, dict[str, float]]]:
    """The learner before and after update `number` of a run of 19, counted from 0, and the metrics."""
    agent = linear_ppo(
        MASKED_SPEC,
        num_updates=19,
        learning_rate=0.5,
        entropy_coefficient=0.3,
        entropy_coefficient_end=0.1,
        policy=np.ones((2, 3)) * 0.1,
    )
    update, learner, trajectory = jax.jit(agent.update), agent.init(jax.random.key(0)), hand_made_trajectory()

    def run(number: int) -> tuple[PPOLearner, PPOLearner, dict[str, float]]:
        before = dataclasses.replace(learner, updates=jnp.int32(number))
        after, _, metrics = update(before, (), trajectory, jax.random.key(1))
        return before, after, {name: float(metric) for name, metric in metrics.items()}

    return run


def test_schedules_are_one_line_from_the_first_update_to_after_the_last(scheduled: Any) -> None:
    # 19 updates, as of 10,000 steps in rollouts of 512.
    runs = [scheduled(number)[2] for number in range(19)]
    rates = [metrics["learning_rate"] for metrics in runs]
    np.testing.assert_allclose(rates, [0.5 * (1 - k / 19) for k in range(19)], rtol=1e-6)
    assert rates[0] == 0.5
    entropies = [metrics["entropy_coefficient"] for metrics in runs]
    np.testing.assert_allclose(entropies, [0.3 - 0.2 * k / 19 for k in range(19)], rtol=1e-6)


def test_schedules_stay_at_their_ends(scheduled: Any) -> None:
    for number in (19, 20, 1000):
        before, after, metrics = scheduled(number)
        assert metrics["learning_rate"] == 0
        assert metrics["entropy_coefficient"] == pytest.approx(0.1)
        np.testing.assert_array_equal(after.params["policy"], before.params["policy"])
        assert int(after.updates) == number + 1


def test_the_rest_of_an_update_is_left_out_past_the_target_kl() -> None:
    def params(**config: Any) -> np.ndarray:
        agent = linear_ppo(MASKED_SPEC, learning_rate=3e3, policy=0.1, **config)
        learner, trajectory = agent.init(jax.random.key(0)), hand_made_trajectory()
        # Acted by the learner itself, so that the first gradient step has a divergence of 0.
        timestep = jax.tree.map(lambda x: x[:-1], trajectory.timestep)
        outputs, value = agent.network.apply(learner.params, timestep.observation.observation)
        legal = jnp.where(timestep.observation.action_mask, outputs, -jnp.inf)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(legal), trajectory.action[..., None], -1)[..., 0]
        extras = dataclasses.replace(trajectory.extras, log_prob=log_probs, value=value)
        trajectory = dataclasses.replace(trajectory, extras=extras)
        return np.asarray(jax.jit(agent.update)(learner, (), trajectory, jax.random.key(1))[0].params["policy"])

    stopped, one, five = params(num_epochs=5, target_kl=1e-5), params(num_epochs=1), params(num_epochs=5)
    np.testing.assert_allclose(stopped, one, rtol=1e-5)
    assert np.abs(five - one).max() > 0.01
    np.testing.assert_array_equal(params(num_epochs=5, target_kl=1e9), five)


def act_twice(agent: PPO, environment: Patchwork, key: jax.Array) -> tuple[PPOLearner, Trajectory, Trajectory]:
    """A learner, and two trajectories that it acts one after the other: 6 steps of 8 environments each."""
    stream, keys = Autoreset(environment), jax.random.split(key, 4)
    learner = agent.init(keys[0])
    # A fresh policy is nearly uniform whatever it sees.
    learner = dataclasses.replace(learner, params=jax.tree.map(lambda x: 3 * x, learner.params))

    def window(state: RolloutState, key: jax.Array) -> tuple[RolloutState, Trajectory]:
        act_key, environment_key = jax.random.split(key)
        environment_keys = jax.random.split(environment_key, 8)
        return unroll(agent, stream, agent.actor_params(learner), state, act_key, environment_keys, 6)

    start = start_rollout(agent, stream, jax.random.split(keys[1], 8))
    _, both = jax.lax.scan(window, start, keys[2:])
    return learner, *(jax.tree.map(lambda x, i=i: x[i], both) for i in range(2))


@pytest.mark.parametrize(
    ("action", "masked", "recurrent_size"),
    [
        (DiscreteSpec(3, start=5), False, 0),
        (DiscreteSpec(3, start=5), True, 0),
        (MultiDiscreteSpec((2, 3)), False, 0),
        (MultiDiscreteSpec((2, 3)), True, 0),
        (BoundedSpec((-1.0, 0.0), (3.0, 10.0)), False, 0),
        # Two minibatches of four environments each, which start from their own states.
        (DiscreteSpec(3), False, 4),
    ],
    ids=["discrete", "masked", "multi-discrete", "masked multi-discrete", "bounded", "recurrent"],
)
def test_the_ratio_is_1_on_what_the_learner_has_just_acted(
    action: ActionSpec, masked: bool, recurrent_size: int
) -> None:
    environment = Patchwork(action, masked)
    network = NetworkConfig(hidden_sizes=(4,), recurrent_size=recurrent_size)
    config = PPOConfig(network=network, num_epochs=1, num_minibatches=2, learning_rate=0, clip_epsilon=1e-4)
    agent = config.make(environment.spec, 10)

    @jax.jit
    def run(key: jax.Array) -> dict[str, jax.Array]:
        act_key, update_key = jax.random.split(key)
        learner, _, trajectory = act_twice(agent, environment, act_key)
        return agent.update(learner, (), trajectory, update_key)[2]

    metrics = run(jax.random.key(0))
    assert metrics["clip_fraction"] == 0
    assert abs(metrics["approx_kl"]) < 1e-6


def test_recurrent_values_are_recomputed_from_the_states_that_acted() -> None:
    # The second trajectory starts in the middle of episodes, with their states; more end inside it.
    # With so narrow a clip every probability ratio that differs from 1 by 1e-5 is counted.
    environment = Patchwork(DiscreteSpec(3))
    network = NetworkConfig(hidden_sizes=(4,), recurrent_size=4)
    numbers = {"num_epochs": 1, "num_minibatches": 1, "clip_epsilon": 1e-5}
    agent = PPOConfig(network=network, **numbers).make(environment.spec, 10)

    @jax.jit
    def run(key: jax.Array) -> tuple[PPOLearner, Trajectory, jax.Array]:
        learner, before, trajectory = act_twice(agent, environment, key)
        timestep, recurrent = before.timestep, before.actor_state.recurrent
        bootstrap = agent._bootstrap(learner.params, timestep.observation, timestep.first(), recurrent)
        return learner, trajectory, bootstrap

    def clipped(learner: PPOLearner, trajectory: Trajectory) -> float:
        return float(update(learner, (), trajectory, jax.random.key(1))[2]["clip_fraction"])

    update = jax.jit(agent.update)
    learner, trajectory, bootstrap = jax.device_get(run(jax.random.key(0)))
    middle = ~trajectory.timestep.first()[0]
    assert middle.any()
    assert trajectory.timestep.last()[:-1].sum() >= 2
    # The row after the first trajectory is the second one's first, where acting computed the value itself.
    np.testing.assert_allclose(bootstrap, trajectory.extras.value[0], atol=1e-5)
    assert clipped(learner, trajectory) == 0
    forgotten = dataclasses.replace(trajectory, actor_state=jax.tree.map(np.zeros_like, trajectory.actor_state))
    assert clipped(learner, forgotten) > 0


# Normalisation.

FLAT_SPEC = EnvironmentSpec(ArraySpec((2,)), DiscreteSpec(3))


def flat_trajectory() -> Trajectory:
    """The same without masks, with what reward scaling remembers for a discount of 0.5."""
    trajectory = hand_made_trajectory()
    discounted = np.zeros((5, 2), np.float32)
    for t in range(1, 5):
        discounted[t] = np.where(STEP_TYPES[t] == F, 0, 0.5 * discounted[t - 1] + REWARDS[t])
    timestep = dataclasses.replace(trajectory.timestep, observation=trajectory.timestep.observation.observation)
    extras = dataclasses.replace(trajectory.extras, discounted_return=jnp.asarray(discounted[:-1]))
    return dataclasses.replace(trajectory, timestep=timestep, extras=extras)


def test_observations_are_normalised_by_the_moments_of_what_was_learnt_from() -> None:
    agent = linear_ppo(FLAT_SPEC, normalize_observations=True, policy=1.0, value=[1.0, 2.0])
    learner, trajectory = agent.init(jax.random.key(0)), flat_trajectory()
    after, _, _ = jax.jit(agent.update)(learner, (), trajectory, jax.random.key(1))
    seen = np.asarray(trajectory.timestep.observation)[:-1][STEP_TYPES[:-1] != L]
    assert float(after.observations.count) == 6
    np.testing.assert_allclose(after.observations.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(after.observations.variance, seen.var(0), rtol=1e-5)

    # Acting reads them, in evaluation too.
    params = agent.actor_params(dataclasses.replace(after, params=learner.params))
    timestep = jax.tree.map(lambda x: x[0], trajectory.timestep)
    value = ((np.asarray(timestep.observation) - seen.mean(0)) / seen.std(0)) @ np.array([1.0, 2.0], np.float32)
    for evaluate in (False, True):
        output = agent.act(params, timestep, agent.init_actor(2), jax.random.key(2), evaluate=evaluate)
        np.testing.assert_allclose(output.extras.value, value, rtol=1e-4)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    numbers = {"discount": 0.5, "gae_lambda": 1.0, "normalize_advantages": False, "value_clip": None}
    plain, scaled = (linear_ppo(FLAT_SPEC, scale_rewards=scale, **numbers) for scale in (False, True))
    trajectory, learner = flat_trajectory(), scaled.init(jax.random.key(0))
    trajectory = dataclasses.replace(
        trajectory, extras=dataclasses.replace(trajectory.extras, value=jnp.zeros((4, 2), jnp.float32))
    )
    after, _, metrics = jax.jit(scaled.update)(learner, (), trajectory, jax.random.key(1))
    # After each of the 6 steps, by hand: column 0 goes 1, 2.5, reset, 0.5; column 1 remembers
    # nothing of its first episode and goes -1, reset, 3, -0.5.
    returns = np.array([1, 2.5, 0.5, -1, 3, -0.5])
    assert float(after.returns.count) == 6
    assert float(after.returns.variance) == pytest.approx(returns.var(), rel=1e-5)
    # All targets, and with values of 0 the value loss, scale with the rewards.
    without = dataclasses.replace(
        trajectory,
        extras=dataclasses.replace(trajectory.extras, discounted_return=()),
    )
    _, _, unscaled = jax.jit(plain.update)(plain.init(jax.random.key(0)), (), without, jax.random.key(1))
    assert float(metrics["value_loss"]) == pytest.approx(float(unscaled["value_loss"]) / returns.var(), rel=1e-4)


def test_acting_remembers_the_discounted_return_of_the_episode_so_far() -> None:
    agent, trajectory = linear_ppo(FLAT_SPEC, scale_rewards=True, discount=0.5), flat_trajectory()
    params, state = agent.actor_params(agent.init(jax.random.key(0))), agent.init_actor(2)
    for t in range(4):
        timestep = jax.tree.map(lambda x, t=t: x[t], trajectory.timestep)
        output = agent.act(params, timestep, state, jax.random.key(t))
        state = output.actor_state
        if t:  # Row 0 of column 1 is in the middle of an episode, of which this agent has seen nothing.
            np.testing.assert_allclose(output.extras.discounted_return[0], trajectory.extras.discounted_return[t, 0])
    assert output.extras.discounted_return[1] == 3.0


@pytest.mark.parametrize("scale_rewards", [False, True])
def test_rewards_are_clipped_before_anything_else_reads_them(scale_rewards: bool) -> None:
    def learnt(trajectory: Trajectory, reward_clip: float | None) -> Any:
        numbers = {"scale_rewards": scale_rewards, "discount": 0.5, "normalize_advantages": False}
        agent = linear_ppo(FLAT_SPEC, reward_clip=reward_clip, value=1.0, **numbers)
        return jax.jit(agent.update)(agent.init(jax.random.key(0)), (), trajectory, jax.random.key(1))

    trajectory = flat_trajectory()
    if not scale_rewards:
        extras = dataclasses.replace(trajectory.extras, discounted_return=())
        trajectory = dataclasses.replace(trajectory, extras=extras)
    assert REWARDS.max() > 1
    assert REWARDS.min() < -1
    rewards = jnp.asarray(np.clip(REWARDS, -1, 1))
    clipped = dataclasses.replace(trajectory, timestep=dataclasses.replace(trajectory.timestep, reward=rewards))
    found, expected, unclipped = learnt(trajectory, 1.0), learnt(clipped, None), learnt(trajectory, None)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(found[0].params["value"] - unclipped[0].params["value"]).max() > 1e-3


def test_acting_remembers_the_discounted_return_of_clipped_rewards() -> None:
    agent, trajectory = linear_ppo(FLAT_SPEC, scale_rewards=True, discount=0.5, reward_clip=1.5), flat_trajectory()
    params, state = agent.actor_params(agent.init(jax.random.key(0))), agent.init_actor(2)
    returns = []
    for t in range(4):
        timestep = jax.tree.map(lambda x, t=t: x[t], trajectory.timestep)
        state = agent.act(params, timestep, state, jax.random.key(t)).actor_state
        returns.append(state.discounted_return)
    # Rewards 1 and 2, which counts 1.5, and a reset; row 0 of column 1 is in the middle of an episode, with 9.
    np.testing.assert_allclose(returns, [[0, 1.5], [1, -0.25], [2, 0], [0, 1.5]])


@pytest.mark.parametrize("reward", [0.0, 2.0])
def test_returns_that_never_vary_leave_rewards_as_they_are(reward: float) -> None:
    agent = linear_ppo(FLAT_SPEC, scale_rewards=True, discount=0.0, normalize_advantages=False, value_clip=None)
    trajectory = flat_trajectory()
    timestep = dataclasses.replace(trajectory.timestep, reward=jnp.full((5, 2), reward, jnp.float32))
    extras = dataclasses.replace(trajectory.extras, value=jnp.zeros((4, 2), jnp.float32))
    trajectory = dataclasses.replace(trajectory, timestep=timestep, extras=extras)
    after, _, metrics = jax.jit(agent.update)(agent.init(jax.random.key(0)), (), trajectory, jax.random.key(1))
    assert float(metrics["value_loss"]) == pytest.approx(0.5 * reward**2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after, metrics)))


def test_ignored_actions_of_many_dimensions_do_not_overflow() -> None:
    # On a row of a reset the remembered sample is replaced by 0, which a narrow policy of many dimensions may find so
    # likely that the probability ratio overflows: that row's weight of 0 times infinity would be NaN.
    size = 20
    spec = EnvironmentSpec(ArraySpec((2,)), BoundedSpec((-1.0,) * size, (1.0,) * size))
    policy = np.zeros((2, 2 * size))
    policy[:, size:] = -3.0
    agent, trajectory = linear_ppo(spec, policy=policy), flat_trajectory()
    timestep = dataclasses.replace(trajectory.timestep, observation=jnp.full((5, 2, 2), 1.0, jnp.float32))
    sample = jnp.full((4, 2, size), 0.01, jnp.float32)
    extras = PPOExtras(sample, jnp.full((4, 2), 100.0, jnp.float32), trajectory.extras.value, ())
    trajectory = Trajectory(timestep, jnp.tanh(sample), extras, PPOActorState((), ()))
    after, _, metrics = jax.jit(agent.update)(agent.init(jax.random.key(0)), (), trajectory, jax.random.key(1))
    assert np.isfinite(after.params["policy"]).all()
    assert all(np.isfinite(metric) for metric in metrics.values())


# Configuration.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("learning_rate_end", float("inf")),
        ("max_grad_norm", -0.5),
        ("discount", 1.01),
        ("gae_lambda", 1.5),
        ("clip_epsilon", -0.1),
        ("value_clip", float("nan")),
        ("entropy_coefficient", -0.01),
        ("target_kl", -1.0),
        ("num_epochs", 0),
        ("num_minibatches", 0),
        ("num_minibatches", -4),
        ("discount", -0.1),
        ("adam_epsilon", 0.0),
        ("max_grad_norm", 0.0),
        ("num_epochs", 2.5),
        ("num_epochs", True),
        ("learning_rate", True),
        ("gae_lambda", "0.9"),
        ("scale_rewards", 1),
        ("reward_clip", 0.0),
        ("reward_clip", float("inf")),
    ],
)
def test_numbers_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}; it must be"):
        PPOConfig(**{field: value})


def test_none_is_for_the_fields_whose_type_says_so() -> None:
    for field in dataclasses.fields(PPOConfig):
        if isinstance(None, field.type):
            assert getattr(PPOConfig(**{field.name: None}), field.name) is None
        else:
            with pytest.raises(ValueError, match=f"{field.name} is None; it must be"):
                PPOConfig(**{field.name: None})


def test_a_run_without_updates_is_refused() -> None:
    with pytest.raises(ValueError, match="num_updates is 0"):
        PPOConfig().make(FLAT_SPEC, 0)


@pytest.mark.parametrize(
    ("recurrent_size", "num_minibatches", "message"),
    [
        (0, 3, "num_minibatches is 3, which does not divide 8 steps x 4 environments = 32 on each device; .*: 2 or 4"),
        (4, 8, "num_minibatches is 8, which does not divide 4 environments = 4 on each device; .*: 2 or 4"),
    ],
)
def test_minibatches_that_do_not_divide_are_refused_before_compiling(
    recurrent_size: int, num_minibatches: int, message: str
) -> None:
    network = NetworkConfig(hidden_sizes=(4,), recurrent_size=recurrent_size)
    agent = PPOConfig(network=network, num_minibatches=num_minibatches).make(Patchwork(DiscreteSpec(3)).spec, 10)
    with pytest.raises(ValueError, match=message):
        Anakin(agent, Patchwork(DiscreteSpec(3)), AnakinConfig(8, 8), jax.devices()[:2])


SCRIPT = """
import jax
from podracer.agents import PPOConfig
from podracer.agents.testing.environments import Patchwork
from podracer.anakin import Anakin, AnakinConfig
from podracer.networks import NetworkConfig
from podracer.types import BoundedSpec

assert jax.config.jax_enable_x64
environment = Patchwork(BoundedSpec((-1.0,), (1.0,)))
network = NetworkConfig(hidden_sizes=(4,), recurrent_size=4)
config = PPOConfig(network=network, num_minibatches=2, normalize_observations=True, scale_rewards=True, target_kl=0.1)
anakin = Anakin(config.make(environment.spec, 3), environment, AnakinConfig(4, 4), jax.devices()[:2])
state, window = anakin.run(anakin.init(0), 3)
window.summarize()
for leaf in jax.tree.leaves((state.learner, state.rollout.timestep)):
    assert leaf.dtype.itemsize <= 4, leaf.dtype
print("done")
"""


def test_runs_in_x64_mode_with_parameters_of_single_precision() -> None:
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout == "done\n", result.stderr[-3000:]
