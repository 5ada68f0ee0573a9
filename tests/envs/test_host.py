"""The contract of host environments, and JAX environments as ones: the same streams as under Anakin."""

import dataclasses

import jax
import numpy as np
import pytest

import podracer
from podracer import envs
from podracer.envs import Autoreset, Catch, Countdown, EnvironmentSlice, HostFactory, JaxHostEnvironment, registry
from podracer.envs.host import check_actions, check_timestep
from podracer.envs.host_testing import HostEnvironmentConformance
from podracer.envs.recording import difference
from podracer.streams import Stream, fold_in_each, stream_key
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, StepType, TimeStep

# Slow, since every batch is compiled anew.


@pytest.mark.slow
class TestCatch(HostEnvironmentConformance):
    num_steps = 40

    def make(self, where):
        return envs.make_host("podracer:Catch", rows=5, columns=3)(where)


@pytest.mark.slow
class TestProbeWithMask(HostEnvironmentConformance):
    num_steps = 40

    def make(self, where):
        return envs.make_host("podracer:ProbeMasked")(where)


@pytest.mark.slow
class TestCartPole(HostEnvironmentConformance):
    # In 32 bits, a batch of one rounds otherwise.
    tolerance = 1e-4

    def make(self, where):
        return envs.make_host("gymnax:CartPole-v1", max_steps_in_episode=12)(where)


def anakin_keys(seed, stream, num_envs, *counters):
    """The keys of Anakin's environments, as `Anakin._environment_keys` makes them."""
    key = stream_key(jax.random.key(seed), stream, *counters)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(num_envs))


def host_rows(environment, actions):
    """What a host environment emits, copied."""
    rows = [jax.tree.map(np.copy, environment.reset())]
    for action in actions:
        rows.append(jax.tree.map(np.copy, environment.step(action)))
    environment.close()
    return rows


def random_actions(spec, num_steps, num_envs):
    high = spec.action.num_actions
    return np.random.default_rng(0).integers(0, high, (num_steps, num_envs)).astype(np.int32)


def test_rows_of_a_slice_are_those_of_autoreset_with_the_keys_of_anakin():
    num_envs, num_steps, seed, rollout_length = 3, 25, 11, 7
    stream = Autoreset(Catch(rows=5, columns=3))
    actions = random_actions(stream.spec, num_steps, num_envs)
    where = EnvironmentSlice(2, first_index=1, seed=seed, rollout_length=rollout_length)
    rows = host_rows(JaxHostEnvironment(Autoreset(Catch(rows=5, columns=3)), where), actions[:, 1:])
    step = jax.jit(stream.step)
    state, timestep = jax.jit(stream.reset)(anakin_keys(seed, Stream.RESET, num_envs))
    assert difference(rows[0], jax.tree.map(lambda x: x[1:], timestep), 0) is None
    ended = 0
    for i, action in enumerate(actions):
        update, t = divmod(i, rollout_length)
        keys = fold_in_each(anakin_keys(seed, Stream.ENVIRONMENT, num_envs), np.uint32(update))
        state, timestep = step(state, action, fold_in_each(keys, np.uint32(t)))
        found = difference(rows[i + 1], jax.tree.map(lambda x: x[1:], timestep), 0)
        assert found is None, f"row {i + 1}: {found}"
        ended += int(timestep.last().sum())
    assert ended > 6


def test_rows_are_those_that_anakin_trains_on():
    agent = podracer.agents.RandomConfig().make(Catch(rows=5, columns=3).spec, num_updates=3)
    config = podracer.AnakinConfig(num_envs=2, rollout_length=5)
    anakin = podracer.Anakin(agent, Catch(rows=5, columns=3), config, devices=jax.devices()[:1])
    state = anakin.init(3)
    stream = Autoreset(Catch(rows=5, columns=3))
    environment = JaxHostEnvironment(stream, EnvironmentSlice(2, seed=3, rollout_length=5))
    timestep = environment.reset()
    assert difference(timestep, jax.device_get(state.rollout.timestep), 0) is None
    for update in range(3):
        for t in range(5):
            # The agent's actions do not depend on what it sees.
            key = stream_key(jax.random.key(3), Stream.ACT, 0, update)
            output = agent.act((), timestep, (), jax.random.fold_in(key, t))
            timestep = environment.step(np.asarray(output.action))
        state, _ = anakin.run(state, num_updates=1)
        assert difference(timestep, jax.device_get(state.rollout.timestep), 0) is None


