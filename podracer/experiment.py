"""An experiment: everything a run is a function of."""

import builtins
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import types
import typing
from typing import TYPE_CHECKING, Any, Protocol

import jax

from podracer import envs
from podracer.agent import Agent
from podracer.agents import registry
from podracer.anakin import Anakin, AnakinConfig
from podracer.envs.host import HostFactory
from podracer.envs.names import unknown_name
from podracer.fields import differences, flatten
from podracer.machine import cores
from podracer.sebulba import Sebulba, SebulbaConfig
from podracer.types import EnvironmentSpec
from podracer.window import MAX_ROWS_PER_CALL

if TYPE_CHECKING:
    from podracer.training import Result

# Fewer rows of an update than this on a CPU device cost more to synchronise than a second core saves; measured in
# docs/design/0003-two-cores.md.
_ROWS_PER_CPU_DEVICE = 2048
# A call of the compiled program should end often enough for progress, checkpoints and Ctrl-C.
_ROWS_PER_WINDOW = 2**18
_WINDOWS_PER_RUN = 200
# What the compiled program counts in 32 bits.
_MAX_UPDATES = 2**31 - 1
_ARCHITECTURES: dict[str, type[AnakinConfig] | type[SebulbaConfig]] = {
    "anakin": AnakinConfig,
    "sebulba": SebulbaConfig,
}


