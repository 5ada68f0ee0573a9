"""Vector environments of Gymnasium in all three ways of resetting."""

import threading
import time

import gymnasium as gymnasium_package
import gymnasium_toys
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium_play import MODES, counters, played, warned

from podracer.envs import EnvironmentSlice, HostFactory, gymnasium
from podracer.envs.child_processes import child_processes
from podracer.envs.host_testing import HostEnvironmentConformance
from podracer.envs.recording import difference
from podracer.types import StepType

gymnasium_toys.register()


class VectorConformance(HostEnvironmentConformance):
    mode: AutoresetMode
    num_steps = 40

    def make(self, where):
        with warned(self.mode, where.num_envs):
            return gymnasium.from_vector_env(counters(self.mode, random_start=True, length=(3, 5)))(where)


class TestNextStep(VectorConformance):
    mode = AutoresetMode.NEXT_STEP


class TestSameStep(VectorConformance):
    mode = AutoresetMode.SAME_STEP


class TestDisabled(VectorConformance):
    mode = AutoresetMode.DISABLED


class Plain(VectorEnv):
    """A vector environment that is not Gymnasium's: it takes one seed and gives final observations as a batch."""

    def __init__(self, num_envs, mode):
        self.num_envs = num_envs
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.single_observation_space = gymnasium_package.spaces.Dict({"t": gymnasium_package.spaces.Discrete(9)})
        self.single_action_space = gymnasium_package.spaces.Discrete(2)
        self.mode = None if mode in (None, "Sometimes") else AutoresetMode(mode)

    def reset(self, *, seed=None, options=None):
        assert seed is None or isinstance(seed, int)
        self.t = np.zeros(self.num_envs, np.int64)
        return {"t": self.t}, {}

    def step(self, actions):
        assert actions.dtype == np.int64
        self.t += 1
        if self.mode == AutoresetMode.NEXT_STEP:
            self.t[self.t > 2] = 0
        over = self.t == 2
        infos = {"final_obs": {"t": self.t.copy()}} if over.any() else {}
        if self.mode == AutoresetMode.SAME_STEP:
            self.t[over] = 0
        # A reward on the step that resets too, which is none of the new episode.
        return {"t": self.t}, np.ones((self.num_envs, 1)), over, np.zeros_like(over), infos


@pytest.mark.parametrize("mode", [*MODES, "NextStep", "SameStep", "Disabled"])
def test_vector_environments_of_others(mode):
    with warned(mode):
        rows = played(gymnasium.from_vector_env(lambda where: Plain(where.num_envs, mode)), 6)
    assert rows.step_type[:, 1].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert rows.observation["t"][:, 1].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert rows.discount[:, 1].tolist() == [1, 1, 0, 1, 1, 0, 1]
    assert rows.reward[:, 1].tolist() == [0, 1, 1, 0, 1, 1, 0]


def test_gymnasiums_own_vector_environment_of_another_class():
    make = gymnasium.from_vector_env(
        lambda where: gymnasium_package.make_vec(
            "CartPole-v1", num_envs=where.num_envs, vectorization_mode="vector_entry_point"
        )
    )
    rows = played(make, 60)
    assert (rows.step_type == StepType.LAST).sum() > 2
    # The environment of Gymnasium 1.3 gives its first rows after a reset the reward 0, as here.
    assert (rows.reward[rows.step_type == StepType.FIRST] == 0).all()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (None, "Plain does not say how it resets; .* one of NEXT_STEP, SAME_STEP, DISABLED"),
        ("Sometimes", "Plain says that it resets by 'Sometimes', which is no such mode"),
    ],
)
def test_a_mode_that_is_not_declared_is_refused(mode, message):
    with pytest.raises(ValueError, match=message):
        gymnasium.from_vector_env(lambda where: Plain(where.num_envs, mode))(EnvironmentSlice(2))


