"""IMPALA: the properties of every agent, and its own numbers by hand."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from test_ppo import DISCOUNTS, MASKED_SPEC, REWARDS, STEP_TYPES, hand_made_trajectory, linear_network

from podracer import parallel
from podracer.agent import ActorOutput, Agent
from podracer.agents import IMPALA, IMPALAConfig, PPOConfig
from podracer.agents.forward import apply_over_time, apply_step
from podracer.agents.impala import IMPALAExtras, IMPALALearner
from podracer.agents.testing import AgentConformance
from podracer.agents.testing.checks import columns_of
from podracer.agents.testing.environments import Patchwork
from podracer.anakin import Anakin, AnakinConfig
from podracer.envs import Autoreset
from podracer.networks import NetworkConfig, actor_critic
from podracer.ops import distribution_for, generalized_advantages
from podracer.rollout import RolloutState, start_rollout, unroll
from podracer.types import (
    ActionSpec,
    ArraySpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MultiDiscreteSpec,
    StepType,
    TimeStep,
    Trajectory,
    split_mask,
    valid_mask,
)

F, M, L = (np.int8(step_type) for step_type in StepType)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExtrasWithValue(IMPALAExtras):
    value: jax.Array


class Telling(IMPALA):
    """IMPALA whose actors remember values besides, so that the probes can judge them. Learning does not read them."""

    def act(
        self, params: Any, timestep: TimeStep, actor_state: Any, key: jax.Array, *, evaluate: bool = False
    ) -> ActorOutput:
        output = super().act(params, timestep, actor_state, key, evaluate=evaluate)
        observation, _ = split_mask(timestep.observation)
        (_, value), _ = apply_step(self.network, params, observation, timestep.first(), actor_state)
        extras = ExtrasWithValue(output.extras.sample, output.extras.log_prob, value)
        return dataclasses.replace(output, extras=extras)


class TestFeedForward(AgentConformance):
    """The paper's optimiser and sum, without a clip that would hide a sum that is too large."""

    probe_updates = 400

    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent:
        network = NetworkConfig(hidden_sizes=(16,), shared=True)
        config = IMPALAConfig(
            network=network, learning_rate=0.02, discount=self.discount, entropy_coefficient=0.001, max_grad_norm=None
        )
        return Telling(spec, actor_critic(network, spec), config, num_updates)


class TestRecurrent(AgentConformance):
    """Adam and the mean, with everything that is optional."""

    feed_forward_probes = False
    remembers = True
    actions = (DiscreteSpec(2),)
    rollout_length = 7  # No multiple of the 4 rows of a memory episode, so that windows cut episodes.
    probe_updates = 400

    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent:
        config = IMPALAConfig(
            network=NetworkConfig(hidden_sizes=(16,), recurrent_size=16),
            optimizer="adam",
            loss_reduction="mean",
            learning_rate=0.02,
            discount=self.discount,
            lambda_=0.9,
            reward_clip=1.5,
            max_grad_norm=1.0,
            entropy_coefficient=0.01,
            entropy_coefficient_end=0.0,
            normalize_advantages=True,
        )
        return config.make(spec, num_updates)


# By hand, with a network that is one matrix.


def linear_impala(
    spec: EnvironmentSpec, *, policy: Any = 0.0, value: Any = 0.0, num_updates: int = 10, **config: Any
) -> IMPALA:
    # With so large an epsilon Adam's first step is proportional to the gradient: lr * g / (|g| + eps).
    numbers = {"optimizer": "adam", "learning_rate": 1e4, "adam_epsilon": 1e4, "max_grad_norm": None}
    numbers |= {"loss_reduction": "mean", "learning_rate_end": 1e4}
    return IMPALA(spec, linear_network(policy, value)(spec), IMPALAConfig(**(numbers | config)), num_updates)


def by_hand() -> Trajectory:
    """PPO's 4 steps of 2 environments, acted by another policy than the learner's."""
    trajectory = hand_made_trajectory()
    extras = IMPALAExtras(trajectory.extras.sample, trajectory.extras.log_prob)
    return dataclasses.replace(trajectory, extras=extras, actor_state=())


