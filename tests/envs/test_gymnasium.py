"""Gymnasium's environments by name: their episodes, parameters and pictures."""

import dataclasses
import subprocess
import sys

import gymnasium as gymnasium_package
import gymnasium_toys
import numpy as np
import pytest
from gymnasium_play import MODES, VECTORIZATIONS, counters, played, stepped, warned

from podracer.envs import EnvironmentSlice, EnvironmentUnavailableError, gymnasium
from podracer.envs.host_testing import HostEnvironmentConformance
from podracer.envs.recording import difference
from podracer.types import StepType

gymnasium_toys.register()


class TestCartPole(HostEnvironmentConformance):
    def make(self, where):
        return gymnasium.make("CartPole-v1")(where)


class TestContinuous(HostEnvironmentConformance):
    num_steps = 60

    def make(self, where):
        return gymnasium.make("Pendulum-v1", max_episode_steps=8)(where)


class TestTupleObservations(HostEnvironmentConformance):
    num_steps = 60

    def make(self, where):
        return gymnasium.make("Blackjack-v1")(where)


class TestOneIntegerAsObservation(HostEnvironmentConformance):
    deterministic_reset = True

    def make(self, where):
        return gymnasium.make("FrozenLake-v1")(where)


class TestTreeWithMask(HostEnvironmentConformance):
    def make(self, where):
        return gymnasium.make("Toy/Hidden-v0", random_start=True, length=4)(where)


# Episodes.


@pytest.mark.parametrize("mode", [*MODES, "sync", "async"])
def test_episodes_of_different_lengths_keep_every_transition(mode):
    if isinstance(mode, str):
        rows = played(gymnasium.make("Toy/Counter-v0", length=(3, 5), vectorization=mode), 12)
    else:
        with warned(mode):
            rows = played(gymnasium.from_vector_env(counters(mode, length=(3, 5))), 12)
    short, long = sorted((0, 1), key=lambda b: (rows.step_type[:, b] == StepType.LAST).argmax())
    assert rows.step_type[:, short].tolist() == [0, 1, 1, 2, 0, 1, 1, 2, 0, 1, 1, 2, 0]
    assert rows.observation[:, short, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert rows.reward[:, short].tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0]
    assert rows.step_type[:, long].tolist() == [0, 1, 1, 1, 1, 2, 0, 1, 1, 1, 1, 2, 0]
    assert rows.observation[:, long, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]
    assert (rows.discount == 1).all()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_all_modes_give_the_same_rows(num_envs):
    where = EnvironmentSlice(num_envs, seed=4)
    parameters = {"random_start": True, "length": (3, 5, 4), "ends": "termination"}
    expected = played(gymnasium.make("Toy/Counter-v0", **parameters), 30, where)
    assert len(np.unique(expected.observation[expected.step_type == StepType.FIRST])) > 4
    for mode in MODES:
        with warned(mode, num_envs):
            rows = played(gymnasium.from_vector_env(counters(mode, **parameters)), 30, where)
        assert difference(rows, expected, 0) is None, mode


def test_all_modes_give_the_same_rows_of_a_tree():
    where = EnvironmentSlice(2, seed=4)
    parameters = {"random_start": True, "length": (3, 5)}
    expected = played(gymnasium.make("Toy/Hidden-v0", **parameters), 30, where)
    for mode in MODES:
        factory = gymnasium.from_vector_env(counters(mode, gymnasium_toys.Hidden, **parameters))
        with warned(mode):
            rows = played(factory, 30, where)
        assert difference(rows, expected, 0) is None, mode


@pytest.mark.parametrize("mode", [*MODES, "sync"])
@pytest.mark.parametrize(("ends", "discount"), [("termination", 0), ("both", 0), ("truncation", 1)])
def test_termination_wins_over_truncation(mode, ends, discount):
    if mode == "sync":
        rows = played(gymnasium.make("Toy/Counter-v0", ends=ends), 7)
    else:
        with warned(mode):
            rows = played(gymnasium.from_vector_env(counters(mode, ends=ends)), 7)
    assert rows.step_type[:, 0].tolist() == [0, 1, 1, 2, 0, 1, 1, 2]
    assert rows.discount[:, 0].tolist() == [1, 1, 1, discount] * 2


