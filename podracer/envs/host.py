"""Environments that run on the host: batches of them, in NumPy, under the contract of every environment.

`Sebulba` steps them in threads. Any JAX environment can be one as well, which is how the two architectures are
compared.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from podracer.envs.actions import sample_action
from podracer.envs.autoreset import Autoreset
from podracer.envs.packages import EnvironmentUnavailableError
from podracer.envs.rendering import render
from podracer.streams import Stream, fold_in_each, key_of_each, stream_key
from podracer.types import ArraySpec, EnvironmentSpec, TimeStep, key_shape, leaf_name
from podracer.worker import Worker

_MAX_SEED = 2**31 - 1  # What every package takes.


@dataclasses.dataclass(frozen=True)
class EnvironmentSlice:
    """Which of a run's environments a batch holds, and what they are seeded with.

    Attributes:
        num_envs: B.
        first_index: The index of the first of them among all environments of the run.
        seed: The run's.
        start: The update before which they begin. Those of a resumed run are not those that it began with.
        attempt: How often they were made before for the same start: an environment that crashed is not to do so again.
        rollout_length: Steps per update, by which JAX environments draw their keys.
    """

    num_envs: int
    first_index: int = 0
    seed: int = 0
    start: int = 0
    attempt: int = 0
    rollout_length: int = 128

    def seeds(self) -> list[int]:
        """One integer within `[0, 2^31 - 1)` per environment, consecutive and so distinct within a run."""
        sequence = np.random.SeedSequence((self.seed, self.start, self.attempt))
        base = int(sequence.generate_state(1, np.uint64)[0])
        return [(base + self.first_index + b) % _MAX_SEED for b in range(self.num_envs)]


class HostEnvironment(Protocol):
    """`B` environments on the host, stepped together.

    Timesteps have NumPy leaves, of the shapes and dtypes of the spec behind the axis `[B]`, which the next `step` may
    overwrite. The contract is that of `podracer.envs.Autoreset`: the step after LAST ignores the action and returns
    FIRST of a fresh episode, with reward 0 and discount 1, and LAST has the true final observation. Column `b` is the
    same environment at every step. The discount is 0 where nothing that follows counts: where an episode terminated,
    and, if the environment says so, within an episode, as at a lost life.

    An environment may also have

    - `render() -> uint8 [H, W, 3]`, a picture of the first environment, to record episodes;
    - `frames_per_step: int`, how many frames of an emulator one step takes, 1 where it is missing;
    - `reference_scores: tuple[float, float]`, the returns of a random player and of a human, to normalise by.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """Observation and action spaces, without the batch axis."""
        ...

    @property
    def num_envs(self) -> int:
        """B."""
        ...

    def reset(self) -> TimeStep:
        """FIRST of all environments. Called once, before any `step`."""
        ...

    def step(self, action: PyTree) -> TimeStep:
        """The next timesteps `[B]` after `action [B, ...]` in NumPy.

        Raises:
            ValueError: There is not one action per environment.
        """
        ...

    def close(self) -> None:
        """Ends all that belongs to the environments, such as processes. May be called from another thread."""
        ...


