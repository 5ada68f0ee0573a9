"""Acting: an agent and a batch of environments for a number of steps."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from podracer.agent import ActorOutput, Agent
from podracer.envs.autoreset import Autoreset
from podracer.streams import fold_in_each
from podracer.types import TimeStep, Trajectory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EpisodeStatistics:
    """What the running episodes have so far, and sums over those that finished, per environment `[B]`.

    Returns are sums of the environment's own rewards, without discounting, scaling or clipping. Lengths are in steps.
    """

    running_return: Float[Array, "B"]
    running_length: Int[Array, "B"]
    count: Int[Array, "B"]
    return_sum: Float[Array, "B"]
    length_sum: Int[Array, "B"]

    @classmethod
    def zero(cls, batch_size: int) -> "EpisodeStatistics":
        """At the start of an episode in each environment."""
        number, integer = jnp.zeros(batch_size, jnp.float32), jnp.zeros(batch_size, jnp.int32)
        return cls(number, integer, integer, number, integer)

    def forget_finished(self) -> "EpisodeStatistics":
        """The same running episodes, with nothing finished yet."""
        zero = EpisodeStatistics.zero(self.count.shape[0])
        return dataclasses.replace(zero, running_return=self.running_return, running_length=self.running_length)

    def add(self, timestep: TimeStep) -> "EpisodeStatistics":
        """After one more timestep `[B]`."""
        first, last = timestep.first(), timestep.last()
        running_return = jnp.where(first, 0, self.running_return + timestep.reward)
        running_length = jnp.where(first, 0, self.running_length + 1)
        return EpisodeStatistics(
            running_return,
            running_length,
            self.count + last.astype(jnp.int32),
            self.return_sum + jnp.where(last, running_return, 0),
            self.length_sum + jnp.where(last, running_length, 0),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RolloutState:
    """Where acting stands: every leaf is per environment, `[B, ...]`."""

    environment: PyTree
    timestep: TimeStep
    actor: PyTree
    episodes: EpisodeStatistics


def start_rollout(agent: Agent, environment: Autoreset, keys: jax.Array) -> RolloutState:
    """Fresh episodes in `B` environments, one key each."""
    state, timestep = environment.reset(keys)
    batch_size = keys.shape[0]
    return RolloutState(state, timestep, agent.init_actor(batch_size), EpisodeStatistics.zero(batch_size))


def rollout_step(
    agent: Agent,
    environment: Autoreset,
    params: PyTree,
    state: RolloutState,
    act_key: jax.Array,
    environment_keys: jax.Array,
    t: Int[Array, ""],
    *,
    evaluate: bool = False,
) -> tuple[RolloutState, ActorOutput]:
    """Acts once: step `t` with `fold_in(act_key, t)` and `fold_in(environment_keys[b], t)`."""
    output = agent.act(params, state.timestep, state.actor, jax.random.fold_in(act_key, t), evaluate=evaluate)
    keys = fold_in_each(environment_keys, t)
    environment_state, timestep = environment.step(state.environment, output.action, keys)
    return RolloutState(environment_state, timestep, output.actor_state, state.episodes.add(timestep)), output


def unroll(
    agent: Agent,
    environment: Autoreset,
    params: PyTree,
    state: RolloutState,
    act_key: jax.Array,
    environment_keys: jax.Array,
    length: int,
) -> tuple[RolloutState, Trajectory]:
    """Acts for `length` steps.

    Args:
        agent: Its `act` is called once per step on all `B` environments.
        environment: The batched environment.
        params: The agent's `actor_params`.
        state: Where the last unroll ended.
        act_key: This trajectory's.
        environment_keys: `[B]`, this trajectory's.
        length: T.

    Returns:
        The state after the last step, and the trajectory of `T` steps and `T + 1` timesteps.
    """

    def step(state: RolloutState, t: jax.Array) -> tuple[RolloutState, tuple[TimeStep, PyTree, PyTree]]:
        following, output = rollout_step(agent, environment, params, state, act_key, environment_keys, t)
        return following, (state.timestep, output.action, output.extras)

    final, (timesteps, actions, extras) = jax.lax.scan(step, state, jnp.arange(length, dtype=jnp.uint32))
    timesteps = jax.tree.map(lambda rows, row: jnp.concatenate([rows, row[None]]), timesteps, final.timestep)
    return final, Trajectory(timesteps, actions, extras, state.actor)
