"""What a measurement was taken on."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

from podracer.machine import cores

PACKAGES = ("podracer-rl", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")


def describe() -> dict[str, Any]:
    """Hardware, versions and the commit. Names neither the host nor its user."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": cores(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "environment": {name: os.environ[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS") if name in os.environ},
    }


def in_words(machine: dict[str, Any]) -> str:
    """What `describe` gives, as a line."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    changed = " with uncommitted changes" if machine["uncommitted_changes"] else ""
    return (
        f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_gib']} GiB, {machine['os']}; "
        f"{packages}; commit {machine['commit']}{changed}"
    )


def host_hash(machine: dict[str, Any]) -> str:
    """Eight characters that are equal for equal hardware and system."""
    identity = "|".join(str(machine[key]) for key in ("cpu", "cores", "memory_gib", "os"))
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def resident_megabytes() -> float:
    """What this process holds in memory now; where the system does not tell, the most it has held."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    here = pathlib.Path(__file__).parent
    try:
        result = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
