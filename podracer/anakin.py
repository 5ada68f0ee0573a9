"""Anakin: environments, acting and learning compiled into one program on every device (arXiv 2104.06272, section 3).

One call of the program makes many updates. Python only schedules it: the state is donated, and one call's sums are read
while the next one runs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from podracer import parallel
from podracer.agent import Agent
from podracer.envs.autoreset import Autoreset
from podracer.envs.base import Environment
from podracer.rollout import RolloutState, start_rollout, unroll
from podracer.rules import COUNT, check_fields
from podracer.streams import Stream, fold_in_each, key_of_each, stream_key
from podracer.types import Trajectory, key_shape
from podracer.window import MAX_ROWS_PER_CALL, Window, check_num_updates


@dataclasses.dataclass(frozen=True)
class AnakinConfig:
    """How much runs at once.

    Attributes:
        num_envs: Environments over all devices.
        rollout_length: Steps of each environment per update, T.

    Raises:
        ValueError: One of them is not an integer of at least 1.
    """

    num_envs: int = 64
    rollout_length: int = 128

    def __post_init__(self) -> None:
        check_fields(self, {"num_envs": COUNT, "rollout_length": COUNT})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnakinState:
    """Everything that changes during a run. A checkpoint of it resumes the run exactly.

    Attributes:
        key: The run's root key; constant.
        updates: Updates done.
        learner: On every device.
        memory: One per replica, `[replicas, ...]`.
        rollout: `[num_envs, ...]`.
    """

    key: jax.Array
    updates: Int[Array, ""]
    learner: PyTree
    memory: PyTree
    rollout: RolloutState


class Anakin:
    """Runs an agent in an environment.

    Args:
        agent: Anything that follows `podracer.agent.Agent`.
        environment: A raw environment.
        config: Its `num_envs` are divided among the devices.
        devices: One replica each; all of the backend's by default.

    Raises:
        ValueError: There is no device, `num_envs` is not a multiple of their number, one update has more than 2^30
            steps, the environment breaks its own spec, or the agent refuses something or uses a reserved name for a
            metric.

    Attributes:
        shapes: `AnakinState` of `jax.ShapeDtypeStruct` with shardings, to restore a checkpoint into.
    """

    def __init__(
        self,
        agent: Agent,
        environment: Environment,
        config: AnakinConfig,
        devices: list[jax.Device] | None = None,
    ) -> None:
        self.agent = agent
        self.environment = Autoreset(environment)
        self.config = config
        if devices is not None and not devices:
            raise ValueError("devices is empty; at least one is needed, or None for all")
        self.mesh = parallel.make_mesh(jax.devices() if devices is None else devices)
        check_divisible(config.num_envs, self.mesh.size)
        if self.steps_per_update > MAX_ROWS_PER_CALL:
            raise ValueError(
                f"num_envs {config.num_envs} x rollout_length {config.rollout_length} = {self.steps_per_update} steps "
                f"per update; at most {MAX_ROWS_PER_CALL} can be counted"
            )
        self._axis = parallel.axis_name(self.mesh)
        places: dict[str, Any] = dict.fromkeys(("key", "updates", "learner"), parallel.REPLICATED)
        places |= dict.fromkeys(("memory", "rollout"), parallel.SHARDED)
        specs = AnakinState(**places)
        self.shardings = parallel.shardings(self.mesh, specs)
        self._init = jax.jit(
            parallel.run_on_replicas(self._replica_init, self.mesh, (parallel.REPLICATED,), specs),
            out_shardings=self.shardings,
        )
        self._run = jax.jit(
            parallel.run_on_replicas(
                self._replica_run, self.mesh, (specs, parallel.REPLICATED), (specs, parallel.REPLICATED)
            ),
            donate_argnums=0,
        )
        # Tracing finds what an agent or an environment refuses, long before anything is compiled.
        shapes = jax.eval_shape(self._init, key_shape())
        self.shapes = parallel.with_shardings(shapes, self.shardings)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.shardings.updates)
        self._traced = self._run.trace(self.shapes, number)
        self._compiled: Any = None

    @property
    def steps_per_update(self) -> int:
        """Rows of all environments in one update."""
        return self.config.num_envs * self.config.rollout_length

    @property
    def placement(self) -> str:
        """Where it runs, in words."""
        count = self.mesh.size
        return f"on {count} {self.mesh.devices.flat[0].platform.upper()} device{'s' * (count > 1)}"

    def init(self, seed: int | jax.Array) -> AnakinState:
        """The state before the first update.

        Args:
            seed: An integer, or a typed key.

        Raises:
            ValueError: It is neither.
        """
        if isinstance(seed, int | np.integer):
            return self._init(jax.random.key(int(seed)))
        if not isinstance(seed, jax.Array) or not jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) or seed.ndim:
            raise ValueError(f"seed is {seed!r}; it must be an integer or one typed key, as from jax.random.key")
        return self._init(seed)

    def run(self, state: AnakinState, num_updates: int) -> tuple[AnakinState, Window]:
        """Makes updates, without waiting for them.

        Args:
            state: Donated: use the returned one from here on.
            num_updates: Any number; the program is compiled once for all of them.

        Raises:
            ValueError: `num_updates` is no integer from 1 to what one call can count, or the state was donated before.
        """
        check_num_updates(num_updates, self.steps_per_update)
        # JAX would say so less clearly, or crash, as 0.10.1 does in a compiled function.
        if state.updates.is_deleted():
            raise ValueError("the state was given to an earlier call, which donated it; use the state that it returned")
        self.compile()
        # Put there explicitly, so that the loop runs under `jax.transfer_guard("disallow")`.
        return self._compiled(state, jax.device_put(np.int32(num_updates), self.shardings.updates))

    def compile(self) -> None:
        """Compiles `run`, if it is not compiled yet."""
        if self._compiled is None:
            self._compiled = self._traced.lower().compile()

    def _replica_init(self, key: jax.Array) -> AnakinState:
        keys = self._environment_keys(stream_key(key, Stream.RESET))
        rollout = start_rollout(self.agent, self.environment, keys)
        learner = self.agent.init(stream_key(key, Stream.INIT))
        example = jax.eval_shape(lambda: self._unroll(key, jnp.int32(0), learner, rollout)[1])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), example)
        memory = jax.tree.map(lambda x: x[None], self.agent.init_memory(zeros))
        return AnakinState(key, jnp.int32(0), learner, memory, rollout)

    def _replica_run(self, state: AnakinState, num_updates: jax.Array) -> tuple[AnakinState, Window]:
        episodes = state.rollout.episodes.forget_finished()
        state = dataclasses.replace(state, rollout=dataclasses.replace(state.rollout, episodes=episodes))
        nothing = Window.zero(jax.eval_shape(self._replica_step, state)[1])

        def body(_: jax.Array, carry: tuple[AnakinState, Window]) -> tuple[AnakinState, Window]:
            state, window = carry
            state, more = self._replica_step(state)
            return state, window.add(more)

        state, window = jax.lax.fori_loop(0, num_updates, body, (state, nothing))
        episodes = state.rollout.episodes
        window = dataclasses.replace(
            window,
            episodes=episodes.count.sum(),
            return_sum=episodes.return_sum.sum(),
            length_sum=episodes.length_sum.astype(jnp.float32).sum(),
        )
        window = window.watch_parameters(self.agent.actor_params(state.learner), state.updates)
        return state, window.over_replicas(self._axis)

    def _replica_step(self, state: AnakinState) -> tuple[AnakinState, Window]:
        """One update of this replica: act, then learn."""
        rollout, trajectory = self._unroll(state.key, state.updates, state.learner, state.rollout)
        memory = jax.tree.map(lambda x: x[0], state.memory)
        key = stream_key(state.key, Stream.UPDATE, parallel.replica_index(self._axis), state.updates)
        learner, memory, metrics = self.agent.update(state.learner, memory, trajectory, key, axis=self._axis)
        memory = jax.tree.map(lambda x: x[None], memory)
        state = AnakinState(state.key, state.updates + 1, learner, memory, rollout)
        return state, Window.of_update(trajectory, metrics, state.updates)

    def _unroll(
        self, key: jax.Array, updates: jax.Array, learner: PyTree, rollout: RolloutState
    ) -> tuple[RolloutState, Trajectory]:
        environment_keys = self._environment_keys(stream_key(key, Stream.ENVIRONMENT))
        return unroll(
            self.agent,
            self.environment,
            self.agent.actor_params(learner),
            rollout,
            stream_key(key, Stream.ACT, parallel.replica_index(self._axis), updates),
            fold_in_each(environment_keys, updates),
            self.config.rollout_length,
        )

    def _environment_keys(self, key: jax.Array) -> jax.Array:
        """One key per environment of this replica, by its index among all environments."""
        count = self.config.num_envs // self.mesh.size
        indices = parallel.replica_index(self._axis) * count + jnp.arange(count)
        return key_of_each(key, indices)


def check_divisible(num_envs: int, num_devices: int) -> None:
    """Environments go to devices in equal shares.

    Raises:
        ValueError: They do not; the nearest numbers that do are named.
    """
    if num_envs % num_devices:
        below = num_envs // num_devices * num_devices
        nearest = [str(n) for n in (below, below + num_devices) if n]
        raise ValueError(
            f"num_envs is {num_envs}, which is not a multiple of the {num_devices} devices; "
            f"nearest valid: {' or '.join(nearest)}"
        )
