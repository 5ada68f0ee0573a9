"""Experiments under Sebulba that compile in a moment. Importing this registers them, for processes that tests start."""

import tiny_runs
from sebulba.toys import Script, ScriptedEnvironment

import podracer
from podracer.experiment import CheckpointConfig, Experiment
from podracer.sebulba import SebulbaConfig


def scripted(**script):
    made = Script(**script)
    return lambda where: ScriptedEnvironment(made, where)


def experiment(**changes):
    """12 updates of 8 environments x 5 steps by two threads, saved after every second one."""
    settings = {
        "name": "tiny_scripted",
        "env": "toys:Scripted",
        "agent": tiny_runs.TinyConfig(),
        "architecture": SebulbaConfig(num_envs=8, rollout_length=5, step_timeout=2.0),
        "total_steps": 12 * 40,
        "updates_per_window": 1,
        "evaluation_episodes": 4,
        "checkpoints": CheckpointConfig(interval=2),
    }
    return Experiment(**settings | changes)


podracer.envs.register("toys:Scripted", scripted, is_host=True)
podracer.experiments.register(experiment())
