"""Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347).

docs/agents/ppo.md lists what differs from the paper.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from podracer import parallel
from podracer.agent import ActorOutput, Metrics
from podracer.agents.forward import apply_over_time, apply_step, initial_params, initial_state
from podracer.agents.optimization import descend, flat_optimizer, linear_schedule
from podracer.networks import Network, NetworkConfig, RecurrentNetwork, actor_critic
from podracer.ops import (
    MinibatchGrid,
    Moments,
    clip_rewards,
    distribution_for,
    generalized_advantages,
    merge_moments,
    normalize,
    zero_masked,
)
from podracer.rules import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE, SWITCH, check_fields, instance_of
from podracer.types import EnvironmentSpec, TimeStep, Trajectory, split_mask, valid_mask


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """PPO's numbers.

    Attributes:
        learning_rate: Of Adam, at the first update.
        learning_rate_end: After the last update; linear in between.
        adam_epsilon: Added to the root of the second moment.
        max_grad_norm: The global norm to which gradients are clipped; None does not clip.
        discount: gamma.
        gae_lambda: lambda of the advantages.
        num_epochs: Passes over each trajectory.
        num_minibatches: Gradient steps per pass.
        clip_epsilon: Clips the probability ratio to `[1 - epsilon, 1 + epsilon]`.
        value_clip: How far a value may move from the acting one before its loss is clipped; None does not clip.
        value_coefficient: Weight of the value loss.
        entropy_coefficient: Weight of the entropy bonus at the first update.
        entropy_coefficient_end: After the last update; linear in between. None keeps it constant.
        normalize_advantages: To mean 0 and variance 1 over the batch of all devices.
        target_kl: The approximate KL divergence past which the rest of an update's gradient steps are left out; None
            for no limit.
        normalize_observations: By the running moments of all observations that were learnt from.
        reward_clip: Rewards are learnt from within `[-reward_clip, reward_clip]`, before scaling; None does not clip.
        scale_rewards: Divide rewards by the running standard deviation of the discounted return.
        network: Actor and critic.

    Raises:
        ValueError: A field is out of range or of another type; the field, its value and the rule are named.
    """

    learning_rate: float = 2.5e-4
    learning_rate_end: float = 0.0
    adam_epsilon: float = 1e-5
    max_grad_norm: float | None = 0.5
    discount: float = 0.99
    gae_lambda: float = 0.95
    num_epochs: int = 4
    num_minibatches: int = 4
    clip_epsilon: float = 0.2
    value_clip: float | None = 0.2
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.01
    entropy_coefficient_end: float | None = None
    normalize_advantages: bool = True
    target_kl: float | None = None
    normalize_observations: bool = False
    reward_clip: float | None = None
    scale_rewards: bool = False
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)

    def __post_init__(self) -> None:
        check_fields(
            self,
            {
                "learning_rate": NOT_NEGATIVE,
                "learning_rate_end": NOT_NEGATIVE,
                "adam_epsilon": POSITIVE,
                "max_grad_norm": POSITIVE.or_none(),
                "discount": FRACTION,
                "gae_lambda": FRACTION,
                "num_epochs": COUNT,
                "num_minibatches": COUNT,
                "clip_epsilon": NOT_NEGATIVE,
                "value_clip": NOT_NEGATIVE.or_none(),
                "value_coefficient": NOT_NEGATIVE,
                "entropy_coefficient": NOT_NEGATIVE,
                "entropy_coefficient_end": NOT_NEGATIVE.or_none(),
                "normalize_advantages": SWITCH,
                "target_kl": NOT_NEGATIVE.or_none(),
                "normalize_observations": SWITCH,
                "reward_clip": POSITIVE.or_none(),
                "scale_rewards": SWITCH,
                "network": instance_of(NetworkConfig),
            },
        )

    def make(self, spec: EnvironmentSpec, num_updates: int) -> "PPO":
        """The agent for an environment, with schedules over `num_updates`."""
        return PPO(spec, actor_critic(self.network, spec), self, num_updates)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PPOLearner:
    """What PPO learns. `observations` and `returns` are `()` where nothing is normalised by them."""

    params: PyTree
    optimizer: PyTree
    updates: Int[Array, ""]
    observations: Any
    returns: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PPOActorParams:
    """What acting reads of the learner: its parameters, and the moments of observations, or `()`."""

    params: PyTree
    observations: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PPOActorState:
    """`[B, ...]`: the network's recurrent state, and the discounted return so far for reward scaling, or `()`."""

    recurrent: PyTree
    discounted_return: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PPOExtras:
    """What acting remembers, `[B, ...]`. `sample` is what `log_prob` is of: an action before squashing or offset."""

    sample: PyTree
    log_prob: Float[Array, "*B"]
    value: Float[Array, "*B"]
    discounted_return: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What the loss reads, `[T, B, ...]`."""

    observation: PyTree
    mask: Any
    first: Bool[Array, "T B"]
    weight: Float[Array, "T B"]
    extras: PPOExtras
    advantage: Float[Array, "T B"]
    target: Float[Array, "T B"]


@dataclasses.dataclass(frozen=True)
class PPO:
    """The agent.

    Attributes:
        spec: The environment's.
        network: From an observation to `(policy outputs, value)`; see `podracer.networks.actor_critic`.
        config: The numbers.
        num_updates: Updates in the whole run, over which the schedules go.
    """

    spec: EnvironmentSpec
    network: Network | RecurrentNetwork
    config: PPOConfig
    num_updates: int

    def __post_init__(self) -> None:
        if self.num_updates < 1:
            raise ValueError(f"num_updates is {self.num_updates}; the schedules need at least 1")

    def init(self, key: jax.Array) -> PPOLearner:
        """Parameters drawn with `key`, a fresh optimiser, and moments by which normalising changes nothing."""
        example, _ = split_mask(self.spec.observation)
        params = initial_params(self.network, self.spec, key)
        return PPOLearner(
            params=params,
            optimizer=self._optimizer().init(params),
            updates=jnp.int32(0),
            observations=Moments.zero(example) if self.config.normalize_observations else (),
            returns=Moments.zero(jnp.float32(0)) if self.config.scale_rewards else (),
        )

    def init_actor(self, batch_size: int) -> PPOActorState:
        """The network's initial state and discounted returns of 0, `[batch_size, ...]`."""
        recurrent = initial_state(self.network, batch_size)
        return PPOActorState(recurrent, jnp.zeros(batch_size, jnp.float32) if self.config.scale_rewards else ())

    def init_memory(self, example: Trajectory) -> tuple[()]:
        """Nothing: a trajectory is learnt from once, in the update after it."""
        return ()

    def actor_params(self, learner: PPOLearner) -> PPOActorParams:
        """The parameters, and the moments that normalise observations both here and in the update that follows."""
        return PPOActorParams(learner.params, learner.observations)

    def act(
        self,
        params: PPOActorParams,
        timestep: TimeStep,
        actor_state: PPOActorState,
        key: jax.Array,
        *,
        evaluate: bool = False,
    ) -> ActorOutput:
        """Samples the policy for `[B, ...]`, or plays its mode to evaluate, and remembers what the ratio needs."""
        observation, mask = split_mask(timestep.observation)
        observation = self._normalized(observation, params.observations)
        (outputs, value), recurrent = apply_step(
            self.network, params.params, observation, timestep.first(), actor_state.recurrent
        )
        distribution = distribution_for(self.spec.action, outputs, mask)
        sample = distribution.mode() if evaluate else distribution.sample(key)
        discounted_return = actor_state.discounted_return
        if self.config.scale_rewards:
            reward = clip_rewards(timestep, self.config.reward_clip).reward
            continued = self.config.discount * discounted_return + reward
            discounted_return = jnp.where(timestep.first(), 0, continued)
        return ActorOutput(
            action=distribution.to_action(sample),
            actor_state=PPOActorState(recurrent, discounted_return),
            extras=PPOExtras(sample, distribution.log_prob(sample), value, discounted_return),
        )

    def update(
        self,
        learner: PPOLearner,
        memory: tuple[()],
        trajectory: Trajectory,
        key: jax.Array,
        *,
        axis: str | None = None,
    ) -> tuple[PPOLearner, tuple[()], Metrics]:
        """`num_epochs * num_minibatches` gradient steps on the `[T, B]` rows; the observations' moments change last."""
        valid = valid_mask(trajectory)
        timestep = clip_rewards(trajectory.timestep, self.config.reward_clip)
        extras = _without_masked(trajectory.extras, valid)
        trajectory = dataclasses.replace(trajectory, timestep=timestep, extras=extras)
        observations, returns = learner.observations, learner.returns
        if self.config.scale_rewards:
            # Of the row that follows, so that the reward that ends an episode counts.
            following = self.config.discount * trajectory.extras.discounted_return + trajectory.timestep.reward[1:]
            returns = merge_moments(returns, following, valid, axis)
            trajectory = _with_scaled_rewards(trajectory, _reward_scale(returns))
        batch = self._batch(learner, trajectory, valid, axis)
        if self.config.normalize_observations:
            raw, _ = split_mask(jax.tree.map(lambda x: x[:-1], trajectory.timestep.observation))
            observations = merge_moments(observations, raw, valid, axis)
        params, optimizer, metrics = self._learn(learner, batch, trajectory.actor_state.recurrent, key, axis)
        metrics["explained_variance"] = _explained_variance(batch)
        return PPOLearner(params, optimizer, learner.updates + 1, observations, returns), memory, metrics

    def _batch(self, learner: PPOLearner, trajectory: Trajectory, valid: jax.Array, axis: str | None) -> Batch:
        """Advantages, targets and weights, with the observations normalised as they were for acting."""
        observation, mask = split_mask(trajectory.timestep.observation)
        observation = self._normalized(observation, learner.observations)
        first = trajectory.timestep.first()
        bootstrap = self._bootstrap(learner.params, observation, first, trajectory.actor_state.recurrent)
        values = jnp.concatenate([trajectory.extras.value, bootstrap[None]])
        advantage = generalized_advantages(trajectory, values, self.config.discount, self.config.gae_lambda)
        target = advantage + values[:-1]
        if self.config.normalize_advantages:
            moments = merge_moments(Moments.zero(jnp.float32(0)), advantage, valid, axis)
            advantage = normalize(advantage, moments, clip=jnp.inf)
        # Weighted by the share of valid rows in the whole batch, a plain mean over any minibatch is an unbiased mean
        # over valid rows, without one more collective in the loop.
        share = parallel.mean_over_replicas(valid.astype(jnp.float32).mean(), axis)
        weight = valid.astype(jnp.float32) / jnp.maximum(share, 1e-8)
        observation, mask, first = jax.tree.map(lambda x: x[:-1], (observation, mask, first))
        return Batch(observation, mask, first, weight, trajectory.extras, advantage, target)

    def _learn(
        self, learner: PPOLearner, batch: Batch, recurrent: PyTree, key: jax.Array, axis: str | None
    ) -> tuple[PyTree, PyTree, Metrics]:
        """Epochs x minibatches of gradient steps, in one loop."""
        config = self.config
        length, batch_size = batch.first.shape
        sequences = isinstance(self.network, RecurrentNetwork)
        grid = MinibatchGrid.create(length, batch_size, config.num_minibatches, sequences=sequences)
        # Replicas that draw the same rows make the same minibatches as one large replica would.
        keys = jax.random.split(parallel.shared_key(key, axis), config.num_epochs)
        rows, columns = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), jax.vmap(grid.shuffle)(keys))
        optimizer = self._optimizer()
        learning_rate = linear_schedule(
            config.learning_rate, config.learning_rate_end, learner.updates, self.num_updates
        )
        entropy_coefficient = linear_schedule(
            config.entropy_coefficient, config.entropy_coefficient_end, learner.updates, self.num_updates
        )

        def step(carry: PyTree, indices: PyTree) -> tuple[PyTree, Metrics]:
            params, state, stopped = carry
            part = grid.take(batch, *indices)
            start = grid.take_columns(recurrent, indices[1])
            grads, metrics = jax.grad(self._loss, has_aux=True)(params, part, start, entropy_coefficient)
            if config.target_kl is None:
                grads = parallel.mean_over_replicas(grads, axis)
            else:
                grads, kl = parallel.mean_over_replicas((grads, metrics["approx_kl"]), axis)
                stopped = stopped | (kl > config.target_kl)
            new_params, new_state = descend(optimizer, params, state, grads, learning_rate)
            new_params, new_state = jax.tree.map(
                lambda new, old: jnp.where(stopped, old, new), (new_params, new_state), (params, state)
            )
            return (new_params, new_state, stopped), metrics

        carry = (learner.params, learner.optimizer, jnp.array(False))
        (params, state, _), metrics = jax.lax.scan(step, carry, (rows, columns))
        metrics = jax.tree.map(jnp.mean, metrics)
        return params, state, metrics | {"learning_rate": learning_rate, "entropy_coefficient": entropy_coefficient}

    def _loss(
        self, params: PyTree, batch: Batch, recurrent: PyTree, entropy_coefficient: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        config = self.config
        outputs, value = apply_over_time(self.network, params, batch.observation, batch.first, recurrent)
        distribution = distribution_for(self.spec.action, outputs, batch.mask)
        # On masked rows both stand for nothing, and a ratio that overflows is NaN even with a weight of 0.
        log_ratio = jnp.where(batch.weight > 0, distribution.log_prob(batch.extras.sample) - batch.extras.log_prob, 0)
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - config.clip_epsilon, 1 + config.clip_epsilon)
        policy_loss = -jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
        value_loss = jnp.square(value - batch.target)
        if config.value_clip is not None:
            moved = jnp.clip(value - batch.extras.value, -config.value_clip, config.value_clip)
            value_loss = jnp.maximum(value_loss, jnp.square(batch.extras.value + moved - batch.target))
        terms = {
            "policy_loss": policy_loss,
            "value_loss": 0.5 * value_loss,
            "entropy": distribution.entropy(),
            "approx_kl": ratio - 1 - log_ratio,  # The low-variance estimator k3 of Schulman's note.
            "clip_fraction": (ratio != clipped).astype(jnp.float32),
        }
        means = {name: (batch.weight * term).mean() for name, term in terms.items()}
        loss = means["policy_loss"] + config.value_coefficient * means["value_loss"]
        return loss - entropy_coefficient * means["entropy"], means

    def _bootstrap(self, params: PyTree, observation: PyTree, first: jax.Array, recurrent: PyTree) -> Float[Array, "B"]:
        """The value of row `T`, which no actor has computed."""
        if isinstance(self.network, RecurrentNetwork):
            return apply_over_time(self.network, params, observation, first, recurrent)[1][-1]
        return self.network.apply(params, jax.tree.map(lambda x: x[-1], observation))[1]

    def _normalized(self, observation: PyTree, moments: Any) -> PyTree:
        return normalize(observation, moments) if self.config.normalize_observations else observation

    def _optimizer(self) -> optax.GradientTransformation:
        return flat_optimizer(optax.scale_by_adam(eps=self.config.adam_epsilon), self.config.max_grad_norm)


