"""Anakin in one file: PPO learns CartPole, environment and all, in one compiled program on every device.

Podracer's `Anakin` and `PPO` do exactly this for any agent and any environment; here is what remains of them for one
agent and one environment, with nothing hidden in a library. A test holds both to the same parameters.

The idea of Anakin (arXiv 2104.06272, section 3): an environment written in JAX can be compiled together with the agent.
Then nothing ever travels between host and device, and more devices only means the same program on each of them, with
gradients averaged in between. Python starts the loop and reads a few sums when it ends.

    pip install jax flax optax gymnax
    python examples/anakin_in_one_file.py
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

environment, environment_params = gymnax.make("CartPole-v1")


@dataclasses.dataclass(frozen=True)
class Config:
    num_envs: int = 64  # B, over all devices.
    rollout_length: int = 128  # T, steps of each environment per update.
    num_updates: int = 61  # 61 x 64 x 128 = 500,000 steps.
    num_epochs: int = 4
    num_minibatches: int = 8
    learning_rate: float = 2.5e-4
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_epsilon: float = 0.2
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.01


# 1. Random numbers. Every draw has a key made of counters: what it is for, where, and when. Nothing has to be carried
# through the loop, and environment 17 sees the same luck on one device as on eight.

INIT, RESET, ENVIRONMENT, ACT, UPDATE = range(5)
fold_in_each = jax.vmap(jax.random.fold_in, (0, None))


def key_for(root: jax.Array, *counters: int | jax.Array) -> jax.Array:
    for counter in counters:
        root = jax.random.fold_in(root, counter)
    return root


# 2. The environment. After the last step of an episode comes one more row, on which the action is ignored and a new
# episode starts. So the final observation is a row like any other, and its value can be bootstrapped from where the
# episode was only cut by the time limit. gymnax's own `step` would replace that observation by the next episode's.


class TimeStep(NamedTuple):
    observation: jax.Array
    reward: jax.Array
    discount: jax.Array  # 0 where the pole fell; 1 otherwise, also at the time limit.
    last: jax.Array  # The episode ended here, either way.


def reset(key: jax.Array) -> tuple[Any, TimeStep]:
    observation, state = environment.reset_env(key, environment_params)
    # gymnax starts its clock at a Python 0, whose weak type would have everything compiled twice.
    state = state.replace(time=jnp.int32(state.time))
    return state, TimeStep(observation, jnp.float32(0), jnp.float32(1), jnp.bool_(False))


def step(state: Any, last: jax.Array, action: jax.Array, key: jax.Array) -> tuple[Any, TimeStep]:
    step_key, reset_key = jax.random.split(key)
    observation, stepped, reward, fell, _ = environment.step_env(step_key, state, action, environment_params)
    ended = fell | environment.is_truncated(stepped, environment_params)
    timestep = TimeStep(observation, reward.astype(jnp.float32), 1 - fell.astype(jnp.float32), ended)
    # Under `vmap` both branches run for every environment, so a plain choice costs nothing extra.
    return jax.tree.map(partial(jnp.where, last), reset(reset_key), (stepped, timestep))


# 3. The network: two small MLPs, one for the policy and one for the value.


class Torso(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(math.sqrt(2)))(x))
        return x


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        actor, critic = Torso(name="actor_torso")(x), Torso(name="critic_torso")(x)
        # Nearly equal logits at the start: the agent should explore before it has an opinion.
        logits = nn.Dense(2, kernel_init=nn.initializers.orthogonal(0.01))(actor)
        return logits, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(critic)[..., 0]


network = ActorCritic()
# Adam on one flat vector: a small network would otherwise spend its time on a dozen tiny kernels.
optimizer = optax.flatten(optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam(eps=1e-5)))


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    # A sum over a one-hot differentiates into elementwise work, where an index would into a scatter.
    return (jax.nn.one_hot(action, 2) * jax.nn.log_softmax(logits)).sum(-1)


# 4. What the loop carries. Environments are spread over the devices; everything else is the same on each of them.


class State(NamedTuple):
    params: Any
    optimizer: Any
    updates: jax.Array
    environment: Any  # [B, ...]
    timestep: TimeStep  # [B, ...]
    running_return: jax.Array  # [B], of the episodes that are not over yet.


SPECS = State(*(PartitionSpec(),) * 3, *(PartitionSpec("device"),) * 3)


def average(tree: Any) -> Any:
    """The mean over devices, as one vector: what an all-reduce of small arrays costs is latency, not size."""
    if jax.lax.axis_size("device") == 1:
        return tree
    vector, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(vector, "device"))


# 5. Acting: T steps of this device's environments.


class Rollout(NamedTuple):
    timestep: TimeStep  # [T + 1, B]: row T is where the next rollout starts.
    action: jax.Array  # [T, B], chosen on timestep t, like the next two.
    log_prob: jax.Array
    value: jax.Array
    episode_return: jax.Array  # [T, B], after the step.


def environment_keys(config: Config, key: jax.Array) -> jax.Array:
    """One for each of this device's environments, by its place among all environments."""
    count = config.num_envs // jax.lax.axis_size("device")
    return jax.vmap(partial(jax.random.fold_in, key))(jax.lax.axis_index("device") * count + jnp.arange(count))


