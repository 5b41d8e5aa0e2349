"""Read run folders: settings, one record per round, finished or not. Needs no torch and executes nothing it reads.

An incomplete last line of an unfinished run is skipped. Any other defect is an error that names the file: what is not
JSON, a line out of order, and what does not match its checksum. Folders of an older format, which have fewer checksums,
are converted to the current format on reading.
"""

import hashlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from fedgma.documents import PathLike, parse_json
from fedgma.errors import DataError, IntegrityError
from fedgma.records.format import CHECKSUM, FORMAT, SUMS, Done, Head, Identity, Record, identity_of, is_intact, upgrade

LARGEST = 2**30  # bytes; larger files are refused
SUMMED = ("run.json", "rounds.jsonl", "done")  # the files in SHA256SUMS
GONE = ".gone-"  # begins the name of a folder that is being deleted
RESTORE = "restore it from a copy, or delete the run's folder and run again"

LOG = logging.getLogger(__name__)


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
        below = sorted(folders_below(path))
        if not below:
            reason = "it is a file" if path.is_file() else "no such folder"
            reason = "no run.json in it or its subfolders" if path.is_dir() else reason
            raise DataError(f"{str(path)!r} holds no run: {reason}; give a folder that `fedgma run` wrote")
        folders.update(dict.fromkeys(folder.resolve() for folder in below))
    return list(folders)


def folders_below(path: Path) -> Iterator[Path]:
    """The run folders at or below a path; a subfolder that a process deletes, or that is half deleted, is skipped."""
    for folder, below, files in os.walk(path):
        below[:] = [name for name in below if not name.startswith(GONE)]
        if "run.json" in files:
            below.clear()
            yield Path(folder)


def read_run(folder: PathLike) -> Run:
    """Read one run folder; a broken file raises an error that names it."""
    folder = Path(folder)
    head = read_head(folder)
    settings = settings_of(folder, head)
    rounds, done = _rounds_and_end(folder, head, scored=_has_shares(head))
    return Run(folder, head, settings, tuple(rounds), done)


def settings_of(folder: Path, head: Head) -> dict[str, Any]:
    """The settings of a run, flat; an error if one that every run of the simulator has is missing."""
    settings = dict(flat(head["settings"]))
    if settings.get("engine") == "flower":
        do = "`fedgma watch` shows its rounds, and `fedgma export` writes its model"
        raise DataError(f"{folder} holds a run of a Flower app, which belongs to no arm; {do}")
    for name, kind in (("rounds", int), ("seed", int), ("aggregator", str), ("algorithm", str)):
        if not isinstance(settings.get(name), kind) or isinstance(settings.get(name), bool):
            got = settings.get(name)
            raise DataError(f"{folder / 'run.json'}: setting {name!r} should be {kind.__name__}, got {got!r}")
    return settings


def _has_shares(head: Head) -> bool:
    """Whether an accuracy in the lines is a share: that of the library is, a user's metric may be in another unit."""
    facts = [fact for fact in head.get("metrics", []) if isinstance(fact, dict) and fact.get("name") == "accuracy"]
    return not facts or facts[0].get("unit") == "%"


def read_head(folder: Path) -> Head:
    """`run.json` of a folder in the current format."""
    file = folder / "run.json"
    head = read_object(file)
    version = head.get("format")
    if version == FORMAT or CHECKSUM in head:  # one changed bit may turn the number into that of another format
        check_intact(head, file)
    if version not in (1, 2, FORMAT):
        raise DataError(f"{file} has format {version!r}; this version of fedgma reads 1 to {FORMAT}")
    if version != FORMAT and CHECKSUM in head:
        raise DataError(f"{file} has format {version} with a checksum, which only later formats have; {RESTORE}")
    _part(head, "settings", dict, file)
    return cast(Head, upgrade(head) if version == 1 else {**head, "format": FORMAT})


def is_older(folder: Path) -> bool:
    """Whether the `run.json` of a folder has an older format."""
    return read_object(folder / "run.json").get("format") != FORMAT


def read_rounds(folder: Path) -> list[Record]:
    """The rounds of a run: of a finished one all and checked, of an unfinished one the complete lines."""
    return _rounds_and_end(folder, read_head(folder))[0] if is_done(folder) else read_lines(folder)


def read_lines(folder: Path) -> list[Record]:
    """The leading lines of a folder that are complete and in order, of a run that may be writing them."""
    return [record for _, record in _lines(folder / "rounds.jsonl")[0]]


def complete_lines(path: Path) -> list[bytes]:
    """The leading lines of `rounds.jsonl` that are complete and in order, as bytes."""
    return [line + b"\n" for line, _ in _lines(path)[0]]


def digest_of_lines(lines: Iterable[bytes]) -> str:
    """SHA-256 of lines of `rounds.jsonl`."""
    return hashlib.sha256(b"".join(lines)).hexdigest()