def test_the_mode_is_the_environments_own_and_not_that_of_the_next_one_made():
    """Gymnasium's classes share the metadata of the environment's class, and write their mode into it."""

    def make_vector_env(where):
        vector = counters(AutoresetMode.SAME_STEP, length=2)(where)
        counters(AutoresetMode.NEXT_STEP)(where).close()
        assert vector.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        return vector

    with warned(AutoresetMode.SAME_STEP):
        rows = played(gymnasium.from_vector_env(make_vector_env), 6)
    assert rows.observation[:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("make_vector_env", "message"),
    [
        (lambda where: None, "make_vector_env returned None; a gymnasium.vector.VectorEnv is needed"),
        (lambda where: gymnasium_toys.Counter(), "make_vector_env returned a Counter"),
        (lambda where: Plain(3, "NextStep"), "make_vector_env made 3 environments; 2 were asked for"),
    ],
)
def test_what_is_no_vector_environment_of_the_size_is_refused(make_vector_env, message):
    with pytest.raises(ValueError, match=message):
        gymnasium.from_vector_env(make_vector_env)(EnvironmentSlice(2))


def test_a_size_that_does_not_follow_the_slice_is_refused():
    factory = gymnasium.from_vector_env(lambda where: Plain(2, "SameStep"))
    with (
        warned("SameStep"),
        pytest.raises(ValueError, match="make_vector_env made 2 environments; 1 were asked for"),
    ):
        factory(EnvironmentSlice(2))


def test_that_environments_are_stepped_one_at_a_time_is_said_once_per_factory():
    message = "Plain resets by SAME_STEP.* one at a time, which is slower; by NEXT_STEP"
    for _ in range(2):
        factory = gymnasium.from_vector_env(lambda where: Plain(where.num_envs, "SameStep"))
        factory(EnvironmentSlice(1)).close()
        with pytest.warns(RuntimeWarning, match=message):
            factory(EnvironmentSlice(2)).close()
        factory(EnvironmentSlice(2)).close()  # Warnings are errors here.


# Vector environments that exist already.


@pytest.mark.parametrize(("mode", "num_envs"), [(AutoresetMode.NEXT_STEP, 3), *((mode, 1) for mode in MODES)])
def test_a_vector_environment_itself_gives_the_rows_of_a_function_that_makes_it(mode, num_envs):
    make = counters(mode, random_start=True, length=(3, 5, 4))
    where = EnvironmentSlice(num_envs, first_index=2, seed=4)
    vector = make(where)
    factory = HostFactory("toy", gymnasium.from_vector_env(vector))
    assert factory.spec.observation.shape == (1,)  # Which makes one environment and closes it.
    assert not vector.closed
    rows = played(factory, 30, where)
    assert (rows.step_type == StepType.LAST).sum() > 4
    assert difference(rows, played(gymnasium.from_vector_env(make), 30, where), 0) is None
    assert vector.closed


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_vector_environment_that_cannot_be_stepped_as_it_is_is_refused_at_once(mode):
    message = (
        f"Plain resets by {mode.name} and has 2 environments.* pass a function .*, or one that resets by NEXT_STEP"
    )
    with pytest.raises(ValueError, match=message):
        gymnasium.from_vector_env(Plain(2, mode))


def test_a_vector_environment_that_does_not_declare_its_mode_is_refused_at_once():
    with pytest.raises(ValueError, match="Plain does not say how it resets"):
        gymnasium.from_vector_env(Plain(1, None))


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_vector_environment_of_another_size_is_refused(num_envs):
    factory = gymnasium.from_vector_env(Plain(3, "NextStep"))
    message = f"has 3 environments; {num_envs} were asked for: set num_envs .* to 3 and threads_per_actor_device"
    with pytest.raises(ValueError, match=message):
        factory(EnvironmentSlice(num_envs)).reset()
    played(factory, 6, EnvironmentSlice(3))  # It has been left as it is.


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_vector_environment_serves_once(num_envs):
    vector = Plain(num_envs, "NextStep")
    where, message = EnvironmentSlice(num_envs), "Plain has been used, and is closed.* pass a function"
    factory = gymnasium.from_vector_env(vector)
    first, second = factory(where), factory(where)
    first.reset()
    with pytest.raises(ValueError, match=message):
        second.reset()
    second.close()
    assert not vector.closed
    first.step(np.zeros(num_envs, np.int32))
    first.close()
    assert vector.closed
    for again in (factory, gymnasium.from_vector_env(vector)):
        with pytest.raises(ValueError, match=message):
            again(where)
    played(gymnasium.from_vector_env(Plain(num_envs, "NextStep")), 6, where)


