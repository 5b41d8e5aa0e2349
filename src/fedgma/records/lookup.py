"""Find run folders by what a user calls them: a path, the first digits of an id, or a name; and delete them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from fedgma.documents import PathLike
from fedgma.errors import ConfigError, DataError
from fedgma.records.checkpoints import sync_folder, written_to
from fedgma.records.format import SUMS
from fedgma.records.label import LABEL, read_label
from fedgma.records.reader import GONE, run_folders
from fedgma.records.repair import DAMAGED
from fedgma.records.state import FAILED, WRITER, is_running

LEAST_DIGITS = 4  # of an id
INITIAL = "initial"  # the file with the SHA-256 of the model that a Flower run began with
RULE = "rule"  # the file with the SHA-256 of the code of a Flower run's own rule
FILES = {"run.json", "rounds.jsonl", "checkpoints", SUMS, "done", "lock", WRITER, LABEL, DAMAGED, FAILED, INITIAL, RULE}


def find_runs(word: str, folders: Sequence[PathLike] = ("runs",)) -> list[Path]:
    """The run folders that a word names: a path, an id or its first digits, or the name of runs in `folders`."""
    path = Path(word)
    if (path / "run.json").is_file():
        return [path]
    if path.is_dir():
        raise ConfigError(f"{word!r} is not a run folder: it has no run.json; give one of the folders in it, or an id")
    there = [folder for folder in folders if Path(folder).is_dir()]
    known = run_folders(there) if there else []
    by_id = [folder for folder in known if len(word) >= LEAST_DIGITS and folder.name.startswith(word)]
    matches = by_id or [folder for folder in known if read_label(folder).name == word]
    if not matches:
        where = ", ".join(map(str, folders))
        if len(word) < LEAST_DIGITS and any(folder.name.startswith(word) for folder in known):
            raise ConfigError(f"{word!r} is too short for an id; give at least {LEAST_DIGITS} digits")
        raise DataError(f"no run {word!r} in {where}; `fedgma ls` lists the runs, and --runs names other folders")
    return matches


def find_run(word: str, folders: Sequence[PathLike] = ("runs",)) -> Path:
    """The one run folder that a word names."""
    matches = find_runs(word, folders)
    if len(matches) > 1:
        ids = ", ".join(folder.name for folder in matches[:5])
        raise ConfigError(f"{word!r} names {len(matches)} runs, and one is needed; give the id of one: {ids}")
    return matches[0]


def check_removable(folder: Path) -> None:
    """Raise an error if a folder is not a run folder, holds other files, or is being written."""
    if folder.is_symlink() or not (folder / "run.json").is_file():
        raise ConfigError(f"{str(folder)!r} is not a run folder, so it is not removed; give the folder of a run")
    other = sorted(entry.name for entry in folder.iterdir() if entry.name not in FILES and entry.name[0] != ".")
    if other:
        raise ConfigError(
            f"{folder} holds {other[0]!r}, which fedgma did not write; move it away or remove it yourself"
        )
    if is_running(folder):
        raise ConfigError(f"run {folder.name} is running; stop it first, then remove it")


def remove_run(folder: Path) -> None:
    """Delete a run folder; its name disappears at once, so that a kill in between leaves no part of a run."""
    check_removable(folder)
    gone = folder.with_name(f"{GONE}{folder.name}")
    with written_to(folder.parent):
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        sync_folder(folder.parent)
        shutil.rmtree(gone)