def test_a_time_limit_truncates():
    rows = played(gymnasium.make("Pendulum-v1", max_episode_steps=3), 7)
    assert rows.step_type[:, 0].tolist() == [0, 1, 1, 2, 0, 1, 1, 2]
    assert (rows.discount == 1).all()
    assert (rows.observation[3] != rows.observation[4]).any()


def test_rows_are_those_of_gymnasium_itself():
    where = EnvironmentSlice(1, first_index=3, seed=7)
    environment = gymnasium.make("CartPole-v1")(where)
    raw = gymnasium_package.make("CartPole-v1")
    observation, _ = raw.reset(seed=where.seeds()[0])
    over, resets = False, 0
    timestep = environment.reset()
    for t in range(100):
        np.testing.assert_array_equal(timestep.observation[0], observation)
        action = int(t % 3 == 0)
        timestep = environment.step(np.asarray([action], np.int32))
        if over:
            (observation, _), over, resets = raw.reset(), False, resets + 1
            assert timestep.step_type[0] == StepType.FIRST
            continue
        observation, reward, terminated, truncated, _ = raw.step(action)
        over = terminated or truncated
        assert (timestep.reward[0], timestep.discount[0], timestep.last()[0]) == (reward, not terminated, over)
    assert resets > 3
    environment.close()


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_reward_of_one_element_is_a_number(vectorization, shape):
    timestep = stepped("Toy/Counter-v0", np.zeros(2, np.int32), shape=shape, **vectorization)
    assert timestep.reward.tolist() == [1, 1]


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_a_reward_of_more_elements_is_refused(vectorization):
    with pytest.raises(ValueError, match=r"a reward of float64\[2\]; one number is needed") as error:
        stepped("Toy/Counter-v0", np.zeros(2, np.int32), shape=(2,), **vectorization)
    assert "in environment 0 of gymnasium:Toy/Counter-v0" in error.value.__notes__


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_reset_options_are_kept_for_every_reset(vectorization):
    factory = gymnasium.make("Toy/Counter-v0", reset_options={"level": 3}, **vectorization)
    rows = played(factory, 7)
    assert rows.observation[:, 0, 0].tolist() == [3, 4, 5, 6, 3, 4, 5, 6]


# Names and parameters.


def test_names_are_those_of_the_installed_version(monkeypatch):
    # Other packages register theirs when they are imported, as ale_py does.
    code = "import gymnasium; print(*gymnasium.registry)"
    own = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert set(gymnasium._NAMES) == own
    assert len(gymnasium._NAMES) == len(own)
    assert "Toy/Counter-v0" in gymnasium.names()
    monkeypatch.delitem(sys.modules, "gymnasium")
    assert gymnasium.names() == gymnasium._NAMES


