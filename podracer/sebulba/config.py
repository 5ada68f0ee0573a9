"""How much runs at once under Sebulba, and where."""

import dataclasses
from typing import Any, Literal

from podracer.rules import COUNT, COUNT_FROM_0, POSITIVE, SWITCH, Rule, check_fields, one_of


def _are_places(value: Any) -> bool:
    if not isinstance(value, tuple) or not value or len(set(value)) != len(value):
        return False
    return all(COUNT_FROM_0.holds(place) for place in value)


_PLACES = Rule("a tuple of different places, counted from 0", _are_places)
_SECONDS = Rule("a positive number of seconds", POSITIVE.holds)


@dataclasses.dataclass(frozen=True)
class SebulbaConfig:
    """Threads, devices and batches.

    Attributes:
        num_envs: Environments over all actor threads of all actor devices, which share them equally. The default can be
            shared by 1, 2, 4 or 8 devices.
        rollout_length: Steps of each environment per trajectory, T.
        threads_per_actor_device: While the environments of one thread step, the device acts for another.
        actor_devices: Places of the devices that act in JAX's list of local devices. None takes one in four, or all
            that do not learn if those are given, or the only one.
        learner_devices: Of those that learn; they may be the same. None takes all that do not act, or the only one;
            fewer where the environments cannot be divided among them.
        max_lag: How many updates the parameters that act may be behind: 0 alternates acting and learning, 1 overlaps
            them, and both give the same run every time. With more, actors take the newest parameters there are.
        refresh: `rollout` acts a whole trajectory with the same parameters. `step` takes up new ones between its
            steps, as the paper does; it is for agents that correct for it, and runs are not repeatable.
        batch_splits: Cut what arrives into so many parts along the environments and learn from one after the other, so
            that the batch that acts and the batch that learns are chosen apart (arXiv 2104.06272, section 4).
        start_timeout: Seconds in which a thread's environments have to be made and reset.
        step_timeout: Seconds in which a thread's environments have to step.
        device_timeout: Seconds in which a device has to act, to pass a trajectory on, and to make an update.
        max_restarts: How often a thread may make its environments anew after they raised an error. What they were in
            the middle of is discarded, and counted.
        serial: Do everything in one thread, for a debugger. The run is the same.

    Raises:
        ValueError: A field is out of range or of another type; the field, its value and the rule are named.
    """

    num_envs: int = 96
    rollout_length: int = 128
    threads_per_actor_device: int = 2
    actor_devices: tuple[int, ...] | None = None
    learner_devices: tuple[int, ...] | None = None
    max_lag: int = 1
    refresh: Literal["rollout", "step"] = "rollout"
    batch_splits: int = 1
    start_timeout: float = 120.0
    step_timeout: float = 60.0
    device_timeout: float = 600.0
    max_restarts: int = 0
    serial: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            {
                "num_envs": COUNT,
                "rollout_length": COUNT,
                "threads_per_actor_device": COUNT,
                "actor_devices": _PLACES.or_none(),
                "learner_devices": _PLACES.or_none(),
                "max_lag": COUNT_FROM_0,
                "refresh": one_of("rollout", "step"),
                "batch_splits": COUNT,
                "start_timeout": _SECONDS,
                "step_timeout": _SECONDS,
                "device_timeout": _SECONDS,
                "max_restarts": COUNT_FROM_0,
                "serial": SWITCH,
            },
        )
