"""Which devices act and which learn."""

import dataclasses
import math
from collections.abc import Sequence

import jax

from podracer.sebulba.config import SebulbaConfig


@dataclasses.dataclass(frozen=True)
class DeviceSplit:
    """The devices of one host.

    Attributes:
        actors: Each acts for `threads_per_actor_device` threads.
        learners: Each is a replica of the learner.
    """

    actors: tuple[jax.Device, ...]
    learners: tuple[jax.Device, ...]

    @classmethod
    def of(cls, config: SebulbaConfig, devices: Sequence[jax.Device]) -> "DeviceSplit":
        """What the configuration chooses among the host's devices.

        By default one device does both, and of several one in four acts, as the paper has it for agents without search
        (arXiv 2104.06272, section 4): of 8, 2 act and 6 learn. Of those that are not named, fewer learn where the
        environments cannot be divided among all.

        Raises:
            ValueError: There is no device of a place, or none is left for one of the two.
        """
        count = len(devices)
        places = range(count)
        for name in ("actor_devices", "learner_devices"):
            for place in getattr(config, name) or ():
                if place not in places:
                    valid = "only 0" if count == 1 else f"0 to {count - 1}"
                    raise ValueError(f"{name} has {place}; this machine has {count} devices, {valid}")
        actors, learners = config.actor_devices, config.learner_devices
        if actors is None:
            free = [place for place in places if place not in (learners or ())] or list(places)
            actors = tuple(free if learners else free[: max(1, count // 4)])
        if learners is None:
            rest = tuple(place for place in places if place not in actors) or actors
            fitting = (n for n in range(len(rest), 0, -1) if config.num_envs % _unit(config, len(actors), n) == 0)
            learners = rest[: next(fitting, len(rest))]
        return cls(tuple(devices[place] for place in actors), tuple(devices[place] for place in learners))


def check_shares(config: SebulbaConfig, split: DeviceSplit) -> None:
    """Environments go to threads in equal shares, those of a thread to learner devices, and those there to parts.

    Raises:
        ValueError: They do not; the nearest numbers that do are named.
    """
    threads, learners = len(split.actors) * config.threads_per_actor_device, len(split.learners)
    unit = _unit(config, len(split.actors), learners)
    if config.num_envs % unit:
        below = config.num_envs // unit * unit
        nearest = " or ".join(str(n) for n in (below, below + unit) if n)
        of_parts = f" and {config.batch_splits} batch_splits" if config.batch_splits > 1 else ""
        raise ValueError(
            f"num_envs is {config.num_envs}, which cannot be divided among {threads} actor thread{'s' * (threads > 1)} "
            f"({len(split.actors)} device{'s' * (len(split.actors) > 1)} x {config.threads_per_actor_device}), "
            f"{learners} learner device{'s' * (learners > 1)}{of_parts}; nearest valid: {nearest}"
        )


def _unit(config: SebulbaConfig, actors: int, learners: int) -> int:
    """What the number of environments has to be a multiple of, with so many devices."""
    threads = actors * config.threads_per_actor_device
    # A learner's part may have columns of several threads.
    parts = max(1, config.batch_splits // math.gcd(threads, config.batch_splits))
    return threads * learners * parts