def test_listing_the_names_imports_no_gymnasium():
    code = (
        "import sys, podracer; from podracer.envs import gymnasium; assert 'CartPole-v1' in gymnasium.names(); "
        "assert 'gymnasium' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("CartPol-v1", {}, "there is no gymnasium environment 'CartPol-v1'; nearest: CartPole-v"),
        ("CartPole-v9", {}, "nearest: CartPole-v"),
        ("no_such_module:CartPole-v1", {}, "there is no gymnasium environment 'no_such_module:CartPole-v1'"),
        ("CartPole-v1", {"vectorization": "asynch"}, "no vectorization of gymnasium 'asynch'; nearest: async"),
        ("CartPole-v1", {"sutton": True}, "gymnasium:CartPole-v1 named 'sutton'; nearest: sutton_barto_reward"),
        ("CartPole-v1", {"max_episode_step": 4}, "nearest: max_episode_steps"),
        ("CartPole-v1", {"num_processes": 2}, "num_processes is 2; it must be an integer of at least 1, with"),
        ("CartPole-v1", {"vectorization": "async", "num_processes": 0}, "num_processes is 0"),
        ("CartPole-v1", {"vectorization": "async", "num_processes": 1.5}, "num_processes is 1.5"),
        ("CartPole-v1", {"reset_options": 3}, "reset_options is 3; it must be a dict"),
    ],
)
def test_unknown_names_and_parameters_name_the_nearest(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        gymnasium.make(name, **parameters)


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_what_only_the_environment_can_tell_is_a_value_error_too(vectorization):
    with pytest.raises(ValueError, match="gymnasium:CartPole-v1 cannot be made as asked"):
        gymnasium.make("CartPole-v1", max_episode_steps=0, **vectorization)(EnvironmentSlice(2))


def test_a_package_that_an_environment_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(EnvironmentUnavailableError, match=r"LunarLander-v3 needs a package.*gymnasium\[box2d\]"):
        gymnasium.make("LunarLander-v3")(EnvironmentSlice(1))


def test_what_mujoco_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio", None)
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(EnvironmentUnavailableError, match=r'imageio.*pip install "gymnasium\[mujoco\]"'):
        gymnasium.make("HalfCheetah-v5")


def test_an_environment_for_vectors_only_is_refused(monkeypatch):
    monkeypatch.setattr(gymnasium_package.envs.registration, "registry", dict(gymnasium_package.registry))
    gymnasium_package.register("Toy/Vectors-v0", vector_entry_point="gymnasium_toys:Counter")
    with pytest.raises(ValueError, match="exists as a vector environment only"):
        gymnasium.make("Toy/Vectors-v0")


# Pictures.


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_pictures_are_the_environments_own_where_it_has_any(vectorization):
    factory = gymnasium.make("Toy/Counter-v0", render_mode="rgb_array", **vectorization)
    environment = factory(EnvironmentSlice(2))
    environment.reset()
    environment.step(np.zeros(2, np.int32))
    assert environment.render().tolist() == np.full((4, 6, 3), 1).tolist()
    environment.close()


def test_pictures_of_vector_environments():
    for mode in MODES:
        vector = counters(mode, render_mode="rgb_array")
        with warned(mode):
            environment = gymnasium.from_vector_env(vector)(EnvironmentSlice(2))
        environment.reset()
        assert environment.render().shape == (4, 6, 3)
        environment.close()


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_without_pictures_the_observation_is_drawn(vectorization):
    environment = gymnasium.make("Toy/Counter-v0", **vectorization)(EnvironmentSlice(2))
    environment.reset()
    frame = environment.render()
    assert (frame.dtype, frame.ndim, frame.shape[2]) == (np.uint8, 3, 3)
    assert frame.shape[0] > 100
    environment.close()


def test_a_picture_of_another_kind_is_refused(monkeypatch):
    monkeypatch.setattr(gymnasium_toys.Counter, "render", lambda self: np.zeros((4, 4), np.float32))
    environment = gymnasium.make("Toy/Counter-v0", render_mode="rgb_array")(EnvironmentSlice(2))
    environment.reset()
    with pytest.raises(ValueError, match=r"renders float32\[4, 4\]; a picture is uint8 \[H, W, 3\]"):
        environment.render()


def test_slices_are_seeded_as_one_run():
    factory = gymnasium.make("CartPole-v1")
    whole = played(factory, 1, EnvironmentSlice(4, seed=3))
    parts = [played(factory, 1, EnvironmentSlice(2, first_index, seed=3)) for first_index in (0, 2)]
    joined = np.concatenate([part.observation[0] for part in parts])
    assert joined.tolist() == whole.observation[0].tolist()
    assert len(np.unique(joined, axis=0)) == 4
    other = played(factory, 1, dataclasses.replace(EnvironmentSlice(4, seed=3), start=10))
    assert not (other.observation[0] == whole.observation[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Hopper-v5"])
def test_mujoco(name):
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio")  # Gymnasium imports it with every MuJoCo environment.
    rows = played(gymnasium.make(name, max_episode_steps=20), 50)
    assert (rows.step_type == StepType.LAST).any()
    assert np.isfinite(rows.observation).all()


def test_an_environment_is_closed_once(monkeypatch):
    closed = []
    monkeypatch.setattr(gymnasium_toys.Counter, "close", lambda self: closed.append(self))
    environment = gymnasium.make("Toy/Counter-v0")(EnvironmentSlice(2))
    environment.close()
    environment.close()
    assert len(closed) == len(set(closed)) == 2


def test_environments_that_no_agent_can_play_are_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(gymnasium_toys.Sees, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="the observation Text"):
        gymnasium.make("Toy/Sees-v0", kind="text")(EnvironmentSlice(2))
    assert len(closed) == 2