def paper_loss(
    params: dict[str, np.ndarray], fixed: dict[str, np.ndarray], trajectory: Trajectory, config: IMPALAConfig
) -> dict[str, float]:
    """Section 4.2, one sample at a time, in double precision; `fixed` is what targets and ratios are made of."""
    observation = np.asarray(trajectory.timestep.observation.observation, np.float64)
    legal, action = np.asarray(trajectory.timestep.observation.action_mask), np.asarray(trajectory.action)
    length, batch_size = action.shape
    reward = np.clip(REWARDS.astype(np.float64), -(config.reward_clip or np.inf), config.reward_clip or np.inf)
    gamma, values = config.discount * DISCOUNTS.astype(np.float64), observation @ fixed["value"]

    def probabilities(i: tuple[int, int], policy: np.ndarray) -> np.ndarray:
        exponentials = np.where(legal[i], np.exp(observation[i] @ policy), 0)
        return exponentials / exponentials.sum()

    def ratio(i: tuple[int, int]) -> float:
        return probabilities(i, fixed["policy"])[action[i]] / np.exp(np.float64(trajectory.extras.log_prob[i]))

    def target(t: int, b: int) -> float:  # Remark 1 of the paper.
        if t == length or STEP_TYPES[t, b] == L:
            return values[t, b]
        c = config.lambda_ * min(config.c_clip, ratio((t, b)))
        error = reward[t + 1, b] + gamma[t + 1, b] * values[t + 1, b] - values[t, b]
        later = gamma[t + 1, b] * c * (target(t + 1, b) - values[t + 1, b])
        return values[t, b] + min(config.rho_clip, ratio((t, b))) * error + later

    samples = [(t, b) for t in range(length) for b in range(batch_size) if STEP_TYPES[t, b] != L]
    totals = dict.fromkeys(("policy_loss", "value_loss", "entropy", "rho", "rho_clip_fraction"), 0.0)
    advantages = {}
    for t, b in samples:
        mixed = config.lambda_ * target(t + 1, b) + (1 - config.lambda_) * values[t + 1, b]
        advantages[t, b] = min(config.rho_clip, ratio((t, b))) * (
            reward[t + 1, b] + gamma[t + 1, b] * mixed - values[t, b]
        )
    if config.normalize_advantages:
        mean, std = np.mean(list(advantages.values())), np.std(list(advantages.values()))
        advantages = {i: (advantage - mean) / std for i, advantage in advantages.items()}
    for t, b in samples:
        p, rho = probabilities((t, b), params["policy"]), min(config.rho_clip, ratio((t, b)))
        totals["policy_loss"] -= advantages[t, b] * np.log(p[action[t, b]])
        totals["value_loss"] += 0.5 * (target(t, b) - observation[t, b] @ params["value"]) ** 2
        totals["entropy"] -= sum(x * np.log(x) for x in p if x > 0)
        totals["rho"] += rho
        totals["rho_clip_fraction"] += ratio((t, b)) > config.rho_clip
    means = {name: total / len(samples) for name, total in totals.items()}
    loss = means["policy_loss"] + config.value_coefficient * means["value_loss"]
    loss -= config.entropy_coefficient * means["entropy"]
    return means | {"loss": loss * (len(samples) if config.loss_reduction == "sum" else 1)}


