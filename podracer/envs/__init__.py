"""Environments: the contract, the stream that architectures consume, and a registry of names."""

from podracer.envs.actions import sample_action
from podracer.envs.autoreset import Autoreset
from podracer.envs.base import Environment, Step
from podracer.envs.catch import Catch
from podracer.envs.countdown import Countdown
from podracer.envs.packages import EnvironmentUnavailableError
from podracer.envs.registry import EnvironmentEntry, list_environments, make, register

__all__ = [
    "Autoreset",
    "Catch",
    "Countdown",
    "Environment",
    "EnvironmentEntry",
    "EnvironmentUnavailableError",
    "Step",
    "list_environments",
    "make",
    "register",
    "sample_action",
]
