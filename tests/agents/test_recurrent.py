"""What a recurrent agent remembers when it acts is what it remembers when it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agents import IMPALAConfig, PPOConfig
from podracer.agents.testing.environments import Patchwork
from podracer.envs import Autoreset
from podracer.networks import NetworkConfig
from podracer.types import DiscreteSpec


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("config", [PPOConfig, IMPALAConfig])
def test_states_of_acting_and_of_learning_are_equal_at_every_step(config, cell):
    network = NetworkConfig(hidden_sizes=(4,), recurrent_size=3, recurrent_cell=cell)
    stream = Autoreset(Patchwork(DiscreteSpec(2)))
    agent = config(network=network).make(stream.spec, 10)
    learner = agent.init(jax.random.key(0))
    act = jax.jit(lambda *inputs: agent.act(agent.actor_params(learner), *inputs))
    unroll = jax.jit(lambda *inputs: agent.network.unroll(learner.params, *inputs))
    step = jax.jit(stream.step)
    environment, timestep = stream.reset(jax.random.split(jax.random.key(1), 2))
    state, learnt, restarts = agent.init_actor(2), agent.network.initial_state(2), 0
    for t in range(20):
        output = act(timestep, state, jax.random.key(t))
        state = output.actor_state
        _, learnt = unroll(*jax.tree.map(lambda x: x[None], (timestep.observation, timestep.first())), learnt)
        acted = getattr(state, "recurrent", state)  # PPO keeps what it acts on besides.
        for a, b in zip(jax.tree.leaves(acted), jax.tree.leaves(learnt), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
            assert float(jnp.abs(b).max()) > 0
        restarts += int(timestep.first().sum())
        environment, timestep = step(environment, output.action, jax.random.split(jax.random.key(t), 2))
    assert restarts > 4