@pytest.mark.parametrize(
    ("numbers", "scale"),
    [
        ({"entropy_coefficient": 0.2}, lambda g: g),
        ({"normalize_advantages": True}, lambda g: g),
        (
            {
                "optimizer": "rmsprop",
                "learning_rate": 0.5,
                "learning_rate_end": 0.5,
                "rmsprop_decay": 0.9,
                "rmsprop_epsilon": 0.3,
                "loss_reduction": "sum",
                "lambda_": 0.7,
                "rho_clip": 1.5,
                "c_clip": 0.8,
                "reward_clip": 1.2,
            },
            # The mean square starts at 1, and epsilon is under the root.
            lambda g: 0.5 * g / np.sqrt(0.9 + 0.1 * g**2 + 0.3),
        ),
    ],
    ids=["adam, mean", "normalized", "rmsprop, sum"],
)
def test_a_gradient_step_is_that_of_the_papers_loss(numbers: dict[str, Any], scale: Any) -> None:
    weights = np.random.default_rng(1)
    start = {"policy": weights.normal(size=(2, 3)), "value": weights.normal(size=2)}
    agent = linear_impala(MASKED_SPEC, **start, **({"discount": 0.8, "value_coefficient": 0.6} | numbers))
    learner, trajectory = agent.init(jax.random.key(0)), by_hand()
    after, _, metrics = jax.jit(agent.update)(learner, (), trajectory, jax.random.key(1))

    expected = paper_loss(start, start, trajectory, agent.config)
    gradients = {name: np.zeros_like(array) for name, array in start.items()}
    for name, gradient in gradients.items():
        for index in np.ndindex(gradient.shape):
            losses = []
            for sign in (1, -1):
                moved = start[name].copy()
                moved[index] += sign * 1e-6
                losses.append(paper_loss(start | {name: moved}, start, trajectory, agent.config)["loss"])
            gradient[index] = (losses[0] - losses[1]) / 2e-6
        step = np.asarray(learner.params[name] - after.params[name])
        np.testing.assert_allclose(step, scale(gradient), rtol=2e-3, atol=5e-4)
        assert np.abs(gradient).max() > 0.04
    del expected["loss"]
    expected["gradient_norm"] = np.linalg.norm(np.concatenate([g.ravel() for g in gradients.values()]))
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 < expected["rho_clip_fraction"] < 1