def _without_masked(extras: PPOExtras, valid: Bool[Array, "T B"]) -> PPOExtras:
    """Zeros for what was remembered of ignored actions.

    The value stays. On a masked row it is that of the final observation, from which a truncation bootstraps.
    """
    return dataclasses.replace(zero_masked(extras, valid), value=extras.value)


def _reward_scale(returns: Moments) -> Float[Array, ""]:
    """One over the standard deviation; 1 where the returns never varied, which says nothing of their scale."""
    constant = returns.variance <= 1e-10 * jnp.square(returns.mean)
    return jnp.where(constant, 1, jax.lax.rsqrt(jnp.where(constant, 1, returns.variance)))


def _with_scaled_rewards(trajectory: Trajectory, scale: Float[Array, ""]) -> Trajectory:
    timestep = dataclasses.replace(trajectory.timestep, reward=trajectory.timestep.reward * scale)
    return dataclasses.replace(trajectory, timestep=timestep)


def _explained_variance(batch: Batch) -> Float[Array, ""]:
    """1 - Var(target - value) / Var(target) over valid rows of this replica; 0 where the targets do not vary."""

    def variance(x: jax.Array) -> jax.Array:
        mean = (batch.weight * x).mean() / jnp.maximum(batch.weight.mean(), 1e-8)
        return (batch.weight * jnp.square(x - mean)).mean()

    total = variance(batch.target)
    return jnp.where(total > 0, 1 - variance(batch.target - batch.extras.value) / jnp.where(total > 0, total, 1), 0)
