"""What this process finds on the machine: its name, the cores it may use, and packages that are not installed."""

import contextlib
import os
import platform
from pathlib import Path

from fedgma.errors import ConfigError

EXTRAS = {  # name to import -> extra
    **dict.fromkeys(("torch", "pydantic", "typer", "click", "rich", "safetensors", "filelock"), "sim"),
    **dict.fromkeys(("scipy", "matplotlib", "PIL", "pooch"), "sim"),
    "numba": "fast",
    "pyarrow": "hub",
    "flwr": "flower",
    **{name: name for name in ("nvflare", "pfl", "peft", "ray")},
}


def this_machine() -> dict[str, str]:
    """The name of the machine, and what its system calls the time since it was started; "" where it does not say."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"machine": platform.node(), "boot": boot}


def available_cores() -> int:
    """How many cores this process may use; all of the machine's where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def not_installed(error: ImportError) -> ConfigError | None:
    """What to say of an import that failed; None if it is of no package that an extra brings.

    >>> print(not_installed(ModuleNotFoundError(name="scipy.special")))
    scipy is not installed: pip install 'fedgma[sim]'
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package) if isinstance(error, ModuleNotFoundError) else None
    return None if extra is None else ConfigError(f"{package} is not installed: pip install 'fedgma[{extra}]'")
