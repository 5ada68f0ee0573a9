"""PPO learns on real environments, as users run it. What it comes to in the end is measured by `make reproduce`."""

import pytest

from podracer import experiments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "total_steps", "at_least"),
    [
        ("ppo_cartpole", 500_000, 400),  # Random actions: 22.
        ("ppo_breakout_minatar", 2_000_000, 10),  # 0.5.
        ("ppo_pendulum", 300_000, -400),  # -1200.
        ("ppo_mountain_car_continuous", 1_000_000, 80),  # -33, and 0 for doing nothing.
    ],
)
def test_it_learns(name, total_steps, at_least, tmp_path):
    experiment = experiments.get(name, total_steps=total_steps, devices=1)
    evaluation = experiment.run(tmp_path / "run", quiet=True).evaluation
    assert evaluation.unfinished == 0
    assert evaluation.returns.mean() >= at_least
