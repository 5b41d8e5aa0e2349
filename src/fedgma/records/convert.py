"""Run folders of an older format rewritten to the present one, in place; rounds, checkpoints and marks stay the same.

Each folder is changed by one atomic write of its `run.json`. Where data and model of a run are known it then gets the
name that a new run of the same settings would have, so that it counts as done, is gone on with, or is extended. Killed
at any moment, the next conversion finishes what was left.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.errors import DataError
from fedgma.records.checkpoints import sync_folder, written_to
from fedgma.records.format import complete, fingerprint, identity_of
from fedgma.records.reader import PathLike, is_older, read_head, run_folders
from fedgma.records.writer import write_head

FORMERLY = "formerly"  # in run.json: the fingerprint that the older format gave the run


class Converted(NamedTuple):
    """What became of one run folder."""

    folder: Path  # where it is now
    rewritten: bool
    renamed: bool
    known: bool  # whether its data and model are
    problem: str = ""  # why it was left as it was


def convert(paths: PathLike | Iterable[PathLike]) -> list[Converted]:
    """Rewrite every run folder at or below these paths that is of an older format; the others are left alone."""
    folders = run_folders(paths)
    names = _new_names(folders)
    return [_convert(folder, names) for folder in folders]


def _new_names(folders: Iterable[Path]) -> dict[str, str]:
    """The fingerprint in the present format by the older one, of the runs whose data and model are known."""
    names = {}
    for folder in folders:
        try:
            head: Mapping[str, Any] = read_head(folder)
            before = head.get(FORMERLY, head.get("fingerprint"))
            if (is_older(folder) or FORMERLY in head) and isinstance(before, str) and complete(identity_of(head)):
                names[before] = fingerprint(head["settings"], identity_of(head))
        except DataError:
            continue  # said when it is its turn
    return names


def _convert(folder: Path, names: Mapping[str, str]) -> Converted:
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / "lock", timeout=0.5):
            older = is_older(folder)
            head = dict(read_head(folder))
            known = complete(identity_of(head))
            if older:
                with written_to(folder):
                    write_head(folder, _rewritten(head, names))
    except Timeout:
        return Converted(folder, False, False, False, "a process is writing it; convert it when that has ended")
    except DataError as error:
        return Converted(folder, False, False, False, str(error))
    placed = _renamed(folder, str(head.get(FORMERLY, head.get("fingerprint"))), names)
    return Converted(placed, older, placed != folder, known)


def _rewritten(head: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    made = dict(head)
    before, shorter = str(head.get("fingerprint")), str(head.get("extends"))
    if before in names:
        made |= {"fingerprint": names[before], FORMERLY: before}
    if shorter in names:
        made["extends"] = names[shorter]
    return made


def _renamed(folder: Path, before: str, names: Mapping[str, str]) -> Path:
    """The folder under the run's new name; one that has another name than its run's, or whose place is taken, stays."""
    if folder.name != before or before not in names:
        return folder
    target = folder.with_name(names[before])
    if target.exists():
        return folder
    with written_to(folder.parent):
        folder.rename(target)
        sync_folder(folder.parent)
    return target
