"""What the exported files hold: every field of `runs.json` and `runs.jsonl`, and the columns of runs as one table."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedgma.paper.entries import Entry
from fedgma.reports.tables import Table
from fedgma.statistics.arms import Summary

Described = Mapping[str, str]

SHARED: Described = {
    "names": "the names of all settings; one that neither `settings` nor the run's line holds is null: the run does "
    "not use it",
    "settings": "settings that all runs share",
    "circumstances": "a list: software, device and data of runs; a line names its entry by the place, from 0",
    "absent": "a list of lists: settings that did not exist when a run was made; only if there are such runs",
    "columns": "the order of the numbers in the lists under `scores` and `curves` of a line",
}
CIRCUMSTANCES: Described = {
    "versions": "of fedgma, Python and packages; `commit` is that of the source, if it was known",
    "device": "the GPU, or the CPU with its number of cores and threads",
    "precision": "fp32, tf32 or bf16",
    "data": "name, source, SHA-256 of the content, number of training and test samples",
    "parameters": "trainable numbers of the model",
    "command": "that made the run; absent if it was not recorded",
}
LINE: Described = {
    "settings": "by dotted name: those in which this run differs from others",
    "circumstances": "the place of its entry in `circumstances` of `runs.json`",
    "absent": "the place of its entry in `absent` of `runs.json`; only if settings are newer than the run",
    "facts": "see below",
    "scores": "by split: `best`, `last10` and `final` accuracy in percent",
    "curves": "by split: the rounds, and the accuracy after each in ten-thousandths; at most 40 of them",
    "mask": "means over the measured rounds: `agreement`, and `histogram`, the share of entries in which the signs of "
    "the updates add up to 0, 1, 2, ... up to the number of clients; empty if not measured",
    "done": "`rounds` that were completed, fewer than in the settings if the run was stopped, and the SHA-256 of the "
    "final model",
}
FACTS: Described = {
    "fingerprint": "the name of the run: a hash of its settings, data and model",
    "started": "time in UTC; absent in some of the first runs",
    "seconds": "training and evaluation; the time of a fleet is divided over its runs",
}
SPLITS: Described = {
    "train": "the training samples of the sampled clients, while they train",
    "test": "the test data; on unseen clients, writers or colours where the experiment has them",
    "validation": "samples held out of every client's training data",
    "seen": "test images in the colours of the training clients",
    "same_writers": "test images of writers who are clients",
    "backdoor": "the share of images that a trigger turns into the attacker's class",
}
COLUMNS: Described = {
    "experiment": "its number",
    "run": "the fingerprint",
    "started": "UTC",
    "device": "GPU or CPU",
    "precision": "fp32, tf32 or bf16",
    "fedgma": "version",
    "torch": "version",
    "commit": "of the source",
    "command": "that made the run",
    "data_sha256": "of the data",
    "seconds": "share of the run in the time of its fleet",
    "rounds_done": "completed rounds",
}


def runs_table(runs: Iterable[tuple[str, Entry]]) -> Table:
    """One row for each run of an experiment: where it comes from, its settings, and its accuracies in percent."""
    listed = list(runs)
    settings = list(dict.fromkeys(name for _, entry in listed for name in entry.settings))
    splits = [split for split in SPLITS if any(split in entry.scores for _, entry in listed)]
    scores = [f"{split}_{name}_percent" for split in splits for name in Summary._fields]
    rows = [(name, *_origin(entry), *_values(entry, settings), *_scores(entry, splits)) for name, entry in listed]
    return Table("runs", "Runs", (*COLUMNS, *settings, *scores), tuple(rows))


def _origin(entry: Entry) -> list[Any]:
    facts, versions, data = entry.facts, entry.facts.get("versions", {}), entry.facts.get("data", {})
    return [
        *(facts.get(name) for name in ("fingerprint", "started", "device", "precision")),
        *(versions.get(name) for name in ("fedgma", "torch", "commit")),
        *(facts.get("command"), data.get("sha256"), facts.get("seconds"), entry.played),
    ]


def _values(entry: Entry, names: Sequence[str]) -> list[Any]:
    values = [entry.settings.get(name) for name in names]
    return [json.dumps(value) if isinstance(value, bool | list | dict) else value for value in values]


def _scores(entry: Entry, splits: Sequence[str]) -> list[Any]:
    return [value for split in splits for value in entry.scores.get(split, (None,) * len(Summary._fields))]