def act(config: Config, root: jax.Array, state: State) -> tuple[State, Rollout]:
    act_key = key_for(root, ACT, jax.lax.axis_index("device"), state.updates)
    step_keys = fold_in_each(environment_keys(config, key_for(root, ENVIRONMENT)), state.updates)

    def one_step(carry: tuple, t: jax.Array) -> tuple[tuple, tuple]:
        inner, timestep, running = carry
        logits, value = network.apply(state.params, timestep.observation)
        action = jax.random.categorical(jax.random.fold_in(act_key, t), logits)
        inner, following = jax.vmap(step)(inner, timestep.last, action, fold_in_each(step_keys, t))
        running = jnp.where(timestep.last, 0, running + following.reward)
        return (inner, following, running), (timestep, action, log_prob_of(logits, action), value, running)

    carry, (timesteps, *rest) = jax.lax.scan(one_step, tuple(state[3:]), jnp.arange(config.rollout_length))
    timesteps = jax.tree.map(lambda rows, row: jnp.concatenate([rows, row[None]]), timesteps, carry[1])
    return State(*state[:3], *carry), Rollout(timesteps, *rest)


# 6. From rewards to what the loss needs: advantages (GAE, arXiv 1506.02438), value targets and weights.


def make_batch(config: Config, params: Any, rollout: Rollout) -> tuple[jax.Array, ...]:
    timestep = rollout.timestep
    values = jnp.concatenate([rollout.value, network.apply(params, timestep.observation[-1])[1][None]])
    # Rows on which an environment reset itself are no experience: their weight is 0, and nothing flows across them.
    valid = ~timestep.last[:-1]
    reward = jnp.where(valid, timestep.reward[1:], 0)
    discount = jnp.where(valid, config.discount * timestep.discount[1:], 0)
    decay = discount * jnp.where(timestep.last[1:], 0, config.gae_lambda)
    error = reward + discount * values[1:] - values[:-1]

    def backwards(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = row[0] + row[1] * following
        return advantage, advantage

    _, advantage = jax.lax.scan(backwards, jnp.zeros_like(error[0]), (error, decay), reverse=True, unroll=16)
    advantage = jnp.where(valid, advantage, 0)

    # To mean 0 and variance 1 over the valid rows of ALL devices, or else their number would change the result.
    count, total = average((valid.sum().astype(jnp.float32), advantage.sum()))
    safe = jnp.where(count > 0, count, 1)  # Of the average device, so it may be a fraction.
    mean = total / safe
    variance = average(jnp.where(valid, jnp.square(advantage - mean), 0).sum()) / safe
    advantage_in_loss = (advantage - mean) * jax.lax.rsqrt(jnp.maximum(variance, 1e-30))
    # Over the share of valid rows: then a plain mean over any minibatch is a fair estimate of the mean over valid rows.
    weight = valid / jnp.maximum(average(valid.astype(jnp.float32).mean()), 1e-8)
    target = advantage + values[:-1]
    acting = (timestep.observation[:-1], rollout.action, rollout.log_prob, rollout.value)
    return *acting, advantage_in_loss, target, weight


# 7. Learning (PPO, arXiv 1707.06347).


def loss(params: Any, config: Config, batch: tuple[jax.Array, ...]) -> tuple[jax.Array, dict[str, jax.Array]]:
    observation, action, acting_log_prob, acting_value, advantage, target, weight = batch
    logits, value = network.apply(params, observation)
    log_probs = jax.nn.log_softmax(logits)
    ratio = jnp.exp(log_prob_of(logits, action) - acting_log_prob)
    # Past the clipping the objective is flat: nothing is gained by moving further from the policy that acted.
    clipped = jnp.clip(ratio, 1 - config.clip_epsilon, 1 + config.clip_epsilon)
    moved = acting_value + jnp.clip(value - acting_value, -config.clip_epsilon, config.clip_epsilon)
    terms = {
        "policy_loss": -jnp.minimum(ratio * advantage, clipped * advantage),
        "value_loss": 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(moved - target)),
        "entropy": -(jnp.exp(log_probs) * log_probs).sum(-1),
    }
    means = {name: (weight * term).mean() for name, term in terms.items()}
    total = means["policy_loss"] + config.value_coefficient * means["value_loss"]
    return total - config.entropy_coefficient * means["entropy"], means


