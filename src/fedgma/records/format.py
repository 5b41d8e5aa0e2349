"""The format of a run folder, its version number, and how folders of an older format are read.

    <fingerprint>/run.json       `Head`: settings, identity, software and device
                  rounds.jsonl   `Line`: one JSON object a round
                  checkpoints/   states to resume from, each with a manifest
                  SHA256SUMS     checksums of the other three files
                  done           `Done`: written last; without it the run is unfinished

`run.json` and the manifest of a checkpoint hold a checksum of themselves. A manifest also holds `Records`: the checksum
in `run.json`, and the SHA-256 of `rounds.jsonl` up to its round. A finished run has the checksums of its three files in
`SHA256SUMS`, for `sha256sum -c` too. So a changed bit, a lost line or a file of another run is found when a run is read
or resumed.

The identity of a run is all that determines its outcome besides its settings: `data`, `clients`, `model`, `task`,
`rule`, `clock`, `precision`, `version`. The fingerprint, which names the folder, is a hash of settings and identity.

Format 2 had no checksums: its records are read as they are. Format 1 had no identity. The reader infers what it can
from the record: the checksum of the data, and name and size of a built-in model. Other parts stay unknown, and an
unknown part equals only another unknown part.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Required, TypedDict

FORMAT = 3  # of run.json, rounds.jsonl and done
CHECKPOINT_FORMAT = 2  # of a checkpoint's manifest
SUMS = "SHA256SUMS"  # of a finished run
CHECKSUM = "checksum"  # the entry of a JSON object that holds the SHA-256 of its other entries

RENAMED = {"cohort": "clients_per_round"}  # settings of format 1 that were renamed

Record = Mapping[str, Any]


class Identity(TypedDict, total=False):
    """What determines a run's outcome besides its settings; unknown parts are absent."""

    data: str  # SHA-256 of the content
    clients: str  # SHA-256 of the owner of each sample, for data passed in Python, or of a user's partition
    model: str  # name and size of a built-in model; SHA-256 of structure, initial weights and code of any other
    task: str  # SHA-256 of the code of a user's task
    rule: str  # SHA-256 of the code of the user's own rule
    clock: str  # SHA-256 of the files of measured delays
    precision: str
    version: str  # the user's name for this version of their data and code


PARTS = tuple(Identity.__annotations__)


class DataFacts(TypedDict, total=False):
    """The data of a run, as recorded."""

    name: str
    source: str
    sha256: str
    train: int
    test: int
    classes: list[str]
    counts: list[list[int]]  # [client, class]; absent if the table would be long
    reading: list[str]  # how a user's arrays were understood, where they are not used as they are
    notes: list[str]  # on the data and their partition
    shape: list[int]  # of a sample as the model sees it
    normalisation: dict[str, list[float]]  # of images: `mean` and `std` of each channel, for pixels in [0, 1]


class MetricFacts(TypedDict):
    """A metric, as recorded."""

    name: str
    better: str  # "higher" or "lower"
    unit: str  # "%" for a share; else the unit, or nothing


class Head(TypedDict, total=False):
    """`run.json`."""

    format: Required[int]
    fingerprint: str
    lineage: str  # the fingerprint without the number of rounds; a longer run can continue a shorter one that shares it
    extends: str  # fingerprint of the shorter run that this run continued
    settings: Required[dict[str, Any]]
    identity: Identity
    versions: dict[str, str]
    device: str
    data: DataFacts
    precision: str
    parameters: Any  # trainable entries; in a Flower run, shape and type of each array
    tied: dict[str, str]  # further names of arrays that the model holds under several; absent if there are none
    compiled_after: int  # rounds that were trained before steps were compiled; absent where nothing was compiled
    metrics: list[MetricFacts]  # verdicts are about the first; absent for a classification, which has the accuracy
    started: str
    command: str  # that made the run; absent in older records and for runs that no command made
    notes: list[str]
    checksum: str


Scores = dict[str, float | None]  # on one split after a round: the loss, and each metric by its name


class Line(TypedDict, total=False):
    """One line of `rounds.jsonl`; further test splits have scores under their own names beside `test`."""

    round: Required[int]
    train: Scores
    test: Scores
    clients: dict[str, float]
    mask: dict[str, Any]
    counted: int
    refused: list[list[Any]]  # client and reason
    clock: dict[str, float]  # simulated time, of a run that has a clock
    seconds: float


class Records(TypedDict):
    """The records that a checkpoint belongs to."""

    run: str  # the checksum in run.json
    lines: str  # SHA-256 of rounds.jsonl up to this round


