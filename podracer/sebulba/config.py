"""How much runs at once under Sebulba, and where."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class SebulbaConfig:
    """Threads, devices and batches.

    Attributes:
        num_envs: Environments over all actor threads of all actor devices, which share them equally.
        rollout_length: Steps of each environment per trajectory, T.
        threads_per_actor_device: While the environments of one thread step, the device acts for another.
        actor_devices: Places of the devices that act in JAX's list of local devices. None takes one in four, or the
            only one.
        learner_devices: Of those that learn; they may be the same. None takes all that do not act, or the only one.
        max_lag: How many updates the parameters that act may be behind: 0 alternates acting and learning, 1 overlaps
            them, and both give the same run every time. With more, actors take the newest parameters there are.
        refresh: `rollout` acts a whole trajectory with the same parameters. `step` takes up new ones before any step,
            as the paper does; it is for agents that correct for it, and runs are not repeatable.
        batch_splits: Cut what arrives into so many parts along the environments and learn from one after the other, so
            that the batch that acts and the batch that learns are chosen apart (arXiv 2104.06272, section 4).
        start_timeout: Seconds in which a thread's environments have to be made and reset.
        step_timeout: Seconds in which a thread's environments have to step.
        max_restarts: How often a thread may make its environments anew after they raised an error. What they were in
            the middle of is discarded, and counted.
        serial: Do everything in one thread, for a debugger. The run is the same.

    Raises:
        ValueError: A field is out of range or of another type; the field, its value and the rule are named.
    """

    num_envs: int = 64
    rollout_length: int = 128
    threads_per_actor_device: int = 2
    actor_devices: tuple[int, ...] | None = None
    learner_devices: tuple[int, ...] | None = None
    max_lag: int = 1
    refresh: Literal["rollout", "step"] = "rollout"
    batch_splits: int = 1
    start_timeout: float = 120.0
    step_timeout: float = 60.0
    max_restarts: int = 0
    serial: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            integer = isinstance(value, int) and not isinstance(value, bool)
            match field.name:
                case "max_lag" | "max_restarts":
                    rule, holds = "an integer of at least 0", integer and value >= 0
                case "actor_devices" | "learner_devices":
                    rule, holds = "a tuple of different places, counted from 0, or None", _are_places(value)
                case "refresh":
                    rule, holds = "rollout or step", value in ("rollout", "step")
                case "start_timeout" | "step_timeout":
                    rule = "a positive number of seconds"
                    holds = (integer or isinstance(value, float)) and 0 < value < float("inf")
                case "serial":
                    rule, holds = "True or False", isinstance(value, bool)
                case _:
                    rule, holds = "an integer of at least 1", integer and value >= 1
            if not holds:
                raise ValueError(f"{field.name} is {value!r}; it must be {rule}")


def _are_places(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, tuple) or not value or len(set(value)) != len(value):
        return False
    return all(isinstance(place, int) and not isinstance(place, bool) and place >= 0 for place in value)