class HostFactory:
    """Makes batches of one kind of host environment.

    Args:
        name: What errors call it.
        make: Makes a batch; called in the thread that will step it.
        start_timeout: Seconds in which environments have to be made and reset where nothing else says so: to ask for
            the spec, in evaluation, in recording. None for any time, in the thread that calls.
        step_timeout: The same to step, or to draw.

    Attributes:
        name: As given.
        start_timeout: As given.
        step_timeout: As given.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[EnvironmentSlice], HostEnvironment],
        *,
        start_timeout: float | None = 120.0,
        step_timeout: float | None = 60.0,
    ) -> None:
        self.name, self.start_timeout, self.step_timeout = name, start_timeout, step_timeout
        self._make = make

    def with_timeouts(self, start_timeout: float | None, step_timeout: float | None) -> "HostFactory":
        """The same with other limits."""
        return HostFactory(self.name, self._make, start_timeout=start_timeout, step_timeout=step_timeout)

    @property
    def spec(self) -> EnvironmentSpec:
        """Of every batch."""
        return self._facts[0]

    @property
    def frames_per_step(self) -> int:
        """1 where the environments do not say."""
        return self._facts[1]

    @property
    def reference_scores(self) -> tuple[float, float] | None:
        """The returns of a random player and of a human, None where they are not known."""
        return self._facts[2]

    @functools.cached_property
    def _facts(self) -> tuple[EnvironmentSpec, int, tuple[float, float] | None]:
        """Makes a batch of one environment to ask it, and closes it."""

        def ask() -> tuple[EnvironmentSpec, int, tuple[float, float] | None]:
            environment = self(EnvironmentSlice(1))
            try:
                frames_per_step = getattr(environment, "frames_per_step", 1)
                return environment.spec, frames_per_step, getattr(environment, "reference_scores", None)
            finally:
                environment.close()

        worker = Worker(f"the factory of {self.name}")
        try:
            return worker.call("making one environment to ask for its spec", ask, self.start_timeout)
        finally:
            worker.end()

    def __call__(self, where: EnvironmentSlice) -> HostEnvironment:
        """Makes the environments of a slice.

        Raises:
            ValueError: What was made is no host environment, or of another size.
        """
        environment: Any = self._make(where)
        missing = [name for name in ("spec", "num_envs", "reset", "step", "close") if not hasattr(environment, name)]
        if missing:
            what = "None" if environment is None else f"a {type(environment).__name__} without {', '.join(missing)}"
            raise ValueError(f"the factory of {self.name} returned {what}; a podracer.envs.HostEnvironment is needed")
        if environment.num_envs != where.num_envs:
            environment.close()
            raise ValueError(
                f"the factory of {self.name} made {environment.num_envs} environments; {where.num_envs} were asked for"
            )
        return environment


class JaxHostEnvironment:
    """A JAX environment as a host environment.

    Its keys are those that Anakin uses, so that both architectures step through the same episodes.

    Args:
        stream: Of a raw environment; batches of the same one share what is compiled.
        where: The slice.

    Raises:
        EnvironmentUnavailableError: JAX was told to leave the CPU out.
    """

    def __init__(self, stream: Autoreset, where: EnvironmentSlice) -> None:
        self._stream, self._where = stream, where
        self._steps = 0
        self._state: PyTree = None
        self._timestep: Any = None
        # The host's own device, whatever the agent runs on.
        try:
            self._device = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
            if not platforms or "cpu" in platforms.split(","):
                raise
            raise EnvironmentUnavailableError(
                "a JAX environment on the host needs JAX's CPU device, which this program was told to leave out: "
                f"JAX_PLATFORMS is {platforms!r}; {f'{platforms},cpu'!r} has it"
            ) from error
        self._indices = where.first_index + np.arange(where.num_envs, dtype=np.uint32)

    @property
    def spec(self) -> EnvironmentSpec:
        return self._stream.spec

    @property
    def num_envs(self) -> int:
        return self._where.num_envs

    def reset(self) -> TimeStep:
        counters = self._counters(self._where.seed, self._where.start, self._where.attempt, 0)
        first = self._emit(*_reset(self._stream, *counters[:-1]))
        # Compiled now, when time is given for it, and not in the first step.
        action = jax.eval_shape(lambda key: sample_action(self.spec, key, self.num_envs), key_shape())
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=self._device), action)
        jax.block_until_ready(_step(self._stream, self._state, zeros, *counters))
        return first

    def step(self, action: PyTree) -> TimeStep:
        check_actions(action, self.num_envs)
        update, t = divmod(self._steps, self._where.rollout_length)
        self._steps += 1
        counters = self._counters(self._where.seed, self._where.start + update, self._where.attempt, t)
        return self._emit(*_step(self._stream, self._state, jax.device_put(action, self._device), *counters))

    def render(self) -> np.ndarray:
        """A picture of the first environment."""
        state, observation = jax.tree.map(lambda x: x[0], (self._state[0], self._timestep.observation))
        return render(self._stream.environment, state, observation)

    def close(self) -> None:
        """Nothing is open."""

    def _emit(self, state: PyTree, timestep: TimeStep) -> TimeStep:
        self._state, self._timestep = state, jax.device_get(timestep)
        return self._timestep

    def _counters(self, *numbers: int) -> tuple[jax.Array, ...]:
        """The indices of the environments and what else keys are made of, on the device."""
        return jax.device_put((self._indices, *[np.uint32(number) for number in numbers]), self._device)


# Compiled once for all batches of a stream: threads and restarts share it.
@functools.partial(jax.jit, static_argnums=0)
def _reset(
    stream: Autoreset, indices: jax.Array, seed: jax.Array, start: jax.Array, attempt: jax.Array
) -> tuple[PyTree, TimeStep]:
    key = stream_key(jax.random.key(seed), Stream.RESET)
    again = jax.random.fold_in(jax.random.fold_in(key, start), attempt)
    return stream.reset(key_of_each(_choose((start == 0) & (attempt == 0), key, again), indices))


@functools.partial(jax.jit, static_argnums=0)
def _step(
    stream: Autoreset,
    state: PyTree,
    action: PyTree,
    indices: jax.Array,
    seed: jax.Array,
    update: jax.Array,
    attempt: jax.Array,
    t: jax.Array,
) -> tuple[PyTree, TimeStep]:
    key = stream_key(jax.random.key(seed), Stream.ENVIRONMENT)
    key = _choose(attempt == 0, key, jax.random.fold_in(key, attempt))
    return stream.step(state, action, fold_in_each(fold_in_each(key_of_each(key, indices), update), t))


def _choose(is_first: jax.Array, first: jax.Array, again: jax.Array) -> jax.Array:
    """A key by whether an environment begins as in a fresh run: it has Anakin's then."""
    data = jnp.where(is_first, jax.random.key_data(first), jax.random.key_data(again))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(first))


