"""The protocol as tests: an agent's methods, and the shapes, types and actions that they give."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree

from podracer.agents.testing.checks import (
    action_shape,
    check_same,
    check_strong,
    illegal_rows,
    row,
    shapes,
)
from podracer.agents.testing.subject import AgentUnderTest
from podracer.envs.autoreset import Autoreset
from podracer.envs.recording import difference
from podracer.types import TimeStep, key_shape, leaf_name, split_mask

METHODS = {
    "init": ["key"],
    "init_actor": ["batch_size"],
    "init_memory": ["example"],
    "actor_params": ["learner"],
    "act": ["params", "timestep", "actor_state", "key", "evaluate"],
    "update": ["learner", "memory", "trajectory", "key", "axis"],
}


class ProtocolConformance(AgentUnderTest):
    """The part of `AgentConformance` that asks what methods take and give."""

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
            pytest.skip("evaluation_is_deterministic = False")
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


def _keys_shape(batch_size: int) -> Any:
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))
