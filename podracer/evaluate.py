"""Whole episodes with a fixed policy: how good it is, and what it looks like."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt8

from podracer.agent import Agent
from podracer.envs.autoreset import Autoreset
from podracer.envs.base import Environment
from podracer.envs.host import HostFactory
from podracer.envs.rendering import render
from podracer.host_evaluation import Player, play_episodes, record_episode
from podracer.rollout import RolloutState, rollout_step, start_rollout
from podracer.types import TimeStep

_CHUNK = 128  # Steps between two looks of the host, so that Ctrl-C is heard.


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The episodes of an evaluation.

    Attributes:
        returns: `[episodes]`, undiscounted sums of the environment's own rewards.
        lengths: `[episodes]`, in steps.
        unfinished: Episodes that were still going at the step limit; they are in neither.
        greedy: Whether the agent acted greedily, and not as it explores.
        reference_scores: The returns of a random player and of a human, None where they are not known.
    """

    returns: Float[np.ndarray, "N"]
    lengths: Int[np.ndarray, "N"]
    unfinished: int = 0
    greedy: bool = True
    reference_scores: tuple[float, float] | None = None

    def summary(self) -> dict[str, float | int]:
        """Mean, standard deviation, extremes and number of the returns, and how it acted. NaN where no episode ended.

        Where the scores of a random player and of a human are known, the mean on a scale from 0 for the one to 1 for
        the other is among them, as `human_normalized`.
        """
        returns = self.returns if len(self.returns) else np.array([math.nan])
        figures: dict[str, float | int] = {
            "mean": float(returns.mean()),
            "std": float(returns.std()),
            "min": float(returns.min()),
            "max": float(returns.max()),
            "episodes": len(self.returns),
            "greedy": self.greedy,
        }
        if self.reference_scores is not None:
            random, human = self.reference_scores
            figures["human_normalized"] = (float(returns.mean()) - random) / (human - random)
        return figures

    def __str__(self) -> str:
        figures = self.summary()
        human = f", {figures['human_normalized']:.0%} of human" if self.reference_scores is not None else ""
        return (
            f"return {figures['mean']:.4g} +- {figures['std']:.3g} "
            f"({figures['min']:.4g} to {figures['max']:.4g}) over {figures['episodes']} "
            f"{'greedy' if self.greedy else 'exploring'} episodes{human}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Progress:
    rollout: RolloutState
    done: Bool[Array, "B"]
    episode_return: Float[Array, "B"]
    episode_length: Int[Array, "B"]
    steps: Int[Array, ""]


class Evaluator:
    """Plays episodes side by side; compiled by its first call, for all calls.

    Every environment plays exactly one episode, so that short ones do not count more often than long ones. Nothing of
    the agent changes.

    Args:
        agent: The agent.
        environment: A raw environment.
        num_episodes: B.
        max_steps: Per episode; one that is longer is unfinished.
        greedy: Whether the agent acts with `evaluate=True`. Where neither it nor the environment leaves anything to
            chance, few different episodes are played again and again.

    Raises:
        ValueError: `num_episodes` or `max_steps` is below 1.
    """

    def __init__(
        self,
        agent: Agent,
        environment: Environment,
        num_episodes: int,
        *,
        max_steps: int = 100_000,
        greedy: bool = True,
    ) -> None:
        _check(num_episodes, max_steps)
        self._agent, self._stream, self._greedy = agent, Autoreset(environment), greedy
        self._num_episodes, self._max_steps = num_episodes, max_steps
        # Compiled as one program: on their own the small operations of a reset take longer than all that follows.
        self._start = jax.jit(self._first)
        self._play = jax.jit(self._chunk)

    def __call__(self, actor_params: PyTree, key: jax.Array) -> Evaluation:
        """The episodes, which are a function of the agent's `actor_params` and the key alone."""
        progress, act_key, environment_keys = self._start(key)
        while not (done := np.asarray(progress.done)).all() and int(progress.steps) < self._max_steps:
            progress = self._play(progress, actor_params, act_key, environment_keys)
        returns, lengths = np.asarray(progress.episode_return)[done], np.asarray(progress.episode_length)[done]
        return Evaluation(returns, lengths, int((~done).sum()), self._greedy)

    def _first(self, key: jax.Array) -> tuple[_Progress, jax.Array, jax.Array]:
        reset_key, act_key, environment_key = jax.random.split(key, 3)
        zero = jnp.zeros(self._num_episodes, jnp.int32)
        progress = _Progress(
            rollout=start_rollout(self._agent, self._stream, jax.random.split(reset_key, self._num_episodes)),
            done=zero.astype(bool),
            episode_return=zero.astype(jnp.float32),
            episode_length=zero,
            steps=jnp.int32(0),
        )
        return progress, act_key, jax.random.split(environment_key, self._num_episodes)

    def _chunk(self, progress: _Progress, params: PyTree, act_key: jax.Array, environment_keys: jax.Array) -> _Progress:
        end = jnp.minimum(progress.steps + _CHUNK, self._max_steps)

        def unfinished(progress: _Progress) -> jax.Array:
            return (progress.steps < end) & ~progress.done.all()

        def step(progress: _Progress) -> _Progress:
            where = (progress.rollout, act_key, environment_keys, progress.steps)
            rollout, _ = rollout_step(self._agent, self._stream, params, *where, evaluate=self._greedy)
            counts = ~progress.done
            return _Progress(
                rollout=rollout,
                done=progress.done | rollout.timestep.last(),
                episode_return=progress.episode_return + jnp.where(counts, rollout.timestep.reward, 0),
                episode_length=progress.episode_length + counts.astype(jnp.int32),
                steps=progress.steps + 1,
            )

        return jax.lax.while_loop(unfinished, step, progress)


class HostEvaluator:
    """As `Evaluator`, in host environments, which are made for each call and closed after it.

    Args:
        agent: The agent.
        environments: What makes the environments.
        num_episodes: B, each in an environment of its own.
        max_steps: Per episode; one that is longer is unfinished.
        greedy: Whether the agent acts with `evaluate=True`.

    Raises:
        ValueError: `num_episodes` or `max_steps` is below 1.
    """

    def __init__(
        self,
        agent: Agent,
        environments: HostFactory,
        num_episodes: int,
        *,
        max_steps: int = 100_000,
        greedy: bool = True,
    ) -> None:
        _check(num_episodes, max_steps)
        self._player, self._greedy = Player(agent, environments, num_episodes, greedy=greedy), greedy
        self._max_steps, self._reference_scores = max_steps, environments.reference_scores

    def __call__(self, actor_params: PyTree, key: jax.Array) -> Evaluation:
        """The episodes, which are a function of the agent's `actor_params` and the key alone.

        Raises:
            TimeoutError: The environments take longer than they may.
        """
        returns, lengths, done = play_episodes(self._player, actor_params, key, self._max_steps)
        return Evaluation(returns[done], lengths[done], int((~done).sum()), self._greedy, self._reference_scores)


def evaluate(
    agent: Agent,
    environment: Environment | HostFactory,
    actor_params: PyTree,
    key: jax.Array,
    num_episodes: int,
    *,
    max_steps: int = 100_000,
    greedy: bool = True,
) -> Evaluation:
    """Evaluates once. To do it again without compiling again, keep an `Evaluator`, whose arguments these are.

    Raises:
        ValueError: `num_episodes` or `max_steps` is below 1.
    """
    if isinstance(environment, HostFactory):
        return HostEvaluator(agent, environment, num_episodes, max_steps=max_steps, greedy=greedy)(actor_params, key)
    return Evaluator(agent, environment, num_episodes, max_steps=max_steps, greedy=greedy)(actor_params, key)


def record(
    agent: Agent,
    environment: Environment | HostFactory,
    actor_params: PyTree,
    key: jax.Array,
    *,
    max_steps: int = 1000,
    greedy: bool = True,
) -> tuple[list[UInt8[np.ndarray, "H W 3"]], float]:
    """One episode as pictures: a frame per timestep and the episode's return, cut at `max_steps`.

    Raises:
        ValueError: `max_steps` is below 1.
    """
    _check(1, max_steps)
    if isinstance(environment, HostFactory):
        return record_episode(Player(agent, environment, 1, greedy=greedy), actor_params, key, max_steps)
    stream = Autoreset(environment)

    @jax.jit
    def start(key: jax.Array) -> tuple[RolloutState, jax.Array, jax.Array]:
        reset_key, act_key, environment_key = jax.random.split(key, 3)
        return start_rollout(agent, stream, reset_key[None]), act_key, environment_key[None]

    @jax.jit
    def play(
        rollout: RolloutState, params: PyTree, act_key: jax.Array, environment_keys: jax.Array, start: jax.Array
    ) -> tuple[RolloutState, tuple[PyTree, TimeStep]]:
        def step(rollout: RolloutState, t: jax.Array) -> tuple[RolloutState, tuple[PyTree, TimeStep]]:
            shown = rollout.environment[0], rollout.timestep
            where = (rollout, act_key, environment_keys, t)
            return rollout_step(agent, stream, params, *where, evaluate=greedy)[0], shown

        return jax.lax.scan(step, rollout, start + jnp.arange(_CHUNK))

    frames: list[np.ndarray] = []
    total = 0.0
    rollout, act_key, environment_keys = start(key)
    for begun in range(0, max_steps + 1, _CHUNK):
        rollout, shown = play(rollout, actor_params, act_key, environment_keys, np.int32(begun))
        states, timesteps = jax.tree.map(lambda x: x[:, 0], jax.device_get(_without_keys(shown)))
        for i in range(min(_CHUNK, max_steps + 1 - begun)):
            state, timestep = jax.tree.map(lambda x, i=i: x[i], (states, timesteps))
            frames.append(render(environment, state, timestep.observation))
            total += float(timestep.reward)
            if timestep.last():
                return frames, total
    return frames, total


def _check(num_episodes: int, max_steps: int) -> None:
    if num_episodes < 1:
        raise ValueError(f"the number of episodes is {num_episodes}; it must be at least 1")
    if max_steps < 1:
        raise ValueError(f"max_steps is {max_steps}; an episode has at least 1 step")


def _without_keys(tree: PyTree) -> PyTree:
    """Typed keys as their data: a picture needs no key, and NumPy has none."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
