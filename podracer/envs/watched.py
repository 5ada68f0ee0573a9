"""Host environments that are given a time for what they do, for callers that cannot do anything else meanwhile."""

from collections.abc import Callable
from typing import Any, TypeVar

from jaxtyping import PyTree

from podracer.envs.host import EnvironmentSlice, HostEnvironment, HostFactory, failure_in_words
from podracer.types import EnvironmentSpec, TimeStep
from podracer.worker import Worker

Returned = TypeVar("Returned")


class WatchedEnvironment:
    """Host environments in a thread of their own, which is waited for no longer than the factory says.

    Args:
        factory: Makes the environments; without limits, in the thread that calls.
        where: Which.

    Raises:
        TimeoutError: Making them, or whatever is asked of them later, takes longer.
        RuntimeError: They raise something later, which is its cause.
    """

    def __init__(self, factory: HostFactory, where: EnvironmentSlice) -> None:
        self._start_timeout, self._step_timeout = factory.start_timeout, factory.step_timeout
        self._name = f"environments {factory.name}"
        self._worker = Worker(self._name)
        made: list[HostEnvironment] = []
        try:
            self._worker.call("making them", lambda: made.append(factory(where)), self._start_timeout)
        except BaseException:
            self._worker.end(lambda: made[0].close() if made else None)  # If they come after all.
            raise
        (self._environment,) = made

    @property
    def spec(self) -> EnvironmentSpec:
        return self._environment.spec

    @property
    def num_envs(self) -> int:
        return self._environment.num_envs

    def reset(self) -> TimeStep:
        return self._ask("reset", self._environment.reset, self._start_timeout)

    def step(self, action: PyTree) -> TimeStep:
        return self._ask("step", lambda: self._environment.step(action), self._step_timeout)

    def attribute(self, name: str) -> Any:
        """An attribute that environments may have, such as `render`; None where they do not."""
        return getattr(self._environment, name, None)

    def call(self, what: str, function: Callable[[], Returned]) -> Returned:
        """Something else that the environments' thread is to do."""
        return self._ask(what, function, self._step_timeout)

    def _ask(self, what: str, function: Callable[[], Returned], timeout: float | None) -> Returned:
        try:
            return self._worker.call(what, function, timeout)
        except Exception as error:
            if self._worker.hangs:
                raise
            raise RuntimeError(f"{self._name}: {what}: {failure_in_words(error)}") from error

    def close(self) -> None:
        """Ends them, or gives up on it after the time that a step may take."""
        hung = self._worker.hangs
        # Of environments that hang another thread may end the processes; that they hang is known already.
        worker = Worker(f"{self._name}, which hang") if hung else self._worker
        try:
            worker.call("close", self._environment.close, self._step_timeout)
        except TimeoutError:
            if not hung:
                raise
        finally:
            worker.end()
            if hung:
                self._worker.end()
