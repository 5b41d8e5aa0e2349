"""What this machine has and lacks for fedgma: packages, device, memory, data sets, speed; each with what to do."""

import os
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from fedgma.data.files.cache import cache_folder
from fedgma.data.files.locate import availability
from fedgma.errors import DataError

# package -> extra that brings it, and what it is for; those of `sim` are needed by every command
PACKAGES = {
    "numpy": ("", "everything"),
    "torch": ("sim", "training"),
    "pydantic": ("sim", "settings"),
    "safetensors": ("sim", "checkpoints"),
    "filelock": ("sim", "run folders"),
    "scipy": ("sim", "intervals"),
    "matplotlib": ("sim", "pictures"),
    "numba": ("fast", "LeNet and logistic regression on a CPU, several times as fast"),
    "pyarrow": ("hub", "data sets in parquet files"),
}
NEEDED = ("", "sim")


class Finding(NamedTuple):
    """One thing looked at: `advice` is empty where all is well."""

    what: str
    found: str
    advice: str = ""
    must: bool = False  # without it runs cannot be played


def examine(out: Path = Path("runs")) -> Iterator[Finding]:
    """Everything that can be looked at without playing."""
    yield from _packages()
    yield _device()
    yield from _room(out)
    yield from _data()


def _packages() -> Iterator[Finding]:
    for name, (extra, purpose) in PACKAGES.items():
        try:
            yield Finding(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            whole = f"fedgma[{extra}]" if extra else "fedgma"
            yield Finding(name, "missing", f"pip install '{whole}', for {purpose}", extra in NEEDED)


def _device() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("device", "unknown without torch", "pip install 'fedgma[sim]'", True)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Finding("device", f"{torch.cuda.get_device_name()}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"cpu, {cores} cores, torch uses {torch.get_num_threads()} threads"
    if shutil.which("nvidia-smi"):
        return Finding("device", found, "a GPU seems to be here, but this build of torch cannot use it")
    if torch.get_num_threads() < cores:
        return Finding("device", found, "OMP_NUM_THREADS holds torch back, unless that is meant")
    return Finding("device", found)


def _room(out: Path) -> Iterator[Finding]:
    for what, folder in (("run folders", out), ("cache", cache_folder())):
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free / 2**30
        found = f"{folder}, {free:.0f} GiB free"
        if not os.access(there, os.W_OK):
            yield Finding(what, found, f"{there} cannot be written to", what == "run folders")
        else:
            yield Finding(what, found, "less than 1 GiB is left" if free < 1 else "")


def _data() -> Iterator[Finding]:
    try:
        for one in availability():
            found, advice = (one.where, "") if one.here else ("absent", one.where)
            yield Finding(f"data: {one.name}", found, advice)
    except DataError as error:
        yield Finding("data", "FEDGMA_DATA is wrong", str(error), True)


def measure_speed(seconds: float = 10.0, device: str = "auto") -> Finding:
    """Rounds a second of the embedded comparison, start-up and compilation left out."""
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.plan import grid_of, pack, plan
    from fedgma.experiments.play import play_fleet

    materials = Materials(device)
    grid = grid_of({"rounds": 10_000, "evaluate_every": 10})
    (members, *_) = pack(plan(grid, materials, None), materials)
    began = time.monotonic()
    ready, count = 0.0, 0
    for played in play_fleet(members, materials):
        now = time.monotonic()
        if played.line["round"] == 1:
            ready = now
        else:
            count += 1
        if ready and now - ready > seconds and played.run is members[-1]:
            break
    rate = count / (now - ready)
    whole = 200 * len(members) / rate
    found = (
        f"{rate:.0f} rounds/s after {ready - began:.0f} s of preparation; the default comparison takes {whole:.0f} s"
    )
    return Finding("speed", found, "" if whole < 90 else "close other programs, or install 'fedgma[fast]'")