def check_intact(record: Record, path: Path) -> None:
    """Raise an error if a JSON object does not match its checksum."""
    if not is_intact(record):
        raise IntegrityError(f"{path} does not match its checksum; {RESTORE}")


def is_done(folder: Path) -> bool:
    """Whether the run in a folder is finished."""
    return (folder / "done").exists()


def finished(out: Path) -> Iterator[tuple[Head, Path]]:
    """The finished runs in a folder of run folders; unreadable folders are skipped."""
    for done in sorted(out.glob("*/done")):
        try:
            yield read_head(done.parent), done.parent
        except DataError as error:
            LOG.warning("%s is not extended: %s", done.parent, error)


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as dotted names.

    >>> dict(flat({"tau": 0.4, "partition": {"name": "iid"}}))
    {'tau': 0.4, 'partition.name': 'iid'}
    """
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            pairs.extend(flat(value, f"{before}{name}."))
        else:
            pairs.append((before + name, value))
    return iter(pairs)


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


def _rounds_and_end(folder: Path, head: Head, *, scored: bool = False) -> tuple[list[Record], Done | None]:
    """The rounds of a folder and its `done`, checked; only an unfinished run may end in an incomplete line."""
    done = cast(Done, read_object(folder / "done")) if is_done(folder) else None
    rounds, fault = _lines(folder / "rounds.jsonl", scored=scored)
    if fault is not None and (done is not None or not isinstance(fault, _Incomplete)):
        raise fault
    if done is None:
        _check_saved(folder, head, [line + b"\n" for line, _ in rounds])
        return [record for _, record in rounds], None
    if done.get("rounds") != len(rounds):
        raise DataError(f"{folder} is marked done after {done.get('rounds')!r} rounds but holds {len(rounds)}")
    if CHECKSUM in head:  # an older format has none
        _check_sums(folder)
    return [record for _, record in rounds], done


def _check_saved(folder: Path, head: Head, lines: Sequence[bytes]) -> None:
    """Compare the records of an unfinished run with its newest checkpoint; later lines have no checksum yet."""
    for file in sorted(folder.glob("checkpoints/[0-9]*/manifest.json"), reverse=True):
        try:
            manifest = read_object(file)
        except DataError:
            continue  # damaged, or deleted meanwhile by a process that runs
        if is_intact(manifest) and isinstance(manifest.get("records"), dict):
            records = {"run": head.get(CHECKSUM), "lines": digest_of_lines(lines[: manifest["round"]])}
            for part, name in (("run", "run.json"), ("lines", "rounds.jsonl")):
                if manifest["records"].get(part) != records[part]:
                    raise IntegrityError(f"{folder / name} does not belong to checkpoint {file.parent}; {RESTORE}")
            return


def sums(digests: Mapping[str, str]) -> bytes:
    """`SHA256SUMS`: a line for each file, as the program sha256sum writes it."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()


def _check_sums(folder: Path) -> None:
    """Compare the files of a finished run with `SHA256SUMS`."""
    stated = read_content(folder / SUMS)
    actual = {name: hashlib.sha256(read_content(folder / name)).hexdigest() for name in SUMMED}
    for name, digest in actual.items():
        if sums({name: digest}) not in stated:
            raise IntegrityError(f"{folder / name} does not match its checksum in {SUMS}; {RESTORE}")
    if stated != sums(actual):
        raise IntegrityError(f"{folder / SUMS} should be the checksums of {', '.join(SUMMED)} only; {RESTORE}")


class _Incomplete(DataError):
    """The last line has no end."""


def _lines(path: Path, *, scored: bool = False) -> tuple[list[tuple[bytes, Record]], DataError | None]:
    """The leading lines that are complete and in order, with their records; and the error in the next line.

    With `scored`, accuracies must be from 0 to 1. In a Flower app, "accuracy" may be any number.
    """
    lines = read_content(path).split(b"\n") if path.exists() else [b""]
    read: list[tuple[bytes, Record]] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = parse_object(line, f"{path}, line {number},")
            _check_line(record, number, path, scored=scored)
        except DataError as error:
            return read, error
        read.append((line, record))
    incomplete = f"{path} ends in an incomplete line though its run is marked done; restore the file or run again"
    return read, _Incomplete(incomplete) if lines[-1] else None


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


def read_object(path: Path) -> Record:
    """The JSON object in a file."""
    return parse_object(read_content(path), str(path))


def parse_object(content: bytes, where: str) -> Record:
    """The JSON object in a text; `where` names it in the error."""
    try:
        value = parse_json(content, where)
    except DataError as error:
        raise IntegrityError(str(error)) from None
    if not isinstance(value, dict):
        raise IntegrityError(f"{where} should be a JSON object, got {type(value).__name__}")
    return value


def read_content(path: Path, largest: int = LARGEST) -> bytes:
    """The bytes of a file; an error if it is missing, unreadable or larger than `largest`."""
    try:
        if path.stat().st_size > largest:
            raise DataError(
                f"{path} is larger than {largest} bytes, so it is not a record of a run; give another folder"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing; {RESTORE}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
