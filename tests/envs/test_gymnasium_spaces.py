"""Every space of Gymnasium, as an agent sees it."""

import gymnasium as gymnasium_package
import gymnasium_toys
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium_play import VECTORIZATIONS, counters, played, stepped

from podracer.envs import EnvironmentSlice, gymnasium
from podracer.envs.gymnasium_columns import Leaf, checked
from podracer.types import ArraySpec, BoundedSpec, DiscreteSpec, MaskedObservation, MultiDiscreteSpec

gymnasium_toys.register()


def test_the_spec_of_a_tree():
    spec = gymnasium.make("Toy/Hidden-v0")(EnvironmentSlice(1)).spec
    assert spec.action == DiscreteSpec(3, 5)
    assert spec.observation == MaskedObservation(
        {
            "zebra": {"inner": ArraySpec((3,), "int8", 0, 1)},
            "image": ArraySpec((4, 4, 1), "uint8", 0, 255),
            "vector": ArraySpec((2,), "float32"),
            "pair": (ArraySpec((), "int32", 0, 100), ArraySpec((2,), "int32", 0, 3)),
        },
        ArraySpec((3,), "bool"),
    )


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_every_leaf_is_where_it_belongs(vectorization):
    rows = played(gymnasium.make("Toy/Hidden-v0", **vectorization), 4)
    observation = rows.observation.observation
    assert observation["vector"][:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 0]]
    assert observation["image"].shape == (5, 2, 4, 4, 1)
    assert observation["image"][:, 1, 0, 0, 0].tolist() == [0, 1, 2, 3, 0]
    assert observation["pair"][0][:, 0].tolist() == [0, 1, 2, 3, 0]
    assert observation["pair"][1][:, 0].tolist() == [[1, 0], [2, 1], [3, 2], [1, 3], [1, 0]]
    assert observation["zebra"]["inner"].tolist() == [[[1, 0, 1]] * 2] * 5
    every, two, one = [True] * 3, [False, True, True], [False, False, True]
    # On LAST the toy has no legal action, which no agent could draw from.
    assert rows.observation.action_mask[:, 0].tolist() == [every, one, two, every, every]


def test_integers_are_narrowed_only_where_they_fit():
    leaf = Leaf("x", (2,), "int32")
    assert checked(leaf, np.asarray([2**31 - 1, -(2**31)]), (2,)).tolist() == [2**31 - 1, -(2**31)]
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(ValueError, match=f"the observation at x has {value}, which int32 does not hold"):
            checked(leaf, np.asarray([0, value]), (2,))
    with pytest.raises(ValueError, match="has 4294967296, which uint32 does not hold"):
        checked(Leaf("x", (), "uint32"), np.uint64(2**32), ())


def test_a_mask_that_does_not_fit_the_actions_is_an_observation():
    class Fits(gymnasium_toys.Counter):
        def __init__(self, n):
            super().__init__()
            self.observation_space = gymnasium_package.spaces.Dict(
                {"action_mask": gymnasium_package.spaces.MultiBinary(n), "x": gymnasium_package.spaces.Discrete(2)}
            )

    def spec(n):
        vector = counters(AutoresetMode.NEXT_STEP, Fits, n=n)
        return gymnasium.from_vector_env(vector)(EnvironmentSlice(1)).spec.observation

    assert isinstance(spec(2), MaskedObservation)
    assert set(spec(3)) == {"action_mask", "x"}


@pytest.mark.parametrize(
    ("name", "observation", "action"),
    [
        ("CartPole-v1", ArraySpec((4,)), DiscreteSpec(2)),
        ("Pendulum-v1", ArraySpec((3,), "float32", -8, 8), BoundedSpec((-2.0,), (2.0,))),
        ("FrozenLake-v1", ArraySpec((), "int32", 0, 15), DiscreteSpec(4)),
        (
            "Blackjack-v1",
            tuple(ArraySpec((), "int32", 0, last) for last in (31, 10, 1)),
            DiscreteSpec(2),
        ),
    ],
)
def test_specs(name, observation, action):
    spec = gymnasium.make(name)(EnvironmentSlice(1)).spec
    assert (spec.observation, spec.action) == (observation, action)