def test_on_policy_it_is_actor_critic_with_n_step_targets() -> None:
    weights = np.random.default_rng(2)
    agent = linear_impala(MASKED_SPEC, policy=weights.normal(size=(2, 3)), value=weights.normal(size=2), discount=0.8)
    learner, trajectory = agent.init(jax.random.key(0)), by_hand()
    timestep, valid = trajectory.timestep, valid_mask(trajectory)

    def evaluated(params: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        outputs, values = agent.network.apply(params, timestep.observation.observation)
        policy = distribution_for(agent.spec.action, outputs[:-1], timestep.observation.action_mask[:-1])
        return policy.log_prob(trajectory.action), policy.entropy(), values

    def actor_critic_loss(params: Any) -> jax.Array:
        log_prob, entropy, values = evaluated(params)
        fixed = jax.lax.stop_gradient(values)
        advantage = generalized_advantages(trajectory, fixed, 0.8, 1.0)
        error = advantage + fixed[:-1] - values[:-1]
        terms = -log_prob * advantage + 0.5 * 0.5 * jnp.square(error) - 0.01 * entropy
        return jnp.where(valid, terms, 0).sum() / valid.sum().astype(jnp.float32)

    own = jnp.where(valid, evaluated(learner.params)[0], jnp.nan)
    trajectory = dataclasses.replace(trajectory, extras=dataclasses.replace(trajectory.extras, log_prob=own))
    after, _, metrics = jax.jit(agent.update)(learner, (), trajectory, jax.random.key(1))
    gradients = jax.jit(jax.grad(actor_critic_loss))(learner.params)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(learner.params[name] - after.params[name], gradient, rtol=2e-3, atol=5e-4)
    assert float(metrics["rho"]) == pytest.approx(1, abs=1e-6)
    assert float(metrics["rho_clip_fraction"]) == 0


def test_a_truncation_and_a_termination_have_other_targets() -> None:
    # One step of reward 1 from an observation worth 10; column 0 is then cut off at one worth 20, column 1 ends there.
    spec = EnvironmentSpec(ArraySpec((2,)), DiscreteSpec(2))
    agent = linear_impala(spec, value=[10.0, 20.0], discount=0.9)
    observation = np.tile(np.array([[[1, 0]], [[0, 1]], [[1, 0]]], np.float32), (1, 2, 1))
    timestep = TimeStep(
        jnp.asarray([[F, F], [L, L], [F, F]]),
        jnp.asarray([[0, 0], [1, 1], [7, 7]], jnp.float32),
        jnp.asarray([[1, 1], [1, 0], [1, 1]], jnp.float32),
        jnp.asarray(observation),
    )
    extras = IMPALAExtras(jnp.zeros((2, 2), jnp.int32), jnp.full((2, 2), -np.log(2), jnp.float32))
    trajectory = Trajectory(timestep, extras.sample, extras, ())
    terms = jax.jit(lambda params: agent._terms(params, trajectory, None))(agent.init(jax.random.key(0)).params)
    np.testing.assert_allclose(terms["value_loss"][0], [0.5 * (1 + 0.9 * 20 - 10) ** 2, 0.5 * (1 - 10) ** 2])
    np.testing.assert_allclose(terms["policy_loss"][0], np.log(2) * np.array([1 + 0.9 * 20 - 10, 1 - 10]), rtol=1e-5)


def test_what_the_learner_would_never_do_teaches_nothing() -> None:
    # It is so sure of action 2 that actions 0 and 1, which others took, have no probability left.
    spec = EnvironmentSpec(ArraySpec((2,)), DiscreteSpec(3))
    policy = np.array([[0, 0, 1e4], [0, 0, 0]])
    agent = linear_impala(spec, policy=policy, value=[1.0, 2.0], entropy_coefficient=0.0)
    trajectory, ones = by_hand(), jnp.ones((5, 2, 2), jnp.float32)
    timestep = dataclasses.replace(trajectory.timestep, observation=ones)
    learner = agent.init(jax.random.key(0))
    for action, learns in ((0, False), (1, False), (2, True)):
        extras = dataclasses.replace(trajectory.extras, sample=jnp.full((4, 2), action, jnp.int32))
        acted = Trajectory(timestep, extras.sample, extras, ())
        after, _, metrics = jax.jit(agent.update)(learner, (), acted, jax.random.key(1))
        assert (np.abs(after.params["value"] - learner.params["value"]).max() > 0) == learns
        assert float(metrics["rho"]) == learns


def test_gradients_are_clipped_to_their_global_norm() -> None:
    agent, trajectory = linear_impala(MASKED_SPEC, max_grad_norm=1e-2), by_hand()
    learner = agent.init(jax.random.key(0))
    after, _, metrics = jax.jit(agent.update)(learner, (), trajectory, jax.random.key(1))
    steps = [np.asarray(learner.params[name] - after.params[name]).ravel() for name in ("policy", "value")]
    assert np.linalg.norm(np.concatenate(steps)) == pytest.approx(1e-2, rel=1e-3)
    assert float(metrics["gradient_norm"]) > 0.1  # Before it is clipped.


def test_schedules_are_linear_over_the_run_and_stay_at_their_ends() -> None:
    numbers = {"learning_rate": 0.5, "learning_rate_end": 0.0, "adam_epsilon": 1e-5}
    entropies = {"entropy_coefficient": 0.3, "entropy_coefficient_end": 0.1}
    agent = linear_impala(MASKED_SPEC, num_updates=19, policy=0.1, **numbers, **entropies)
    update, learner, trajectory = jax.jit(agent.update), agent.init(jax.random.key(0)), by_hand()

    def run(number: int) -> tuple[IMPALALearner, dict[str, float]]:
        before = dataclasses.replace(learner, updates=jnp.int32(number))
        after, _, metrics = update(before, (), trajectory, jax.random.key(1))
        assert int(after.updates) == number + 1
        return after, {name: float(metric) for name, metric in metrics.items()}

    for number in (0, 7, 18, 19, 1000):
        after, metrics = run(number)
        done = min(number / 19, 1)
        assert metrics["learning_rate"] == pytest.approx(0.5 * (1 - done))
        assert metrics["entropy_coefficient"] == pytest.approx(0.3 - 0.2 * done)
        moved = np.abs(after.params["policy"] - learner.params["policy"]).max()
        assert moved == pytest.approx(0.5 * (1 - done), rel=1e-2)  # Adam's first step is about as long as its rate.


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_a_batch_may_be_divided_among_devices(loss_reduction: str) -> None:
    # Of the first device's environment 3 rows count, of the second one's 4. The step is the gradient, so that a sum
    # over one device only, or a mean of means, would be seen.
    weights = np.random.default_rng(3)
    numbers = {"policy": weights.normal(size=(2, 3)), "value": weights.normal(size=2)}
    agent = linear_impala(MASKED_SPEC, **numbers, loss_reduction=loss_reduction)
    learner, trajectory = agent.init(jax.random.key(0)), by_hand()
    step_type = trajectory.timestep.step_type.at[:, 1].set(M)
    trajectory = dataclasses.replace(trajectory, timestep=dataclasses.replace(trajectory.timestep, step_type=step_type))
    results = []
    for count in (1, 2):
        mesh = parallel.make_mesh(jax.devices()[:count])
        axis = parallel.axis_name(mesh)

        def update(trajectory: Trajectory, axis: str | None = axis) -> Any:
            after, _, metrics = agent.update(learner, (), trajectory, jax.random.key(1), axis=axis)
            return after.params, parallel.mean_over_replicas(metrics, axis)

        batched = PartitionSpec(None, parallel.AXIS)
        function = parallel.run_on_replicas(update, mesh, (batched,), parallel.REPLICATED)
        results.append(jax.device_get(jax.jit(function)(trajectory)))
    (one, metrics), (two, metrics_of_two) = results
    for name in one:
        steps = [params[name] - np.asarray(learner.params[name]) for params in (one, two)]
        np.testing.assert_allclose(steps[1], steps[0], rtol=1e-3, atol=1e-6)
        assert np.abs(steps[0]).max() > 1e-4
    assert {k: float(v) for k, v in metrics_of_two.items()} == pytest.approx(jax.tree.map(float, metrics), rel=1e-4)


# Acting and learning.


def act_twice(
    agent: IMPALA, environment: Patchwork, params: Any, key: jax.Array
) -> tuple[Trajectory, Trajectory, RolloutState]:
    """Two trajectories, one after the other, of 6 steps of 8 environments each, and where the second one ended."""
    stream, keys = Autoreset(environment), jax.random.split(key, 3)

    def window(state: RolloutState, key: jax.Array) -> tuple[RolloutState, Trajectory]:
        act_key, environment_key = jax.random.split(key)
        return unroll(agent, stream, params, state, act_key, jax.random.split(environment_key, 8), 6)

    end, both = jax.lax.scan(window, start_rollout(agent, stream, jax.random.split(keys[0], 8)), keys[1:])
    return *(jax.tree.map(lambda x, i=i: x[i], both) for i in range(2)), end


@pytest.mark.parametrize(
    ("action", "masked", "recurrent_size"),
    [
        (DiscreteSpec(3, start=5), False, 0),
        (DiscreteSpec(3, start=5), True, 0),
        (MultiDiscreteSpec((2, 3)), True, 0),
        (BoundedSpec((-1.0, 0.0), (3.0, 10.0)), False, 0),
        (DiscreteSpec(3), False, 4),
    ],
    ids=["discrete", "masked", "masked multi-discrete", "bounded", "recurrent"],
)
def test_every_ratio_is_1_on_what_the_learner_has_just_acted(
    action: ActionSpec, masked: bool, recurrent_size: int
) -> None:
    environment = Patchwork(action, masked)
    network = NetworkConfig(hidden_sizes=(4,), recurrent_size=recurrent_size)
    agent = IMPALAConfig(network=network, rho_clip=1e3).make(environment.spec, 10)

    @jax.jit
    def run(key: jax.Array) -> Any:
        init_key, act_key, update_key = jax.random.split(key, 3)
        learner = agent.init(init_key)
        # A fresh policy is nearly uniform whatever it sees.
        learner = dataclasses.replace(learner, params=jax.tree.map(lambda x: 3 * x, learner.params))
        _, trajectory, end = act_twice(agent, environment, learner.params, act_key)
        ratios = agent._terms(learner.params, trajectory, None)["rho"]
        metrics = agent.update(learner, (), trajectory, update_key)[2]
        forgotten = dataclasses.replace(trajectory, actor_state=jax.tree.map(jnp.zeros_like, trajectory.actor_state))
        other = agent._terms(learner.params, forgotten, None)["rho"]
        state = trajectory.actor_state
        if recurrent_size:  # The state that learning comes to after T rows is the one that acting goes on from.
            timestep = jax.tree.map(lambda x: x[:-1], trajectory.timestep)
            state = agent.network.unroll(learner.params, timestep.observation, timestep.first(), state)[1]
        return trajectory, ratios, metrics, other, state, end.actor

    trajectory, ratios, metrics, other, state, acted_state = jax.device_get(run(jax.random.key(0)))
    valid = np.asarray(valid_mask(trajectory))
    assert (~trajectory.timestep.first()[0]).any()  # Windows begin in the middle of episodes, and more end in them.
    assert (trajectory.timestep.last()[:-1].sum(0) >= 2).any()
    np.testing.assert_allclose(ratios[valid], 1, atol=1e-5)
    assert metrics["rho"] == pytest.approx(1, abs=1e-5)
    for learnt, acted in zip(jax.tree.leaves(state), jax.tree.leaves(acted_state), strict=True):
        np.testing.assert_allclose(learnt, acted, atol=1e-6)
    if recurrent_size:
        assert np.abs(other[valid] - 1).max() > 1e-3


def test_gradient_steps_are_made_one_after_the_other_each_on_some_of_the_environments() -> None:
    """2 passes over 2 environments, one at a time, in an order that is drawn; a recurrent network with its states."""
    network = NetworkConfig(hidden_sizes=(4,), recurrent_size=3)
    rates = {"learning_rate": 0.05, "learning_rate_end": 0.05, "network": network, "optimizer": "adam"}
    several = IMPALAConfig(num_epochs=2, num_minibatches=2, **rates).make(MASKED_SPEC, 10)
    once = IMPALAConfig(**rates).make(MASKED_SPEC, 10)
    states = jax.tree.map(lambda x: jax.random.normal(jax.random.key(5), x.shape), once.init_actor(2))
    trajectory = dataclasses.replace(by_hand(), actor_state=states)
    learner = once.init(jax.random.key(0))

    update, ends = jax.jit(once.update), []
    for order in itertools.product(((0, 1), (1, 0)), repeat=2):
        after = learner
        for b in (*order[0], *order[1]):
            after, _, _ = update(after, (), columns_of(trajectory, slice(b, b + 1)), jax.random.key(1))
        ends.append(ravel_pytree(after.params)[0])
    found, _, metrics = jax.jit(several.update)(learner, (), trajectory, jax.random.key(1))
    distances = [float(jnp.abs(ravel_pytree(found.params)[0] - end).max()) for end in ends]
    assert min(distances) < 1e-5
    assert sorted(distances)[1] > 1e-4
    assert int(found.updates) == 1
    assert 0 < float(metrics["rho"]) < 1


def test_weights_are_those_of_the_learners_policy_over_the_acting_one() -> None:
    environment = Patchwork(DiscreteSpec(3))
    agent = IMPALAConfig(network=NetworkConfig(hidden_sizes=(4,)), rho_clip=1.2).make(environment.spec, 10)

    @jax.jit
    def run(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        acting, learner = (agent.init(k) for k in keys[:2])
        learner, acting = (
            dataclasses.replace(x, params=jax.tree.map(lambda leaf: 9 * leaf, x.params)) for x in (learner, acting)
        )
        _, trajectory, _ = act_twice(agent, environment, agent.actor_params(acting), keys[2])
        outputs = [
            apply_over_time(agent.network, x.params, trajectory.timestep.observation, trajectory.timestep.first(), ())
            for x in (learner, acting)
        ]
        return (
            trajectory,
            [jax.nn.log_softmax(o[:-1]) for o, _ in outputs],
            agent.update(learner, (), trajectory, keys[3])[2],
        )

    trajectory, (new, old), metrics = jax.device_get(run(jax.random.key(0)))
    sample, valid = trajectory.extras.sample[..., None], np.asarray(valid_mask(trajectory))
    ratios = np.exp(np.take_along_axis(new, sample, -1) - np.take_along_axis(old, sample, -1))[..., 0][valid]
    assert ratios.min() < 0.9
    assert metrics["rho"] == pytest.approx(np.minimum(ratios, 1.2).mean(), rel=1e-4)
    assert metrics["rho_clip_fraction"] == pytest.approx((ratios > 1.2).mean(), rel=1e-5)
    assert 0 < metrics["rho_clip_fraction"] < 1


def test_on_policy_it_is_ppo_with_one_step_per_update() -> None:
    # Under Anakin: the same draws, advantages and gradients, update after update, of an agent that is tested by itself.
    network, environment = NetworkConfig(hidden_sizes=(4,), shared=True), Patchwork(DiscreteSpec(3))
    shared: dict[str, Any] = {"network": network, "learning_rate": 0.01, "max_grad_norm": 0.5, "discount": 0.9}
    impala = IMPALAConfig(optimizer="adam", loss_reduction="mean", lambda_=0.8, **shared)
    one_step: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 1, "normalize_advantages": False}
    ppo = PPOConfig(gae_lambda=0.8, value_clip=None, **one_step, **shared)
    learnt = []
    for config in (impala, ppo):
        anakin = Anakin(config.make(environment.spec, 10), environment, AnakinConfig(8, 6), jax.devices()[:2])
        start = anakin.init(0)
        before = jax.device_get(start.learner.params)
        learnt.append(jax.device_get(anakin.run(start, 8)[0].learner.params))
    for leaf, ours, theirs in zip(*map(jax.tree.leaves, (before, *learnt)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        assert np.abs(ours - leaf).max() > 0.01


# Configuration.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate_end", float("nan")),
        ("optimizer", "sgd"),
        ("optimizer", 1),
        ("rmsprop_decay", 1.5),
        ("rmsprop_epsilon", 0.0),
        ("adam_epsilon", -1e-5),
        ("max_grad_norm", 0.0),
        ("loss_reduction", "max"),
        ("discount", 1.01),
        ("lambda_", -0.1),
        ("rho_clip", 0.0),
        ("c_clip", float("inf")),
        ("reward_clip", 0.0),
        ("reward_clip", True),
        ("value_coefficient", -0.5),
        ("entropy_coefficient", "0.01"),
        ("entropy_coefficient_end", -1.0),
        ("network", "mlp"),
    ],
)
def test_numbers_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}; it must be"):
        IMPALAConfig(**{field: value})


def test_none_is_for_the_fields_whose_type_says_so() -> None:
    for field in dataclasses.fields(IMPALAConfig):
        if field.name in ("max_grad_norm", "reward_clip", "entropy_coefficient_end"):
            assert getattr(IMPALAConfig(**{field.name: None}), field.name) is None
        else:
            with pytest.raises(ValueError, match=f"{field.name} is None; it must be"):
                IMPALAConfig(**{field.name: None})


def test_later_errors_reach_back_no_further_than_the_paper_allows() -> None:
    IMPALAConfig(rho_clip=2.0, c_clip=2.0)
    with pytest.raises(ValueError, match=r"c_clip is 1.5; it must be at most rho_clip, which is 1.0"):
        IMPALAConfig(c_clip=1.5)


def test_a_run_without_updates_is_refused() -> None:
    with pytest.raises(ValueError, match="num_updates is 0"):
        IMPALAConfig().make(MASKED_SPEC, 0)
