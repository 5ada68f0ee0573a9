"""The actors of a run: their threads, what passes to and from them, and how they end."""

import queue
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from podracer.envs.host import EnvironmentSlice, HostFactory
from podracer.sebulba.acting import Acting
from podracer.sebulba.actor import (
    ACTING,
    MAKING,
    RESETTING,
    SENDING,
    STEPPING,
    Actor,
    Rollout,
    close_actor,
    run_actor,
)
from podracer.sebulba.config import SebulbaConfig
from podracer.sebulba.parameter_slot import ParameterSlot, Stopped

_LOOK = 0.05  # Seconds between two looks at whether all actors are well.
# Seconds without a look after which patience begins anew: the process may have been stopped (Ctrl-Z), and with it all
# that it was waiting for.
_AWAY = 1.0
# Seconds that threads have to end by themselves, then closing their environments, then the threads again. With what
# it takes to notice, less than the 5 in which a run that has failed is to be over.
_ENDING, _CLOSING, _ENDED = 1.0, 1.0, 1.5
# The field of the configuration that has an activity's limit.
_LIMITS = {
    MAKING: "start_timeout",
    RESETTING: "start_timeout",
    STEPPING: "step_timeout",
    ACTING: "device_timeout",
    SENDING: "device_timeout",
}


class Crew:
    """All actors of this host, from one update on.

    Args:
        config: Threads, lag and time-outs.
        factory: Makes the environments.
        acting: The compiled functions, by actor device.
        learner_devices: Where trajectories go.
        seed: Of the environments.
        key: The run's root key.
        first: The update that the first rollouts go into.
    """

    def __init__(
        self,
        config: SebulbaConfig,
        factory: HostFactory,
        acting: list[Acting],
        learner_devices: tuple[jax.Device, ...],
        seed: int,
        key: jax.Array,
        first: int,
    ) -> None:
        self.next_update = first
        self._config = config
        self._stop = threading.Event()
        self._collected: list[Rollout] = []
        self._failures: list[BaseException] = []
        self._complaints: list[str] = []
        self._restarts: list[str] = []
        self._looked = self._back = float("-inf")
        self._slots = [(one.device, ParameterSlot[PyTree](config.max_lag, self._stop)) for one in acting]
        self.actors: list[Actor] = []
        self._queues: list[queue.Queue[Rollout]] = []
        self._keys: list[jax.Array] = []
        # Read to the host, since the key that came is part of a state that the learner donates.
        data, impl = np.array(jax.device_get(jax.random.key_data(key))), jax.random.key_impl(key)
        size = config.num_envs // (len(acting) * config.threads_per_actor_device)
        for one, (device, slot) in zip(acting, self._slots, strict=True):
            for _ in range(config.threads_per_actor_device):
                index = len(self.actors)
                where = EnvironmentSlice(size, index * size, seed, rollout_length=config.rollout_length)
                self.actors.append(
                    Actor(
                        index,
                        factory,
                        where,
                        one,
                        learner_devices,
                        slot,
                        self._stop,
                        max_restarts=config.max_restarts,
                        tell=self._restarts.append,
                        is_fresh_each_step=config.refresh == "step",
                    )
                )
                # Never full: a rollout beyond these would have to wait for its parameters first.
                self._queues.append(queue.Queue(config.max_lag + 1))
                self._keys.append(jax.random.wrap_key_data(jax.device_put(data, device), impl=impl))
        self._threads: list[threading.Thread] = []

    @property
    def has_ended(self) -> bool:
        """Whether there are no more rollouts."""
        return self._stop.is_set()

    def publish(self, version: int, params: PyTree) -> None:
        """Parameters for all actors: a copy on each of their devices."""
        for device, slot in self._slots:
            slot.publish(version, jax.device_put(params, device))

    def collect(self, is_wanted: Callable[[], bool]) -> list[Rollout] | None:
        """One rollout of every actor, in the order of the actors; None where it stops being wanted.

        What had come by then is kept, for when it is wanted again. A serial run is in the middle of a rollout, and has
        ended.

        Raises:
            ActorError: An actor failed.
            TimeoutError: An actor takes longer than it may.
        """
        if self._config.serial:
            pairs = zip(self.actors, self._keys, strict=True)
            try:
                self._collected = [actor.rollout(self.next_update, key, is_wanted) for actor, key in pairs]
            except Stopped:
                self._stop.set()
                return None
        else:
            self._start()
            for waiting in self._queues[len(self._collected) :]:
                while (rollout := _next(waiting)) is None:
                    # First: Ctrl-C may have ended the environments' processes, too.
                    if not is_wanted():
                        return None
                    self.check()
                self._collected.append(rollout)
        rollouts, self._collected = self._collected, []
        self.next_update += 1
        return rollouts

    def check(self) -> None:
        """Whether all actors are well.

        Raises:
            ActorError: An actor failed.
            TimeoutError: An actor takes longer than it may.
        """
        if self._failures:
            raise self._failures[0]
        self._look()
        if self._config.serial:
            return
        for actor in self.actors:
            activity, since = actor.pulse.current()
            if activity in _LIMITS:
                self.check_time(f"{actor.name}: {activity}", since, _LIMITS[activity])

    def check_time(self, what: str, since: float, limit: str) -> None:
        """Whether something that began at a time of `time.perf_counter` takes longer than a field of the configuration.

        Raises:
            TimeoutError: It does.
        """
        seconds, now = getattr(self._config, limit), self._look()
        if now - max(since, self._back) > seconds:
            raise TimeoutError(f"{what} has not come back for {now - since:.1f} s; the limit is {limit}, {seconds:g} s")

    def take_failures(self) -> tuple[str, ...]:
        """Of environments that were made anew after it since the last call, a line each."""
        taken = tuple(self._restarts)
        del self._restarts[: len(taken)]
        return taken

    def close(self) -> list[str]:
        """Ends threads and environments; returns what went wrong with it, a line each."""
        self._stop.set()
        alive = _join(self._threads, _ENDING)
        actors = [actor for actor, thread in zip(self.actors, self._threads, strict=False) if thread in alive]
        if self._config.serial:
            actors = self.actors
        # An environment that hangs may end when it is closed, or hang in that too.
        closers = [
            threading.Thread(
                target=close_actor, args=(actor, self._complaints.append), name=f"close {actor.name}", daemon=True
            )
            for actor in actors
        ]
        for closer in closers:
            closer.start()
        _join(closers, _CLOSING)
        alive = _join(alive, _ENDED)
        stuck = [actor for actor, thread in zip(self.actors, self._threads, strict=False) if thread in alive]
        return self._complaints + [f"{actor.name} did not end" for actor in stuck]

    def _look(self) -> float:
        """The time, of which what passes between two looks that are far apart is nobody's."""
        now = time.perf_counter()
        if now - self._looked > _AWAY:
            self._back = now
        self._looked = now
        return now

    def _start(self) -> None:
        if self._threads:
            return
        for actor, key, ready in zip(self.actors, self._keys, self._queues, strict=True):
            # Daemons: a thread that hangs in an environment must not keep the process from ending.
            tell = ready.put_nowait, self._failures.append, self._complaints.append
            arguments = (actor, self.next_update, key, *tell)
            self._threads.append(threading.Thread(target=run_actor, args=arguments, name=actor.name, daemon=True))
        for thread in self._threads:
            thread.start()


def _next(rollouts: queue.Queue[Rollout]) -> Rollout | None:
    """The oldest rollout, None if there is none for a while."""
    try:
        return rollouts.get(timeout=_LOOK)
    except queue.Empty:
        return None


def _join(threads: list[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Those that have not ended after some time."""
    until = time.perf_counter() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.perf_counter()))
    return [thread for thread in threads if thread.is_alive()]
