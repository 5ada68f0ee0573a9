"""Agents by name, as configuration files and the command line know them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from podracer.agents.impala import IMPALAConfig
from podracer.agents.ppo import PPOConfig
from podracer.agents.random import RandomConfig
from podracer.envs.names import unknown_name

_configs: dict[str, Callable[[], Any]] = {}


def register(name: str, config_class: Callable[[], Any]) -> None:
    """Makes an agent's configuration known by name, so that runs of it can be saved and resumed.

    Args:
        name: As in `podracer list agents`.
        config_class: A frozen dataclass with a default for every field, and `make(spec, num_updates) -> Agent`.

    Raises:
        ValueError: Another agent has the name, or a field has no default.
    """
    required = [
        field.name
        for field in dataclasses.fields(config_class)  # type: ignore[arg-type]
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    ]
    if required:
        raise ValueError(f"cannot register the agent {name!r}: its field {required[0]!r} has no default")
    if _configs.setdefault(name, config_class) is not config_class:
        raise ValueError(f"cannot register the agent {name!r}: the name is taken by {_configs[name]!r}")


def registered_agents() -> tuple[str, ...]:
    """The names, in order."""
    return tuple(sorted(_configs))


def config_class(name: str) -> Callable[[], Any]:
    """The configuration of an agent.

    Raises:
        ValueError: There is none of this name; the nearest are named.
    """
    if name not in _configs:
        raise unknown_name("agent", name, list(_configs))
    return _configs[name]


def registered_name(config: Any) -> str:
    """The name under which a configuration's class is registered.

    Raises:
        ValueError: It is not.
    """
    for name, known in _configs.items():
        if type(config) is known:
            return name
    raise ValueError(
        f"the agent configuration {type(config).__name__} is not registered; "
        "call podracer.agents.register(name, config_class) to save and resume runs of it"
    )


register("impala", IMPALAConfig)
register("ppo", PPOConfig)
register("random", RandomConfig)
