"""Gymnasium environments stepped one after the other, under the contract of host environments.

A process that holds environments (`podracer.envs.gymnasium_processes`) runs this file alone. So it imports neither
podracer nor JAX: the process starts fast, stays small and takes no accelerator.
"""

import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

FIRST, MID, LAST = 0, 1, 2  # As in `podracer.types.StepType`.

# The kinds of number that an array of a kind may be filled with: neither rounding reals nor cutting complex numbers.
_KINDS = {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}


class Leaf(NamedTuple):
    """One array of an observation: its name in errors, and its shape and dtype without a batch axis."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Rows(NamedTuple):
    """A timestep `[n]`, with the observation as a list of leaves `[n, ...]` in the order of the space."""

    step_type: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    leaves: list[np.ndarray]


class Columns:
    """Environments `first_index .. first_index + n - 1`, each stepped by itself.

    Args:
        name: What errors call the kind of environment.
        makers: One for each environment.
        first_index: The index of the first in the run.
        seeds: One for each, for its first reset; later ones continue its generator.
        options: The `options` of every reset.

    Raises:
        ValueError: The environments have different spaces.
    """

    def __init__(
        self,
        name: str,
        makers: Sequence[Callable[[], Any]],
        first_index: int,
        seeds: Sequence[int],
        options: dict[str, Any] | None,
    ) -> None:
        self._name, self._first_index, self._options = name, first_index, options
        self._seeds: list[int | None] = list(seeds)
        self._leaves: Sequence[Leaf] = ()
        self._rows: Any = None
        self._environments: list[Any] = []
        try:
            for make in makers:
                self._environments.append(make())
            self.observation_space = self._environments[0].observation_space
            self.action_space = self._environments[0].action_space
            for b, environment in enumerate(self._environments):
                for which in ("observation_space", "action_space"):
                    if getattr(environment, which) != getattr(self, which):
                        raise ValueError(
                            f"the environments of {name} differ: the {which} of environment {first_index} is "
                            f"{getattr(self, which)}, that of environment {first_index + b} "
                            f"{getattr(environment, which)}"
                        )
        except BaseException:
            self.close()
            raise

    def reset(self, leaves: Sequence[Leaf]) -> Rows:
        """FIRST of every environment, with observations of these leaves."""
        n = len(self._environments)
        self._leaves = [Leaf(*leaf) for leaf in leaves]
        arrays = [np.zeros((n, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        self._rows = Rows(np.zeros(n, np.int8), np.zeros(n, np.float32), np.ones(n, np.float32), arrays)
        for b in range(n):
            self._try(self._start, b)
        return self._rows

    def step(self, actions: np.ndarray) -> Rows:
        """The next rows, in the arrays of the last ones. After LAST the action is ignored and FIRST follows."""
        for b in range(len(self._environments)):
            if self._rows.step_type[b] == LAST:
                self._try(self._start, b)
            else:
                # A Box of shape () takes an array, Discrete a number.
                self._try(self._advance, b, actions[b, ...] if hasattr(self.action_space, "low") else actions[b])
        return self._rows

    def frame(self) -> Any:
        """A picture of the first environment by its own `render`, None if it was made without `rgb_array`."""
        environment = self._environments[0]
        return environment.render() if getattr(environment, "render_mode", None) == "rgb_array" else None

    def close(self, idle: bool = True) -> None:
        """Closes the environments. In the middle of a step, only those are ended that can be, by a `kill` of theirs."""
        for environment in self._environments:
            if idle:
                environment.close()
            elif hasattr(environment, "kill"):
                environment.kill()

    def _start(self, b: int) -> None:
        # A copy, since Gymnasium's own code takes entries out of it.
        options = None if self._options is None else dict(self._options)
        observation, _ = self._environments[b].reset(seed=self._seeds[b], options=options)
        self._seeds[b] = None
        self._write(b, FIRST, 0.0, 1.0, observation)

    def _advance(self, b: int, action: Any) -> None:
        observation, reward, terminated, truncated, _ = self._environments[b].step(action)
        terminated, truncated = (
            bool(one(x, name)) for x, name in ((terminated, "terminated"), (truncated, "truncated"))
        )
        step_type = LAST if terminated or truncated else MID
        # Where both are true, termination wins.
        self._write(b, step_type, one(reward, "reward"), 0.0 if terminated else 1.0, observation)

    def _write(self, b: int, step_type: int, reward: float, discount: float, observation: Any) -> None:
        values = flatten(self.observation_space, observation)
        for leaf, array, value in zip(self._leaves, self._rows.leaves, values, strict=True):
            array[b] = checked(leaf, value, leaf.shape)
        self._rows.step_type[b], self._rows.reward[b], self._rows.discount[b] = step_type, reward, discount

    def _try(self, function: Callable[..., None], b: int, *arguments: Any) -> None:
        try:
            function(b, *arguments)
        except Exception as error:
            error.add_note(f"in environment {self._first_index + b} of {self._name}")
            raise


def flatten(space: Any, observation: Any) -> list[Any]:
    """The leaves of an observation, or of a batch of them, in the order of its space.

    Raises:
        ValueError: A part is missing.
    """
    spaces = getattr(space, "spaces", None)
    if spaces is None:
        return [observation]
    pairs = list(spaces.items() if isinstance(spaces, dict) else enumerate(spaces))
    parts = dict(observation) if isinstance(spaces, dict) else dict(enumerate(observation))
    missing = [key for key, _ in pairs if key not in parts]
    if missing:
        raise ValueError(f"an observation lacks {missing[0]!r}, which its space {space} has")
    return [leaf for key, inner in pairs for leaf in flatten(inner, parts[key])]


def checked(leaf: Leaf, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The value of a leaf as an array, if it fills it without broadcasting, rounding or cutting integers off.

    Raises:
        ValueError: It does not.
    """
    array = np.asarray(value)
    if array.shape != shape or array.dtype.kind not in _KINDS[np.dtype(leaf.dtype).kind]:
        raise ValueError(
            f"the observation at {leaf.name} is {array.dtype}{list(array.shape)}; its space says "
            f"{leaf.dtype}{list(shape)}"
        )
    if np.dtype(leaf.dtype).kind in "iu" and not np.can_cast(array.dtype, leaf.dtype) and array.size:
        limits = np.iinfo(leaf.dtype)
        for bound in (array.min(), array.max()):
            if not limits.min <= int(bound) <= limits.max:
                raise ValueError(f"the observation at {leaf.name} has {bound}, which {leaf.dtype} does not hold")
    return array


