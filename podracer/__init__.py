"""Reinforcement learning at scale in JAX: one agent definition, two architectures, any number of devices."""

__version__ = "0.1.0"
