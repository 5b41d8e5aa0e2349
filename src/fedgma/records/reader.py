"""Run folders as they are read: settings, one record a round, finished or not (no torch, nothing is executed).

    <fingerprint>/run.json       what was run, with what
                  rounds.jsonl   one JSON object a round
                  done           written last; without it the run is unfinished

Of an unfinished run, what a crash left at the end of its rounds is passed over. Everything else that is not as it
should be is an error that names the file.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.errors import DataError

FORMAT = 1
LARGEST = 2**30  # bytes of a file that is read

Record = Mapping[str, Any]


class Run(NamedTuple):
    """One run folder."""

    folder: Path
    head: Record  # run.json
    settings: dict[str, Any]  # flat: "partition.clients"
    rounds: tuple[Record, ...]
    done: Record | None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.done is not None

    @property
    def planned(self) -> int:
        """Rounds asked for."""
        return int(self.settings["rounds"])

    @property
    def seed(self) -> int:
        """Its seed; runs with the same one are paired."""
        return int(self.settings["seed"])


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in these folders and all below them, each once, in the order of their names."""
    found: dict[Path, None] = {}
    for path in paths:
        here = sorted(_folders(path))
        if not here:
            what = "no run.json in it or below" if path.is_dir() else "no such folder"
            raise DataError(f"{str(path)!r} holds no run: {what}; give a folder that `fedgma run` wrote")
        found.update(dict.fromkeys(folder.resolve() for folder in here))
    return [read_run(folder) for folder in found]


def _folders(path: Path) -> Iterator[Path]:
    """The run folders at or below a path; what a running one deletes meanwhile is not looked into."""
    for folder, below, files in os.walk(path):
        if "run.json" in files:
            below.clear()
            yield Path(folder)


def read_run(folder: Path) -> Run:
    """One run folder; refuses what is broken with a sentence that names the file."""
    head = _object(folder / "run.json")
    if head.get("format") != FORMAT:
        raise DataError(f"{folder / 'run.json'} has format {head.get('format')!r}; this version reads {FORMAT}")
    settings = dict(flat(_part(head, "settings", dict, folder / "run.json")))
    for name, kind in (("rounds", int), ("seed", int), ("aggregator", str), ("algorithm", str)):
        if not isinstance(settings.get(name), kind) or isinstance(settings.get(name), bool):
            got = settings.get(name)
            raise DataError(f"{folder / 'run.json'}: setting {name!r} should be {kind.__name__}, got {got!r}")
    done = _object(folder / "done") if (folder / "done").exists() else None
    rounds = tuple(_rounds(folder / "rounds.jsonl", finished=done is not None))
    if done is not None and done.get("rounds") != len(rounds):
        raise DataError(f"{folder} is marked done after {done.get('rounds')!r} rounds but holds {len(rounds)}")
    return Run(folder, head, settings, rounds, done)


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as dotted names.

    >>> dict(flat({"tau": 0.4, "partition": {"name": "iid"}}))
    {'tau': 0.4, 'partition.name': 'iid'}
    """
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def curve(run: Run, *path: str) -> dict[int, float]:
    """A number of each round in which it was measured: `curve(run, "test", "accuracy")`."""
    numbers = ((record["round"], number(record, *path)) for record in run.rounds)
    return {round: value for round, value in numbers if value is not None}


def number(record: Record, *path: str) -> float | None:
    """The finite number at a path of a record, or None where it is absent.

    >>> number({"test": {"accuracy": 0.5}}, "test", "accuracy"), number({}, "test", "accuracy")
    (0.5, None)
    """
    value = _at(record, path)
    return float(value) if _real(value) else None


def numbers(record: Record, *path: str) -> list[float] | None:
    """The list of finite numbers at a path of a record, or None where it is absent."""
    listed = _at(record, path)
    whole = isinstance(listed, list) and len(listed) > 0 and all(map(_real, listed))
    return [float(value) for value in listed] if whole else None


def _at(record: Record, path: tuple[str, ...]) -> Any:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _rounds(path: Path, *, finished: bool) -> Iterator[Record]:
    """The records in order, checked: numbered 1, 2, ... and accuracies that are shares."""
    lines = _text(path).split("\n") if path.exists() else [""]
    if lines[-1] and finished:
        raise DataError(f"{path} ends in half a line though its run is marked done; it was damaged after the run")
    for place, line in enumerate(lines[:-1], 1):
        try:
            yield _checked(_parsed(line, f"{path}, line {place},"), place, path)
        except DataError:
            if finished:
                raise
            return  # what a crash left; the run goes on before it


def _checked(record: Record, place: int, path: Path) -> Record:
    if record.get("round") != place:
        raise DataError(f"{path}, line {place}, should be round {place} but says {record.get('round')!r}")
    for split, scores in record.items():
        accuracy = scores.get("accuracy") if isinstance(scores, dict) else None
        if accuracy is not None and not (_real(accuracy) and 0 <= accuracy <= 1):
            raise DataError(f"{path}, line {place}: {split} accuracy should be from 0 to 1, got {accuracy!r}")
    return record


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _part(record: Record, name: str, kind: type, path: Path) -> Any:
    if not isinstance(record.get(name), kind):
        raise DataError(f"{path} should hold {name!r} as a {kind.__name__}, got {record.get(name)!r}")
    return record[name]


def _object(path: Path) -> Record:
    return _parsed(_text(path), str(path))


def _parsed(text: str, where: str) -> Record:
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be written down again
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); the run has to be made again") from None
    if not isinstance(value, dict):
        raise DataError(f"{where} should be a JSON object, got {type(value).__name__}")
    return value


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path} is larger than {LARGEST} bytes, which no record of a run is")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; it was damaged") from None