def one(value: Any, what: str) -> float:
    """A number, also where it is the only one of an array.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, bool | int | float):  # Nearly always, so faster.
        return float(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise ValueError(f"step returned a {what} of {array.dtype}{list(array.shape)}; one number is needed")
    return float(array.reshape(()))


def serve(descriptor: int) -> None:
    """The life of a process: makes `Columns` as its parent says, answers calls of their methods, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(descriptor)
    columns: Any = None
    try:
        while True:
            try:
                method, arguments = connection.recv()
            except (EOFError, OSError):
                return  # The parent is gone.
            try:
                if method == "make":
                    path, pickled = arguments
                    sys.path[:] = path
                    columns = Columns(*importlib.import_module("cloudpickle").loads(pickled))
                    answer: Any = columns.observation_space, columns.action_space
                else:
                    answer = getattr(columns, method)(*arguments)
                # Classes of this file have another name in the parent.
                connection.send((True, tuple(answer) if isinstance(answer, Rows) else answer))
            except Exception as error:
                connection.send((False, _portable(error)))
    finally:
        if columns is not None:
            columns.close()


def _end_with(parent: int) -> None:
    """Ends the process when its parent is gone. An environment that hangs would not see the connection close."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _portable(error: Exception) -> tuple[bytes | None, str]:
    text = traceback.format_exc()
    try:
        return importlib.import_module("cloudpickle").dumps(error.with_traceback(None)), text
    except Exception:  # Whatever an exception holds may refuse to be pickled.
        return None, text