def check_actions(action: PyTree, num_envs: int) -> None:
    """Whether there is one action per environment, without which some packages wait for ever.

    Raises:
        ValueError: There is not.
    """
    for leaf in map(np.asarray, jax.tree.leaves(action, is_leaf=lambda x: isinstance(x, list))):
        if leaf.shape[:1] != (num_envs,):
            raise ValueError(f"the actions have the shape {leaf.shape}; there are {num_envs} environments")


def timestep_spec(spec: EnvironmentSpec) -> Any:
    """The leaves of a timestep, without the batch axis."""
    scalars: Any = (ArraySpec((), dtype) for dtype in ("int8", "float32", "float32"))
    step_type, reward, discount = scalars
    return TimeStep(step_type, reward, discount, spec.observation)


def failure_in_words(error: BaseException | None) -> str:
    """What environments raised, in one line; those that know which of them failed say so in a note."""
    # The traceback of another process is a note as well, of many lines.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return ", ".join([f"{type(error).__name__}: {error}", *notes])


def check_timestep(name: str, spec: EnvironmentSpec, num_envs: int, timestep: TimeStep) -> None:
    """Whether a timestep is what the spec says, by leaf name.

    Raises:
        ValueError: It is not.
    """
    expected = timestep_spec(spec)
    if not isinstance(timestep, TimeStep):
        raise ValueError(f"{name} emits a {type(timestep).__name__}; a podracer.types.TimeStep is needed")
    found: list[Any] = [jax.tree.structure(tree) for tree in (expected, timestep)]
    if found[0] != found[1]:
        raise ValueError(f"{name} emits {found[1]}, its spec says {found[0]}")

    def check(path: Any, leaf_spec: ArraySpec, leaf: Any) -> None:
        shape, dtype = (num_envs, *leaf_spec.shape), leaf_spec.dtype
        found = getattr(leaf, "dtype", f"a {type(leaf).__name__} "), list(np.shape(leaf))
        if found != (dtype, list(shape)):
            raise ValueError(f"{name} emits {found[0]}{found[1]} at {leaf_name(path)}; {dtype}{list(shape)} is due")

    jax.tree_util.tree_map_with_path(check, expected, timestep)
