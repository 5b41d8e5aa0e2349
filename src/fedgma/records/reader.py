"""Read run folders: settings, one record per round, finished or not. Needs no torch and executes nothing it reads.

An incomplete last line of an unfinished run is skipped. Any other defect is an error that names the file. Folders of
format 1 are converted to the current format on reading.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from fedgma.errors import DataError
from fedgma.records.format import FORMAT, Done, Head, Identity, Record, identity_of, upgrade

LARGEST = 2**30  # bytes; larger files are refused

PathLike = str | os.PathLike[str]


class Run(NamedTuple):
    """One run folder."""

    folder: Path
    head: Head  # run.json
    settings: dict[str, Any]  # flat: "partition.clients"
    rounds: tuple[Record, ...]
    done: Done | None

    @property
    def finished(self) -> bool:
        """Whether the run completed all its rounds."""
        return self.done is not None

    @property
    def planned(self) -> int:
        """The number of rounds in the settings."""
        return int(self.settings["rounds"])

    @property
    def seed(self) -> int:
        """The seed; runs with the same seed are paired."""
        return int(self.settings["seed"])

    @property
    def identity(self) -> Identity:
        """The identity of data and model; only runs with equal identities are compared."""
        return identity_of(self.head)


def read_runs(paths: PathLike | Iterable[PathLike]) -> list[Run]:
    """The runs in one or several folders and their subfolders, each once, sorted by name."""
    return [read_run(folder) for folder in run_folders(paths)]


def run_folders(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    """The run folders at or below one or several paths, each once, sorted by name."""
    folders: dict[Path, None] = {}
    for path in map(Path, [paths] if isinstance(paths, str | os.PathLike) else paths):
        here = sorted(_folders(path))
        if not here:
            what = "no run.json in it or its subfolders" if path.is_dir() else "no such folder"
            raise DataError(f"{str(path)!r} holds no run: {what}; give a folder that `fedgma run` wrote")
        folders.update(dict.fromkeys(folder.resolve() for folder in here))
    return list(folders)


def _folders(path: Path) -> Iterator[Path]:
    """The run folders at or below a path; a subfolder that a running process deletes meanwhile is skipped."""
    for folder, below, files in os.walk(path):
        if "run.json" in files:
            below.clear()
            yield Path(folder)


def read_run(folder: PathLike) -> Run:
    """Read one run folder; a broken file raises an error that names it."""
    folder = Path(folder)
    head = read_head(folder)
    settings = dict(flat(head["settings"]))
    for name, kind in (("rounds", int), ("seed", int), ("aggregator", str), ("algorithm", str)):
        if not isinstance(settings.get(name), kind) or isinstance(settings.get(name), bool):
            got = settings.get(name)
            raise DataError(f"{folder / 'run.json'}: setting {name!r} should be {kind.__name__}, got {got!r}")
    done = cast(Done, _object(folder / "done")) if is_done(folder) else None
    rounds, fault = _rounds(folder / "rounds.jsonl", scored=True)
    if done is not None and fault is not None:
        raise fault
    if done is not None and done.get("rounds") != len(rounds):
        raise DataError(f"{folder} is marked done after {done.get('rounds')!r} rounds but holds {len(rounds)}")
    return Run(folder, head, settings, tuple(record for _, record in rounds), done)


def read_head(folder: Path) -> Head:
    """`run.json` of a folder in the current format."""
    file = folder / "run.json"
    head = _object(file)
    version = head.get("format")
    if version not in (1, FORMAT):
        raise DataError(f"{file} has format {version!r}; this version of fedgma reads 1 to {FORMAT}")
    _part(head, "settings", dict, file)
    return cast(Head, upgrade(head) if version == 1 else head)


def is_older(folder: Path) -> bool:
    """Whether the `run.json` of a folder has an older format."""
    return _object(folder / "run.json").get("format") != FORMAT


def read_lines(folder: Path) -> list[Record]:
    """The rounds of a folder, without an incomplete last line."""
    return [record for _, record in _rounds(folder / "rounds.jsonl")[0]]


def complete_lines(path: Path) -> list[bytes]:
    """The leading lines of `rounds.jsonl` that are complete and in order, as bytes."""
    return [line + b"\n" for line, _ in _rounds(path)[0]]


def is_done(folder: Path) -> bool:
    """Whether the run in a folder is finished."""
    return (folder / "done").exists()


def finished(out: Path) -> Iterator[tuple[Head, Path]]:
    """The finished runs in a folder of run folders; unreadable folders are skipped."""
    for done in sorted(out.glob("*/done")):
        try:
            yield read_head(done.parent), done.parent
        except DataError:
            continue


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
    """Round -> value, for the rounds in which it was measured: `curve(run, "test", "accuracy")`."""
    numbers = ((record["round"], number(record, *path)) for record in run.rounds)
    return {round: value for round, value in numbers if value is not None}


def number(record: Record, *path: str) -> float | None:
    """The finite number at a path of a record; None if absent.

    >>> number({"test": {"accuracy": 0.5}}, "test", "accuracy"), number({}, "test", "accuracy")
    (0.5, None)
    """
    value = _at(record, path)
    return float(value) if _real(value) else None


def numbers(record: Record, *path: str) -> list[float] | None:
    """The list of finite numbers at a path of a record; None if absent."""
    listed = _at(record, path)
    valid = isinstance(listed, list) and len(listed) > 0 and all(map(_real, listed))
    return [float(value) for value in listed] if valid else None


def _at(record: Record, path: tuple[str, ...]) -> Any:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _rounds(path: Path, *, scored: bool = False) -> tuple[list[tuple[bytes, Record]], DataError | None]:
    """The leading lines that are complete and in order, with their records; and the error in the next line.

    With `scored`, accuracies must be from 0 to 1. In a Flower app, "accuracy" may be any number.
    """
    lines = _content(path).split(b"\n") if path.exists() else [b""]
    read: list[tuple[bytes, Record]] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = _parsed(line, f"{path}, line {number},")
            _check_line(record, number, path, scored=scored)
        except DataError as error:
            return read, error
        read.append((line, record))
    incomplete = f"{path} ends in an incomplete line though its run is marked done; restore the file or run again"
    return read, DataError(incomplete) if lines[-1] else None


def _check_line(record: Record, number: int, path: Path, *, scored: bool) -> None:
    if record.get("round") != number:
        raise DataError(f"{path}, line {number}, should be round {number}, got {record.get('round')!r}")
    for split, scores in record.items() if scored else ():
        accuracy = scores.get("accuracy") if isinstance(scores, dict) else None
        if accuracy is not None and not (_real(accuracy) and 0 <= accuracy <= 1):
            raise DataError(f"{path}, line {number}: {split} accuracy should be from 0 to 1, got {accuracy!r}")


def _real(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _part(record: Record, name: str, kind: type, path: Path) -> Any:
    if not isinstance(record.get(name), kind):
        raise DataError(f"{path} should hold {name!r} as a {kind.__name__}, got {record.get(name)!r}")
    return record[name]


def _object(path: Path) -> Record:
    return _parsed(_content(path), str(path))


def _parsed(content: bytes, where: str) -> Record:
    try:
        text = content.decode("utf-8")
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be written back
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8 text; the file is damaged, restore it or run again") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); the file is damaged, restore it or run again") from None
    if not isinstance(value, dict):
        raise DataError(f"{where} should be a JSON object, got {type(value).__name__}")
    return value


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(
                f"{path} is larger than {LARGEST} bytes, so it is not a record of a run; give another folder"
            )
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
