import dataclasses
import functools
import os
import pickle
import shutil
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

from podracer import checkpoint, checkpoint_leaves
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


def buffers_of(leaves):
    arrays = [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves.values()
    ]
    return {shard.data.unsafe_buffer_pointer() for array in arrays if array.size for shard in array.addressable_shards}


def damage(path, flip):
    """Flips a bit in the middle of a file, the largest of a directory, or cuts it there."""
    file = max((p for p in [path, *path.rglob("*")] if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    file.write_bytes(content if flip else content[:middle])


def start_script(script, **environment):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environment}, **pipes)


def run_script(script, **environment):
    process = start_script(script, **environment)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


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
        import jax, numpy as np
        from podracer.checkpoint import Checkpointer
        assert len(jax.devices()) == 1
        template = {{
            "frame": np.zeros((8, 3, 2), np.uint8),
            "done": np.zeros(8, bool),
            "key": jax.random.split(jax.random.key(9), 8),
            "nothing": np.zeros((8, 0), np.float32),
            "step_type": jax.numpy.zeros(8, np.int8),
        }}
        checkpointer = Checkpointer({str(tmp_path / "checkpoints")!r}, config={CONFIG!r})
        restored = checkpointer.restore(template, only="environment")
        print(restored.metadata["env_steps"], restored.state["frame"].tobytes().hex())
    """
    assert run_script(script, XLA_FLAGS="").split() == ["3", as_bytes(state.environment["frame"]).hex()]


def test_numbers_and_host_arrays_come_back_as_they_were(checkpointer):
    state = {
        "steps": 2**40,
        "rate": 0.1,
        "on": True,
        "np": np.float32(0.1),
        "host": np.arange(3.0),
        "none": (),
        "x": None,
    }
    checkpointer.save(0, state, {})
    template = {**state, "steps": 0, "rate": 0.0, "on": False, "np": np.float32(0), "host": np.zeros(3)}
    restored = checkpointer.restore(template).state
    assert [type(leaf) for leaf in jax.tree.leaves(restored)] == [type(leaf) for leaf in jax.tree.leaves(state)]
    np.testing.assert_array_equal(restored.pop("host"), state.pop("host"))
    assert restored == state


def test_a_leaf_without_a_sharding_is_not_committed_to_a_device(checkpointer):
    state = {"x": jnp.arange(3, dtype=jnp.bfloat16), "key": jax.random.key(3), "empty": jnp.zeros((0, 2))}
    checkpointer.save(0, state, {})
    for template in (state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)):
        restored = checkpointer.restore(template).state
        assert_same(restored, state)
        assert not any(leaf.committed for leaf in jax.tree.leaves(restored))


def test_a_state_without_data_is_a_state(checkpointer):
    checkpointer.save(0, {"memory": (), "empty": jnp.zeros((0, 2))}, {"env_steps": 1})
    restored = checkpointer.restore({"memory": (), "empty": jnp.zeros((0, 2))})
    assert restored.metadata == {"env_steps": 1}
    assert restored.state["empty"].shape == (0, 2)


def test_keys_of_other_generators_come_back(checkpointer):
    keys = {"rbg": jax.random.key(1, impl="rbg"), "threefry": jax.random.key(1)}
    checkpointer.save(0, keys, {})
    assert_same(checkpointer.restore(template_of(keys)).state, keys)
    with pytest.raises(ValueError, match=r"rbg is key<rbg>\[\] instead of key<fry>\[\]"):
        checkpointer.restore({**keys, "rbg": jax.random.key(0)})


def test_the_state_may_be_donated_while_it_is_written(checkpointer):
    mesh = mesh_of(4)
    states = {
        "sharded": jax.device_put(jnp.zeros((1024, 1024)), NamedSharding(mesh, P("replica"))),
        "replicated": jax.device_put(jnp.zeros((512, 512)), NamedSharding(mesh, P())),
        "alone": jnp.zeros((512, 512)),
    }
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    states = {name: step(state) for name, state in states.items()}
    checkpointer.save(1, states, {})
    for _ in range(20):
        states = {name: step(state) for name, state in states.items()}
    restored = checkpointer.restore(states).state
    for name, state in restored.items():
        assert np.unique(np.asarray(state)).tolist() == [1.0], name


def test_what_is_written_shares_no_buffer_with_the_state():
    state = checkpoint_leaves.by_path(make_state(4))
    stored = checkpoint_leaves.snapshot(state)
    assert stored.keys() == state.keys() - {"environment/nothing"}
    assert not buffers_of(stored) & buffers_of(state)
    assert stored["environment/frame"].sharding == state["environment/frame"].sharding
    # One of the equal copies, whole.
    assert stored["learner/0/torso/0/kernel"].sharding.num_devices == 1


def test_saving_is_allowed_inside_a_transfer_guard(checkpointer):
    state = make_state(4)
    with jax.transfer_guard("disallow"):
        checkpointer.save(1, state, {})
        checkpointer.wait()
    assert checkpointer.errors == []
    assert checkpointer.updates() == [1]


def test_keys_are_not_used_up_by_saving(checkpointer):
    key = jax.random.key(0)
    checkpointer.save(1, {"key": key}, {})
    checkpointer.save(2, {"key": key}, {})
    jax.random.normal(key)
    assert checkpointer.errors == []


def test_keeps_the_newest_and_the_best_also_after_a_restart(tmp_path):
    state = {"x": jnp.zeros(3)}
    scores = {10: 1.0, 20: 5.0, 30: None, 40: float("nan"), 50: 5.0, 60: 2.0, 70: 3.0}
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_best=2, config={})
    for update in (10, 20, 30, 40):
        checkpointer.save(update, state, {}, scores[update])
    checkpointer.wait()
    assert checkpointer.updates() == [10, 20, 30, 40]
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_best=2, config={})
    for update in (50, 60, 70):
        checkpointer.save(update, state, {}, scores[update])
    checkpointer.wait()
    assert checkpointer.updates() == [20, 50, 60, 70]
    checkpointer = Checkpointer(tmp_path, keep_last=1, keep_best=1, config={})
    checkpointer.save(80, state, {}, 4.0)
    checkpointer.wait()
    assert checkpointer.updates() == [50, 80]


def test_the_best_is_found_and_the_newest_of_equals(tmp_path, checkpointer):
    checkpointer = Checkpointer(tmp_path, keep_last=4, config={})
    with pytest.raises(ValueError, match=r"no checkpoint in .* that can be read has a score"):
        checkpointer.best()
    for update, score in enumerate([1.0, 3.0, 3.0, None], 1):
        checkpointer.save(update, {"x": jnp.zeros(1)}, {}, score)
    checkpointer.wait()
    assert checkpointer.best() == 3
    (tmp_path / "3" / "checksums.json").write_text("{}}")
    messages = []
    assert Checkpointer(tmp_path, config={}, report=messages.append).best() == 2
    assert [message.partition(":")[0] for message in messages] == ["the checkpoint of update 3 is damaged"]


def test_a_score_that_is_not_a_number_is_never_the_best(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=1, config={})
    for update, score in enumerate([float("nan"), 1.0, None, float("nan"), 0.5]):
        checkpointer.save(update, {"x": jnp.zeros(3)}, {}, score)
    checkpointer.wait()
    assert checkpointer.updates() == [1, 4]


def test_a_save_replaces_its_update_and_ends_the_future_of_a_run_that_went_back(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=3, config={})
    for update in (1, 2, 3):
        checkpointer.save(update, {"x": jnp.full(2, update)}, {}, score=9.0)
    assert checkpointer.restore({"x": jnp.zeros(2, int)}, 1).state["x"].tolist() == [1, 1]
    checkpointer.save(2, {"x": jnp.full(2, 22)}, {}, score=0.0)
    assert 3 not in checkpointer.updates()
    checkpointer.wait()
    assert checkpointer.updates() == [1, 2]
    assert checkpointer.restore({"x": jnp.zeros(2, int)}).state["x"].tolist() == [22, 22]
    checkpointer.restore({"x": jnp.zeros(2, int)}, 1)
    checkpointer.save(2, {"x": jnp.full(2, 222)}, {}, score=0.0)
    assert checkpointer.restore({"x": jnp.zeros(2, int)}).state["x"].tolist() == [222, 222]


def test_saving_an_update_again_does_not_risk_the_checkpoint_of_it(tmp_path):
    checkpointer = Checkpointer(tmp_path, config={})
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    checkpointer.wait()
    written = (tmp_path / "1").stat().st_ino
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    assert checkpointer.updates() == [1]
    checkpointer.close()
    assert (tmp_path / "1").stat().st_ino == written


DAMAGES = {
    "a flipped bit in the arrays": lambda path: damage(path / "state", flip=True),
    "arrays cut short": lambda path: damage(path / "state", flip=False),
    "a flipped bit in the header": lambda path: damage(path / "header", flip=True),
    "no arrays": lambda path: shutil.rmtree(path / "state"),
    "no checksums": lambda path: (path / "checksums.json").unlink(),
    "half the checksums": lambda path: damage(path / "checksums.json", flip=False),
    "nothing": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, name):
    lines: list[str] = []
    checkpointer = Checkpointer(tmp_path, config={}, report=lines.append)
    for update in (1, 2):
        checkpointer.save(update, {"x": jnp.full(1000, update)}, {"at": update})
    checkpointer.wait()
    DAMAGES[name](tmp_path / "2")
    restored = checkpointer.restore({"x": jnp.zeros(1000, int)})
    assert (restored.update, restored.metadata, restored.state["x"][0]) == (1, {"at": 1}, 1)
    assert list(restored.skipped) == lines
    assert len(lines) == 1
    assert lines[0].startswith("skipped the checkpoint of update 2: ")
    with pytest.raises(ValueError, match=r"no readable checkpoint in .*: skipped the checkpoint of update 2"):
        checkpointer.restore({"x": jnp.zeros(1000, int)}, 2)
    DAMAGES[name](tmp_path / "1")
    with pytest.raises(ValueError, match=r"no readable checkpoint in .*update 2.*update 1"):
        checkpointer.restore({"x": jnp.zeros(1000, int)})
    # The next save takes no account of what cannot be read.
    checkpointer.save(3, {"x": jnp.full(1000, 3)}, {}, 1.0)
    checkpointer.wait()
    assert checkpointer.updates() == [3]


def test_there_is_nothing_to_restore(tmp_path, checkpointer):
    with pytest.raises(ValueError, match="no checkpoint in"):
        checkpointer.restore({"x": jnp.zeros(3)})
    assert not (tmp_path / "checkpoints").exists()
    checkpointer.save(3, {"x": jnp.zeros(3)}, {})
    with pytest.raises(ValueError, match=r"no checkpoint of update 4 in .*; there are \[3\]"):
        checkpointer.restore({"x": jnp.zeros(3)}, 4)


def test_another_experiment_is_refused_with_the_fields_that_differ(tmp_path, checkpointer):
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    checkpointer.wait()
    same = Checkpointer(tmp_path / "checkpoints", config={**CONFIG, "sizes": [64, 64]})
    assert same.restore({"x": jnp.zeros(3)}).update == 1
    other = Checkpointer(tmp_path / "checkpoints", config={"agent": {"name": "ppo"}, "env": "snake", "sizes": [64, 64]})
    with pytest.raises(
        ValueError, match=r"another experiment: agent.learning_rate was 0.001 and is absent, "
    ) as raised:
        other.restore({"x": jnp.zeros(3)})
    assert "env was 'catch' and is 'snake'" in str(raised.value)
    assert "name" not in str(raised.value)
    # A field that did not exist yet when it was saved.
    younger = Checkpointer(tmp_path / "checkpoints", config={**CONFIG, "target_kl": None, "new": {"field": 1}})
    assert younger.restore({"x": jnp.zeros(3)}).update == 1


def test_leaves_that_differ_are_listed(checkpointer):
    checkpointer.save(1, {"a": {"x": jnp.zeros(3), "y": jnp.zeros(3)}, "b": [jnp.zeros(2), 1]}, {})
    with pytest.raises(ValueError, match="update 1 does not fit: ") as raised:
        checkpointer.restore({"a": {"x": jnp.zeros(4), "z": jnp.zeros(3)}, "b": [jnp.zeros(2, int), 1.0]})
    problems = str(raised.value).split("does not fit: ")[1].split(", ")
    assert problems == [
        "a/z is missing",
        "a/y is unexpected",
        "a/x is float32[3] instead of float32[4]",
        "b/0 is float32[2] instead of int32[2]",
        "b/1 is int instead of float",
    ]


def test_one_field_can_be_restored_alone(checkpointer):
    state = make_state(4)
    checkpointer.save(1, state, {})
    assert_same(checkpointer.restore(template_of(state.learner), only="learner").state, state.learner)
    assert_same(checkpointer.restore(template_of(state.key), only="key").state, state.key)
    with pytest.raises(ValueError, match=r"no 'learn'; it has \['environment', 'key', 'learner'\]"):
        checkpointer.restore(template_of(state.learner), only="learn")
    with pytest.raises(ValueError, match="learner/0/torso/0/kernel is unexpected"):
        checkpointer.restore(template_of(state.learner[2]), only="learner")


def test_a_failing_write_is_reported_and_later_saves_work(tmp_path, monkeypatch):
    lines: list[str] = []
    checkpointer = Checkpointer(tmp_path, config={}, report=lines.append)
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    checkpointer.wait()
    with monkeypatch.context() as patch:
        # In Orbax's thread, after the arrays are written: what is left looks whole but for its name.
        patch.setattr(checkpoint, "_checksums", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
        checkpointer.save(2, {"x": jnp.zeros(3)}, {}, score=100.0)
        checkpointer.wait()
    assert lines == ["could not save the checkpoint of update 2: OSError: [Errno 28] No space left"]
    assert [type(error) for error in checkpointer.errors] == [OSError]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["1"]
    assert checkpointer.restore({"x": jnp.zeros(3)}).update == 1
    checkpointer.save(3, {"x": jnp.zeros(3)}, {})
    checkpointer.close()
    assert checkpointer.updates() == [1, 3]
    assert len(checkpointer.errors) == 1


def test_a_full_disk_is_reported_and_the_checkpoint_before_is_kept(tmp_path):
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path]).returncode:
        pytest.skip("mounting a small disk needs privileges")
    try:
        lines: list[str] = []
        checkpointer = Checkpointer(tmp_path / "checkpoints", config={}, report=lines.append)
        noise = lambda size: {"x": jax.random.normal(jax.random.key(0), (size,))}  # noqa: E731
        checkpointer.save(1, noise(100_000), {})
        checkpointer.save(2, noise(1_000_000), {})
        checkpointer.save(3, noise(100_000), {})
        checkpointer.wait()
        assert [line.split(":")[0] for line in lines] == ["could not save the checkpoint of update 2"]
        assert "o space left" in lines[0] or "RESOURCE_EXHAUSTED" in lines[0], lines
        assert checkpointer.updates() == [1, 3]
        assert checkpointer.restore(noise(100_000)).update == 3
        checkpointer.close()
        assert not list((tmp_path / "checkpoints").glob("*tmp*"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_only_a_saver_removes_what_a_killed_one_left(tmp_path):
    checkpointer = Checkpointer(tmp_path, config={})
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    checkpointer.close()
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    checkpointer = Checkpointer(tmp_path, config={})
    assert checkpointer.restore({"x": jnp.zeros(3)}).update == 1
    assert unfinished.exists()
    checkpointer.save(3, {"x": jnp.zeros(3)}, {})
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_a_process_killed_while_saving_leaves_a_checkpoint_to_restore(tmp_path):
    """Each process goes on where the last was killed, at moments spread over several saves."""
    script = f"""
        import jax.numpy as jnp, numpy as np
        from podracer.checkpoint import Checkpointer
        checkpointer = Checkpointer({str(tmp_path)!r}, config={{}}, report=print)
        template = {{f"layer{{i}}": jnp.zeros((64, 64), jnp.int32) for i in range(8)}}
        update = checkpointer.restore(template).update if checkpointer.updates() else 0
        while True:
            update += 1
            checkpointer.save(update, {{name: leaf + update for name, leaf in template.items()}}, {{"update": update}})
            print("saving", update, flush=True)
    """
    template = {f"layer{i}": jnp.zeros((64, 64), jnp.int32) for i in range(8)}
    last = 0
    for delay in (0.0, 0.03, 0.07, 0.11, 0.2):
        lines = []
        with start_script(script) as process:
            try:
                while not lines or lines[-1] != f"saving {last + 3}\n":
                    lines.append(process.stdout.readline())
                    assert lines[-1], "".join(lines)
                time.sleep(delay)
            finally:
                process.kill()
        assert not any("skipped" in line for line in lines), lines
        restored = Checkpointer(tmp_path, config={}).restore(template)
        assert restored.skipped == ()
        assert restored.update >= last + 2
        assert restored.metadata == {"update": restored.update}
        for leaf in restored.state.values():
            assert np.unique(leaf).tolist() == [restored.update]
        last = restored.update


def test_nothing_is_pickled(checkpointer, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle is used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    state = make_state(2)
    checkpointer.save(1, state, {})
    assert_same(checkpointer.restore(template_of(state)).state, state)
    assert checkpointer.errors == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_best": -1}, "keep_best -1"),
        ({"config": {"network": object()}}, "the configuration must be JSON"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, **{"config": {}, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, {}, {}), "update is -1"),
        ((1, {}, {"steps": jnp.zeros(())}), "the metadata must be JSON"),
        ((1, {"a": ["text"]}, {}), "a/0 is a str"),
        ((1, {"a": {"b": 1}, "a/b": 2}, {}), "two leaves of the state have the path 'a/b'"),
    ],
)
def test_what_cannot_be_saved_is_refused(checkpointer, arguments, message):
    with pytest.raises(ValueError, match=message):
        checkpointer.save(*arguments)
    assert checkpointer.updates() == []
