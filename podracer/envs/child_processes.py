"""The processes that this one has started, to see whether environments have ended theirs."""

import multiprocessing
import pathlib


def child_processes() -> set[int]:
    """The ids of this process's children that run, without the servants of `multiprocessing`, which stay."""
    processes = pathlib.Path("/proc")
    if not (processes / "self").exists():
        return {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    multiprocessing.active_children()  # Collects those that have ended.
    own = str((processes / "self").resolve().name)
    children = set()
    for process in processes.glob("[0-9]*"):
        try:
            # After the name, which may contain anything: the state, then the parent.
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (process / "cmdline").read_bytes()
        except OSError:  # It has ended in the meantime.
            continue
        servant = b"multiprocessing.resource_tracker" in command or b"multiprocessing.forkserver" in command
        if parent == own and state != "Z" and not servant:
            children.add(int(process.name))
    return children
