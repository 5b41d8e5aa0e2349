"""The records of a run: its head (`run.json`) and one line for each round (`rounds.jsonl`)."""

import functools
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import fedgma
from fedgma.data.federation import Federation
from fedgma.data.files import Dataset
from fedgma.data.partitions import Index, Partition
from fedgma.data.pools import normalisation_of
from fedgma.data.skew import class_counts
from fedgma.records.format import DataFacts, Line
from fedgma.simulation.batched.votes import Share, VoteStatistics
from fedgma.simulation.device_round import RoundRecord
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.timeline import Attendance
from fedgma.training.task import Task
from fedgma.training.tasks import CLASSIFICATION

ALWAYS = (
    "round",
    "train",
    "counted",
    "refused",
    "clock",
    "seconds",
)  # fields of every line, evaluated and measured or not
MOST = 20_000  # numbers of a table in run.json
PACKAGES = ("numpy", "torch", "numba", "safetensors")


def describe_run(data: Dataset, federation: Federation, device: torch.device) -> dict[str, Any]:
    """The part of `run.json` that describes software, device, data, their partition and how they reach the model."""
    facts = DataFacts(
        name=data.name,
        source=f"{data.source.kind}: {data.source.name}",
        sha256=data.source.sha256,
        train=len(data.train.y),
        test=len(data.test.y),
    )
    if data.reading:
        facts["reading"] = list(data.reading)
    if federation.notes:
        facts["notes"] = list(federation.notes)
    first = torch.zeros(1, dtype=torch.int64, device=federation.train.y.device)
    facts["shape"] = list(federation.train.batch(first, first)[0].shape[1:])
    if (normalisation := normalisation_of(federation.train)) is not None:
        facts["normalisation"] = {"mean": list(normalisation.mean), "std": list(normalisation.std)}
    return {
        "versions": dict(versions()),
        "device": describe_device(device),
        "data": {**facts, **_holdings(data, federation.clients)},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **({"command": made_by} if (made_by := command_line(sys.argv)) else {}),
    }


def _holdings(data: Dataset, clients: Sequence[Index]) -> dict[str, Any]:
    """Samples of each class at each client, unless there are no classes or the table would be too long."""
    if data.target != "class" or len(data.classes) > MOST:
        return {}
    if len(clients) * len(data.classes) > MOST:
        return {"classes": list(data.classes)}
    counts = class_counts(Partition(tuple(clients)), data.train.y, len(data.classes))
    return {"classes": list(data.classes), "counts": counts.tolist()}


def line_of(record: RoundRecord, seconds: float, task: Task = CLASSIFICATION) -> Line:
    """One line of `rounds.jsonl`; what was not measured in this round is absent, or null if it is of training."""
    line: dict[str, Any] = {
        "round": record.round,
        "train": record.train if record.clients else dict.fromkeys(record.train),
        **record.scores,
    }
    if (attended := record.attendance) is not None:
        line["clock"] = clock_figures(record.round, attended)
    if record.client_scores is not None:
        line["clients"] = client_figures(record.client_scores, record.sampled, lower=task.lower)
    if record.votes is not None:
        line["mask"] = mask_figures(record.votes)
    line["counted"] = record.clients
    line["refused"] = [[client, reason] for client, reason in record.refused]
    return cast(Line, {**line, "seconds": round(seconds, 6)})


def as_planned(line: Mapping[str, Any], spec: RunSpec) -> dict[str, Any]:
    """A line of a shorter run as `spec` would have written it: without extra measurements at that run's end."""
    due, measured = spec.is_due(line["round"]), spec.is_measured(line["round"])
    return {name: value for name, value in line.items() if name in ALWAYS or (measured if name == "mask" else due)}


def client_figures(scores: np.ndarray, sampled: tuple[int, ...], *, lower: bool = False) -> dict[str, float]:
    """Scores over clients: mean of all, of the worst tenth, of those that took part and of those that did not.

    With `lower`, lower scores are better.

    >>> client_figures(np.array([0.5, 1.0, np.nan, 0.0]), (0, 1))
    {'worst_decile': 0.0, 'mean': 0.5, 'participating': 0.75, 'non_participating': 0.0}
    """
    there = np.sort(scores[np.isfinite(scores)])
    if not len(there):
        return {}
    tenth = max(1, len(there) // 10)
    worst = there[-tenth:] if lower else there[:tenth]
    part = np.isin(np.arange(len(scores)), sampled)
    figures = {"worst_decile": float(worst.mean()), "mean": float(there.mean())}
    for name, chosen in (("participating", part), ("non_participating", ~part)):
        values = scores[chosen & np.isfinite(scores)]
        if len(values):
            figures[name] = float(values.mean())
    return figures


def clock_figures(round: int, attended: Attendance) -> dict[str, float]:
    """Simulated time after a round, its length, clients that began and were lost, and how old the updates were."""
    ages = round - attended.rounds
    figures = {"time": attended.time, "seconds": attended.seconds, "asked": attended.asked, "lost": attended.lost}
    if ages.any():
        figures |= {"staleness": float(ages.mean()), "oldest": int(ages.max())}
    return figures


def mask_figures(votes: VoteStatistics) -> dict[str, Any]:
    """The statistics of a round's votes and mask."""
    return {
        **_share(votes.whole),
        "ratio": votes.ratio,
        "cosine": votes.cosine,
        **({} if votes.stability is None else votes.stability._asdict()),
        "histogram": list(votes.histogram),
        "layers": {name: _share(share) for name, share in votes.layers.items()},
    }


def _share(share: Share) -> dict[str, float]:
    return {name: value for name, value in share._asdict().items() if value is not None}


def describe_device(device: torch.device) -> str:
    """A description of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"


def command_line(words: Sequence[str]) -> str:
    """The command of a process of the `fedgma` script, as one would type it; empty for any other process.

    Of whole paths only the last name is kept: folders are private.

    >>> command_line(["/usr/bin/fedgma", "run", "seed=0,1", "dataset=my data.npz", "--out", "/home/ann/runs"])
    "fedgma run seed=0,1 'dataset=my data.npz' --out runs"
    >>> command_line(["fedgma", "run", "model=/home/ann/net.py:Net"])
    'fedgma run model=net.py:Net'
    >>> command_line(["train.py", "--fast"])
    ''
    """
    script = Path(words[0]) if words else Path()
    name = script.parent.name if script.name == "__main__.py" else script.stem
    line = shlex.join([name, *map(_without_folder, words[1:])]) if name == "fedgma" else ""
    return line.encode("utf-8", "replace").decode()  # the name of a file may be in another encoding


def _without_folder(word: str) -> str:
    """A word of a command whose value, if it is a whole path, is cut to its last name."""
    key, sign, value = word.rpartition("=")
    return f"{key}{sign}{Path(value).name or value}" if Path(value).is_absolute() else word


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of the packages that compute, and the commit of the source tree if there is one."""
    packages = {"fedgma": fedgma.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = _commit()
    return {**packages, "commit": commit} if commit else packages


def _commit() -> str:
    """$FEDGMA_COMMIT, or the commit of the checkout that contains the package; empty if there is neither."""
    if named := os.environ.get("FEDGMA_COMMIT"):
        return named
    here = Path(__file__).resolve().parent
    if not (here.parents[2] / ".git").exists():
        return ""
    try:
        asked = ["git", "-C", str(here), "rev-parse", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
