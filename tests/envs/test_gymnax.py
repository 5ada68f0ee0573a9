"""The adapter against gymnax itself, its time limits, and its settings of precision."""

import os
import subprocess
import sys

import gymnax as gymnax_package
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.envs import Autoreset, gymnax
from podracer.types import BoundedSpec, DiscreteSpec, StepType


def rollout(stream, actions, keys, first_keys):
    """The timesteps `[T + 1, B]`, in NumPy."""
    step = jax.jit(stream.step)
    rows = [jax.jit(stream.reset)(first_keys)]
    for action, key in zip(actions, keys, strict=True):
        rows.append(step(rows[-1][0], action, key))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(timestep for _, timestep in rows))


def random_rollout(name, num_steps, batch_size=2, **parameters):
    stream = Autoreset(envs.make(f"gymnax:{name}", **parameters))
    actions = [envs.sample_action(stream.spec, jax.random.key(t), batch_size) for t in range(num_steps)]
    keys = jax.random.split(jax.random.key(7), (num_steps, batch_size))
    return rollout(stream, actions, list(keys), jax.random.split(jax.random.key(8), batch_size))


# Short limits, so that the streams meet terminations, truncations and many resets.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("CartPole-v1", {"max_steps_in_episode": 15}),
        ("Breakout-MinAtar", {"max_steps_in_episode": 12}),
        pytest.param("Pendulum-v1", {"max_steps_in_episode": 9}, marks=pytest.mark.slow),
        pytest.param("FourRooms-misc", {"max_steps_in_episode": 20}, marks=pytest.mark.slow),
        pytest.param("FrozenLake-misc", {"max_steps_in_episode": 7}, marks=pytest.mark.slow),
    ],
)
def test_every_row_is_what_gymnax_itself_gives(name, parameters):
    stream = Autoreset(envs.make(f"gymnax:{name}", **parameters))
    with jax.debug_key_reuse(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        environment, params = gymnax_package.make(name)
        params = params.replace(**parameters)
        step = jax.jit(lambda key, state, action: environment.step_env(key, state, action, params))
        reset = jax.jit(lambda key: environment.reset_env(key, params))
        truncates = jax.jit(lambda state: environment.is_truncated(state, params))
        ours = jax.jit(stream.step)
        state, timestep = jax.jit(stream.reset)(jax.random.split(jax.random.key(0), 1))
        observation, raw = reset(jax.random.split(jax.random.key(0), 1)[0])
        reward, terminated, truncated, seen = 0.0, False, False, {"terminated": 0, "truncated": 0, "reset": 0}
        for t in range(300):
            row = jax.tree.map(lambda x: np.asarray(x[0]), timestep)
            shown = np.eye(16)[int(observation)] if name == "FrozenLake-misc" else np.asarray(observation)
            np.testing.assert_allclose(row.observation, shown, rtol=1e-4, atol=1e-5, err_msg=f"t = {t}")
            np.testing.assert_allclose(row.reward, float(reward), rtol=1e-5, atol=1e-6, err_msg=f"t = {t}")
            assert bool(row.step_type == StepType.LAST) == (terminated or truncated)
            assert row.discount == (0 if terminated else 1)
            action = envs.sample_action(stream.spec, jax.random.key(1000 + t), 1)
            keys = jax.random.split(jax.random.key(2000 + t), 1)
            step_key, reset_key = jax.random.split(keys[0])
            if terminated or truncated:
                observation, raw = reset(reset_key)
                reward, terminated, truncated = 0.0, False, False
                seen["reset"] += 1
            else:
                observation, raw, reward, ended, _ = step(step_key, raw, action[0])
                terminated, truncated = bool(ended), bool(truncates(raw))
                seen["terminated"] += terminated
                seen["truncated"] += truncated
            state, timestep = ours(state, action, keys)
    assert seen["reset"] > 10
    assert seen["truncated"] > 0 or name == "Breakout-MinAtar"
    assert seen["terminated"] > 0 or name in ("Pendulum-v1", "FourRooms-misc")


# After C06 and C09: at the limit the final observation is there and the episode did not terminate.
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0"])
def test_a_time_limit_truncates_and_shows_the_final_observation(name):
    environment = envs.make(f"gymnax:{name}", max_steps_in_episode=5)
    stream = Autoreset(environment)
    step = jax.jit(stream.step)
    (state, timestep), before, rows = jax.jit(stream.reset)(jax.random.split(jax.random.key(8), 1)), [], []
    for t in range(18):
        action = envs.sample_action(stream.spec, jax.random.key(t), 1)
        before.append((state[0], action, jax.random.split(jax.random.key(100 + t), 1)))
        rows.append(timestep)
        state, timestep = step(state, *before[-1][1:])
    assert [int(row.step_type[0]) for row in rows] == [0, 1, 1, 1, 1, 2] * 3
    assert all(row.discount == 1 for row in rows)
    # What the stream's fifth step shows is what one raw step from the state before it gives, and not the next start.
    with jax.debug_key_reuse(False):
        inner, action, key = jax.tree.map(lambda x: x[0], before[4])
        _, raw = jax.jit(environment.step)(inner, action, jax.random.split(key)[0])
    np.testing.assert_allclose(rows[5].observation[0], raw.observation, rtol=1e-5, atol=1e-6)
    assert (raw.terminated, raw.truncated) == (False, True)
    assert (rows[5].observation != rows[6].observation).any()


def test_termination_at_the_time_limit_is_a_termination():
    """DeepSea's last row is reached exactly at its limit (C12)."""
    rows = random_rollout("DeepSea-bsuite", 9, size=8)
    assert rows.step_type[8].tolist() == [StepType.LAST] * 2
    assert rows.discount[8].tolist() == [0, 0]


def test_cartpole_that_falls_terminates():
    rows = random_rollout("CartPole-v1", 120, batch_size=4)
    last = rows.step_type == StepType.LAST
    assert last.sum() > 4
    assert (rows.discount[last] == 0).all()
    assert (np.abs(rows.observation[last][:, 2]) > 0.2094).all()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "bounds", "action"),
    [
        ("CartPole-v1", (4,), "float32", (None, None), DiscreteSpec(2)),
        ("Pendulum-v1", (3,), "float32", (-8, 8), BoundedSpec((-2.0,), (2.0,))),
        ("Breakout-MinAtar", (10, 10, 4), "float32", (0, 1), DiscreteSpec(3)),
        ("FourRooms-misc", (4,), "float32", (1, 11), DiscreteSpec(4)),
        ("Catch-bsuite", (10, 5), "float32", (0, 1), DiscreteSpec(3)),
        ("FrozenLake-misc", (16,), "float32", (0, 1), DiscreteSpec(4)),
        ("GaussianBandit-misc", (4,), "float32", (None, None), DiscreteSpec(2)),
        ("Swimmer-misc", (16,), "float32", (None, None), BoundedSpec((-1.0, -1.0), (1.0, 1.0))),
    ],
)
def test_specs(name, shape, dtype, bounds, action):
    spec = envs.make(f"gymnax:{name}").spec
    assert (spec.observation.shape, spec.observation.dtype) == (shape, dtype)
    assert (spec.observation.minimum, spec.observation.maximum) == bounds
    assert spec.action == action


