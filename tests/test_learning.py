"""Agents learn under both architectures, as users run them. `make reproduce` measures what it comes to."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "total_steps", "at_least"),
    [
        ("ppo_cartpole", "5e5", 400),  # Random actions: 22.
        ("ppo_breakout_minatar", "2e6", 10),  # 0.5.
        ("ppo_pendulum", "3e5", -400),  # -1200.
        ("ppo_mountain_car_continuous", "1e6", 80),  # -33, and 0 for doing nothing.
        ("ppo_memory", "5e5", 0.8),  # 0.
        ("impala_breakout_minatar", "2e6", 5),  # 0.5.
        ("ppo_cartpole_gymnasium", "5e5", 400),  # 22.
    ],
)
def test_it_learns(name, total_steps, at_least, tmp_path):
    podracer = pathlib.Path(sys.executable).with_name("podracer")
    command = [podracer, "train", name, "--total-steps", total_steps, "--run-dir", tmp_path / "run", "--quiet"]
    # Without the eight devices and the quick compilation of the other tests.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, env=environment, check=True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]["mean"] >= at_least