@pytest.mark.parametrize(
    ("kind", "spec", "action", "shown"),
    [
        ("matrix", BoundedSpec((-1, -2, -0.4, 0), (1,) * 4), [0.5, -1, 0, 1], [[0.5, -1], [0, 1]]),
        ("scalar", BoundedSpec((-2,), (3,)), [2.5], 2.5),
        ("multi", MultiDiscreteSpec((3, 4, 2, 2)), [2, 3, 0, 1], [[3, 3], [0, 6]]),
        ("binary", MultiDiscreteSpec((2,) * 4), [1, 0, 0, 1], [[1, 0], [0, 1]]),
        ("start", DiscreteSpec(3, -1), -1, -1),
    ],
)
def test_actions_have_the_shape_of_the_space(kind, spec, action, shown):
    factory = gymnasium.make("Toy/Acts-v0", kind=kind)
    assert factory(EnvironmentSlice(1)).spec.action == spec
    dtype = np.float32 if isinstance(spec, BoundedSpec) else np.int32
    # The toy asserts that the action is in its space.
    timestep = stepped("Toy/Acts-v0", np.asarray([action, action], dtype), kind=kind)
    np.testing.assert_allclose(timestep.observation[1], shown)


def test_a_bound_that_rounds_to_beyond_itself_is_within_it():
    low = np.float32(-0.4)
    assert float(low) < -0.4
    stepped("Toy/Acts-v0", np.full((2, 4), [1, 1, low, 1], np.float32), kind="matrix")


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_environment_gets_its_own_scalar_action(vectorization, num_envs):
    actions = np.arange(num_envs).astype(np.int32) - 1
    timestep = stepped("Toy/Acts-v0", actions, num_envs, kind="start", **vectorization)
    assert timestep.observation.tolist() == actions.tolist()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(1, np.int32), "there are 2 environments"),
        (np.zeros(3, np.int32), "there are 2 environments"),
        (np.int32(0), "there are 2 environments"),
        (np.zeros((2, 1), np.int32), r"int32\[2, 1\].*integers of shape \[2\]"),
        (np.zeros(2, np.float32), r"float32\[2\].*integers of shape \[2\]"),
    ],
)
def test_other_actions_are_refused(action, message):
    with pytest.raises(ValueError, match=message):
        stepped("CartPole-v1", action)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Sees", "text", r"the observation Text at \['words'\]; its leaves may be Box, Discrete"),
        ("Sees", "graph", r"the observation Graph at \[1\]"),
        ("Sees", "sequence", r"the observation Sequence at \(root\)"),
        ("Sees", "one_of", r"the observation OneOf at \(root\)"),
        ("Sees", "far", "with integers beyond those of int32"),
        ("Acts", "unbounded", r"Toy/Acts-v0 are Box.*need finite bounds"),
        ("Acts", "integers", r"Box.*they may be Discrete, MultiDiscrete, MultiBinary or a bounded Box of reals"),
        ("Acts", "dict", "Dict.*they may be Discrete"),
    ],
)
def test_other_spaces_are_refused_when_they_are_made(name, kind, message):
    with pytest.raises(ValueError, match=message):
        gymnasium.make(f"Toy/{name}-v0", kind=kind)(EnvironmentSlice(2))


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("wrong_shape", r"the observation at \(root\) is float32\[1\]; its space says float32\[2\]"),
        ("rounds", r"the observation at \(root\) is float32\[1\]; its space says uint8\[1\]"),
        ("lacks", "an observation lacks 'missing'"),
    ],
)
def test_observations_outside_their_space_are_refused(vectorization, kind, message):
    with pytest.raises(ValueError, match=message):
        stepped("Toy/Sees-v0", np.zeros(2, np.int32), kind=kind, **vectorization)
