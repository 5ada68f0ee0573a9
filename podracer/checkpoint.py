"""Checkpoints on Orbax: asynchronous, atomic, verified, and free of pickle.

Orbax writes the arrays; this module decides what is written, what is kept, and what may be read back. Retention is done
here rather than by Orbax's `CheckpointManager`, because a failed write must neither stop training nor be mistaken for a
checkpoint later.

A checkpoint is a directory named by its update. Orbax fills it under a temporary name and renames it when all is on
disk, so that a killed process leaves no half of one. It holds `state` (the arrays, by path), `header` (JSON) and
`checksums.json`: without the last, a flipped bit in an array would be read back as a number.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
import shutil
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from podracer import checkpoint_leaves
from podracer.fields import differences, flatten

_TEMPORARY = ".orbax-checkpoint-tmp"
_CHECKSUMS = "checksums.json"


class _Damaged(Exception):
    """A checkpoint that cannot be read back as it was written."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` found.

    Attributes:
        update: The update that the state was saved after.
        state: Pytree of the template's structure and shardings.
        metadata: As it was given to `Checkpointer.save`.
        skipped: A message for each newer checkpoint that could not be read.
    """

    update: int
    state: PyTree
    metadata: dict[str, Any]
    skipped: tuple[str, ...] = ()


class Checkpointer:
    """Saves the training state while training goes on, and restores it on any number of devices.

    The leaves of a state are arrays, typed PRNG keys, and Python or NumPy scalars. With several processes every one
    calls every method; only the first removes files.

    Args:
        directory: Where the checkpoints are. Made by the first save.
        keep_last: How many of the newest to keep, at least 1.
        keep_best: How many of the best by score to keep besides.
        config: The part of the configuration that a checkpoint must agree with to be restored; JSON. Fields that the
            saved one does not have, because it is older, are not compared.
        report: Called with one line for every failed save and every skipped checkpoint.

    Raises:
        ValueError: For numbers out of range, or a config that is not JSON.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        config: dict[str, Any],
        report: Callable[[str], None] = lambda message: None,
    ):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last is {keep_last} and keep_best {keep_best}; at least 1 and 0 are needed")
        self.errors: list[Exception] = []
        """Every failed save's exception, oldest first."""
        self._directory = pathlib.Path(directory).absolute()
        self._keep_last, self._keep_best = keep_last, keep_best
        self._config = _as_json(config, "the configuration")
        self._report = report
        self._checkpointer = ocp.AsyncCheckpointer(_Handler())
        logging.getLogger("absl").addFilter(_is_not_an_error_of_orbax)
        self._pending: int | None = None
        self._scores: dict[int, float | None] = {}
        self._damaged: set[int] = set()
        self._newest: int | None = None
        self._is_clean = False

    def updates(self) -> list[int]:
        """The updates that a checkpoint is on disk for, oldest first, whether or not it can be read."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.glob("*/") if path.name.isdecimal())

    def best(self) -> int:
        """The update of the checkpoint with the best score; of equal ones the newest.

        Raises:
            ValueError: None that can be read has a score.
        """
        if not (ranked := self._ranked(self.updates())):
            raise ValueError(f"no checkpoint in {self._directory} that can be read has a score")
        return ranked[0]

    def save(self, update: int, state: PyTree, metadata: dict[str, Any], score: float | None = None) -> None:
        """Copies the state and starts to write it.

        The state may be donated as soon as this returns: what is written is a copy on the same devices, because Orbax
        reads a CPU array in place for as long as the write lasts. The call blocks until the state is computed and,
        where the previous save is not finished, until it is. A failed write is reported by the next call of any
        method and recorded in `errors`, never raised.

        Checkpoints of this update and of later ones are removed first: they belong to a future that training has left
        by restoring an earlier one. Saving the update that was saved last does nothing.

        Args:
            update: How many updates led to the state.
            state: Pytree.
            metadata: JSON to give back with the state: counters, the last metrics.
            score: The higher the better; None or NaN where it is not known.

        Raises:
            ValueError: For a negative update, metadata that is not JSON, or a leaf that cannot be saved.
        """
        if update < 0:
            raise ValueError(f"update is {update}; it counts from 0")
        header: dict[str, Any] = {
            "update": update,
            "score": None if score is None or np.isnan(score) else float(score),
            "metadata": _as_json(metadata, "the metadata"),
            "config": self._config,
        }
        leaves = checkpoint_leaves.by_path(state)
        header["leaves"] = {path: checkpoint_leaves.describe(path, leaf) for path, leaf in leaves.items()}
        header["keys"] = checkpoint_leaves.key_impls(leaves)
        self.wait()
        if update == self._newest:
            return
        self._newest = None
        self._remove_unfinished()
        self._remove([later for later in self.updates() if later >= update])
        # Copying to the host and to disk is what a save is for, whatever the loop around it forbids.
        with jax.transfer_guard("allow"):
            arrays = checkpoint_leaves.snapshot(leaves)
            items = {"state": ocp.args.PyTreeSave(arrays)} if arrays else {}
            items["header"] = ocp.args.JsonSave(header)
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._checkpointer.save(self._directory / str(update), _Items(**items))
            except Exception as error:
                self._fail(update, error)
                return
        self._pending = update
        self._scores[update] = header["score"]

    def wait(self) -> None:
        """Blocks until the last save is on disk or has failed, then removes what need not be kept."""
        if self._pending is None:
            return
        update = self._pending
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:
            self._fail(update, error)
            return
        self._pending = None
        self._newest = update
        self._prune()

    def close(self) -> None:
        """Waits for the last save and ends Orbax's threads. Nothing may be called after it."""
        self.wait()
        self._checkpointer.close()

    def restore(self, template: PyTree, update: int | None = None, *, only: str | None = None) -> Restored:
        """Reads back the newest checkpoint that is whole.

        Args:
            template: Pytree of arrays or `jax.ShapeDtypeStruct` with the structure, shapes, dtypes and shardings to
                restore to. A leaf without a sharding, or not committed to its device, is restored so.
            update: The checkpoint to read, instead of the newest.
            only: The name of a top-level field of the saved state, of which `template` then is a template; nothing
                else is read.

        Raises:
            ValueError: If there is no checkpoint, none can be read, the one asked for cannot, it is of another
                experiment (names the fields), or its leaves differ from the template's (lists the paths).
        """
        self.wait()
        self._newest = None
        candidates = self.updates()[::-1]
        if update is not None and update not in candidates:
            raise ValueError(f"no checkpoint of update {update} in {self._directory}; there are {candidates[::-1]}")
        skipped: list[str] = []
        for candidate in candidates if update is None else [update]:
            try:
                header = self._read_header(candidate)
                self._check_config(header)
                state = self._read_state(candidate, header, template, only)
            except _Damaged as error:
                self._damaged.add(candidate)
                skipped.append(f"skipped the checkpoint of update {candidate}: {error}")
                self._report(skipped[-1])
                continue
            return Restored(candidate, state, header["metadata"], tuple(skipped))
        if not skipped:
            raise ValueError(f"no checkpoint in {self._directory}")
        raise ValueError(f"no readable checkpoint in {self._directory}: {'; '.join(skipped)}")

    def _read_header(self, update: int) -> dict[str, Any]:
        """The header, after every byte of the checkpoint has been compared with its checksum."""
        path = self._directory / str(update)
        try:
            expected = json.loads((path / _CHECKSUMS).read_text())
            actual = _checksums(path)
        except (OSError, ValueError) as error:
            raise _Damaged(_one_line(error)) from error
        wrong = [name for name in expected if actual.get(name) != expected[name]]
        if wrong:
            raise _Damaged(f"{wrong[0]} is {'not what was written' if wrong[0] in actual else 'missing'}")
        return self._checkpointer.restore(path, _Items(header=ocp.args.JsonRestore()))["header"]

    def _check_config(self, header: dict[str, Any]) -> None:
        # A field that is younger than the checkpoint says nothing of it.
        known = flatten(header["config"])
        current = {name: value for name, value in flatten(self._config).items() if name in known}
        if differing := list(differences(known, current)):
            raise ValueError(f"{self._directory} holds checkpoints of another experiment: {_first(differing)}")

    def _read_state(self, update: int, header: dict[str, Any], template: PyTree, only: str | None) -> PyTree:
        templates = checkpoint_leaves.by_path(template, only or "")
        saved = header["leaves"]
        if only is not None:
            saved = {path: text for path, text in saved.items() if path == only or path.startswith(f"{only}/")}
            if not saved:
                names = sorted({path.split("/")[0] for path in header["leaves"]})
                raise ValueError(f"the checkpoint of update {update} has no {only!r}; it has {names}")
        wanted = {path: checkpoint_leaves.describe(path, leaf) for path, leaf in templates.items()}
        problems = [f"{path} is missing" for path in wanted if path not in saved]
        problems += [f"{path} is unexpected" for path in saved if path not in wanted]
        problems += [
            f"{path} is {saved[path]} instead of {wanted[path]}"
            for path in wanted
            if path in saved and saved[path] != wanted[path]
        ]
        if problems:
            raise ValueError(f"the checkpoint of update {update} does not fit: {_first(problems)}")
        plan = checkpoint_leaves.restore_args(templates)
        arrays: dict[str, Any] = {}
        if plan:
            args = ocp.args.PyTreeRestore(item=dict.fromkeys(plan, 0), restore_args=plan, partial_restore=True)
            # Its bytes are those that were written, so that an error here is no reason to fall back on another.
            arrays = self._checkpointer.restore(self._directory / str(update), _Items(state=args))["state"]
        impls = header["keys"]
        leaves = [
            checkpoint_leaves.rebuild(arrays.get(path), leaf, impls.get(path)) for path, leaf in templates.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def _fail(self, update: int, error: Exception) -> None:
        self._pending = None
        self._scores.pop(update, None)
        self._is_clean = False
        self._remove_unfinished()
        self._is_clean = False  # Orbax may not have stopped writing yet.
        self.errors.append(error)
        self._report(f"could not save the checkpoint of update {update}: {_one_line(error)}")

    def _remove_unfinished(self) -> None:
        """Removes what killed or failed saves left. Only savers do: a reader may be looking at a run that goes on."""
        if self._is_clean or jax.process_index() != 0:
            return
        for path in self._directory.glob(f"*{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)
        self._is_clean = True

    def _prune(self) -> None:
        updates = self.updates()
        sound = [update for update in updates if update not in self._damaged]
        kept = {*sound[-self._keep_last :], *self._ranked(sound)[: self._keep_best]}
        self._remove([update for update in updates if update not in kept])

    def _remove(self, updates: list[int]) -> None:
        if jax.process_index() != 0:
            return
        for update in updates:
            self._scores.pop(update, None)
            self._damaged.discard(update)
            path = self._directory / str(update)
            # A process killed here leaves nothing that looks like a checkpoint.
            with contextlib.suppress(OSError):
                shutil.rmtree(path.rename(f"{path}{_TEMPORARY}-removed"))

    def _ranked(self, updates: list[int]) -> list[int]:
        """Those with a score, best first."""
        scores = {update: self._score(update) for update in updates}
        scored = [update for update in updates if scores[update] is not None]
        return sorted(scored, key=lambda update: (scores[update], update), reverse=True)

    def _score(self, update: int) -> float | None:
        if update not in self._scores:
            try:
                self._scores[update] = self._read_header(update)["score"]
            except _Damaged as error:
                self._report(f"the checkpoint of update {update} is damaged: {error}")
                self._scores[update] = None
        return self._scores[update]


def _is_not_an_error_of_orbax(record: logging.LogRecord) -> bool:
    """Keeps pages of nested tracebacks off the terminal: each of these errors is in `errors` and reported in a line."""
    return not (record.levelno == logging.ERROR and "orbax" in record.pathname)


class _Handler(ocp.CompositeCheckpointHandler):
    """Adds the checksums of all that was written, just before Orbax gives the checkpoint its name."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        path = pathlib.Path(directory)
        (path / _CHECKSUMS).write_text(json.dumps(_checksums(path)))


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """The arguments that Orbax requires a handler to have of its own."""


def _checksums(path: pathlib.Path) -> dict[str, list[int]]:
    """Size and CRC-32 by file, without Orbax's own files at the top, which it writes last and which hold no value."""
    sums = {}
    for file in sorted(path.glob("*/**/*")):
        if file.is_file():
            size = crc = 0
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    size, crc = size + len(block), zlib.crc32(block, crc)
            sums[file.relative_to(path).as_posix()] = [size, crc]
    return sums


def _as_json(value: dict[str, Any], what: str) -> dict[str, Any]:
    """The value as JSON gives it back, tuples as lists."""
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        raise ValueError(f"{what} must be JSON: {error}") from error


def _one_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    # TensorStore says it at the end of a line of paths.
    return "no space left on the device" if "o space left on device" in text else text.splitlines()[0]


def _first(items: Sequence[str], limit: int = 10) -> str:
    rest = f", and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
