"""The Agent protocol: six pure functions over pytrees.

An agent decides WHAT to do with a timestep and with a trajectory. An architecture decides WHERE acting and learning run
and HOW data moves between them. So an agent never sees a device, a thread, a mesh, a queue or an environment's
internals, and one definition runs under every architecture.

An agent is a frozen, hashable dataclass of static configuration. Everything that changes is in the pytrees it takes and
returns:

| pytree      | made by        | copies                 | what it holds                                   |
|-------------|----------------|------------------------|-------------------------------------------------|
| Learner     | `init`         | one on every device    | parameters, optimiser state, update count       |
| ActorState  | `init_actor`   | one per environment    | recurrent state; `()` if feed-forward           |
| Memory      | `init_memory`  | one per replica        | replay; `()` if none                            |
| ActorParams | `actor_params` | on every acting device | all that acting depends on, exploration and all |

`memory` is apart from the learner because it is sharded, checkpointed and donated differently.
"""

import dataclasses
from typing import Any, Protocol, TypeVar

import jax
from jaxtyping import Array, Float, PyTree

from podracer.types import TimeStep, Trajectory

Learner = TypeVar("Learner")
Memory = TypeVar("Memory")
ActorParams = TypeVar("ActorParams")
ActorState = TypeVar("ActorState")
Metrics = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActorOutput:
    """What acting gives: `action [B, ...]`, the next `actor_state [B, ...]`, and `extras [B, ...]` to remember."""

    action: PyTree
    actor_state: PyTree
    extras: Any = ()


class Agent(Protocol[Learner, Memory, ActorParams, ActorState]):
    """What an architecture calls. See the module's table for the pytrees."""

    def init(self, key: jax.Array) -> Learner:
        """The learner before any update. Equal on every replica."""
        ...

    def init_actor(self, batch_size: int) -> ActorState:
        """The actor's state at the start of training, `[batch_size, ...]`.

        `act` itself resets it where a timestep is FIRST.
        """
        ...

    def init_memory(self, example: Trajectory) -> Memory:
        """The memory of one replica, given a trajectory of the shapes and dtypes that `update` will see."""
        ...

    def actor_params(self, learner: Learner) -> ActorParams:
        """All that actors ever receive of the learner."""
        ...

    def act(
        self,
        params: ActorParams,
        timestep: TimeStep,
        actor_state: ActorState,
        key: jax.Array,
        *,
        evaluate: bool = False,
    ) -> ActorOutput:
        """Chooses an action for each of the `B` environments.

        On LAST the environment ignores the action and resets. With `evaluate=True` the agent acts without exploring.
        """
        ...

    def update(
        self,
        learner: Learner,
        memory: Memory,
        trajectory: Trajectory,
        key: jax.Array,
        *,
        axis: str | None = None,
    ) -> tuple[Learner, Memory, Metrics]:
        """Learns from the `[T, B]` steps of this replica.

        Args:
            learner: Equal on every replica, and equal again when returned.
            memory: This replica's.
            trajectory: This replica's, with the rows of `podracer.valid_mask` to be left out of every average.
            key: This replica's.
            axis: The mapped axis of replicas to average gradients and statistics over; None when there is one replica.
                `podracer.parallel` has the averaging.

        Returns:
            The learner, the memory and scalar metrics of this replica, which the architecture averages.
        """
        ...
