"""What this process may use of the machine."""

import os


def available_cores() -> int:
    """How many cores this process may use; all of the machine's where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
