"""The stream that architectures consume, on environments whose every row is known, and on awkward ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.envs import Autoreset, Countdown, Step
from podracer.types import (
    ArraySpec,
    DiscreteSpec,
    EnvironmentSpec,
    StepType,
    TimeStep,
    Trajectory,
    valid_mask,
)

F, M, L = StepType.FIRST, StepType.MID, StepType.LAST


def rollout(environment, num_steps, batch_size=1, seed=0):
    """The `[num_steps + 1, batch_size]` rows of a stream under random actions, in NumPy."""
    stream = Autoreset(environment)
    state, timestep = jax.jit(stream.reset)(jax.random.split(jax.random.key(seed), batch_size))
    step, rows = jax.jit(stream.step), [timestep]
    for t in range(num_steps):
        key = jax.random.fold_in(jax.random.key(seed + 1), t)
        action = envs.sample_action(stream.spec, jax.random.fold_in(key, 0), batch_size)
        state, timestep = step(state, action, jax.random.split(jax.random.fold_in(key, 1), batch_size))
        rows.append(timestep)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


# After C06, C09, C12: of the same three steps only the discount on LAST tells how they ended.
@pytest.mark.parametrize(("ends", "discount"), [("termination", 0), ("truncation", 1), ("both", 0)])
def test_every_row_of_a_known_stream(ends, discount):
    rows = rollout(Countdown(3, ends), 8)
    assert rows.step_type[:, 0].tolist() == [F, M, M, L, F, M, M, L, F]
    assert rows.observation[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert rows.reward[:, 0].tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 0]
    assert rows.discount[:, 0].tolist() == [1, 1, 1, discount, 1, 1, 1, discount, 1]


def test_dtypes_of_the_rows():
    rows = rollout(Countdown(3), 2)
    assert (rows.step_type.dtype, rows.reward.dtype, rows.discount.dtype) == (np.int8, np.float32, np.float32)


def test_an_episode_of_one_step():
    rows = rollout(Countdown(1), 4)
    assert rows.step_type[:, 0].tolist() == [F, L, F, L, F]
    assert rows.reward[:, 0].tolist() == [0, 1, 0, 1, 0]


# After C93: the masked rows, and only they, are no environment steps.
@pytest.mark.parametrize(("length", "steps", "returns"), [(1000, 1001, [1000.0]), (3, 12, [3.0, 3.0, 3.0])])
def test_counted_steps_and_returns_are_exact(length, steps, returns):
    def unroll(key):
        stream = Autoreset(Countdown(length))

        def body(carry, key):
            following = stream.step(carry[0], jnp.zeros(1, jnp.int32), key[None])
            return following, following[1]

        first_key, key = jax.random.split(key)
        first = stream.reset(first_key[None])
        rows = jax.lax.scan(body, first, jax.random.split(key, steps))[1]
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first[1], rows)

    timestep = jax.jit(unroll)(jax.random.key(0))
    assert int(valid_mask(Trajectory(timestep, (), (), ())).sum()) == length * len(returns)
    seen, total = [], 0.0
    for reward, step_type in zip(np.asarray(timestep.reward)[:, 0], np.asarray(timestep.step_type)[:, 0], strict=True):
        total = 0.0 if step_type == F else total + reward
        seen += [total] if step_type == L else []
    assert seen == returns


@dataclasses.dataclass(frozen=True)
class Awkward:
    """Python numbers, shapes of one and flags of every kind: C18, C82."""

    reward: object = 1.0
    flag: object = False
    first_state: object = 0
    next_state: object = None

    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((1,)), DiscreteSpec(2))

    def reset(self, key):
        return {"time": self.first_state}, jnp.zeros(1, jnp.float32)

    def step(self, state, action, key):
        following = state["time"] + 1 if self.next_state is None else self.next_state
        return {"time": following}, Step(jnp.ones(1, jnp.float32), self.reward, self.flag, jnp.bool_(False))


@pytest.mark.parametrize("reward", [1, 1.0, np.float64(1), np.ones(1), np.ones((1, 1), np.float32), np.int32(1), True])
@pytest.mark.parametrize("flag", [False, np.bool_(False), np.zeros(1, bool), np.int32(0)])
def test_rewards_and_flags_of_any_scalar_kind_become_scalars(reward, flag):
    environment = Awkward(_Constant(reward), _Constant(flag))
    stream = Autoreset(_Unwrapped(environment))
    state, _ = stream.reset(jax.random.split(jax.random.key(0), 3))
    _, timestep = stream.step(state, jnp.zeros(3, jnp.int32), jax.random.split(jax.random.key(1), 3))
    assert timestep.reward.shape == timestep.discount.shape == (3,)
    assert (timestep.reward.dtype, timestep.discount.dtype) == (jnp.float32, jnp.float32)
    assert timestep.reward.tolist() == [1, 1, 1]
    assert timestep.step_type.tolist() == [M, M, M]


@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """An array in a frozen dataclass that must stay hashable."""

    value: object


@dataclasses.dataclass(frozen=True)
class _Unwrapped:
    environment: Awkward

    @property
    def spec(self):
        return self.environment.spec

    def reset(self, key):
        return self.environment.reset(key)

    def step(self, state, action, key):
        state, step = self.environment.step(state, action, key)
        return state, dataclasses.replace(step, reward=step.reward.value, terminated=step.terminated.value)


@pytest.mark.parametrize(
    ("first", "following", "dtype"),
    [
        (0, None, "int32"),
        (0.0, None, "float32"),
        (0, np.float32(1), "float32"),
        (0.5, np.int32(1), "float32"),  # An integer would lose the half.
        (2, np.bool_(True), "int32"),
        (0, np.uint8(1), "uint8"),
        (0.5, np.float16(1), "float16"),
        (np.int32(0), np.float32(1), "float32"),
        (np.uint8(0), np.int32(1), "int32"),
        (False, np.bool_(True), "bool"),
    ],
)
def test_the_state_keeps_one_strong_type(first, following, dtype):
    stream = Autoreset(Awkward(first_state=first, next_state=following))

    def body(carry, key):
        return stream.step(carry[0], jnp.zeros(1, jnp.int32), key[None]), None

    start = stream.reset(jax.random.split(jax.random.key(0), 1))
    assert start[0][0]["time"].tolist() == [first]
    ((inner, _), timestep), _ = jax.lax.scan(body, start, jax.random.split(jax.random.key(1), 3))
    assert inner["time"].dtype == dtype
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((inner, timestep)))


def test_a_compiled_step_is_compiled_once():
    stream = Autoreset(Awkward())
    step = jax.jit(stream.step)
    state, _ = stream.reset(jax.random.split(jax.random.key(0), 2))
    for t in range(4):
        state, _ = step(state, jnp.zeros(2, jnp.int32), jax.random.split(jax.random.key(t), 2))
    assert step._cache_size() == 1


@dataclasses.dataclass(frozen=True)
class KeepsAKey:
    """An environment that carries a random key in its state."""

    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((1,)), DiscreteSpec(2))

    def reset(self, key):
        return key, jnp.zeros(1, jnp.float32)

    def step(self, state, action, key):
        state, draw = jax.random.split(state)
        value = jax.random.uniform(draw, (1,), jnp.float32)
        return state, Step(value, value[0], value[0] > 0.8, jnp.bool_(False))


def test_a_state_may_hold_a_random_key():
    rows = rollout(KeepsAKey(), 12, batch_size=3)
    assert len(np.unique(rows.reward)) > 12
    assert (rows.step_type == L).any()


@dataclasses.dataclass(frozen=True)
class Faulty:
    fault: str

    @property
    def spec(self):
        return EnvironmentSpec({"a": ArraySpec((2,))}, DiscreteSpec(2))

    def reset(self, key):
        shape = 3 if self.fault == "observation shape" else 2
        name = "b" if self.fault == "observation name" else "a"
        state = {"x": jax.random.split(key) if self.fault == "state type" else jnp.zeros(2, jnp.float32)}
        return state, {name: jnp.zeros(shape, jnp.float32)}

    def step(self, state, action, key):
        if self.fault == "state shape":
            state = {"x": jnp.zeros(3, jnp.float32)}
        if self.fault == "state type":
            state = {"x": jnp.zeros(2, jnp.float32)}
        if self.fault == "state name":
            state = {"y": jnp.zeros(2, jnp.float32)}
        reward = jnp.zeros(2 if self.fault == "reward" else (), jnp.float32)
        step = Step({"a": jnp.zeros(2, jnp.float32)}, reward, jnp.bool_(False), jnp.bool_(False))
        return state, (step.observation, 0.0, False) if self.fault == "tuple" else step


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("observation shape", ("Faulty.reset", "['a']", "(3,)", "(2,)")),
        ("observation name", ("Faulty.reset", "'b'", "'a'")),
        ("state shape", ("state of Faulty", "['x']", "(2,) from reset", "(3,) from step")),
        ("state type", ("state of Faulty changes type", "['x']", "key<fry> from reset", "float32 from step")),
        ("state name", ("state of Faulty", "['x'], ['y']")),
        ("reward", ("Faulty.step", "reward of shape (2,)", "scalar")),
        ("tuple", ("Faulty.step must return (state, podracer.envs.Step)", "tuple")),
    ],
)
def test_faults_are_named_at_construction(fault, expected):
    with pytest.raises(ValueError, match="Faulty") as error:
        Autoreset(Faulty(fault))
    for part in expected:
        assert part in str(error.value)


def test_the_step_after_last_starts_a_fresh_episode():
    rows = rollout(envs.Catch(rows=4), 20, batch_size=8)
    starts = rows.observation[rows.step_type == F]
    assert len(np.unique(starts.reshape(len(starts), -1), axis=0)) == 5
    assert isinstance(rows, TimeStep)
