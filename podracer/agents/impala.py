"""IMPALA's learner: actor-critic with V-trace (Espeholt et al. 2018, arXiv 1802.01561).

docs/agents/impala.md lists what differs from the paper.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

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
    merge_moments,
    normalize,
    vtrace,
    zero_masked,
)
from podracer.rules import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE, SWITCH, check_fields, instance_of, one_of
from podracer.types import EnvironmentSpec, TimeStep, Trajectory, split_mask, valid_mask


@dataclasses.dataclass(frozen=True)
class IMPALAConfig:
    """IMPALA's numbers; those of the paper's Atari experiments by default, but for the network and the rewards.

    Attributes:
        learning_rate: At the first update.
        learning_rate_end: After the last update; linear in between.
        optimizer: `rmsprop` without momentum, or `adam`.
        rmsprop_decay: Of the running mean of squared gradients.
        rmsprop_epsilon: Added to that mean, under the root.
        adam_epsilon: Added to the root of the second moment.
        max_grad_norm: The global norm to which gradients are clipped; None does not clip.
        loss_reduction: `sum` over the valid rows of all devices, or their `mean`. The gradient of a mean is smaller by
            the number of rows, so it needs another `max_grad_norm` and another epsilon.
        discount: gamma.
        lambda_: lambda of the targets and advantages.
        rho_clip: Bounds the importance weights of the targets and of the policy's gradient.
        c_clip: Bounds those by which later errors reach back; at most `rho_clip`.
        normalize_advantages: To mean 0 and variance 1 over the rows of a gradient step on all devices.
        num_epochs: Passes over each trajectory; the targets are computed anew for each gradient step.
        num_minibatches: Gradient steps per pass, each on as many of the environments.
        reward_clip: Rewards are learnt from within `[-reward_clip, reward_clip]`; None does not clip.
        value_coefficient: Weight of the value loss.
        entropy_coefficient: Weight of the entropy bonus at the first update.
        entropy_coefficient_end: After the last update; linear in between. None keeps it constant.
        network: Actor and critic.

    Raises:
        ValueError: A field is out of range or of another type; the field, its value and the rule are named.
    """

    learning_rate: float = 6e-4
    learning_rate_end: float = 0.0
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    rmsprop_decay: float = 0.99
    rmsprop_epsilon: float = 0.01
    adam_epsilon: float = 1e-5
    max_grad_norm: float | None = 40.0
    loss_reduction: Literal["sum", "mean"] = "sum"
    discount: float = 0.99
    lambda_: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    normalize_advantages: bool = False
    num_epochs: int = 1
    num_minibatches: int = 1
    reward_clip: float | None = None
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.01
    entropy_coefficient_end: float | None = None
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)

    def __post_init__(self) -> None:
        check_fields(
            self,
            {
                "learning_rate": NOT_NEGATIVE,
                "learning_rate_end": NOT_NEGATIVE,
                "optimizer": one_of("rmsprop", "adam"),
                "rmsprop_decay": FRACTION,
                "rmsprop_epsilon": POSITIVE,
                "adam_epsilon": POSITIVE,
                "max_grad_norm": POSITIVE.or_none(),
                "loss_reduction": one_of("sum", "mean"),
                "discount": FRACTION,
                "lambda_": FRACTION,
                "rho_clip": POSITIVE,
                "c_clip": POSITIVE,
                "normalize_advantages": SWITCH,
                "num_epochs": COUNT,
                "num_minibatches": COUNT,
                "reward_clip": POSITIVE.or_none(),
                "value_coefficient": NOT_NEGATIVE,
                "entropy_coefficient": NOT_NEGATIVE,
                "entropy_coefficient_end": NOT_NEGATIVE.or_none(),
                "network": instance_of(NetworkConfig),
            },
        )
        if self.c_clip > self.rho_clip:
            raise ValueError(f"c_clip is {self.c_clip!r}; it must be at most rho_clip, which is {self.rho_clip!r}")

    def make(self, spec: EnvironmentSpec, num_updates: int) -> "IMPALA":
        """The agent for an environment, with schedules over `num_updates`."""
        return IMPALA(spec, actor_critic(self.network, spec), self, num_updates)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IMPALALearner:
    """What IMPALA learns."""

    params: PyTree
    optimizer: PyTree
    updates: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IMPALAExtras:
    """What acting remembers, `[B, ...]`. `sample` is what `log_prob` is of: an action before squashing or offset."""

    sample: PyTree
    log_prob: Float[Array, "*B"]


@dataclasses.dataclass(frozen=True)
class IMPALA:
    """The agent. Its actor parameters are the network's, and its actor state is the network's recurrent state.

    Attributes:
        spec: The environment's.
        network: From an observation to `(policy outputs, value)`; see `podracer.networks.actor_critic`.
        config: The numbers.
        num_updates: Updates in the whole run, over which the schedules go.
    """

    spec: EnvironmentSpec
    network: Network | RecurrentNetwork
    config: IMPALAConfig
    num_updates: int

    def __post_init__(self) -> None:
        if self.num_updates < 1:
            raise ValueError(f"num_updates is {self.num_updates}; the schedules need at least 1")

    def init(self, key: jax.Array) -> IMPALALearner:
        """Parameters drawn with `key`, and a fresh optimiser."""
        params = initial_params(self.network, self.spec, key)
        return IMPALALearner(params, self._optimizer().init(params), jnp.int32(0))

    def init_actor(self, batch_size: int) -> PyTree:
        """The network's initial state, `[batch_size, ...]`; `()` if feed-forward."""
        return initial_state(self.network, batch_size)

    def init_memory(self, example: Trajectory) -> tuple[()]:
        """Nothing: a trajectory is learnt from once, in the update after it."""
        return ()

    def actor_params(self, learner: IMPALALearner) -> PyTree:
        """The network's parameters."""
        return learner.params

    def act(
        self,
        params: PyTree,
        timestep: TimeStep,
        actor_state: PyTree,
        key: jax.Array,
        *,
        evaluate: bool = False,
    ) -> ActorOutput:
        """Samples the policy for `[B, ...]`, or plays its mode to evaluate, and remembers what the weights need."""
        observation, mask = split_mask(timestep.observation)
        (outputs, _), recurrent = apply_step(self.network, params, observation, timestep.first(), actor_state)
        policy = distribution_for(self.spec.action, outputs, mask)
        sample = policy.mode() if evaluate else policy.sample(key)
        return ActorOutput(policy.to_action(sample), recurrent, IMPALAExtras(sample, policy.log_prob(sample)))

    def update(
        self,
        learner: IMPALALearner,
        memory: tuple[()],
        trajectory: Trajectory,
        key: jax.Array,
        *,
        axis: str | None = None,
    ) -> tuple[IMPALALearner, tuple[()], Metrics]:
        """`num_epochs * num_minibatches` gradient steps on the `[T, B]` rows, whatever parameters acted them."""
        config = self.config
        trajectory = dataclasses.replace(
            trajectory,
            timestep=clip_rewards(trajectory.timestep, config.reward_clip),
            extras=zero_masked(trajectory.extras, valid_mask(trajectory)),
        )
        rates = {
            "learning_rate": (config.learning_rate, config.learning_rate_end),
            "entropy_coefficient": (config.entropy_coefficient, config.entropy_coefficient_end),
        }
        now = {name: linear_schedule(*ends, learner.updates, self.num_updates) for name, ends in rates.items()}
        length, batch_size = valid_mask(trajectory).shape
        grid = MinibatchGrid.create(length, batch_size, config.num_minibatches, sequences=True)
        carry = learner.params, learner.optimizer
        if config.num_epochs == config.num_minibatches == 1:
            # Outside of a loop, where convolutions are faster.
            (params, optimizer), metrics = self._step(carry, trajectory, now, axis)
        else:

            def step(carry: PyTree, columns: Int[Array, "b"]) -> tuple[PyTree, Metrics]:
                state = grid.take_columns(trajectory.actor_state, columns)
                rows = dataclasses.replace(trajectory, actor_state=())
                part = dataclasses.replace(grid.take(rows, jnp.arange(length), columns), actor_state=state)
                return self._step(carry, part, now, axis)

            keys = jax.random.split(parallel.shared_key(key, axis), config.num_epochs)
            columns = jax.vmap(grid.shuffle)(keys)[1]
            (params, optimizer), metrics = jax.lax.scan(step, carry, columns.reshape(-1, columns.shape[-1]))
            metrics = jax.tree.map(jnp.mean, metrics)
        return IMPALALearner(params, optimizer, learner.updates + 1), memory, metrics | now

    def _step(
        self, carry: tuple[PyTree, PyTree], trajectory: Trajectory, rates: Metrics, axis: str | None
    ) -> tuple[tuple[PyTree, PyTree], Metrics]:
        """One gradient step."""
        config, (params, optimizer) = self.config, carry
        valid = valid_mask(trajectory)
        replicas = 1 if axis is None else jax.lax.axis_size(axis)
        rows = replicas * parallel.mean_over_replicas(valid.sum().astype(jnp.float32), axis)  # Valid ones, of all.
        # The mean over replicas of sums with these weights is the mean over the valid rows of all of them.
        weight = valid.astype(jnp.float32) * (replicas / jnp.maximum(rows, 1))

        def loss(params: PyTree) -> tuple[jax.Array, Metrics]:
            terms = {name: (weight * term).sum() for name, term in self._terms(params, trajectory, axis).items()}
            total = terms["policy_loss"] + config.value_coefficient * terms["value_loss"]
            total = total - rates["entropy_coefficient"] * terms["entropy"]
            return total * rows if config.loss_reduction == "sum" else total, terms

        gradients, metrics = jax.grad(loss, has_aux=True)(params)
        gradients = parallel.mean_over_replicas(gradients, axis)
        new = descend(self._optimizer(), params, optimizer, gradients, rates["learning_rate"])
        return new, metrics | {"gradient_norm": optax.tree.norm(gradients)}

    def _terms(self, params: PyTree, trajectory: Trajectory, axis: str | None) -> dict[str, Float[Array, "T B"]]:
        """What the loss and the metrics are sums of. On masked rows they are finite and mean nothing."""
        config, timestep, extras = self.config, trajectory.timestep, trajectory.extras
        observation, mask = split_mask(timestep.observation)
        # All T + 1 rows: the last one has the value that the row before bootstraps from.
        outputs, values = apply_over_time(self.network, params, observation, timestep.first(), trajectory.actor_state)
        policy = distribution_for(self.spec.action, outputs[:-1], None if mask is None else mask[:-1])
        log_prob = policy.log_prob(extras.sample)
        log_ratio = jax.lax.stop_gradient(log_prob - extras.log_prob)
        corrected = vtrace(
            trajectory,
            jax.lax.stop_gradient(values),
            log_ratio,
            config.discount,
            config.lambda_,
            config.rho_clip,
            config.c_clip,
        )
        advantage = corrected.advantage
        if config.normalize_advantages:
            moments = merge_moments(Moments.zero(jnp.float32(0)), advantage, valid_mask(trajectory), axis)
            advantage = normalize(advantage, moments, clip=jnp.inf)
        # Where the learner's policy is the one that acted, ratios are 1 but for rounding, which is no clipping.
        above = log_ratio > math.log(config.rho_clip) + 1e-3
        return {
            "policy_loss": -log_prob * advantage,
            "value_loss": 0.5 * jnp.square(corrected.target - values[:-1]),
            "entropy": policy.entropy(),
            "rho": corrected.rho,
            "rho_clip_fraction": above.astype(jnp.float32),
        }

    def _optimizer(self) -> optax.GradientTransformation:
        config = self.config
        if config.optimizer == "adam":
            return flat_optimizer(optax.scale_by_adam(eps=config.adam_epsilon), config.max_grad_norm)
        # TensorFlow's form, in which the paper's epsilon is meant: under the root, and a mean square that starts at 1.
        rms = optax.scale_by_rms(decay=config.rmsprop_decay, eps=config.rmsprop_epsilon, initial_scale=1.0)
        return flat_optimizer(rms, config.max_grad_norm)
