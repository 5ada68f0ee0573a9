"""The smallest legal agent: uniformly random legal actions, and nothing learnt.

It is a floor for learning curves, a source of load for benchmarks, and all six methods of the protocol in one screen.
"""

import dataclasses

import jax

from podracer.agent import ActorOutput, Metrics
from podracer.envs.actions import sample_legal_action
from podracer.types import EnvironmentSpec, TimeStep, Trajectory


@dataclasses.dataclass(frozen=True)
class RandomConfig:
    """Random play has no numbers; this makes it an agent like any other to experiments and to the command line."""

    def make(self, spec: EnvironmentSpec, num_updates: int) -> "Random":
        """The agent for an environment."""
        return Random(spec)


@dataclasses.dataclass(frozen=True)
class Random:
    """Draws every action uniformly: among the legal ones where there is a mask, between the bounds where they are real.

    Its learner, memory and actor state are all `()`, since there is nothing to keep.

    Attributes:
        spec: The environment's.
    """

    spec: EnvironmentSpec

    def init(self, key: jax.Array) -> tuple[()]:
        return ()

    def init_actor(self, batch_size: int) -> tuple[()]:
        return ()

    def init_memory(self, example: Trajectory) -> tuple[()]:
        return ()

    def actor_params(self, learner: tuple[()]) -> tuple[()]:
        return ()

    def act(
        self, params: tuple[()], timestep: TimeStep, actor_state: tuple[()], key: jax.Array, *, evaluate: bool = False
    ) -> ActorOutput:
        # Evaluation draws as well: to play at random is all that this agent is.
        action = sample_legal_action(self.spec, timestep.observation, key, timestep.step_type.shape[0])
        return ActorOutput(action, actor_state)

    def update(
        self,
        learner: tuple[()],
        memory: tuple[()],
        trajectory: Trajectory,
        key: jax.Array,
        *,
        axis: str | None = None,
    ) -> tuple[tuple[()], tuple[()], Metrics]:
        return learner, memory, {}
