"""One actor: a batch of host environments, and the loop that a thread runs on them."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from podracer.envs.host import EnvironmentSlice, HostEnvironment, HostFactory, check_timestep, failure_in_words
from podracer.sebulba.acting import Acting
from podracer.sebulba.episodes import HostEpisodes
from podracer.sebulba.parameter_slot import ParameterSlot, Stopped
from podracer.sebulba.pulse import Pulse
from podracer.types import TimeStep, Trajectory

# What an actor's time goes to. All but the wait for parameters may take as long as it is given, and no longer.
MAKING, RESETTING, STEPPING, ACTING, SENDING = "make", "reset", "step", "act", "transfer"
ACTIVITIES = (MAKING, RESETTING, STEPPING, ACTING, SENDING, "parameters")


class ActorError(RuntimeError):
    """What went wrong in an actor, with the thread, the device and the environment named."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What an actor gives the learner.

    Attributes:
        shards: The trajectory, in one part per learner device, on those devices.
        versions: `[T]`, of the parameters that acted.
        episodes: That finished: their number, and the sums of their returns and lengths.
        discarded: Rows that were lost to environments that had to be made anew.
    """

    shards: list[Trajectory]
    versions: np.ndarray
    episodes: tuple[int, float, int]
    discarded: int = 0


class Actor:
    """Acts in a batch of environments, one rollout after the other.

    Args:
        index: Among all actors of the run.
        factory: Makes the environments.
        where: Which environments, of which `start` and `attempt` are filled in here.
        acting: The compiled functions of the actor's device.
        learner_devices: Where the parts of a trajectory go.
        slot: The parameters.
        stop: The run's; set, the rollout that is under way is abandoned.
        max_restarts: How often the environments may be made anew.
        tell: Called with a line each time that they are.
        is_fresh_each_step: Whether new parameters are taken up within a rollout.

    Attributes:
        pulse: What it is doing; read by the thread that supervises it.
        name: What errors call it.
    """

    def __init__(
        self,
        index: int,
        factory: HostFactory,
        where: EnvironmentSlice,
        acting: Acting,
        learner_devices: tuple[jax.Device, ...],
        slot: ParameterSlot[PyTree],
        stop: threading.Event,
        *,
        max_restarts: int = 0,
        tell: Callable[[str], None] = lambda line: None,
        is_fresh_each_step: bool = False,
    ) -> None:
        self.index, self.pulse = index, Pulse(ACTIVITIES)
        last = where.first_index + where.num_envs - 1
        self.name = f"actor {index} on {acting.device}, {factory.name} {where.first_index} to {last}"
        self._factory, self._where, self._acting, self._learner_devices = factory, where, acting, learner_devices
        self._slot, self._stop = slot, stop
        self._max_restarts, self._tell, self._is_fresh_each_step = max_restarts, tell, is_fresh_each_step
        self._environment: HostEnvironment | None = None
        self._timestep: Any = None
        self._state: PyTree = None
        self._episodes = HostEpisodes.zero(where.num_envs)
        self._restarts = 0
        self._structure: Any
        leaves, self._structure = jax.tree.flatten(acting.timestep)
        self._leaves = [(leaf.shape, leaf.dtype) for leaf in leaves]

    def rollout(self, number: int, key: jax.Array, is_wanted: Callable[[], bool] = lambda: True) -> Rollout:
        """The rollout that goes into update `number`, counted from 0.

        Args:
            number: One more than at the call before. At the first call the environments are made.
            key: The run's root key, on the actor's device.
            is_wanted: Asked at every step; the answer no is for good.

        Raises:
            Stopped: The run has ended, or the rollout is not wanted.
            ActorError: The environments failed once more than they may, or anything else did.
        """
        discarded = 0
        while True:
            done: list[int] = []
            try:
                environment = self._environment or self._make(number)
                made = self._roll(environment, number, key, is_wanted, done)
                return dataclasses.replace(made, discarded=discarded)
            except Stopped:
                raise
            except _EnvironmentFailure as failure:
                with contextlib.suppress(Exception):  # Of environments that are broken already.
                    self.close()
                line = f"{self.name}: {failure}: {failure_in_words(failure.__cause__)}"
                if self._restarts >= self._max_restarts or self._stop.is_set():
                    raise ActorError(line) from failure.__cause__
                self._restarts += 1
                self._tell(f"{line}; made anew, {self._restarts} of {self._max_restarts}")
                discarded += len(done) * self._where.num_envs
            except Exception as error:
                raise ActorError(f"{self.name}: {failure_in_words(error)}") from error

    def close(self) -> None:
        """Ends the environments. May be called from another thread, of an actor that does not answer."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    def _make(self, number: int) -> HostEnvironment:
        where = dataclasses.replace(self._where, start=number, attempt=self._restarts)
        self._state, self._episodes = self._acting.init_actor(), HostEpisodes.zero(where.num_envs)
        with self._calling(MAKING):
            environment = self._factory(where)
        self._environment = environment
        with self._calling(RESETTING):
            self._timestep = self._checked(environment.reset())
        return environment

    def _roll(
        self,
        environment: HostEnvironment,
        number: int,
        key: jax.Array,
        is_wanted: Callable[[], bool],
        done: list[int],
    ) -> Rollout:
        """One attempt at a rollout; `done` has the rows that it got to, for when it fails."""
        acting, pulse = self._acting, self.pulse
        pulse.enter("parameters")
        version, params = self._slot.for_rollout(number)
        pulse.enter(SENDING)
        jax.block_until_ready(params)
        pulse.enter(ACTING)
        (buffers, keys), start = acting.begin(key, self.index, number), self._state
        versions = np.empty(acting.length, np.int64)
        for t in range(acting.length):
            if self._stop.is_set() or not is_wanted():
                raise Stopped
            if self._is_fresh_each_step and t:
                version, params = self._slot.newest()
            versions[t] = version
            buffers, self._state, action = acting.act(params, buffers, self._timestep, self._state, keys, t)
            with self._calling(STEPPING):
                self._timestep = self._checked(environment.step(action))
            pulse.enter(ACTING)
            self._episodes.add(self._timestep)
            done.append(t)
        shards = acting.finish(buffers, self._timestep, start)
        pulse.enter(SENDING)
        pairs = zip(shards, self._learner_devices, strict=True)
        # Waited for: the host's memory of the last row is the environment's again after this.
        shards = jax.block_until_ready([jax.device_put(shard, device) for shard, device in pairs])
        return Rollout(shards, versions, self._episodes.take_finished())

    def _checked(self, timestep: TimeStep) -> TimeStep:
        """A timestep, if it is one of those that acting is compiled for."""
        # At every step, so what says what is wrong, which takes longer, is asked only where something is.
        leaves, structure = jax.tree.flatten(timestep)
        found = [(getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves]
        if structure != self._structure or found != self._leaves:
            check_timestep(self._factory.name, self._acting.spec, self._where.num_envs, timestep)
        return timestep

    @contextlib.contextmanager
    def _calling(self, activity: str) -> Any:
        """While the environments' code runs: how long it takes is watched, and what it raises is theirs."""
        self.pulse.enter(activity)
        try:
            yield
        except BaseException as error:
            # Anywhere but in the main thread, where serial runs are, Ctrl-C too is something that the environments do.
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            raise _EnvironmentFailure(activity) from error


class _EnvironmentFailure(Exception):
    """The environments raised what is the cause of this, while they did what this says."""


def run_actor(
    actor: Actor,
    first: int,
    key: jax.Array,
    put: Callable[[Rollout], None],
    fail: Callable[[BaseException], None],
    complain: Callable[[str], None],
) -> None:
    """What an actor's thread does: rollouts from number `first` on, until the run ends or something goes wrong."""
    try:
        for number in itertools.count(first):
            put(actor.rollout(number, key))
    except Stopped:
        pass
    except BaseException as error:
        fail(error)
    finally:
        close_actor(actor, complain)


def close_actor(actor: Actor, complain: Callable[[str], None]) -> None:
    """Ends an actor's environments; what they raise is put into words, since the run is over whatever it is."""
    try:
        actor.close()
    except BaseException as error:
        complain(f"{actor.name}: close: {failure_in_words(error)}")
