"""Whole episodes in host environments with a fixed policy."""

import contextlib
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree, UInt8

from podracer.agent import Agent
from podracer.envs.host import EnvironmentSlice, HostFactory
from podracer.envs.rendering import draw_observation
from podracer.envs.watched import WatchedEnvironment
from podracer.types import StepType, TimeStep


class Player:
    """An agent that acts in a batch of host environments, its recurrent state carried along.

    Args:
        agent: The agent.
        environments: What makes the environments.
        num_envs: B.
        greedy: Whether it acts with `evaluate=True`.

    Attributes:
        num_envs: As given.
    """

    def __init__(self, agent: Agent, environments: HostFactory, num_envs: int, *, greedy: bool = True) -> None:
        self._agent, self._environments, self.num_envs, self._greedy = agent, environments, num_envs, greedy
        self._act = jax.jit(self._choose)

    def play(self, params: PyTree, key: jax.Array) -> Any:
        """Timesteps `[B]` in NumPy, from FIRST on, each with the environments; without an end.

        Args:
            params: The agent's `actor_params`.
            key: What the environments are seeded with is drawn from it too.
        """
        seed_key, act_key = jax.random.split(key)
        where = EnvironmentSlice(self.num_envs, seed=int(jax.device_get(jax.random.bits(seed_key))))
        environment = WatchedEnvironment(self._environments, where)
        with contextlib.closing(environment):
            timestep, state = environment.reset(), self._agent.init_actor(self.num_envs)
            step = 0
            while True:
                yield environment, timestep
                action, state = self._act(params, timestep, state, act_key, np.uint32(step))
                timestep = environment.step(jax.device_get(action))
                step += 1

    def _choose(
        self, params: PyTree, timestep: TimeStep, state: PyTree, key: jax.Array, step: jax.Array
    ) -> tuple[PyTree, PyTree]:
        output = self._agent.act(params, timestep, state, jax.random.fold_in(key, step), evaluate=self._greedy)
        return output.action, output.actor_state


def play_episodes(
    player: Player, params: PyTree, key: jax.Array, max_steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first episode of every environment: returns, lengths, and whether it ended, `[B]` each."""
    done = np.zeros(player.num_envs, bool)
    returns, lengths = np.zeros(done.shape, np.float64), np.zeros(done.shape, np.int64)
    with contextlib.closing(player.play(params, key)) as steps:
        for step, (_, timestep) in enumerate(steps):
            counts = ~done & (timestep.step_type != StepType.FIRST)
            returns += np.where(counts, timestep.reward, 0)
            lengths += counts
            done |= timestep.step_type == StepType.LAST
            if done.all() or step == max_steps:
                break
    return returns, lengths, done


def record_episode(
    player: Player, params: PyTree, key: jax.Array, max_steps: int
) -> tuple[list[UInt8[np.ndarray, "H W 3"]], float]:
    """One episode as pictures, and its return, cut at `max_steps`."""
    frames: list[np.ndarray] = []
    total = 0.0
    with contextlib.closing(player.play(params, key)) as steps:
        for step, (environment, timestep) in enumerate(steps):
            draw = environment.attribute("render")
            if draw is None:
                observation = jax.tree.map(lambda x: x[0], timestep.observation)
                frames.append(draw_observation(observation, environment.spec.observation))
            else:
                frames.append(np.asarray(environment.call("render", draw)))
            total += float(timestep.reward[0])
            if timestep.step_type[0] == StepType.LAST or step == max_steps:
                break
    return frames, total
