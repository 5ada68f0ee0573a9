"""What every agent must satisfy, as tests to inherit.

```
from podracer.agents.testing import AgentConformance

class TestMyAgent(AgentConformance):
    def make(self, spec, num_updates):
        return MyAgent(spec, num_updates, discount=self.discount)
```

pytest collects the inherited tests. They act and learn in a small environment whose episodes end in every way, compare
devices, run the agent under Anakin, and train it on environments of known value. What they compile is shared within the
class, so `make` has to return an equal agent every time. Each failure says what is wrong and what to do about it.
"""

import dataclasses
import inspect
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from podracer import parallel
from podracer.agent import Agent
from podracer.agents.testing_checks import (
    action_shape,
    check_same,
    check_strong,
    illegal_rows,
    key_shape,
    leaf_name,
    relative_difference,
    row,
    shapes,
    soil,
    values_of_what_followed,
)
from podracer.agents.testing_environments import Patchwork, ProbeTruncation
from podracer.anakin import Anakin, AnakinConfig, summarize
from podracer.envs.autoreset import Autoreset
from podracer.envs.base import Environment
from podracer.envs.probe import (
    ProbeActionMatters,
    ProbeConstantReward,
    ProbeContinuous,
    ProbeDelayedReward,
    ProbeMasked,
    ProbeMemory,
    ProbeMultiDiscrete,
    ProbeObservationReward,
)
from podracer.envs.recording import difference, to_numpy
from podracer.rollout import RolloutState, rollout_step, start_rollout, unroll
from podracer.types import (
    ActionSpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MultiDiscreteSpec,
    TimeStep,
    Trajectory,
    split_mask,
    valid_mask,
)

METHODS = {
    "init": ["key"],
    "init_actor": ["batch_size"],
    "init_memory": ["example"],
    "actor_params": ["learner"],
    "act": ["params", "timestep", "actor_state", "key", "evaluate"],
    "update": ["learner", "memory", "trajectory", "key", "axis"],
}


