"""Environments of Gymnasium in processes: the same rows, and none of them left behind."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import gymnasium_toys
import numpy as np
import pytest
from gymnasium_play import played, stepped

from podracer.envs import EnvironmentSlice, gymnasium
from podracer.envs.child_processes import child_processes
from podracer.envs.host_testing import HostEnvironmentConformance
from podracer.envs.recording import difference

gymnasium_toys.register()


@pytest.mark.slow  # It starts forty processes. That they give the same rows is tested below.
class TestCartPoleInProcesses(HostEnvironmentConformance):
    num_steps = 40

    def make(self, where):
        return gymnasium.make("CartPole-v1", vectorization="async", num_processes=2, max_episode_steps=15)(where)


def test_too_few_actions_never_wait_for_processes():
    with pytest.raises(ValueError, match="there are 2 environments"):
        stepped("CartPole-v1", np.zeros(1, np.int32), vectorization="async", num_processes=1)


@pytest.mark.parametrize("num_processes", [1, 2, 8])
def test_processes_change_nothing(num_processes):
    where = EnvironmentSlice(3, first_index=2, seed=5)
    expected = played(gymnasium.make("CartPole-v1", max_episode_steps=7), where=where)
    factory = gymnasium.make("CartPole-v1", max_episode_steps=7, vectorization="async", num_processes=num_processes)
    assert difference(played(factory, where=where), expected, 0) is None


def test_processes_import_no_jax_and_take_no_accelerator():
    code = """
import gymnasium, numpy as np
class Looks(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(4)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        import os, sys
        return 2 * ("jax" in sys.modules or "podracer" in sys.modules) + (os.environ["JAX_PLATFORMS"] != "cpu"), {}
gymnasium.register("Looks-v0", Looks)  # Not below `if __name__ == "__main__"`, and in no module.
from podracer.envs import EnvironmentSlice, gymnasium
environment = gymnasium.make("Looks-v0", vectorization="async")(EnvironmentSlice(2))
assert environment.reset().observation.tolist() == [0, 0]
# It is not closed: the processes end with the program all the same.
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_exception_in_a_process_is_raised_with_its_traceback():
    factory = gymnasium.make("Toy/Misbehaves-v0", how="raises", length=5, vectorization="async", num_processes=2)
    environment = factory(EnvironmentSlice(4, first_index=8))
    environment.reset()
    environment.step(np.zeros(4, np.int32))
    with pytest.raises(KeyError, match="broken on purpose") as error:
        environment.step(np.zeros(4, np.int32))
    notes = "\n".join(error.value.__notes__)
    assert "gymnasium:Toy/Misbehaves-v0" in notes
    assert "gymnasium_toys.py" in notes
    with pytest.raises(RuntimeError, match="have failed or were closed"):
        environment.step(np.zeros(4, np.int32))
    environment.close()


def test_a_dead_process_is_named():
    before = child_processes()
    factory = gymnasium.make("Toy/Misbehaves-v0", how="dies", vectorization="async", num_processes=2)
    environment = factory(EnvironmentSlice(4, first_index=8))
    environment.reset()
    environment.step(np.zeros(4, np.int32))
    with pytest.raises(RuntimeError, match=r"which held environment (8 to 9|10 to 11), exited with code 7"):
        environment.step(np.zeros(4, np.int32))
    environment.close()
    assert child_processes() <= before


def test_a_process_that_is_killed_is_named_while_another_hangs():
    before = child_processes()
    factory = gymnasium.make("Toy/Misbehaves-v0", how="hangs", at=1, vectorization="async", num_processes=2)
    environment = factory(EnvironmentSlice(2))
    environment.reset()
    second = environment._steps._processes[1].pid
    threading.Timer(0.3, os.kill, (second, signal.SIGKILL)).start()
    with pytest.raises(RuntimeError, match=f"process {second} of .* environment 1, was killed by SIGKILL"):
        environment.step(np.zeros(2, np.int32))
    environment.close()
    assert child_processes() <= before


def test_close_closes_the_environments_of_processes(tmp_path):
    closed = tmp_path / "closed"
    factory = gymnasium.make("Toy/Misbehaves-v0", closed=str(closed), vectorization="async", num_processes=1)
    environment = factory(EnvironmentSlice(1))
    environment.reset()
    assert not closed.exists()
    environment.close()
    assert closed.exists()


@pytest.mark.parametrize("how", ["hangs", "deaf"])
def test_close_ends_processes_that_hang_under_a_step_in_another_thread(how):
    before = child_processes()
    factory = gymnasium.make("Toy/Misbehaves-v0", how=how, vectorization="async", num_processes=2)
    environment = factory(EnvironmentSlice(2))
    environment.reset()
    environment.step(np.zeros(2, np.int32))
    raised = []

    def step():
        try:
            environment.step(np.zeros(2, np.int32))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    time.sleep(0.2)
    environment.close()
    thread.join(5)
    assert raised == ["gymnasium:Toy/Misbehaves-v0 was closed during a step"]
    assert child_processes() <= before
    with pytest.raises(RuntimeError, match="is closed"):
        environment.step(np.zeros(2, np.int32))


def test_a_process_that_hangs_ends_with_a_parent_that_is_killed():
    code = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import gymnasium_toys, numpy as np
from podracer.envs import EnvironmentSlice, gymnasium
gymnasium_toys.register()
factory = gymnasium.make("Toy/Misbehaves-v0", how="hangs", at=1, vectorization="async", num_processes=1)
environment = factory(EnvironmentSlice(1))
environment.reset()
threading.Thread(target=environment.step, args=(np.zeros(1, np.int32),), daemon=True).start()
print(environment._steps._processes[0].pid, flush=True)
threading.Event().wait(100)
"""
    command = [sys.executable, "-c", code, os.path.dirname(__file__)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert runs(worker)
        time.sleep(0.3)
        parent.kill()
    deadline = time.monotonic() + 20
    while runs(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs(worker)


def runs(process):
    """Whether a process exists and has not ended; in a container nobody may collect those that have."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_close_returns_while_an_environment_of_this_process_hangs():
    environment = gymnasium.make("Toy/Misbehaves-v0", how="hangs", at=1)(EnvironmentSlice(1))
    environment.reset()
    threading.Thread(target=lambda: environment.step(np.zeros(1, np.int32)), daemon=True).start()
    time.sleep(0.1)
    start = time.monotonic()
    environment.close()
    assert time.monotonic() - start < 5


def test_an_environment_that_cannot_be_made_leaves_no_process():
    before = child_processes()
    with pytest.raises(ValueError, match="the observation Text"):
        gymnasium.make("Toy/Sees-v0", kind="text", vectorization="async")(EnvironmentSlice(2))
    with pytest.raises(ValueError, match="cannot be made as asked"):
        gymnasium.make("CartPole-v1", max_episode_steps=0, vectorization="async")(EnvironmentSlice(2))
    assert child_processes() <= before
