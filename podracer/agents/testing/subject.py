"""The agent under test: what its author declares of it, and what the tests do with it more than once."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from podracer import parallel
from podracer.agent import Agent
from podracer.agents.testing.checks import columns_of, soil
from podracer.agents.testing.environments import Patchwork
from podracer.anakin import Anakin, AnakinConfig, AnakinState
from podracer.envs.autoreset import Autoreset
from podracer.envs.recording import to_numpy
from podracer.rollout import start_rollout, unroll
from podracer.streams import key_of_each
from podracer.types import ActionSpec, BoundedSpec, DiscreteSpec, EnvironmentSpec, MultiDiscreteSpec, Trajectory


class AgentUnderTest:
    """Inherit through `AgentConformance`, override `make`, and declare below what is so on purpose.

    Attributes:
        learns: False for an agent that learns nothing; leaves out the tests of learning.
        discount: The discount of the agent that `make` returns, by which values on the probes are judged.
        feed_forward_probes: False leaves out the probes that need no memory.
        remembers: True adds the probe that only a recurrent agent solves.
        actions: The kinds of action that the agent can choose, each with and without a mask if discrete.
        evaluation_is_deterministic: False for an agent that draws its actions in evaluation too.
        same_on_any_number_of_devices: False where replicas sample by themselves, from replay for instance, so that
            their number changes what is learnt from.
        kept_extras: The extras, by name, that stay meaningful on the row after which an environment resets itself:
            those about the final observation, not about the ignored action.
        num_envs: Environments of the fixed trajectory and under Anakin; a multiple of 8.
        rollout_length: T.
        tolerance: How far learners on 1, 2 and 8 devices may differ, as a share of the largest number of each array.
        probe_envs: Environments in which a probe is learnt.
        probe_updates: Updates in which a probe is learnt.
        value_tolerance: Between learnt and true values on the probes.
        return_tolerance: Between the mean return and the optimal one on the probes.
    """

    learns: ClassVar[bool] = True
    discount: ClassVar[float] = 0.9
    feed_forward_probes: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    actions: ClassVar[tuple[ActionSpec, ...]] = (
        DiscreteSpec(3, start=5),
        MultiDiscreteSpec((2, 3)),
        BoundedSpec((-1.0, 0.0), (3.0, 10.0)),
    )
    evaluation_is_deterministic: ClassVar[bool] = True
    same_on_any_number_of_devices: ClassVar[bool] = True
    kept_extras: ClassVar[tuple[str, ...]] = ("value",)
    num_envs: ClassVar[int] = 8
    rollout_length: ClassVar[int] = 8
    tolerance: ClassVar[float] = 1e-4
    probe_envs: ClassVar[int] = 64
    probe_updates: ClassVar[int] = 150
    value_tolerance: ClassVar[float] = 0.1
    return_tolerance: ClassVar[float] = 0.05

    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent:
        """The agent under test, for a run of `num_updates` updates; called more than once."""
        raise NotImplementedError(f"{type(self).__name__} must override make() to return the agent under test")

    def value(self, extras: PyTree) -> Float[Array, "T B"] | None:
        """What the agent thought a row to be worth, from what `act` remembered.

        None if it has no such number; then only its returns on the probes are judged.
        """
        return getattr(extras, "value", None)

    # What the tests share.

    def _shared(self, name: str, build: Callable[[], Any]) -> Any:
        """Built once for the class, not inherited."""
        if "_cache" not in type(self).__dict__:
            type(self)._cache = {}  # type: ignore[attr-defined]
        cache = type(self)._cache  # type: ignore[attr-defined]
        if name not in cache:
            cache[name] = build()
        return cache[name]

    def _agent(self) -> Agent:
        return self._shared("agent", lambda: self.make(Patchwork(self.actions[0]).spec, 10))

    def _environments(self) -> list[Patchwork]:
        """One environment for each kind of action."""
        kinds = [Patchwork(action) for action in self.actions]
        discrete = [action for action in self.actions if isinstance(action, DiscreteSpec | MultiDiscreteSpec)]
        return kinds + [Patchwork(action, masked=True) for action in discrete]

    def _rollout(self) -> tuple[PyTree, Trajectory]:
        """A fresh learner, and a trajectory that it acted."""
        agent, stream = self._agent(), Autoreset(Patchwork(self.actions[0]))

        @jax.jit
        def build(key: jax.Array) -> tuple[PyTree, Trajectory]:
            keys = jax.random.split(key, 4)
            learner = agent.init(keys[0])
            rollout = start_rollout(agent, stream, jax.random.split(keys[1], self.num_envs))
            environment_keys = jax.random.split(keys[2], self.num_envs)
            params = agent.actor_params(learner)
            return learner, unroll(agent, stream, params, rollout, keys[3], environment_keys, self.rollout_length)[1]

        return self._shared("rollout", lambda: jax.device_get(build(jax.random.key(3))))

    def _replicas(self, devices: int, trajectory: Trajectory, learner: PyTree = None) -> PyTree:
        """`update` of the trajectory on so many devices: the learner of each, `[devices, ...]`."""
        learner = self._rollout()[0] if learner is None else learner
        update, memory = self._shared(f"update {devices}", lambda: self._compile_update(devices))
        # The same key for the first replica whatever their number, and another for each of the rest.
        keys = key_of_each(jax.random.key(4), jnp.arange(devices))
        return jax.device_get(update(learner, memory, trajectory, keys)[0])

    def _update(self, devices: int, trajectory: Trajectory, learner: PyTree = None) -> PyTree:
        return jax.tree.map(lambda x: x[0], self._replicas(devices, trajectory, learner))

    def _compile_update(self, devices: int) -> tuple[Callable[..., Any], PyTree]:
        """`update` on every replica, and their memories before it."""
        agent, mesh = self._agent(), parallel.make_mesh(jax.devices()[:devices])
        axis, count = parallel.axis_name(mesh), self.num_envs // devices

        def update(learner: PyTree, memory: PyTree, trajectory: Trajectory, keys: jax.Array) -> PyTree:
            traces = self._shared(f"traces {devices}", dict)
            traces["count"] = traces.get("count", 0) + 1
            memory = jax.tree.map(lambda x: x[0], memory)
            result = agent.update(learner, memory, trajectory, keys[0], axis=axis)
            return jax.tree.map(lambda x: x[None], result)

        in_specs = (parallel.REPLICATED, parallel.SHARDED, parallel.BY_ENVIRONMENT, parallel.SHARDED)
        function = jax.jit(parallel.run_on_replicas(update, mesh, in_specs, parallel.SHARDED))
        memory = agent.init_memory(columns_of(self._rollout()[1], slice(count)))
        return function, jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * devices), memory)

    def _soiled(self, trajectory: Trajectory, garbage: float) -> Trajectory:
        """Garbage in all that belongs to no transition."""
        first, last = trajectory.timestep.first(), trajectory.timestep.last()[:-1]
        reward, discount = (soil(x, first, garbage) for x in (trajectory.timestep.reward, trajectory.timestep.discount))

        def soiled(path: Any, leaf: PyTree) -> PyTree:
            name = getattr(path[0], "name", getattr(path[0], "key", None)) if path else None
            return leaf if name in self.kept_extras else soil(leaf, last, garbage)

        return dataclasses.replace(
            trajectory,
            timestep=dataclasses.replace(trajectory.timestep, reward=reward, discount=discount),
            action=soil(trajectory.action, last, garbage),
            extras=jax.tree_util.tree_map_with_path(soiled, trajectory.extras),
        )

    def _anakin(self) -> Anakin:
        config = AnakinConfig(self.num_envs, self.rollout_length)
        environment = Patchwork(self.actions[0])
        return self._shared("anakin", lambda: Anakin(self._agent(), environment, config, jax.devices()[:2]))

    def _run(self, *chunks: int, state: AnakinState | None = None) -> PyTree:
        """Everything that changes in a run, after updates in calls of these sizes."""
        state = self._anakin().init(0) if state is None else state
        for num_updates in chunks:
            state, _ = self._anakin().run(state, num_updates)
        state = jax.tree.map(to_numpy, state)
        # What finished is counted anew in every call.
        episodes = dataclasses.replace(state.rollout.episodes, count=(), return_sum=(), length_sum=())
        return dataclasses.replace(state, rollout=dataclasses.replace(state.rollout, episodes=episodes))