class AgentConformance:
    """Inherit, override `make`, and declare below what is so on purpose.

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

    # The protocol.

    def test_the_agent_is_a_frozen_hashable_dataclass(self) -> None:
        agent = self._agent()
        frozen = dataclasses.is_dataclass(agent) and agent.__dataclass_params__.frozen
        assert frozen, f"{type(agent).__name__} must be a dataclass with frozen=True: configuration, and nothing else"
        assert hash(agent) == hash(agent), "hash(agent) must be the same every time"

    def test_the_agent_has_the_six_methods_and_no_other(self) -> None:
        agent = self._agent()
        members = {name for name in dir(type(agent)) if not name.startswith("_")}
        methods = {name for name in members if inspect.isfunction(getattr(type(agent), name))}
        assert methods == set(METHODS), (
            f"an agent's public methods are {', '.join(METHODS)}; missing: {sorted(set(METHODS) - methods)}, "
            f"besides them: {sorted(methods - set(METHODS))} (architectures call no others: make them private)"
        )
        for name, expected in METHODS.items():
            parameters = inspect.signature(getattr(agent, name)).parameters
            assert list(parameters) == expected, f"{name} takes {list(parameters)}; it must take {expected}"
        for name, option, default in (("act", "evaluate", False), ("update", "axis", None)):
            parameter = inspect.signature(getattr(agent, name)).parameters[option]
            by_name = parameter.kind == parameter.KEYWORD_ONLY and parameter.default is default
            assert by_name, f"{option} of {name} must be keyword-only with default {default}"

    def test_init_depends_on_its_key_alone(self) -> None:
        init = jax.jit(lambda seeds: jax.vmap(lambda seed: self._agent().init(jax.random.key(seed)))(seeds))
        one, same, other = (jax.tree.map(lambda x, i=i: x[i], init(jnp.arange(3) // 2)) for i in range(3))
        found = difference(one, same, 0)
        assert found is None, f"init gives two learners with one key: {found}; draw from the key only"
        if self.learns:
            assert difference(one, other, 0), "init gives the same learner with every key: use the key"

    def test_shapes_and_types_are_those_of_the_specs(self) -> None:
        for environment in self._environments():
            agent, spec = self.make(environment.spec, 10), environment.spec
            learner = jax.eval_shape(agent.init, key_shape())
            check_strong("init", learner)
            for batch_size in (1, 3):
                timestep = jax.eval_shape(Autoreset(environment).reset, _keys_shape(batch_size))[1]
                actor_state = agent.init_actor(batch_size)
                for evaluate in (False, True):
                    output = jax.eval_shape(
                        lambda learner, *rest, agent=agent, evaluate=evaluate: agent.act(
                            agent.actor_params(learner), *rest, evaluate=evaluate
                        ),
                        learner,
                        timestep,
                        actor_state,
                        key_shape(),
                    )
                    wanted = action_shape(spec.action, batch_size)
                    got = (tuple(output.action.shape), str(output.action.dtype))
                    assert got == wanted, f"act(evaluate={evaluate}) gives actions {got}; {spec.action} wants {wanted}"
                    check_strong("act", output)
                    check_same("actor_state", actor_state, output.actor_state)
                    for path, leaf in jax.tree_util.tree_leaves_with_path((output.actor_state, output.extras)):
                        assert leaf.shape[:1] == (batch_size,), (
                            f"act gives {leaf_name(path)} of shape {leaf.shape}; its first axis must be the "
                            f"{batch_size} environments"
                        )

    def test_actions_are_legal(self) -> None:
        environments = self._environments()

        @jax.jit
        def act(key: jax.Array) -> PyTree:
            actions = []
            for i, environment in enumerate(environments):
                agent = self.make(environment.spec, 10)
                keys = jax.random.split(jax.random.fold_in(key, i), 4)
                timestep = Autoreset(environment).reset(jax.random.split(keys[0], 256))[1]
                params, state = agent.actor_params(agent.init(keys[1])), agent.init_actor(256)
                chosen = [agent.act(params, timestep, state, keys[2 + e], evaluate=bool(e)).action for e in (0, 1)]
                actions.append((timestep.observation, chosen))
            return actions

        for environment, (observation, chosen) in zip(environments, act(jax.random.key(0)), strict=True):
            for evaluate, action in enumerate(chosen):
                wrong = illegal_rows(environment.spec, observation, np.asarray(action))
                assert not len(wrong), (
                    f"act(evaluate={bool(evaluate)}) chose {np.asarray(action)[wrong[0]]}, which is not legal in row "
                    f"{wrong[0]} of {environment.spec.action}, mask {row(split_mask(observation)[1], wrong[0])}"
                )

    def test_evaluation_needs_no_luck(self) -> None:
        if not self.evaluation_is_deterministic:
            return
        agent, (learner, trajectory) = self._agent(), self._rollout()

        @jax.jit
        def act(learner: PyTree, timestep: TimeStep, seeds: jax.Array) -> PyTree:
            params = agent.actor_params(learner)

            def together(seed: jax.Array) -> PyTree:
                state = agent.init_actor(self.num_envs)
                return agent.act(params, timestep, state, jax.random.key(seed), evaluate=True).action

            def alone(row: TimeStep) -> PyTree:
                row = jax.tree.map(lambda x: x[None], row)
                return agent.act(params, row, agent.init_actor(1), jax.random.key(0), evaluate=True).action[0]

            return jax.vmap(together)(seeds), jax.vmap(alone)(timestep)

        together, alone = act(learner, jax.tree.map(lambda x: x[0], trajectory.timestep), jnp.arange(4))
        for other in together[1:]:
            found = difference(other, together[0], 0)
            assert found is None, f"act(evaluate=True) depends on the key: {found}; take the mode, do not sample"
        found = difference(alone, together[0], 1e-5)
        assert found is None, f"act(evaluate=True) gives one environment alone another action than in a batch: {found}"

    def test_update_keeps_structures_and_types(self) -> None:
        learner, trajectory = self._rollout()
        agent = self._agent()
        memory = agent.init_memory(trajectory)
        after_learner, after_memory, metrics = jax.eval_shape(agent.update, learner, memory, trajectory, key_shape())
        check_same("learner", learner, after_learner)
        check_same("memory", memory, after_memory)
        check_strong("update", (after_learner, after_memory, metrics))
        for name, metric in metrics.items():
            scalar = metric.shape == () and jnp.issubdtype(metric.dtype, jnp.floating)
            assert scalar, (
                f"the metric {name} of update is {metric.dtype}{list(metric.shape)}; metrics are real scalars"
            )

    def test_types_stay_under_x64(self) -> None:
        learner, trajectory = (shapes(x) for x in self._rollout())
        with jax.enable_x64(True):
            agent = self._agent()
            fresh = jax.eval_shape(agent.init, key_shape())
            check_same("learner (with JAX_ENABLE_X64)", learner, fresh)
            memory = jax.eval_shape(agent.init_memory, trajectory)
            after, _, _ = jax.eval_shape(agent.update, fresh, memory, trajectory, key_shape())
            check_same("learner (with JAX_ENABLE_X64)", learner, after)

    # Learning.

    def test_update_learns_and_compiles_once(self) -> None:
        learner, trajectory = self._rollout()
        once = self._update(1, trajectory)
        found = difference(once, learner, 0)
        assert found is not None or not self.learns, "update returns the learner as it was: nothing was learnt"
        for path, leaf in jax.tree_util.tree_leaves_with_path(once):
            assert np.isfinite(to_numpy(leaf)).all(), f"{leaf_name(path)} is not finite after an update"
        self._update(1, trajectory, learner=once)
        traces = self._shared("traces 1", dict)
        assert traces["count"] == 1, f"update was traced {traces['count']} times for arguments of the same types"

    def test_update_is_equal_on_any_number_of_devices(self) -> None:
        if not (self.learns and self.same_on_any_number_of_devices):
            return
        trajectory = self._rollout()[1]
        one = self._update(1, trajectory)
        for devices in (2, 8):
            found = relative_difference(self._update(devices, trajectory), one, self.tolerance)
            assert found is None, (
                f"update on {devices} devices differs from one device with the same trajectory: {found}; average "
                "gradients and statistics with podracer.parallel.mean_over_replicas, and draw what replicas must "
                "agree on from podracer.parallel.shared_key"
            )

    def test_replicas_stay_equal(self) -> None:
        replicas = self._replicas(8, self._rollout()[1])
        for path, leaf in jax.tree_util.tree_leaves_with_path(replicas):
            array = to_numpy(leaf)
            assert (array == array[:1]).all(), (
                f"{leaf_name(path)} differs between replicas after an update; whatever changes the learner has to be "
                "averaged over the axis first"
            )

    def test_nothing_is_learnt_from_rows_on_which_an_environment_resets(self) -> None:
        trajectory = self._rollout()[1]
        last, first = trajectory.timestep.last()[:-1], trajectory.timestep.first()
        assert (last.any(), first[1:].any()) == (True, True), "no episode ended in the trajectory; raise rollout_length"
        clean = self._update(1, trajectory)
        for garbage in (np.nan, np.inf, -1e30, 3.0):
            found = difference(self._update(1, self._soiled(trajectory, garbage)), clean, 0)
            assert found is None, (
                f"with {garbage} for the rewards of FIRST rows, and for the actions and extras of LAST rows, update "
                f"learns something else: {found}; give rows outside podracer.valid_mask the weight 0, and replace "
                "what they hold by jnp.where, since 0 * NaN is NaN"
            )

    def test_the_rest_of_the_trajectory_is_learnt_from(self) -> None:
        if not self.learns:
            return
        trajectory = self._rollout()[1]
        valid = np.concatenate([np.zeros((1, self.num_envs), bool), valid_mask(trajectory)])
        reward = jnp.where(valid, trajectory.timestep.reward - 3 * trajectory.timestep.observation[..., 3], 0)
        other = dataclasses.replace(trajectory, timestep=dataclasses.replace(trajectory.timestep, reward=reward))
        assert difference(self._update(1, other), self._update(1, trajectory), 0), (
            "update gives the same learner whatever the rewards are"
        )

    # Under Anakin.

    def test_runs_in_chunks_of_any_size_equal_one_run(self) -> None:
        whole = self._run(4)
        for chunks in ((2, 2), (1, 3)):
            found = difference(self._run(*chunks), whole, 0)
            assert found is None, f"{chunks} updates differ from 4 in one call: {found}; keep nothing outside the state"

    def test_one_seed_gives_one_result(self) -> None:
        found = difference(self._run(4), self._run(4), 0)
        assert found is None, f"two runs with one seed differ: {found}"

    def test_the_running_loop_moves_nothing_and_compiles_nothing(self) -> None:
        anakin, state = self._anakin(), self._anakin().init(0)
        state, _ = anakin.run(state, 1)
        compiled: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: compiled.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("jax")
        logger.addHandler(handler)
        try:
            with jax.transfer_guard("disallow"), jax.log_compiles():
                for num_updates in (1, 2, 3):
                    state, window = anakin.run(state, num_updates)
                jax.block_until_ready(state)
        finally:
            logger.removeHandler(handler)
        again = [message for message in compiled if message.startswith("Compiling")]
        assert not again, f"a running loop compiles again: {again}"
        summarize(window)

    # Environments of known value, from the easiest.

    def test_solves_constant_reward(self) -> None:
        self._solve(ProbeConstantReward(), 1.0)

    def test_solves_observation_reward(self) -> None:
        self._solve(ProbeObservationReward(), None)

    def test_solves_delayed_reward(self) -> None:
        self._solve(ProbeDelayedReward(), 1.0)

    def test_solves_action_matters(self) -> None:
        self._solve(ProbeActionMatters(start=1), 1.0)

    def test_a_truncation_bootstraps_and_a_termination_does_not(self) -> None:
        self._solve(ProbeTruncation(), 1.0)

    def test_solves_continuous_actions(self) -> None:
        self._solve(ProbeContinuous(), 1.0)

    def test_solves_multi_discrete_actions(self) -> None:
        self._solve(ProbeMultiDiscrete(), 1.0)

    def test_solves_masked_actions(self) -> None:
        self._solve(ProbeMasked(), 1.0)

    def test_solves_memory(self) -> None:
        if self.remembers:
            self._solve(ProbeMemory(length=2), 1.0)

    def _solve(self, probe: Environment, optimal: float | None) -> None:
        """Trains on the probe, then plays greedily: the mean return, and every value against what followed."""
        chosen = self.feed_forward_probes or isinstance(probe, ProbeMemory)
        able = any(type(probe.spec.action) is type(action) for action in self.actions)
        if not (self.learns and chosen and able):
            return
        agent = self.make(probe.spec, self.probe_updates)
        anakin = Anakin(agent, probe, AnakinConfig(self.probe_envs, self.rollout_length), jax.devices()[:1])
        state, _ = anakin.run(anakin.init(0), self.probe_updates)

        @jax.jit
        def play(learner: PyTree, key: jax.Array) -> PyTree:
            reset_key, environment_key, act_key = jax.random.split(key, 3)
            stream, params = Autoreset(probe), agent.actor_params(learner)
            start = start_rollout(agent, stream, jax.random.split(reset_key, self.probe_envs))
            environment_keys = jax.random.split(environment_key, self.probe_envs)

            def step(rollout: RolloutState, t: jax.Array) -> tuple[RolloutState, PyTree]:
                following, output = rollout_step(
                    agent, stream, params, rollout, act_key, environment_keys, t, evaluate=True
                )
                return following, (rollout.timestep, following.timestep, output.extras)

            final, rows = jax.lax.scan(step, start, jnp.arange(9, dtype=jnp.int32))
            return final.episodes, rows

        episodes, (timestep, following, extras) = jax.device_get(play(state.learner, jax.random.key(1)))
        mean = episodes.return_sum.sum() / episodes.count.sum()
        name = type(probe).__name__
        if optimal is not None:
            assert mean >= optimal - self.return_tolerance, f"the mean return on {name} is {mean}, not {optimal}"
        values = self.value(extras)
        if values is None:
            return
        known = values_of_what_followed(timestep, following, np.asarray(values), self.discount)
        wrong = np.argwhere(np.abs(values - known) > self.value_tolerance)
        if len(wrong):
            t, b = wrong[0]
            raise AssertionError(
                f"the value on {name} of the observation {row(timestep.observation, (t, b))} is "
                f"{values[t, b]:.3f}, the true one {known[t, b]:.3f}"
            )

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
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(4), jnp.arange(devices))
        return jax.device_get(update(learner, memory, trajectory, keys)[0])

    def _update(self, devices: int, trajectory: Trajectory, learner: PyTree = None) -> PyTree:
        return jax.tree.map(lambda x: x[0], self._replicas(devices, trajectory, learner))

    def _compile_update(self, devices: int) -> tuple[Callable[..., Any], PyTree]:
        """`update` on every replica, and their memories before it."""
        agent, mesh = self._agent(), parallel.make_mesh(jax.devices()[:devices])
        axis, count = parallel.axis_name(mesh), self.num_envs // devices
        batched = PartitionSpec(None, parallel.AXIS)
        by_environment = Trajectory(batched, batched, batched, parallel.SHARDED)  # type: ignore[arg-type]

        def update(learner: PyTree, memory: PyTree, trajectory: Trajectory, keys: jax.Array) -> PyTree:
            traces = self._shared(f"traces {devices}", dict)
            traces["count"] = traces.get("count", 0) + 1
            memory = jax.tree.map(lambda x: x[0], memory)
            result = agent.update(learner, memory, trajectory, keys[0], axis=axis)
            return jax.tree.map(lambda x: x[None], result)

        in_specs = (parallel.REPLICATED, parallel.SHARDED, by_environment, parallel.SHARDED)
        function = jax.jit(parallel.run_on_replicas(update, mesh, in_specs, parallel.SHARDED))
        trajectory = self._rollout()[1]
        share = jax.tree.map(lambda x: x[:, :count], dataclasses.replace(trajectory, actor_state=()))
        state = jax.tree.map(lambda x: x[:count], trajectory.actor_state)
        memory = agent.init_memory(dataclasses.replace(share, actor_state=state))
        return function, jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * devices), memory)

    def _soiled(self, trajectory: Trajectory, garbage: float) -> Trajectory:
        """Garbage in all that belongs to no transition."""
        first, last = trajectory.timestep.first(), trajectory.timestep.last()[:-1]
        timestep = dataclasses.replace(trajectory.timestep, reward=soil(trajectory.timestep.reward, first, garbage))

        def soiled(path: Any, leaf: PyTree) -> PyTree:
            name = getattr(path[0], "name", getattr(path[0], "key", None)) if path else None
            return leaf if name in self.kept_extras else soil(leaf, last, garbage)

        return dataclasses.replace(
            trajectory,
            timestep=timestep,
            action=soil(trajectory.action, last, garbage),
            extras=jax.tree_util.tree_map_with_path(soiled, trajectory.extras),
        )

    def _anakin(self) -> Anakin:
        config = AnakinConfig(self.num_envs, self.rollout_length)
        environment = Patchwork(self.actions[0])
        return self._shared("anakin", lambda: Anakin(self._agent(), environment, config, jax.devices()[:2]))

    def _run(self, *chunks: int) -> PyTree:
        """Everything that changes in a run, after updates in calls of these sizes."""
        state = self._anakin().init(0)
        for num_updates in chunks:
            state, _ = self._anakin().run(state, num_updates)
        state = jax.tree.map(to_numpy, state)
        # What finished is counted anew in every call.
        episodes = dataclasses.replace(state.rollout.episodes, count=(), return_sum=(), length_sum=())
        return dataclasses.replace(state, rollout=dataclasses.replace(state.rollout, episodes=episodes))


def _keys_shape(batch_size: int) -> Any:
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))