def learn(config: Config, root: jax.Array, state: State, batch: tuple) -> tuple[State, dict[str, jax.Array]]:
    # A minibatch is some time steps of all environments. Shuffling T rows costs nothing, whereas a permutation of all
    # T x B samples costs a CPU more than the gradients do. The key is the same on every device, so that their rows are.
    keys = jax.random.split(key_for(root, UPDATE, 0, state.updates), config.num_epochs)
    rows = jax.vmap(lambda key: jax.random.permutation(jax.random.split(key)[0], config.rollout_length))(keys)
    rows = rows.reshape(config.num_epochs * config.num_minibatches, -1)
    done = jnp.minimum(state.updates.astype(jnp.float32) / config.num_updates, 1)
    learning_rate = config.learning_rate - config.learning_rate * done

    def one_step(carry: tuple, rows: jax.Array) -> tuple[tuple, dict[str, jax.Array]]:
        params, optimizer_state = carry
        # One leading axis: with two, the weights' gradient contracts over both, which XLA does at half the speed.
        minibatch = jax.tree.map(lambda x: x[rows].reshape(-1, *x.shape[2:]), batch)
        gradients, metrics = jax.grad(loss, has_aux=True)(params, config, minibatch)
        direction, optimizer_state = optimizer.update(average(gradients), optimizer_state, params)
        return (jax.tree.map(lambda p, d: p - learning_rate * d, params, direction), optimizer_state), metrics

    (params, optimizer_state), metrics = jax.lax.scan(one_step, (state.params, state.optimizer), rows)
    state = state._replace(params=params, optimizer=optimizer_state, updates=state.updates + 1)
    return state, jax.tree.map(jnp.mean, metrics)


# 8. Anakin: all of the above, in a loop, on every device, in one program.


def start(config: Config, root: jax.Array) -> State:
    inner, timestep = jax.vmap(reset)(environment_keys(config, key_for(root, RESET)))
    params = network.init(key_for(root, INIT), jnp.zeros((1, 4)))
    return State(params, optimizer.init(params), jnp.int32(0), inner, timestep, jnp.zeros_like(timestep.reward))


def train(config: Config, root: jax.Array, state: State, num_updates: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    def update(state: State) -> tuple[State, dict[str, jax.Array]]:
        state, rollout = act(config, root, state)
        ended = rollout.timestep.last[1:]
        sums = {"episodes": ended.sum(), "return_sum": jnp.where(ended, rollout.episode_return, 0).sum()}
        state, metrics = learn(config, root, state, make_batch(config, state.params, rollout))
        return state, metrics | jax.tree.map(lambda x: jax.lax.psum(x, "device"), sums)

    def body(_: jax.Array, carry: tuple) -> tuple:
        state, metrics = update(carry[0])
        return state, jax.tree.map(jnp.add, carry[1], metrics)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(update, state)[1])
    state, totals = jax.lax.fori_loop(0, num_updates, body, (state, zeros))
    mean_return = totals.pop("return_sum") / jnp.maximum(totals.pop("episodes"), 1)
    return state, {"episode_return": mean_return} | average(jax.tree.map(lambda x: x / num_updates, totals))


def compile_for(config: Config, devices: list[jax.Device]) -> tuple[Callable, Callable]:
    """`init(key)` and `run(key, state, num_updates)`, each one program on all `devices`."""
    everywhere = PartitionSpec()
    # Without `check_vma=False`, differentiating with respect to parameters that all devices share would already SUM
    # the gradients over devices, and the averaging would leave them too large; Adam hides that.
    on_devices = partial(jax.shard_map, mesh=jax.sharding.Mesh(devices, ("device",)), check_vma=False)
    init = on_devices(partial(start, config), in_specs=everywhere, out_specs=SPECS)
    run = on_devices(partial(train, config), in_specs=(everywhere, SPECS, everywhere), out_specs=(SPECS, everywhere))
    # Donated: the new state is written over the old one.
    return jax.jit(init), jax.jit(run, donate_argnums=1)


if __name__ == "__main__":
    config, root = Config(), jax.random.key(0)
    init, run = compile_for(config, jax.devices())
    state = init(root)
    while state.updates < config.num_updates:
        state, metrics = run(root, state, jnp.minimum(10, config.num_updates - state.updates))
        steps = int(state.updates) * config.num_envs * config.rollout_length
        print(f"{steps:8,d} steps  " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
