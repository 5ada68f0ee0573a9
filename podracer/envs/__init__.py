"""Environments: the contract, the stream that architectures consume, and a registry of names."""

from podracer.envs.actions import sample_action
from podracer.envs.autoreset import Autoreset
from podracer.envs.base import Environment, Step
from podracer.envs.catch import Catch
from podracer.envs.countdown import Countdown
from podracer.envs.host import EnvironmentSlice, HostEnvironment, HostFactory, JaxHostEnvironment
from podracer.envs.packages import EnvironmentUnavailableError
from podracer.envs.registry import EnvironmentEntry, is_host, list_environments, make, make_host, register

__all__ = [
    "Autoreset",
    "Catch",
    "Countdown",
    "Environment",
    "EnvironmentEntry",
    "EnvironmentSlice",
    "EnvironmentUnavailableError",
    "HostEnvironment",
    "HostFactory",
    "JaxHostEnvironment",
    "Step",
    "is_host",
    "list_environments",
    "make",
    "make_host",
    "register",
    "sample_action",
]
