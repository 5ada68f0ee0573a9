"""Agents, one file each."""

from podracer.agents.ppo import PPO, PPOConfig

__all__ = ["PPO", "PPOConfig"]
