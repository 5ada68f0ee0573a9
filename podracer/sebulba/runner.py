"""Sebulba: environments on the host, devices that act, devices that learn (arXiv 2104.06272, section 4).

Actor threads step batches of environments and send trajectories, cut along the environments, from the device that acted
to the devices that learn. The thread that calls `run` learns, and publishes parameters to the devices that act.
"""

import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from podracer import parallel
from podracer.agent import Agent
from podracer.envs.host import HostFactory
from podracer.sebulba.acting import Acting
from podracer.sebulba.config import SebulbaConfig
from podracer.sebulba.crew import Crew
from podracer.sebulba.devices import DeviceSplit, check_shares
from podracer.sebulba.learner import Learning, SebulbaState
from podracer.sebulba.pulse import Pulse
from podracer.sebulba.report import LEARNER_ACTIVITIES, SebulbaWindow, Tally, shares
from podracer.types import key_shape
from podracer.window import check_num_updates


class Sebulba:
    """Runs an agent in host environments.

    Args:
        agent: Anything that follows `podracer.agent.Agent`.
        environments: What makes batches of them, `podracer.envs.make_host("gymnasium:CartPole-v1")` for instance.
        config: Threads, devices and batches.
        devices: Among which the configuration chooses; this host's by default.

    Raises:
        ValueError: Devices or environments cannot be divided as configured, or the agent refuses something.

    Attributes:
        split: The devices that act and those that learn.
        mesh: Of the devices that learn.
        shapes: `SebulbaState` of `jax.ShapeDtypeStruct` with shardings, to restore a checkpoint into.
    """

    def __init__(
        self,
        agent: Agent,
        environments: HostFactory,
        config: SebulbaConfig,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self.agent, self.environments, self.config = agent, environments, config
        self.split = DeviceSplit.of(config, jax.local_devices() if devices is None else devices)
        check_shares(config, self.split)
        self.mesh = parallel.make_mesh(self.split.learners)
        params = jax.eval_shape(lambda key: agent.actor_params(agent.init(key)), key_shape())
        self._acting = [
            Acting(
                agent,
                environments.spec,
                self.envs_per_thread,
                config.rollout_length,
                len(self.split.learners),
                device,
                params,
            )
            for device in self.split.actors
        ]
        shard = self._acting[0].trajectory
        self._learning = Learning(agent, self.mesh, shard, self.num_actors, config.batch_splits)
        self.shapes = self._learning.shapes
        self._seed = 0
        self._crew: Crew | None = None
        self._pulse = Pulse(LEARNER_ACTIVITIES)
        self._spent: tuple[dict[str, float], dict[str, float]] = {}, {}
        self._returned: Any = None

    @property
    def num_actors(self) -> int:
        """Actor threads."""
        return len(self.split.actors) * self.config.threads_per_actor_device

    @property
    def envs_per_thread(self) -> int:
        """The acting batch, B of one call of `act`."""
        return self.config.num_envs // self.num_actors

    @property
    def steps_per_update(self) -> int:
        """Rows of all environments in one update."""
        return self.config.num_envs * self.config.rollout_length

    @property
    def placement(self) -> str:
        """Where it runs, in words."""
        threads = self.num_actors
        actors, learners = (", ".join(map(str, devices)) for devices in (self.split.actors, self.split.learners))
        return f"acted by {threads} thread{'s' * (threads > 1)} on {actors}, learnt from on {learners}"

    def init(self, seed: int) -> SebulbaState:
        """The state before the first update.

        Args:
            seed: Of everything random, of the environments too.

        Raises:
            ValueError: It is no integer.
        """
        self.seed_environments(seed)
        return self._learning.init(jax.random.key(seed))

    def seed_environments(self, seed: int) -> None:
        """Sets what environments are seeded with, for a state that was not made here: one from a checkpoint.

        Raises:
            ValueError: It is no integer.
        """
        if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
            raise ValueError(f"seed is {seed!r}; it must be an integer, 0 or more")
        self._seed = int(seed)

    def compile(self) -> None:
        """Compiles what acts and what learns, if it is not compiled yet: no thread of an actor does."""
        for acting in self._acting:
            acting.compile()
        self._learning.compile()

    def run(
        self, state: SebulbaState, num_updates: int, *, stop: threading.Event | None = None
    ) -> tuple[SebulbaState, SebulbaWindow]:
        """Makes updates.

        Actors begin with the first call, in fresh environments, and keep on acting between calls. A state other than
        that of the last call makes them begin anew.

        Args:
            state: Donated: use the returned one from here on.
            num_updates: How many.
            stop: Set, the call returns after the update that is under way, or at once if none is.

        Raises:
            ValueError: `num_updates` is no integer from 1 to what one call can count, or the state was donated before.
            ActorError: Something went wrong in an actor; thread, device and environment are named, and the cause is
                attached.
            TimeoutError: Environments or a device take longer than they may.
        """
        check_num_updates(num_updates, self.steps_per_update)
        if state.updates.is_deleted():
            raise ValueError("the state was given to an earlier call, which donated it; use the state that it returned")
        self.compile()
        try:
            return self._learn(state, num_updates, stop or threading.Event())
        except BaseException as error:
            earlier = self._crew.take_failures() if self._crew is not None else ()
            for note in (*earlier, *self.close()):
                error.add_note(note)
            raise

    def close(self) -> list[str]:
        """Ends actors and environments, within seconds; returns what goes wrong with it, a line each."""
        crew, self._crew = self._crew, None
        return crew.close() if crew is not None else []

    def __enter__(self) -> "Sebulba":
        return self

    def __exit__(self, *error: Any) -> None:
        self._end()

    def _learn(
        self, state: SebulbaState, num_updates: int, stop: threading.Event
    ) -> tuple[SebulbaState, SebulbaWindow]:
        crew, pulse = self._crew_for(state), self._pulse
        window, tally = self._learning.empty_window(), Tally()
        while tally.updates < num_updates and not stop.is_set():
            update = crew.next_update
            pulse.enter("trajectories")
            rollouts = crew.collect(lambda: not stop.is_set())
            if rollouts is None:
                break
            pulse.enter("update")
            trajectories = self._learning.assemble([rollout.shards for rollout in rollouts])
            tally.add(update, rollouts, self.envs_per_thread)
            del rollouts
            state, window = self._learning.update(state, window, trajectories)
            del trajectories
            _wait_for(window.updates, f"update {update}", crew, stop)
            pulse.enter("publish")
            crew.publish(update + 1, self._learning.actor_params(state))
        pulse.enter("other")
        before, self._spent = self._spent, (_seconds(crew), dict(pulse.seconds))
        actor_shares, learner_shares = map(shares, before, self._spent)
        report = SebulbaWindow(
            sums=self._learning.finish(window, state),
            updates=tally.updates,
            episodes=tally.episodes,
            lag=dict(tally.lag),
            actor_shares=actor_shares,
            learner_shares=learner_shares,
            discarded_rows=tally.discarded_rows,
            failures=crew.take_failures(),
        )
        self._returned = state.updates
        return state, report

    def _crew_for(self, state: SebulbaState) -> Crew:
        """The actors that go on from this state: those that are there, or new ones."""
        if self._crew is None or self._crew.has_ended or state.updates is not self._returned:
            self._end()
            update = int(jax.device_get(state.updates))
            self._crew = Crew(
                self.config, self.environments, self._acting, self.split.learners, self._seed, state.key, update
            )
            self._crew.publish(update, self._learning.actor_params(state))
            # One for all calls: what passes between them is a part of what the learner's time goes to.
            self._pulse, self._spent = Pulse(LEARNER_ACTIVITIES), ({}, {})
        return self._crew

    def _end(self) -> None:
        for complaint in self.close():
            warnings.warn(complaint, RuntimeWarning, stacklevel=3)


def _seconds(crew: Crew) -> dict[str, float]:
    """What all actors together have spent on what."""
    readings = [dict(actor.pulse.seconds) for actor in crew.actors]
    return {name: sum(reading[name] for reading in readings) for name in readings[0]}


def _wait_for(array: Any, what: str, crew: Crew, stop: threading.Event) -> None:
    """Until the devices have made an array, while they are watched, and the actors unless the run is to stop anyway."""
    began, pause = time.perf_counter(), 1e-4
    while not array.is_ready():
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
        if not stop.is_set():
            crew.check()
        crew.check_time(what, began, "device_timeout")
