"""The textbook: PPO under Anakin in one file, in the form that most JAX code for it has.

One device, gymnax's own `step` with its auto-reset, keys split along the way, `jax.random.permutation` over all
samples and a gather of single rows, separate actor and critic, nested scans, Flax's TrainState. The numbers are those
of `PPOConfig`, with 8 minibatches. What the library is measured against; nothing is slowed down on purpose.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

NUM_EPOCHS, NUM_MINIBATCHES = 4, 8
LEARNING_RATE, MAX_GRAD_NORM = 2.5e-4, 0.5
DISCOUNT, GAE_LAMBDA = 0.99, 0.95
CLIP_EPSILON, VALUE_COEFFICIENT, ENTROPY_COEFFICIENT = 0.2, 0.5, 0.01


class ActorCritic(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x.reshape(x.shape[0], -1).astype(jnp.float32)
        heads = []
        for outputs, scale in ((self.num_actions, 0.01), (1, 1.0)):
            hidden = x
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(hidden))
            heads.append(nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale))(hidden))
        return heads[0], heads[1].squeeze(-1)


class Transition(NamedTuple):
    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    observation: jax.Array


class Carry(NamedTuple):
    train_state: TrainState
    env_state: Any
    observation: jax.Array
    running_return: jax.Array
    key: jax.Array


def make_train(
    name: str, num_envs: int, num_steps: int, num_updates: int
) -> tuple[Callable[[jax.Array], Carry], Callable[[Carry, None], tuple[Carry, dict[str, jax.Array]]]]:
    """`init(key)`, and `update(carry, None)` to scan over; `num_updates` is what the learning rate decays over."""
    env, env_params = gymnax.make(name)
    network = ActorCritic(env.action_space(env_params).n)

    def schedule(count: jax.Array) -> jax.Array:
        return LEARNING_RATE * (1 - (count // (NUM_EPOCHS * NUM_MINIBATCHES)) / num_updates)

    def init(key: jax.Array) -> Carry:
        key, env_key, network_key = jax.random.split(key, 3)
        observation, env_state = jax.vmap(env.reset, (0, None))(jax.random.split(env_key, num_envs), env_params)
        optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(schedule, eps=1e-5))
        params = network.init(network_key, observation)
        train_state = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
        return Carry(train_state, env_state, observation, jnp.zeros(num_envs), key)

    def loss(params: Any, batch: tuple[Transition, jax.Array, jax.Array]) -> jax.Array:
        transition, advantage, target = batch
        logits, value = network.apply(params, transition.observation)
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, transition.action[:, None], -1)[:, 0]
        ratio = jnp.exp(log_prob - transition.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = jnp.clip(ratio, 1 - CLIP_EPSILON, 1 + CLIP_EPSILON)
        policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
        moved = transition.value + (value - transition.value).clip(-CLIP_EPSILON, CLIP_EPSILON)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (moved - target) ** 2).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return policy_loss + VALUE_COEFFICIENT * value_loss - ENTROPY_COEFFICIENT * entropy

    def env_step(carry: Carry, _: None) -> tuple[Carry, tuple[Transition, jax.Array]]:
        key, action_key, step_key = jax.random.split(carry.key, 3)
        logits, value = network.apply(carry.train_state.params, carry.observation)
        action = jax.random.categorical(action_key, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        step_keys = jax.random.split(step_key, num_envs)
        observation, env_state, reward, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
            step_keys, carry.env_state, action, env_params
        )
        done = terminated | truncated
        returns = carry.running_return + reward
        transition = Transition(done, action, value, reward, log_prob, carry.observation)
        running = jnp.where(done, 0.0, returns)
        return Carry(carry.train_state, env_state, observation, running, key), (transition, returns)

    def advantages(transitions: Transition, last_value: jax.Array) -> jax.Array:
        def backwards(carry: tuple, transition: Transition) -> tuple[tuple, jax.Array]:
            advantage, next_value = carry
            going_on = 1 - transition.done
            delta = transition.reward + DISCOUNT * next_value * going_on - transition.value
            advantage = delta + DISCOUNT * GAE_LAMBDA * going_on * advantage
            return (advantage, transition.value), advantage

        carry = (jnp.zeros_like(last_value), last_value)
        return jax.lax.scan(backwards, carry, transitions, reverse=True, unroll=16)[1]

    def minibatch_step(train_state: TrainState, batch: tuple) -> tuple[TrainState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(train_state.params, batch)
        return train_state.apply_gradients(grads=gradients), value

    def update(carry: Carry, _: None) -> tuple[Carry, dict[str, jax.Array]]:
        carry, (transitions, returns) = jax.lax.scan(env_step, carry, None, num_steps)
        _, last_value = network.apply(carry.train_state.params, carry.observation)
        advantage = advantages(transitions, last_value)
        data = (transitions, advantage, advantage + transitions.value)

        def epoch(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
            train_state, key = carry
            key, permutation_key = jax.random.split(key)
            size = num_steps * num_envs
            order = jax.random.permutation(permutation_key, size)
            flat = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), data)
            shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0), flat)
            minibatches = jax.tree.map(lambda x: x.reshape(NUM_MINIBATCHES, -1, *x.shape[1:]), shuffled)
            train_state, losses = jax.lax.scan(minibatch_step, train_state, minibatches)
            return (train_state, key), losses

        (train_state, key), losses = jax.lax.scan(epoch, (carry.train_state, carry.key), None, NUM_EPOCHS)
        episodes = transitions.done.sum()
        metrics = {
            "loss": losses.mean(),
            "episodes": episodes,
            "episode_return": jnp.where(transitions.done, returns, 0).sum() / jnp.maximum(episodes, 1),
        }
        return carry._replace(train_state=train_state, key=key), metrics

    return init, update