def test_environments_of_a_resumed_run_and_of_another_attempt_begin_anew():
    stream = Autoreset(Catch(columns=9))

    def start(**fields):
        return JaxHostEnvironment(stream, EnvironmentSlice(8, **fields)).reset().observation.tolist()

    starts = [start(), start(start=3), start(attempt=1)]
    assert all(starts[i] != starts[j] for i in range(3) for j in range(i))


def test_leaves_are_numpy_and_it_draws_itself():
    environment = envs.make_host("podracer:Catch")(EnvironmentSlice(2))
    timestep = environment.reset()
    check_timestep("Catch", environment.spec, 2, timestep)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(timestep))
    assert environment.render().shape[2] == 3


def test_without_the_cpu_among_jax_platforms_it_says_what_to_set(monkeypatch):
    def refuse(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    factory, before = envs.make_host("podracer:Catch"), jax.config.jax_platforms
    monkeypatch.setattr(jax, "local_devices", refuse)
    jax.config.update("jax_platforms", "cuda")
    try:
        with pytest.raises(envs.EnvironmentUnavailableError, match="JAX_PLATFORMS is 'cuda'; 'cuda,cpu' has it"):
            factory(EnvironmentSlice(2))
    finally:
        jax.config.update("jax_platforms", before)


def test_environments_that_cannot_be_hashed_compile_once_for_all_batches():
    class Unhashable(Catch):
        __hash__ = None
        traced = 0

        def reset(self, key):
            type(self).traced += 1
            return super().reset(key)

    stream = Autoreset(Unhashable(rows=5, columns=3))
    JaxHostEnvironment(stream, EnvironmentSlice(2)).reset()
    traced = Unhashable.traced
    JaxHostEnvironment(stream, EnvironmentSlice(2, first_index=2)).reset()
    assert Unhashable.traced == traced > 0


# Slices.


def test_seeds_are_consecutive_over_slices_and_within_what_packages_take():
    whole = EnvironmentSlice(8, seed=4).seeds()
    assert whole == EnvironmentSlice(3, seed=4).seeds() + EnvironmentSlice(5, first_index=3, seed=4).seeds()
    assert len(set(whole)) == 8
    for seed in range(50):
        assert all(0 <= s < 2**31 - 1 for s in EnvironmentSlice(4, seed=seed).seeds())


def test_seeds_wrap_where_packages_end(monkeypatch):
    class Last:
        def __init__(self, entropy):
            pass

        def generate_state(self, count, dtype):
            return np.asarray([2**31 - 3], dtype)

    monkeypatch.setattr(np.random, "SeedSequence", Last)
    assert EnvironmentSlice(4).seeds() == [2**31 - 3, 2**31 - 2, 0, 1]


@pytest.mark.parametrize("field", ["seed", "start", "attempt"])
def test_seeds_depend_on_everything(field):
    where = EnvironmentSlice(4)
    assert where.seeds() == EnvironmentSlice(4).seeds()
    assert not set(where.seeds()) & set(dataclasses.replace(where, **{field: 1}).seeds())


# Factories.


class Nothing:
    """A host environment that only exists."""

    def __init__(self, num_envs):
        self.num_envs, self.closed = num_envs, 0
        self.spec = EnvironmentSpec(ArraySpec(()), DiscreteSpec(2))

    def reset(self):
        raise AssertionError

    step = reset

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "the factory of toy returned None; a podracer.envs.HostEnvironment is needed"),
        (3, "the factory of toy returned a int without spec, num_envs, reset, step, close"),
        (Catch(), "the factory of toy returned a Catch without num_envs, close"),
    ],
)
def test_a_factory_that_makes_no_host_environment_is_refused(made, message):
    with pytest.raises(ValueError, match=message):
        HostFactory("toy", lambda where: made)(EnvironmentSlice(2))


