"""Agents, one file each."""

from podracer.agents.impala import IMPALA, IMPALAConfig
from podracer.agents.ppo import PPO, PPOConfig
from podracer.agents.random import Random, RandomConfig
from podracer.agents.registry import config_class, register, registered_agents, registered_name

__all__ = [
    "IMPALA",
    "PPO",
    "IMPALAConfig",
    "PPOConfig",
    "Random",
    "RandomConfig",
    "config_class",
    "register",
    "registered_agents",
    "registered_name",
]
