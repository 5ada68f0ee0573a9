"""Environments by name: `make("gymnax:Breakout-MinAtar", max_steps_in_episode=500)`.

An id is `suite:name`. A suite may be another package's, whose adapter imports the package only when one of its
environments is made, or a user's own.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

from podracer.envs import ale, catch, countdown, envpool, gymnasium, gymnax, probe
from podracer.envs.autoreset import Autoreset
from podracer.envs.base import Environment
from podracer.envs.host import HostFactory, JaxHostEnvironment
from podracer.envs.names import check_parameters, unknown_name
from podracer.envs.packages import installed_version

Factory = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class EnvironmentEntry:
    """One line of `list_environments`.

    Attributes:
        id: What `make` takes.
        package: The package that the environment comes from.
        version: The installed version of the package, None if it is not installed, "local" for a module without one.
        is_host: Whether it runs on the host, in NumPy, and so under Sebulba only.
    """

    id: str
    package: str
    version: str | None
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class _Suite:
    factory: Factory
    names: Callable[[], tuple[str, ...]]
    package: str
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class _Single:
    factory: Factory
    is_host: bool = False


_environments: dict[str, _Single] = {}
_suites: dict[str, _Suite] = {}


def register(
    prefix_or_id: str,
    factory: Factory,
    *,
    names: Callable[[], tuple[str, ...]] | None = None,
    package: str | None = None,
    is_host: bool = False,
) -> None:
    """Makes environments available to `make` and `make_host`, and so to every experiment and to the command line.

    Args:
        prefix_or_id: An id such as "mine:Grid", or a whole suite such as "mine".
        factory: For an id, called as `factory(**parameters)`, for instance an environment's class; for a suite, called
            as `factory(name, **parameters)`. Returns an `Environment`, or with `is_host` a function from an
            `EnvironmentSlice` to a `HostEnvironment`.
        names: For a suite, the names it has; used to list them and to correct misspellings.
        package: The package that `list_environments` names; the factory's own where None.
        is_host: Whether the environments run on the host.

    Raises:
        ValueError: The name is taken by another factory or malformed, or the factory cannot be called.
    """
    suite, separator, name = prefix_or_id.partition(":")
    if not suite or (separator and not name) or prefix_or_id != prefix_or_id.strip():
        raise ValueError(f'cannot register {prefix_or_id!r}; a name is "suite:name", or "suite" for a whole suite')
    if not callable(factory):
        raise ValueError(f"cannot register {prefix_or_id!r}: the factory {factory!r} is not callable")
    taken = getattr(_environments.get(prefix_or_id) if separator else _suites.get(suite), "factory", None)
    if taken is not None and taken is not factory:
        raise ValueError(f"cannot register {prefix_or_id!r}: it is registered already, with {taken!r}")
    if separator:
        _environments[prefix_or_id] = _Single(factory, is_host)
    else:
        _suites[suite] = _Suite(factory, names or (lambda: ()), package or _module(factory), is_host)


def make(id: str, **parameters: Any) -> Environment:
    """Makes a registered JAX environment.

    Args:
        id: `suite:name`, for example "gymnax:CartPole-v1" or "podracer:Catch".
        parameters: The environment's own keyword parameters.

    Raises:
        ValueError: The suite, the environment or a parameter is unknown (the nearest valid ones are named), or the
            environment runs on the host.
        EnvironmentUnavailableError: The environment's package is missing, broken or too old. A `ValueError` too.
    """
    if is_host(id):
        raise ValueError(f"{id} is not written in JAX: it runs on the host, under Sebulba (`--architecture sebulba`)")
    environment = _call(id, parameters)
    missing = [method for method in ("spec", "reset", "step") if not hasattr(environment, method)]
    if missing:
        kind = type(environment).__name__
        raise ValueError(f"the factory of {id!r} returned a {kind}, which has no {', '.join(missing)}")
    return environment


def make_host(id: str, **parameters: Any) -> HostFactory:
    """What makes batches of a registered environment on the host; of a JAX environment too.

    Args:
        id: `suite:name`, for example "gymnasium:CartPole-v1", "ale:pong" or "gymnax:CartPole-v1".
        parameters: The environment's own keyword parameters.

    Raises:
        ValueError: The suite, the environment or a parameter is unknown; the nearest valid ones are named.
        EnvironmentUnavailableError: The environment's package is missing, broken or too old. A `ValueError` too.
    """
    if is_host(id):
        return HostFactory(id, _call(id, parameters))
    stream = Autoreset(make(id, **parameters))
    return HostFactory(id, lambda where: JaxHostEnvironment(stream, where))


def is_host(id: str) -> bool:
    """Whether an environment runs on the host.

    Raises:
        ValueError: It is unknown; the nearest are named.
    """
    return _entry(id).is_host


def _entry(id: str) -> "_Suite | _Single":
    suite, separator, name = id.partition(":")
    if id in _environments:
        return _environments[id]
    if not separator or suite not in _suites:
        raise unknown_name("environment", id, [entry.id for entry in list_environments()])
    known = _suites[suite].names()
    if known and name not in known:
        raise unknown_name("environment", id, [f"{suite}:{candidate}" for candidate in known])
    return _suites[suite]


def _call(id: str, parameters: dict[str, Any]) -> Any:
    entry = _entry(id)
    if isinstance(entry, _Suite):
        return entry.factory(id.partition(":")[2], **parameters)
    check_parameters(id, parameters, _parameters(entry.factory, parameters))
    return entry.factory(**parameters)


def list_environments() -> tuple[EnvironmentEntry, ...]:
    """Every id that is known, in order, whether or not its package is installed."""
    entries = []
    for id, single in _environments.items():
        package = _module(single.factory)
        entries.append(EnvironmentEntry(id, package, _version(package), single.is_host))
    for prefix, suite in _suites.items():
        version = _version(suite.package)
        ids = [f"{prefix}:{name}" for name in suite.names()]
        entries += [EnvironmentEntry(id, suite.package, version, suite.is_host) for id in ids]
    return tuple(sorted(entries, key=lambda entry: entry.id))


def _parameters(factory: Factory, given: dict[str, Any]) -> set[str]:
    """The keyword parameters of a factory; with `**kwargs` whatever is given."""
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set(given)
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}


def _module(factory: Factory) -> str:
    return (getattr(factory, "__module__", None) or type(factory).__module__).partition(".")[0]


def _version(package: str) -> str | None:
    loaded = sys.modules.get(package)
    if loaded is None:
        return installed_version(package)
    return installed_version(package) or getattr(loaded, "__version__", "local")


register("ale", ale.make, names=ale.names, package="ale-py", is_host=True)
register("envpool", envpool.make, names=envpool.names, package="envpool", is_host=True)
register("gymnasium", gymnasium.make, names=gymnasium.names, package="gymnasium", is_host=True)
register("gymnax", gymnax.make, names=gymnax.names, package="gymnax")
for _class in (catch.Catch, countdown.Countdown, *probe.PROBES):
    register(f"podracer:{_class.__name__}", _class)
