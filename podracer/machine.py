"""What this process may use of the machine."""

import os


def cores() -> int:
    """CPU cores; those that it is bound to, where the system binds processes to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
