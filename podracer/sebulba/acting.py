"""What runs on an actor device: acting, and keeping the rows of a trajectory until it is whole."""

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree, UInt32

from podracer.agent import Agent
from podracer.envs.host import timestep_spec
from podracer.streams import Stream, key_of_each, stream_key
from podracer.types import ArraySpec, EnvironmentSpec, TimeStep, Trajectory, key_shape

_MOMENT = 3e-4 if hasattr(os, "sched_yield") else 0.0  # Seconds.


class Acting:
    """An agent's `act` for a batch of environments, compiled for one device and shared by its threads.

    Rows are written into buffers on the device, in place, one buffer per learner device, so that nothing is left to cut
    when a trajectory is whole. The observation is copied there by the program that acts on it: host environments may
    overwrite it, and JAX may read the host's memory in place.

    Args:
        agent: Anything that follows `podracer.agent.Agent`.
        spec: The environments'.
        batch_size: B, the environments of one thread.
        length: T.
        num_shards: Equal parts to cut B into.
        device: Where to act.
        params: The shapes of the agent's `actor_params`.

    Attributes:
        spec: As given.
        device: As given.
        length: As given.
        timestep: The shapes of a timestep `[B]`.
    """

    def __init__(
        self,
        agent: Agent,
        spec: EnvironmentSpec,
        batch_size: int,
        length: int,
        num_shards: int,
        device: jax.Device,
        params: PyTree,
    ) -> None:
        self.spec, self.device, self.length = spec, device, length
        self._agent, self._num_shards = agent, num_shards
        self._batch_size = batch_size
        sharding = SingleDeviceSharding(device)

        def here(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

        self.timestep = timestep = here(timestep_shape(spec, batch_size))
        params, key = here(params), here(key_shape())
        t, place = here(jax.ShapeDtypeStruct((), jnp.uint32)), here(jax.ShapeDtypeStruct((2,), jnp.uint32))
        state = here(jax.eval_shape(lambda: agent.init_actor(batch_size)))
        output = jax.eval_shape(agent.act, params, timestep, state, key)
        self._rows = (timestep, output.action, output.extras)
        start = jax.jit(self._fresh_state, out_shardings=sharding).trace()
        begin = jax.jit(self._new_rollout, out_shardings=sharding).trace(key, place)
        buffers, keys = here(begin.out_info)
        step, finish = jax.jit(self._step, donate_argnums=1), jax.jit(self._finish, donate_argnums=0)
        self._traced: dict[str, Any] = {
            "start": start,
            "begin": begin,
            "act": step.trace(params, buffers, timestep, state, keys, t),
            "finish": finish.trace(buffers, timestep, state),
        }
        self._compiled: dict[str, Any] = {}

    @property
    def trajectory(self) -> Trajectory:
        """The shapes of one learner device's part of a trajectory."""
        return self._traced["finish"].out_info[0]

    def compile(self) -> None:
        """Compiles all that acting needs, if it is not compiled yet: before there are threads to race for it."""
        for name, traced in self._traced.items():
            if name not in self._compiled:
                self._compiled[name] = traced.lower().compile()

    def init_actor(self) -> PyTree:
        """The agent's state for B environments, on the device."""
        return self._compiled["start"]()

    def begin(self, key: jax.Array, thread: int, rollout: int) -> tuple[PyTree, jax.Array]:
        """Buffers for the rows of a trajectory, and the keys `[T]` of its rows.

        Args:
            key: The run's root key, on the device.
            thread: Its number among all of the run.
            rollout: Its number.
        """
        return self._compiled["begin"](key, jax.device_put(np.array((thread, rollout), np.uint32), self.device))

    def act(
        self, params: PyTree, buffers: PyTree, timestep: TimeStep, state: PyTree, keys: jax.Array, t: int
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Acts on a row and keeps it.

        Args:
            params: The agent's `actor_params`, on the device.
            buffers: Donated.
            timestep: `[B]`, in NumPy.
            state: The agent's, `[B, ...]`.
            keys: `[T]`, of all rows.
            t: The row's number.

        Returns:
            The buffers, the agent's next state, and the actions `[B, ...]` in NumPy.
        """
        # Neither put there first nor fetched by `jax.device_get`: that takes longer than all else where networks are
        # small. The program was compiled for the device, and takes NumPy to it. To a user's guard these are implicit
        # transfers, which it would refuse, though they are what acting is for.
        with jax.transfer_guard("allow"):
            buffers, state, action = self._compiled["act"](params, buffers, timestep, state, keys, np.uint32(t))
            _wait_awake(action)
            return buffers, state, jax.tree.map(np.asarray, action)

    def finish(self, buffers: PyTree, timestep: TimeStep, state: PyTree) -> list[Trajectory]:
        """The trajectory, in one part per learner device.

        Args:
            buffers: Donated.
            timestep: Row T, in NumPy.
            state: The agent's before row 0.
        """
        return self._compiled["finish"](buffers, jax.device_put(timestep, self.device), state)

    def _shards(self, tree: PyTree) -> list[PyTree]:
        """A batch `[B, ...]` in parts."""
        size = self._batch_size // self._num_shards
        return [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], tree) for i in range(self._num_shards)]

    def _fresh_state(self) -> PyTree:
        return self._agent.init_actor(self._batch_size)

    def _new_rollout(self, key: jax.Array, place: UInt32[jax.Array, "2"]) -> tuple[list[PyTree], jax.Array]:
        timestep, action, extras = self._rows
        size = self._batch_size // self._num_shards

        def rows(length: int) -> Any:
            return lambda x: jnp.zeros((length, size, *x.shape[1:]), x.dtype)

        rest = jax.tree.map(rows(self.length), (action, extras))
        buffers = [(jax.tree.map(rows(self.length + 1), timestep), *rest)] * self._num_shards
        # All keys at once: deriving one takes as long as acting with a small network does.
        return buffers, key_of_each(stream_key(key, Stream.ACT, *place), jnp.arange(self.length))

    def _step(
        self,
        params: PyTree,
        buffers: list[PyTree],
        timestep: TimeStep,
        state: PyTree,
        keys: jax.Array,
        t: UInt32[jax.Array, ""],
    ) -> tuple[list[PyTree], PyTree, PyTree]:
        output = self._agent.act(params, timestep, state, keys[t])
        rows = self._shards((timestep, output.action, output.extras))
        buffers = [jax.tree.map(lambda x, row: x.at[t].set(row), *pair) for pair in zip(buffers, rows, strict=True)]
        # Copied: of an output that is an input too, JAX would hand back the input, which is the host's memory.
        return buffers, jax.tree.map(jnp.copy, output.actor_state), output.action

    def _finish(self, buffers: list[PyTree], timestep: TimeStep, state: PyTree) -> list[Trajectory]:
        trajectories = []
        for (rows, action, extras), last, start in zip(
            buffers, self._shards(timestep), self._shards(state), strict=True
        ):
            timesteps = jax.tree.map(lambda x, row: x.at[-1].set(row), rows, last)
            trajectories.append(Trajectory(timesteps, action, extras, start))
        return trajectories


def _wait_awake(arrays: PyTree) -> None:
    """Waits without sleeping for arrays that are there in a moment: to be woken takes longer than a small network."""
    until = time.perf_counter() + _MOMENT
    for array in jax.tree.leaves(arrays):
        while not array.is_ready() and time.perf_counter() < until:
            os.sched_yield()  # To whatever else wants the core, what is waited for above all.


def timestep_shape(spec: EnvironmentSpec, batch_size: int) -> TimeStep:
    """A timestep `[B]` as shapes."""

    def leaf(leaf_spec: ArraySpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *leaf_spec.shape), np.dtype(leaf_spec.dtype))

    return jax.tree.map(leaf, timestep_spec(spec))
