"""What a recurrent agent remembers when it acts is what it remembers when it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agents import IMPALAConfig, PPOConfig
from podracer.agents.forward import apply_over_time, apply_step
from podracer.agents.testing.environments import Patchwork
from podracer.envs import Autoreset
from podracer.networks import NetworkConfig
from podracer.types import DiscreteSpec


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("config", [PPOConfig, IMPALAConfig])
def test_states_and_outputs_of_acting_and_of_learning_are_equal_at_every_step(config, cell):
    network = NetworkConfig(hidden_sizes=(4,), recurrent_size=3, recurrent_cell=cell)
    stream = Autoreset(Patchwork(DiscreteSpec(2)))
    agent = config(network=network).make(stream.spec, 10)
    learner = agent.init(jax.random.key(0))
    # A fresh policy is nearly uniform whatever it remembers.
    learner = dataclasses.replace(learner, params=jax.tree.map(lambda x: 3 * x, learner.params))
    act = jax.jit(lambda *inputs: agent.act(agent.actor_params(learner), *inputs))
    of_a_step = jax.jit(lambda *inputs: apply_step(agent.network, learner.params, *inputs)[0])
    unroll = jax.jit(lambda *inputs: agent.network.unroll(learner.params, *inputs))
    of_all_rows = jax.jit(lambda *inputs: apply_over_time(agent.network, learner.params, *inputs))
    step = jax.jit(stream.step)
    environment, timestep = stream.reset(jax.random.split(jax.random.key(1), 2))
    state, learnt = agent.init_actor(2), agent.network.initial_state(2)
    rows, states, outputs = [], [learnt], []
    for t in range(20):
        row = timestep.observation, timestep.first()
        rows.append(row)
        outputs.append(of_a_step(*row, states[t]))
        output = act(timestep, state, jax.random.key(t))
        state = output.actor_state
        _, learnt = unroll(*jax.tree.map(lambda x: x[None], row), learnt)
        states.append(getattr(state, "recurrent", state))  # PPO keeps what it acts on besides.
        for a, b in zip(jax.tree.leaves(states[-1]), jax.tree.leaves(learnt), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
            assert float(jnp.abs(b).max()) > 0
        environment, timestep = step(environment, output.action, jax.random.split(jax.random.key(t), 2))
    # Learning sees many rows at once, from the state of the first. Here these are ten from the start, and ten from the
    # middle of an episode; others begin in them, not in both environments at once.
    (observation, first), expected = (jax.tree.map(lambda *x: jnp.stack(x), *each) for each in (rows, outputs))
    assert not first[10].all()
    for window in (slice(0, 10), slice(10, 20)):
        here = first[window]
        assert (here[1:, 0] & ~here[1:, 1]).any()
        assert (here[1:, 1] & ~here[1:, 0]).any()
        found = of_all_rows(observation[window], here, states[window.start])
        never_restarted = of_all_rows(observation[window], jnp.zeros_like(here), states[window.start])
        for a, b, other in zip(found, expected, never_restarted, strict=True):
            np.testing.assert_allclose(a, b[window], atol=1e-6)
            # What is remembered shows.
            assert float(jnp.abs(a - other).max()) > 1e-4
