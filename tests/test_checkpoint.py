import dataclasses
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podracer import checkpoint
from podracer.checkpoint import Checkpointer

CONFIG = {"agent": {"name": "ppo", "learning_rate": 1e-3}, "env": "catch", "sizes": (64, 64)}


class Normaliser(NamedTuple):
    mean: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    learner: Any
    environment: Any
    memory: Any
    key: Any


def mesh_of(num_devices):
    return Mesh(np.array(jax.devices()[:num_devices]), ("replica",))


def make_state(num_devices=4, seed=0):
    """Replicated parameters and state sharded over its first axis, with a leaf of every kind that there is."""
    key = jax.random.key(seed)
    params = {"torso": [{"kernel": jax.random.normal(key, (8, 16)), "bias": jnp.full((16,), 0.5, jnp.bfloat16)}]}
    learner = (params, optax.adam(1e-3).init(params), Normaliser(jnp.array([jnp.nan, -0.0]), jnp.uint32(2**32 - 1)))
    environment = {
        "step_type": jnp.arange(8, dtype=jnp.int8) - 4,
        "frame": jnp.arange(8 * 6, dtype=jnp.uint8).reshape(8, 3, 2),
        "done": jnp.arange(8) % 3 == 0,
        "key": jax.random.split(jax.random.fold_in(key, 1), 8),
        "nothing": jnp.zeros((8, 0)),
    }
    mesh = mesh_of(num_devices)
    place = functools.partial(jax.tree.map, lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)))
    return State(
        learner=place(learner, jax.tree.map(lambda _: P(), learner)),
        environment=place(environment, jax.tree.map(lambda _: P("replica"), environment)),
        memory=(),
        key=place(jax.random.fold_in(key, 2), P()),
    )


def template_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def as_bytes(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype, path
        assert a.shape == b.shape, path
        assert as_bytes(a) == as_bytes(b), path


def damage(directory, update, name="state", flip=True):
    """Flips a bit in the middle of the largest file of a checkpoint, or cuts it there."""
    file = max((directory / str(update) / name).rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    file.write_bytes(content if flip else content[:middle])


@pytest.fixture
def checkpointer(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", config=CONFIG)
    yield checkpointer
    checkpointer.close()


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_restores_every_bit_on_another_number_of_devices(checkpointer, num_devices):
    state = make_state(4)
    checkpointer.save(7, state, {"env_steps": 2**40, "note": [1.5, None, "x"]})
    template = template_of(make_state(num_devices, seed=1))
    restored = checkpointer.restore(template)
    assert (restored.update, restored.metadata, restored.skipped) == (
        7,
        {"env_steps": 2**40, "note": [1.5, None, "x"]},
        (),
    )
    assert_same(restored.state, state)
    for leaf, target in zip(jax.tree.leaves(restored.state), jax.tree.leaves(template), strict=True):
        assert leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)
    assert len(restored.state.environment["frame"].sharding.device_set) == num_devices


def test_restores_in_a_process_with_fewer_devices(checkpointer, tmp_path):
    state = make_state(4)
    checkpointer.save(7, state, {"env_steps": 3})
    checkpointer.wait()
    script = f"""
        import jax, jax.numpy as jnp, numpy as np
        from podracer.checkpoint import Checkpointer
        assert len(jax.devices()) == 1
        checkpointer = Checkpointer({str(tmp_path / "checkpoints")!r}, config={CONFIG!r})
        restored = checkpointer.restore({{"frame": jnp.zeros((8, 3, 2), jnp.uint8), "key": jax.random.split(jax.random.key(9), 8),
            "done": jnp.zeros(8, bool), "nothing": jnp.zeros((8, 0)), "step_type": jnp.zeros(8, jnp.int8)}}, only="environment")
        print(restored.metadata["env_steps"], np.asarray(restored.state["frame"]).tobytes().hex())
    """
    environment = {**os.environ, "XLA_FLAGS": ""}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=environment, check=True
    )
    assert run.stdout.split() == ["3", as_bytes(state.environment["frame"]).hex()]
