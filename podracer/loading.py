"""The policy of a run, out of its checkpoints."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Literal

import jax
from jaxtyping import PyTree

from podracer.agent import Agent
from podracer.checkpoint import Checkpointer
from podracer.envs.base import Environment
from podracer.envs.host import HostFactory
from podracer.experiment import Experiment
from podracer.run_directory import RunDirectory, identity
from podracer.streams import Stream, stream_key
from podracer.types import key_shape


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A run's environment and agent, with the parameters to act with from a checkpoint of it."""

    experiment: Experiment
    environment: Environment | HostFactory
    agent: Agent
    params: PyTree
    updates: int

    def key(self, *, recording: bool = False) -> jax.Array:
        """The `evaluation_key` of these parameters."""
        return evaluation_key(self.experiment, self.updates, recording=recording)


def load_policy(
    run_dir: str | pathlib.Path,
    checkpoint: int | Literal["newest", "best"] = "newest",
    report: Callable[[str], None] = lambda message: None,
) -> LoadedPolicy:
    """A run's policy from one of its checkpoints, on one device; of the state only the learner is read.

    Args:
        run_dir: The run directory.
        checkpoint: The update that it was saved after, the newest readable, or the one with the best return in
            training.
        report: Called with one line for every checkpoint that was skipped.

    Raises:
        ValueError: It is not a run directory, there is no such checkpoint, or it cannot be read.
    """
    directory = RunDirectory.existing(run_dir)
    experiment = directory.experiment()
    environment, agent = experiment.make()
    template = jax.eval_shape(agent.init, key_shape())
    checkpointer = Checkpointer(directory.checkpoints, config=identity(experiment), report=report)
    with contextlib.closing(checkpointer):
        update = checkpointer.best() if checkpoint == "best" else None if checkpoint == "newest" else checkpoint
        restored = checkpointer.restore(template, update, only="learner")
    return LoadedPolicy(experiment, environment, agent, agent.actor_params(restored.state), restored.update)


def evaluation_key(experiment: Experiment, updates: int, *, recording: bool = False) -> jax.Array:
    """Evaluation draws from a stream of its own, so that evaluating changes nothing in training.

    Args:
        experiment: Its seed is where the stream begins.
        updates: That led to the parameters.
        recording: The key of the episode that is recorded, instead.
    """
    return stream_key(jax.random.key(experiment.seed), Stream.EVALUATE, updates, int(recording))
