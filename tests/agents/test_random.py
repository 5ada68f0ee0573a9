"""The random agent: legal, uniform, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agent import Agent
from podracer.agents import Random
from podracer.agents.testing import AgentConformance
from podracer.envs.probe import ProbeContinuous
from podracer.types import (
    ActionSpec,
    ArraySpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MaskedObservation,
    MultiDiscreteSpec,
    TimeStep,
)


class TestRandom(AgentConformance):
    learns = False
    evaluation_is_deterministic = False

    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent:
        return Random(spec)


def drawn(action: ActionSpec, observation: object) -> np.ndarray:
    """6000 actions."""
    step_type = jnp.zeros(6000, jnp.int8)
    timestep = TimeStep(step_type, jnp.zeros(6000, jnp.float32), jnp.ones(6000, jnp.float32), observation)
    agent = Random(EnvironmentSpec(ArraySpec((1,)), action))
    return np.asarray(jax.jit(agent.act)((), timestep, (), jax.random.key(0)).action)


def masked(*mask: int) -> MaskedObservation:
    return MaskedObservation(jnp.zeros((6000, 1), jnp.float32), jnp.tile(jnp.array(mask, bool), (6000, 1)))


@pytest.mark.parametrize(
    ("action", "observation", "shares"),
    [
        (DiscreteSpec(3, start=-1), None, {-1: 1 / 3, 0: 1 / 3, 1: 1 / 3}),
        (DiscreteSpec(4, start=7), masked(1, 0, 0, 1), {7: 1 / 2, 10: 1 / 2}),
        (DiscreteSpec(3), masked(0, 1, 0), {1: 1}),
    ],
    ids=["every action", "two are legal", "one is legal"],
)
def test_every_legal_action_is_drawn_as_often(
    action: ActionSpec, observation: object, shares: dict[int, float]
) -> None:
    numbers, counts = np.unique(drawn(action, observation), return_counts=True)
    assert dict(zip(numbers.tolist(), counts / 6000, strict=True)) == pytest.approx(shares, abs=0.03)


def test_components_are_drawn_independently() -> None:
    actions = drawn(MultiDiscreteSpec((2, 3)), masked(1, 1, 1, 0, 1))
    pairs, counts = np.unique(actions, axis=0, return_counts=True)
    assert pairs.tolist() == [[0, 0], [0, 2], [1, 0], [1, 2]]
    np.testing.assert_allclose(counts / 6000, 1 / 4, atol=0.03)


def test_real_actions_fill_their_bounds() -> None:
    spec = ProbeContinuous().spec.action
    assert isinstance(spec, BoundedSpec)
    actions = drawn(spec, None)
    np.testing.assert_allclose(actions.mean(0), [1, 5], atol=0.2)
    np.testing.assert_allclose(actions.min(0), spec.low, atol=0.02)
    np.testing.assert_allclose(actions.max(0), spec.high, atol=0.02)


def test_nothing_is_learnt() -> None:
    agent = Random(EnvironmentSpec(ArraySpec((1,)), DiscreteSpec(2)))
    assert agent.update((), (), None, None) == ((), (), {})