def test_a_factory_that_makes_another_size_is_refused_and_what_it_made_closed():
    made = Nothing(3)
    with pytest.raises(ValueError, match="the factory of toy made 3 environments; 2 were asked for"):
        HostFactory("toy", lambda where: made)(EnvironmentSlice(2))
    assert made.closed == 1


def test_a_factory_knows_its_spec_and_closes_what_it_asked():
    made = []

    def make(where):
        made.append(Nothing(where.num_envs))
        return made[-1]

    factory = HostFactory("toy", make)
    assert factory.spec is factory.spec
    assert [(environment.num_envs, environment.closed) for environment in made] == [(1, 1)]


# Checks.


def timestep(**changes):
    numbers = {"step_type": np.zeros(2, np.int8), "reward": np.zeros(2, np.float32), "discount": np.ones(2, np.float32)}
    return TimeStep(**{**numbers, "observation": {"x": np.zeros((2, 3), np.uint8)}, **changes})


def test_timesteps_are_checked_by_leaf():
    spec = EnvironmentSpec({"x": ArraySpec((3,), "uint8")}, DiscreteSpec(2))
    check_timestep("toy", spec, 2, timestep())
    for changed, message in (
        (timestep(reward=np.zeros(2)), r"toy emits float64\[2\] at .reward; float32\[2\] is due"),
        (timestep(step_type=np.zeros(3, np.int8)), r"toy emits int8\[3\] at .step_type; int8\[2\] is due"),
        (timestep(observation={"x": np.zeros((2, 3), np.int32)}), r"int32\[2, 3\] at .observation\['x'\]; uint8"),
        (timestep(observation={"y": np.zeros((2, 3), np.uint8)}), "its spec says"),
        ((1, 2), "toy emits a tuple"),
    ):
        with pytest.raises(ValueError, match=message):
            check_timestep("toy", spec, 2, changed)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 2)])
def test_another_number_of_actions_is_refused(shape):
    check_actions(np.zeros((2, 5)), 2)
    with pytest.raises(ValueError, match="there are 2 environments"):
        check_actions(np.zeros(shape), 2)


# Names.


@pytest.fixture
def toy_id(monkeypatch):
    monkeypatch.setattr(registry, "_environments", dict(registry._environments))
    envs.register("toy:Host", lambda size=2: lambda where: Nothing(where.num_envs), is_host=True)
    return "toy:Host"


def test_a_jax_id_makes_host_environments():
    factory = envs.make_host("podracer:Countdown", length=2)
    assert factory.name == "podracer:Countdown"
    assert factory.spec == Countdown(2).spec
    environment = factory(EnvironmentSlice(3))
    rows = host_rows(environment, np.zeros((3, 3), np.int32))
    assert [row.step_type.tolist() for row in rows] == [[0] * 3, [1] * 3, [2] * 3, [0] * 3]
    assert rows[2].step_type.dtype == np.int8
    assert rows[2].step_type[0] == StepType.LAST


def test_a_host_id_makes_no_jax_environment(toy_id):
    assert envs.is_host(toy_id)
    assert not envs.is_host("podracer:Catch")
    with pytest.raises(ValueError, match=r"toy:Host is not written in JAX.*--architecture sebulba"):
        envs.make(toy_id)
    assert envs.make_host(toy_id)(EnvironmentSlice(2)).num_envs == 2
    entries = {entry.id: entry.is_host for entry in envs.list_environments()}
    assert entries[toy_id]
    assert not entries["podracer:Catch"]


def test_unknown_host_ids_and_parameters_name_the_nearest(toy_id):
    with pytest.raises(ValueError, match="nearest: toy:Host"):
        envs.make_host("toy:Hots")
    with pytest.raises(ValueError, match="parameter of toy:Host named 'siz'; nearest: size"):
        envs.make_host(toy_id, siz=3)
    with pytest.raises(ValueError, match="nearest: podracer:Catch"):
        envs.make_host("podracer:Cach")