def test_a_limit_given_as_an_integer_where_gymnax_has_a_float():
    rows = random_rollout("BernoulliBandit-misc", 4, max_steps_in_episode=3)
    assert rows.step_type[:, 0].tolist() == [0, 1, 1, 2, 0]


class _Space:
    """Stands in for gymnax's spaces."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


def test_specs_of_observations_that_are_not_one_array():
    box = _Space(low=-1, high=jnp.asarray([1.0, 2.0]), shape=(2,), dtype=jnp.float32)
    pixels = jax.ShapeDtypeStruct((4, 4), jnp.uint8)
    emitted = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": pixels}
    space = _Space(spaces={"a": box, "b": _Space(low=0, high=255, shape=(4, 4), dtype=jnp.uint8)})
    spec = gymnax._observation_spec("Mine", space, emitted)
    assert (spec["a"].minimum, spec["a"].maximum, spec["b"].dtype, spec["b"].maximum) == (-1, 2, "uint8", 255)
    pair = gymnax._observation_spec("Mine", _Space(spaces=(box, box)), (emitted["a"], pixels))
    assert [leaf.shape for leaf in pair] == [(2,), (4, 4)]


# C81. In 64-bit mode gymnax itself cannot trace GaussianBandit, DiscountingChain, MetaMaze and Freeway.
X64 = """
import sys
import jax
from podracer import envs
from podracer.types import ArraySpec

assert jax.config.jax_enable_x64
total = 0.0
for name in sys.argv[1:]:
    stream = envs.Autoreset(envs.make(name))
    state, timestep = jax.jit(stream.reset)(jax.random.split(jax.random.key(0), 2))
    step = jax.jit(stream.step)
    for t in range(4):
        action = envs.sample_action(stream.spec, jax.random.key(t), 2)
        state, following = step(state, action, jax.random.split(jax.random.key(t + 10), 2))
        types = [(leaf.dtype, leaf.shape, leaf.weak_type) for leaf in jax.tree.leaves(timestep)]
        assert types == [(leaf.dtype, leaf.shape, leaf.weak_type) for leaf in jax.tree.leaves(following)]
        timestep = following
    assert step._cache_size() == 1
    specs = jax.tree.leaves(stream.spec.observation)
    for spec, leaf in zip(specs, jax.tree.leaves(timestep.observation), strict=True):
        assert str(leaf.dtype) == spec.dtype, (name, leaf.dtype, spec)
        assert spec.dtype in ("float32", "bool")
    assert timestep.reward.dtype == timestep.discount.dtype == "float32"
    total += float(sum(leaf.astype("float32").sum() for leaf in jax.tree.leaves(timestep.observation)))
print(total)
"""


def _run_x64(names, x64):
    environment = {**os.environ, "JAX_ENABLE_X64": "1" if x64 else "0"}
    code = X64 if x64 else X64.replace("assert jax.config.jax_enable_x64", "")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *names], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_64_bit_mode():
    _run_x64(["gymnax:CartPole-v1", "gymnax:GaussianBandit-misc", "podracer:ProbeMasked"], True)


@pytest.mark.slow
def test_64_bit_mode_changes_nothing():
    names = [entry.id for entry in envs.list_environments() if "MNIST" not in entry.id]
    assert _run_x64(names, True) == pytest.approx(_run_x64(names, False), abs=1e-4)


def test_strict_settings_of_the_caller_are_kept():
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    environment = envs.make("gymnax:CartPole-v1")
    state, _ = environment.reset(jax.random.key(0))
    environment.step(state, jnp.int32(0), jax.random.key(1))
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x: environment.step(state, jnp.int32(0), jax.random.key(1)) if x else None)(True)
    assert jax.config.jax_numpy_dtype_promotion == "strict"
