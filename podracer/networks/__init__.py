"""Networks as pure functions."""

from podracer.networks.actor_critic import NetworkConfig, actor_critic
from podracer.networks.adapters import from_equinox, from_nnx
from podracer.networks.base import Network, RecurrentNetwork

__all__ = ["Network", "NetworkConfig", "RecurrentNetwork", "actor_critic", "from_equinox", "from_nnx"]