class AgentConfig(Protocol):
    """Numbers from which an agent is made, once the environment and the length of the run are known."""

    def make(self, spec: EnvironmentSpec, num_updates: int) -> Agent: ...


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep.

    Attributes:
        interval: Updates between checkpoints, rounded up to whole windows; None makes about 20 in a run. 0 saves only
            at the end and on Ctrl-C.
        keep_last: How many of the newest to keep.
        keep_best: How many of those with the best return in training to keep besides.
    """

    interval: int | None = None
    keep_last: int = 2
    keep_best: int = 1

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval < 0:
            raise ValueError(f"interval is {self.interval}; it must be at least 0")
        if self.keep_last < 1 or self.keep_best < 0:
            raise ValueError(
                f"keep_last is {self.keep_last} and keep_best {self.keep_best}; at least 1 and 0 are needed"
            )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An environment, an agent, an architecture, and how long.

    Attributes:
        name: What summaries and plots call it.
        env: An id of `podracer.envs.make`.
        agent: The agent's configuration.
        env_parameters: Keyword parameters of the environment. On the command line, `--env-parameters NAME VALUE ...`
            replaces all of them, and `--env` with another environment drops them.
        architecture: How acting and learning run: an `AnakinConfig` or a `SebulbaConfig`.
        seed: Of everything random.
        total_steps: Environment steps, rounded down to whole updates of `num_envs x rollout_length`. Rows on which an
            environment resets itself take their place among them but are not counted as steps.
        devices: How many to use. None takes all accelerators. On a CPU it takes as many as make Anakin faster, and for
            Sebulba as many as its configuration names.
        updates_per_window: Updates per call of the compiled program, which is also per line of metrics; None chooses.
        evaluation_episodes: Episodes of the evaluation that ends a run.
        evaluation_greedy: Whether evaluation and recording act greedily, and not as training explores: False for
            environments without chance, where greedy episodes are the same few again and again.
        stop_on_nonfinite: Whether a NaN or infinity in rewards, observations or losses, or a NaN in parameters, ends
            the run.
        checkpoints: When to save.
    """

    name: str
    env: str
    agent: Any
    env_parameters: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    architecture: AnakinConfig | SebulbaConfig = dataclasses.field(default_factory=AnakinConfig)
    seed: int = 0
    total_steps: int = 1_000_000
    devices: int | None = None
    updates_per_window: int | None = None
    evaluation_episodes: int = 128
    evaluation_greedy: bool = True
    stop_on_nonfinite: bool = True
    checkpoints: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if not hasattr(self.agent, "make"):
            raise ValueError(f"agent is {self.agent!r}; a configuration such as podracer.agents.PPOConfig is needed")
        for name in ("seed", "total_steps", "devices", "updates_per_window", "evaluation_episodes"):
            value = getattr(self, name)
            if not (_fits(value, int) or (value is None and name in ("devices", "updates_per_window"))):
                raise ValueError(f"{name} is {value!r}; it must be an integer")
            if value is not None and value < 1 and name not in ("seed", "total_steps"):
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it must be within [0, 2^32)")
        size = (
            f"{self.architecture.num_envs} environments x {self.architecture.rollout_length} steps "
            f"= {self.steps_per_update:,}"
        )
        if self.total_steps < self.steps_per_update:
            raise ValueError(f"total_steps is {self.total_steps}, less than one update of {size}")
        if self.num_updates > _MAX_UPDATES:
            raise ValueError(
                f"total_steps is {self.total_steps:,}, which makes {self.num_updates:,} updates of {size}; at most "
                f"{_MAX_UPDATES:,} are counted"
            )
        if self.window * self.steps_per_update > MAX_ROWS_PER_CALL:
            raise ValueError(
                f"{self.window:,} update{'s' * (self.window > 1)} of {size} are too many for one call of the compiled "
                f"program, which counts to {MAX_ROWS_PER_CALL:,}"
            )

    @property
    def steps_per_update(self) -> int:
        return self.architecture.num_envs * self.architecture.rollout_length

    @property
    def num_updates(self) -> int:
        """Updates in the whole run."""
        return self.total_steps // self.steps_per_update

    @property
    def window(self) -> int:
        """Updates per call of the compiled program: a function of the configuration alone, as reruns must agree."""
        if self.updates_per_window is not None:
            return min(self.updates_per_window, self.num_updates)
        wanted = math.ceil(self.num_updates / _WINDOWS_PER_RUN)
        return max(1, min(wanted, _ROWS_PER_WINDOW // self.steps_per_update))

    @property
    def checkpoint_interval(self) -> int:
        """Updates between checkpoints, in whole windows; 0 for none on the way."""
        wanted = self.checkpoints.interval
        if wanted is None:
            wanted = math.ceil(self.num_updates / 20)
        return math.ceil(wanted / self.window) * self.window

    def make(self) -> tuple[envs.Environment | HostFactory, Agent]:
        """The environment, and the agent."""
        environment = self.make_environment()
        # What the agent's schedules go by is its own count of updates.
        splits = self.architecture.batch_splits if isinstance(self.architecture, SebulbaConfig) else 1
        return environment, self.agent.make(environment.spec, self.num_updates * splits)

    def make_environment(self) -> envs.Environment | HostFactory:
        """The environment; of one that runs on the host what makes it."""
        if isinstance(self.architecture, SebulbaConfig) and envs.is_host(self.env):
            return self._host_factory(self.architecture)
        return envs.make(self.env, **self.env_parameters)

    def make_architecture(self) -> Anakin | Sebulba:
        """The architecture on this machine's devices.

        Raises:
            ValueError: Anything that cannot run, before anything is compiled.
        """
        self._ask_for_cpu_devices()  # First: making an environment may start JAX.
        environment, agent = self.make()
        if isinstance(self.architecture, SebulbaConfig):
            if not isinstance(environment, HostFactory):
                environment = self._host_factory(self.architecture)
            return Sebulba(agent, environment, self.architecture, self._sebulba_devices())
        assert not isinstance(environment, HostFactory)  # `make` refuses it.
        *more, fewest = self._device_choices()
        for devices in more:
            # Nobody asked for as many devices, so an agent that cannot divide its work among them gets fewer.
            with contextlib.suppress(ValueError):
                return Anakin(agent, environment, self.architecture, devices)
        return Anakin(agent, environment, self.architecture, fewest)

    def _host_factory(self, config: SebulbaConfig) -> HostFactory:
        limits = (None, None) if config.serial else (config.start_timeout, config.step_timeout)
        return envs.make_host(self.env, **self.env_parameters).with_timeouts(*limits)

    def run(
        self,
        run_dir: str | pathlib.Path | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        quiet: bool = False,
        wandb_project: str | None = None,
    ) -> "Result":
        """Trains, evaluates, and leaves everything in a run directory; see `podracer.training.train`."""
        from podracer.training import train

        return train(self, run_dir, resume=resume, overwrite=overwrite, quiet=quiet, wandb_project=wandb_project)

    def check_can_be_saved(self) -> None:
        """Whether `config.json` could give the experiment back.

        Raises:
            ValueError: The agent is not registered, or a value would not come back as it is; it is named.
        """
        values = self.to_dict()
        for name, value in flatten(values).items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{name} is {value!r}, of type {type(value).__name__}, which config.json cannot hold; "
                    "give a bool, int, finite float, str, or a tuple of them"
                ) from None
        again = Experiment.from_dict(json.loads(json.dumps(values)))
        if again != self:
            changed = ", ".join(differences(values, again.to_dict()))
            raise ValueError(f"config.json would not give the experiment back: {changed}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. The agent is tagged with its registered name, and the architecture with its own."""
        values = dataclasses.asdict(self)
        values["agent"] = {"name": registry.registered_name(self.agent), **values["agent"]}
        name = next(name for name, kind in _ARCHITECTURES.items() if isinstance(self.architecture, kind))
        values["architecture"] = {"name": name, **values["architecture"]}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Experiment":
        """The inverse of `to_dict`.

        Raises:
            ValueError: A field or the agent is unknown, or a value is of the wrong type or out of range.
        """
        if not isinstance(values, dict) or not isinstance(values.get("agent"), dict):
            raise ValueError("an experiment is an object with an agent, which is one with a name")
        agent, architecture = dict(values["agent"]), values.get("architecture", {})
        config = registry.config_class(agent.pop("name", ""))()
        default = cls(name="", env="", agent=config)
        if isinstance(architecture, dict):
            # Runs from before there was another have no name.
            name = architecture.get("name", "anakin")
            architecture = {field: value for field, value in architecture.items() if field != "name"}
            default = dataclasses.replace(default, architecture=architecture_class(name)())
        return _replace(default, {**values, "agent": agent, "architecture": architecture}, "")

    def _ask_for_cpu_devices(self) -> None:
        """Has JAX make a CPU device per core, unless it runs already or was told how many to make."""
        is_told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
        if not is_told and "JAX_NUM_CPU_DEVICES" not in os.environ:
            # Refused where JAX runs already, with as many devices as it was started with.
            with contextlib.suppress(RuntimeError):
                is_sebulba = isinstance(self.architecture, SebulbaConfig)
                wanted = self._places() if is_sebulba else cores()
                jax.config.update("jax_num_cpu_devices", max(wanted, self.devices or 1))

    def _device_choices(self) -> list[list[jax.Device]]:
        """What to run on, best first."""
        available = jax.devices()
        if self.devices is not None:
            self._check_devices(available)
            return [available[: self.devices]]
        if available[0].platform != "cpu":
            return [available]
        most = min(len(available), max(1, self.steps_per_update // _ROWS_PER_CPU_DEVICE))
        return [available[:n] for n in range(most, 0, -1) if self.architecture.num_envs % n == 0]

    def _check_devices(self, available: list[jax.Device]) -> None:
        if self.devices is not None and self.devices > len(available):
            raise ValueError(f"devices is {self.devices}; this machine has {len(available)}")

    def _places(self) -> int:
        """How many devices a configuration of Sebulba names."""
        assert isinstance(self.architecture, SebulbaConfig)
        named = (self.architecture.actor_devices or ()) + (self.architecture.learner_devices or ())
        return max(named, default=0) + 1

    def _sebulba_devices(self) -> list[jax.Device]:
        """What the configuration chooses among."""
        available = jax.local_devices()
        if self.devices is not None:
            self._check_devices(available)
            return available[: self.devices]
        # Threads on one CPU device run side by side, on all cores.
        return available[: self._places()] if available[0].platform == "cpu" else available


def architecture_class(name: str) -> type[AnakinConfig] | type[SebulbaConfig]:
    """The configuration of an architecture.

    Raises:
        ValueError: There is none of this name; the nearest are named.
    """
    if name not in _ARCHITECTURES:
        raise unknown_name("architecture", name, list(_ARCHITECTURES))
    return _ARCHITECTURES[name]


def _replace(default: Any, values: dict[str, Any], where: str) -> Any:
    """A dataclass with some fields from JSON, nested ones included."""
    fields = {field.name: field for field in dataclasses.fields(default)}
    changes = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown_name("field", where + name, [where + field for field in fields])
        current = getattr(default, name)
        if dataclasses.is_dataclass(current) and isinstance(value, dict):
            value = _replace(current, value, f"{where}{name}.")
        elif dataclasses.is_dataclass(current) or not _fits(value, fields[name].type):
            raise ValueError(f"{where}{name} is {value!r}, which is of the wrong type")
        elif isinstance(value, list):
            value = tuple(value)
        changes[name] = value
    return dataclasses.replace(default, **changes)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of a type, as far as the type says what that is."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint) or hint:
        case typing.Union | types.UnionType:
            return any(_fits(value, choice) for choice in arguments)
        case typing.Literal:
            return value in arguments
        case typing.Any:
            return True
        case builtins.tuple:
            return isinstance(value, list | tuple) and all(_fits(x, kind) for x in value for kind in arguments[:1])
        case builtins.dict:
            values = value.values() if isinstance(value, dict) else ()
            return isinstance(value, dict) and all(_fits(x, kind) for x in values for kind in arguments[1:])
        case builtins.float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        case builtins.int:
            return isinstance(value, int) and not isinstance(value, bool)
        case type() as kind:
            return isinstance(value, kind)
    return True
