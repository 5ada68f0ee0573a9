"""What runs on the learner devices: the update that Anakin runs as well, on trajectories that arrive in parts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from podracer import parallel
from podracer.agent import Agent
from podracer.streams import Stream, key_of_each, stream_key
from podracer.types import Trajectory, key_shape
from podracer.window import Window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SebulbaState:
    """Everything of a run that a checkpoint keeps. The environments are not among it.

    Attributes:
        key: The run's root key; constant.
        updates: Updates done, each with one trajectory of every actor.
        learner: On every learner device.
        memory: One per replica, `[replicas, ...]`.
    """

    key: jax.Array
    updates: Int[Array, ""]
    learner: PyTree
    memory: PyTree


class Learning:
    """An agent's `update` on all learner devices.

    Args:
        agent: Anything that follows `podracer.agent.Agent`.
        mesh: The learner devices.
        shard: The shapes of one device's part of an actor's trajectory.
        num_actors: Trajectories per update.
        batch_splits: Parts to learn from in turn.

    Raises:
        ValueError: The agent refuses something.

    Attributes:
        mesh: As given.
        shapes: `SebulbaState` of `jax.ShapeDtypeStruct` with shardings.
    """

    def __init__(self, agent: Agent, mesh: Mesh, shard: Trajectory, num_actors: int, batch_splits: int) -> None:
        self.mesh = mesh
        self._agent, self._shard, self._num_actors, self._splits = agent, shard, num_actors, batch_splits
        self._axis = parallel.axis_name(mesh)
        replicated_parts: Any = dict.fromkeys(("key", "updates", "learner"), parallel.REPLICATED)
        places: Any = SebulbaState(**replicated_parts, memory=parallel.SHARDED)
        arriving: Any = (parallel.BY_ENVIRONMENT,) * num_actors
        replicated, sharded = parallel.shardings(mesh, (parallel.REPLICATED, parallel.SHARDED))
        state_places, self._arriving = parallel.shardings(mesh, (places, arriving))

        def on_replicas(function: Any, in_specs: Any, out_specs: Any) -> Any:
            return parallel.run_on_replicas(function, mesh, in_specs, out_specs)

        self._init = jax.jit(
            on_replicas(self._replica_init, (parallel.REPLICATED,), places), out_shardings=state_places
        )
        self.shapes = parallel.with_shardings(jax.eval_shape(self._init, key_shape()), state_places)
        if batch_splits > 1 and jax.tree.leaves(self.shapes.memory):
            raise ValueError(
                f"batch_splits is {batch_splits}; this agent has a memory, which needs the same environments in every "
                "update, so it must be 1"
            )
        trajectories = parallel.with_shardings((self._whole(shard),) * num_actors, self._arriving)
        zero = jax.jit(self._zero, out_shardings=sharded).trace()
        window = parallel.with_shardings(zero.out_info, sharded)
        update = on_replicas(self._replica_update, (places, parallel.SHARDED, arriving), (places, parallel.SHARDED))
        finish = on_replicas(self._replica_finish, (parallel.SHARDED, places), parallel.REPLICATED)
        params = jax.jit(self._copied_params, out_shardings=replicated).trace(self.shapes.learner)
        self._traced = {
            "zero": zero,
            "update": jax.jit(update, donate_argnums=(0, 1)).trace(self.shapes, window, trajectories),
            "finish": jax.jit(finish).trace(window, self.shapes),
            "params": params,
        }
        self._compiled: dict[str, Any] = {}

    def compile(self) -> None:
        """Compiles all that learning needs, if it is not compiled yet."""
        for name, traced in self._traced.items():
            if name not in self._compiled:
                self._compiled[name] = traced.lower().compile()

    def init(self, key: jax.Array) -> SebulbaState:
        """The state before the first update."""
        return self._init(key)

    def empty_window(self) -> Window:
        """Of no update, one per replica."""
        return self._compiled["zero"]()

    def assemble(self, rollouts: list[list[Trajectory]]) -> tuple[Trajectory, ...]:
        """Arrays over all learner devices, for each actor, out of what is on each device. Nothing is copied."""

        def leaf(sharding: NamedSharding, *parts: jax.Array) -> jax.Array:
            shape = _over_devices(parts[0].shape, sharding.spec, self.mesh.size)
            return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

        places = jax.tree.broadcast(self._arriving[0], rollouts[0][0])
        return tuple(jax.tree.map(leaf, places, *shards) for shards in rollouts)

    def update(
        self, state: SebulbaState, window: Window, trajectories: tuple[Trajectory, ...]
    ) -> tuple[SebulbaState, Window]:
        """One update, without waiting for it. State and window are donated."""
        return self._compiled["update"](state, window, trajectories)

    def finish(self, window: Window, state: SebulbaState) -> Window:
        """The sums over all replicas."""
        return self._compiled["finish"](window, state)

    def actor_params(self, state: SebulbaState) -> PyTree:
        """What actors receive, replicated: a copy, since the state will be donated."""
        return self._compiled["params"](state.learner)

    def _whole(self, shard: Trajectory) -> Trajectory:
        """The shapes of all devices' parts together."""

        def leaf(spec: PartitionSpec, x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(_over_devices(x.shape, spec, self.mesh.size), x.dtype)

        return jax.tree.map(leaf, jax.tree.broadcast(parallel.BY_ENVIRONMENT, shard), shard)

    def _replica_init(self, key: jax.Array) -> SebulbaState:
        learner = self._agent.init(stream_key(key, Stream.INIT))
        example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._part_shapes())
        memory = self._agent.init_memory(example)
        return SebulbaState(key, jnp.int32(0), learner, jax.tree.map(lambda x: x[None], memory))

    def _replica_update(
        self, state: SebulbaState, window: Window, trajectories: tuple[Trajectory, ...]
    ) -> tuple[SebulbaState, Window]:
        """This replica's part of every actor's trajectory, learnt from in one or several calls of the agent."""
        key = stream_key(state.key, Stream.UPDATE, parallel.replica_index(self._axis), state.updates)
        memory = jax.tree.map(lambda x: x[0], state.memory)
        updates = state.updates + 1

        def learn(carry: PyTree, inputs: tuple[Trajectory, jax.Array]) -> tuple[PyTree, Window]:
            learner, memory = carry
            trajectory, key = inputs
            learner, memory, metrics = self._agent.update(learner, memory, trajectory, key, axis=self._axis)
            return (learner, memory), Window.of_update(trajectory, metrics, updates)

        carry, parts = (state.learner, memory), self._parts(trajectories)
        if self._splits == 1:
            (learner, memory), more = learn(carry, (jax.tree.map(lambda x: x[0], parts), key))
        else:
            keys = key_of_each(key, jnp.arange(self._splits))
            (learner, memory), shares = jax.lax.scan(learn, carry, (parts, keys))
            more = Window.of_parts(shares)
        state = SebulbaState(state.key, updates, learner, jax.tree.map(lambda x: x[None], memory))
        return state, jax.tree.map(lambda x: x[None], _only(window).add(more))

    def _replica_finish(self, window: Window, state: SebulbaState) -> Window:
        params = self._agent.actor_params(state.learner)
        return _only(window).watch_parameters(params, state.updates).over_replicas(self._axis)

    def _parts(self, trajectories: tuple[Trajectory, ...]) -> Trajectory:
        """The columns of all actors, side by side, in parts `[splits, ...]`."""

        def leaf(spec: PartitionSpec, *columns: jax.Array) -> jax.Array:
            axis = 0 if spec == parallel.SHARDED else 1
            joined = jnp.concatenate(columns, axis)
            shape = joined.shape
            cut = joined.reshape(*shape[:axis], self._splits, shape[axis] // self._splits, *shape[axis + 1 :])
            return jnp.moveaxis(cut, axis, 0)

        return jax.tree.map(leaf, jax.tree.broadcast(parallel.BY_ENVIRONMENT, trajectories[0]), *trajectories)

    def _part_shapes(self) -> Trajectory:
        """What one call of the agent's `update` is given on one replica."""
        shards = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self._shard,) * self._num_actors)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.eval_shape(self._parts, shards))

    def _zero(self) -> Window:
        """An empty window per replica, `[replicas, ...]`."""
        # Traced for one replica by itself: the axis does not change a shape.
        state = jax.eval_shape(self._replica_init, key_shape())

        def learn(state: SebulbaState, trajectory: Trajectory) -> Window:
            memory = jax.tree.map(lambda x: x[0], state.memory)
            metrics = self._agent.update(state.learner, memory, trajectory, state.key, axis=None)[2]
            return Window.of_update(trajectory, metrics, state.updates)

        window = Window.zero(jax.eval_shape(learn, state, self._part_shapes()))
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.mesh.size, *x.shape)), window)

    def _copied_params(self, learner: PyTree) -> PyTree:
        # Of an output that is an input too, JAX would hand back the input, which the next update donates.
        return jax.tree.map(jnp.copy, self._agent.actor_params(learner))


def _over_devices(shape: tuple[int, ...], spec: PartitionSpec, count: int) -> tuple[int, ...]:
    """The shape of an array of which each of so many devices has a part of this shape."""
    axis = spec.index(parallel.AXIS)
    return (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])


def _only(window: Window) -> Window:
    """A replica's own, without the axis of replicas."""
    return jax.tree.map(lambda x: x[0], window)
