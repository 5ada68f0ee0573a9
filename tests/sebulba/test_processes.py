"""Learner devices of several processes, as there are on several hosts."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np

PROGRAM = pathlib.Path(__file__).parent / "learner_process.py"


def learnt(directory, processes):
    """What each of the processes had at first, and what it has learnt."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # Of this process's, which compile fast, without the number of devices.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    directory = directory / str(processes)
    directory.mkdir()
    running = []
    try:
        for index in range(processes):
            # Files, since a pipe that nobody reads yet would hold one of them while the other waits for it.
            with (directory / f"{index}.err").open("w") as errors:
                command = [sys.executable, PROGRAM, directory / f"{index}.npz", processes, index, port]
                running.append(subprocess.Popen(list(map(str, command)), env=environment, stderr=errors))
        end = time.monotonic() + 240
        for index, process in enumerate(running):
            assert process.wait(end - time.monotonic()) == 0, (directory / f"{index}.err").read_text()
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [dict(np.load(directory / f"{index}.npz")) for index in range(processes)]


def test_two_processes_learn_what_one_with_as_many_devices_does(tmp_path):
    (alone,) = learnt(tmp_path, 1)
    first, second = learnt(tmp_path, 2)
    assert alone.keys() == first.keys() == second.keys()
    for name, array in alone.items():
        np.testing.assert_array_equal(first[name], second[name], name)
        # The two add gradients in another order.
        np.testing.assert_allclose(first[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    changed = [name for name in alone if name.startswith("after") and (alone[name] != alone["before" + name[5:]]).any()]
    assert len(changed) > 10