class Done(TypedDict):
    """`done`: the number of rounds and the checksum of the final model."""

    rounds: int
    sha256: str


def with_checksum(entries: Record) -> dict[str, Any]:
    """The entries of a JSON object, and their checksum.

    >>> is_intact(with_checksum({"rounds": 3})), is_intact({**with_checksum({"rounds": 3}), "rounds": 4})
    (True, False)
    """
    return {**entries, CHECKSUM: _checksum(entries)}


def is_intact(entries: Record) -> bool:
    """Whether the entries of a JSON object match the checksum among them."""
    return entries.get(CHECKSUM) == _checksum(entries)


def _checksum(entries: Record) -> str:
    text = json.dumps({name: value for name, value in entries.items() if name != CHECKSUM}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(settings: Mapping[str, Any], identity: Mapping[str, object] | None = None) -> str:
    """Sixteen hex digits that name a run: a hash of its settings that are not None and of its identity.

    >>> fingerprint({"rounds": 3, "tau": None}) == fingerprint({"rounds": 3})
    True
    >>> fingerprint({"rounds": 3}) == fingerprint({"rounds": 3}, {"data": "ab"})
    False
    """
    text = json.dumps({"settings": present(settings), "identity": dict(identity or {})}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lineage(settings: Mapping[str, Any], identity: Mapping[str, object]) -> str:
    """The fingerprint of a run without its number of rounds."""
    return fingerprint({**settings, "rounds": None}, identity)


def built_in(model: str, parameters: int) -> str:
    """The identity of a built-in model.

    >>> built_in("lenet", 61706)
    'lenet, 61706 parameters'
    """
    return f"{model}, {parameters} parameters"


def identity_of(head: Record) -> Identity:
    """The identity in a record, or what can be inferred from a record of format 1.

    >>> identity_of({"data": {"sha256": "ab"}, "parameters": 7850, "settings": {"model": "logistic"}})
    {'data': 'ab', 'model': 'logistic, 7850 parameters', 'precision': 'fp32'}
    """
    stated = head.get("identity")
    if isinstance(stated, Mapping):
        parts = {name: stated.get(name) for name in PARTS}
    else:
        data, settings = head.get("data"), head.get("settings")
        model = settings.get("model") if isinstance(settings, Mapping) else None
        size = head.get("parameters")
        known = isinstance(model, str) and ":" not in model and isinstance(size, int)
        parts = {
            "data": data.get("sha256") if isinstance(data, Mapping) else None,
            "model": built_in(str(model), size) if known and isinstance(size, int) else None,
            "precision": head.get("precision", "fp32"),
        }
    return {name: value for name, value in parts.items() if isinstance(value, str)}  # type: ignore[return-value]


def recorded_normalisation(head: Record) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation of each channel with which a run's images were normalised; None if they were not.

    The model's input is `(pixels / 255 - mean) / std`. Records from before it was recorded have none.

    >>> recorded_normalisation({"data": {"normalisation": {"mean": [0.5], "std": [0.25]}}})
    ([0.5], [0.25])
    """
    data = head.get("data")
    recorded = data.get("normalisation") if isinstance(data, Mapping) else None
    if not isinstance(recorded, Mapping):
        return None
    parts = [recorded.get(name) for name in ("mean", "std")]
    if not all(isinstance(part, list) and all(isinstance(value, int | float) for value in part) for part in parts):
        return None
    return parts[0], parts[1]  # type: ignore[return-value]


def complete(identity: Identity) -> bool:
    """Whether data and model are known."""
    return "data" in identity and "model" in identity


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of format 1 under their current names."""
    return {RENAMED.get(name, name): value for name, value in settings.items()}


def upgrade(head: Record) -> dict[str, Any]:
    """A `run.json` of format 1 in the current format; unknown parts stay absent, and nothing is dropped."""
    settings = head.get("settings")
    if not isinstance(settings, Mapping):
        return {**head, "format": FORMAT}  # the reader reports what is wrong with it
    named = {**head, "format": FORMAT, "settings": renamed(settings)}
    identity = identity_of(named)
    named["identity"] = identity
    if complete(identity):
        named["lineage"] = lineage(named["settings"], identity)
    return named


def present(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that are None, and without sections of which nothing is left."""
    given = {name: value for name, value in settings.items() if value is not None}
    kept = {name: present(value) if isinstance(value, Mapping) else value for name, value in given.items()}
    return {name: value for name, value in kept.items() if value != {}}
