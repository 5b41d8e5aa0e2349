"""Checks of this machine: packages, device, memory, data sets and speed, with advice for each problem."""

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
from fedgma.machine import EXTRAS, available_cores

PURPOSES = {
    "numpy": "everything",
    "torch": "training",
    "pydantic": "settings",
    "safetensors": "checkpoints",
    "filelock": "run folders",
    "scipy": "intervals",
    "matplotlib": "pictures",
    "pillow": "images in files",
    "pooch": "downloads",
    "numba": "LeNet and logistic regression on a CPU, several times as fast",
    "pyarrow": "data sets in parquet files",
}
IMPORTED_AS = {"pillow": "PIL"}
NEEDED = (None, "sim")  # extras that every command needs


class Finding(NamedTuple):
    """The result of one check; `advice` is empty if there is no problem."""

    what: str
    found: str
    advice: str = ""
    must: bool = False  # runs cannot be trained without it


def examine(out: Path = Path("runs")) -> Iterator[Finding]:
    """All checks that need no training."""
    yield from _packages()
    yield _device()
    yield from _room(out)
    yield from _data()


def _packages() -> Iterator[Finding]:
    for name, purpose in PURPOSES.items():
        extra = EXTRAS.get(IMPORTED_AS.get(name, name))
        try:
            yield Finding(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            package = f"fedgma[{extra}]" if extra else "fedgma"
            yield Finding(name, "missing", f"pip install '{package}', for {purpose}", extra in NEEDED)


def _device() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("device", "unknown without torch", "pip install 'fedgma[sim]'", True)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Finding("device", f"{torch.cuda.get_device_name()}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
    cores = available_cores()
    summary = f"cpu, {cores} cores, torch uses {torch.get_num_threads()} threads"
    if shutil.which("nvidia-smi"):
        return Finding(
            "device", summary, "this machine seems to have a GPU, but torch cannot use it; install torch with CUDA"
        )
    limits = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    if limits and torch.get_num_threads() < cores:
        return Finding("device", summary, f"torch uses fewer threads than cores; unset {limits[0]} to use all")
    return Finding("device", summary)


def _room(out: Path) -> Iterator[Finding]:
    for name, folder in (("run folders", out), ("cache", cache_folder())):
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free / 2**30
        summary = f"{folder}, {free:.0f} GiB free"
        if not os.access(there, os.W_OK):
            yield Finding(name, summary, f"{there} is not writable; choose another folder", name == "run folders")
        else:
            yield Finding(
                name, summary, "less than 1 GiB is free; delete files or choose another disk" if free < 1 else ""
            )


def _data() -> Iterator[Finding]:
    try:
        for dataset in availability():
            place, advice = (dataset.where, "") if dataset.here else ("absent", dataset.where)
            yield Finding(f"data: {dataset.name}", place, advice)
    except DataError as error:
        yield Finding("data", "FEDGMA_DATA is wrong", str(error), True)


def measure_speed(seconds: float = 10.0, device: str = "auto") -> Finding:
    """Rounds per second of the embedded comparison, without start-up and compilation."""
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
    total = 200 * len(members) / rate
    summary = (
        f"{rate:.0f} rounds/s after {ready - began:.0f} s of preparation; the default comparison takes {total:.0f} s"
    )
    return Finding("speed", summary, "" if total < 90 else _faster())


def _faster() -> str:
    """What would make training faster; never what is there already."""
    try:
        metadata.version("numba")
    except metadata.PackageNotFoundError:
        return f"pip install 'fedgma[fast]', for {PURPOSES['numba']}"
    return "other programs use the processor; close them and measure again"