@pytest.mark.parametrize("what", [None, "CartPole-v1", gymnasium_toys.Counter()])
def test_what_is_neither_a_function_nor_a_vector_environment_is_refused_at_once(what):
    with pytest.raises(ValueError, match=r"make_vector_env is .*; it must be a function .*, or a VectorEnv"):
        gymnasium.from_vector_env(what)


@pytest.mark.parametrize(
    ("mode", "made"),
    [
        (AutoresetMode.NEXT_STEP, [(3, 4)]),
        # The first tells the mode.
        (AutoresetMode.SAME_STEP, [(3, 4), (1, 4), (1, 5), (1, 6)]),
        (AutoresetMode.DISABLED, [(3, 4), (1, 4), (1, 5), (1, 6)]),
    ],
)
def test_each_environment_is_made_for_its_own_slice(mode, made):
    slices, open_ones = [], set()

    class Closes(Plain):
        def close(self):
            open_ones.discard(self)

    def make_vector_env(where):
        slices.append((where.num_envs, where.first_index))
        vector = Closes(where.num_envs, mode)
        open_ones.add(vector)
        return vector

    with warned(mode):
        environment = gymnasium.from_vector_env(make_vector_env)(EnvironmentSlice(3, first_index=4))
    assert slices == made
    assert len(open_ones) == (1 if mode == AutoresetMode.NEXT_STEP else 3)
    environment.close()
    assert not open_ones


def test_an_episode_that_ends_on_its_reset_is_refused():
    class Late(Plain):
        def step(self, actions):
            observation, reward, over, truncated, infos = super().step(actions)
            return observation, reward, over | (self.t == 0), truncated, infos

    environment = gymnasium.from_vector_env(lambda where: Late(where.num_envs, AutoresetMode.NEXT_STEP))(
        EnvironmentSlice(2)
    )
    environment.reset()
    for _ in range(2):
        environment.step(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"ended episodes on the step that resets them, in environments \[0, 1\]"):
        environment.step(np.zeros(2, np.int32))


def test_a_missing_final_observation_is_refused():
    class Hides(Plain):
        def step(self, actions):
            *step, _ = super().step(actions)
            return *step, {}

    environment = gymnasium.from_vector_env(lambda where: Hides(where.num_envs, "SameStep"))(EnvironmentSlice(1))
    environment.reset()
    environment.step(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=r'infos\["final_obs"\] is missing'):
        environment.step(np.zeros(1, np.int32))


def async_counters(where, mode=AutoresetMode.NEXT_STEP, **parameters):
    # The lambda of a test is pickled by cloudpickle; the toy by its module's name.
    kind = gymnasium_toys.Misbehaves if parameters else gymnasium_toys.Counter
    return AsyncVectorEnv([lambda: kind(**parameters)] * where.num_envs, context="forkserver", autoreset_mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_vector_environments_in_processes(mode):
    before = child_processes()
    with warned(mode):
        rows = played(gymnasium.from_vector_env(lambda where: async_counters(where, mode)), 7)
    assert rows.observation[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert child_processes() <= before


@pytest.mark.slow
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_close_ends_the_processes_of_a_vector_environment_that_hangs(mode):
    before = child_processes()
    factory = gymnasium.from_vector_env(lambda where: async_counters(where, mode, how="hangs", at=1))
    with warned(mode):
        environment = factory(EnvironmentSlice(2))
    environment.reset()
    raised = []

    def step():
        try:
            environment.step(np.zeros(2, np.int32))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    time.sleep(0.3)
    environment.close()
    thread.join(5)
    assert "was closed during a step" in raised[0]
    assert child_processes() <= before


@pytest.mark.slow
def test_a_vector_environment_of_which_a_process_dies_is_closed():
    before = child_processes()
    factory = gymnasium.from_vector_env(lambda where: async_counters(where, how="dies", at=1))
    environment = factory(EnvironmentSlice(2))
    environment.reset()
    with pytest.raises((EOFError, ConnectionError)):
        environment.step(np.zeros(2, np.int32))
    environment.close()
    assert child_processes() <= before
