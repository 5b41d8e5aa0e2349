"""Convert run folders of an older format in place; rounds, checkpoints and `done` files stay the same.

Each folder changes by one atomic write of its `run.json`, after that of `SHA256SUMS`. If data and model of a run are
known, its folder is then renamed to the fingerprint that a new run of the same settings would have, so that such a run
finds it as finished, continues it or extends it. If a conversion is killed, the next one finishes it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.documents import PathLike
from fedgma.errors import DataError
from fedgma.records.checkpoints import sync_folder, written_to
from fedgma.records.format import complete, fingerprint, identity_of
from fedgma.records.reader import is_older, read_head, run_folders
from fedgma.records.writer import rewrite_head

FORMERLY = "formerly"  # in run.json: the fingerprint that the older format gave the run


class Converted(NamedTuple):
    """The result of converting one run folder."""

    folder: Path  # after the conversion
    rewritten: bool
    renamed: bool
    known: bool  # whether its data and model are known
    problem: str = ""  # why it was not converted


def convert(paths: PathLike | Iterable[PathLike]) -> list[Converted]:
    """Rewrite every run folder at or below these paths that has an older format; leave the others unchanged."""
    folders = run_folders(paths)
    names = _new_names(folders)
    return [_convert(folder, names) for folder in folders]


def _new_names(folders: Iterable[Path]) -> dict[str, str]:
    """Old fingerprint -> new fingerprint, for the runs whose data and model are known."""
    names = {}
    for folder in folders:
        try:
            head: Mapping[str, Any] = read_head(folder)
            before = head.get(FORMERLY, head.get("fingerprint"))
            if (is_older(folder) or FORMERLY in head) and isinstance(before, str) and complete(identity_of(head)):
                names[before] = fingerprint(head["settings"], identity_of(head))
        except DataError:
            continue  # reported when this folder is converted
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
                    rewrite_head(folder, _rewritten(head, names))
    except Timeout:
        return Converted(
            folder, False, False, False, "a process is writing this folder; convert it after that process has ended"
        )
    except DataError as error:
        return Converted(folder, False, False, False, str(error))
    placed = _renamed(folder, str(head.get(FORMERLY, head.get("fingerprint"))), names)
    return Converted(placed, older, placed != folder, known)


def _rewritten(head: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    rewritten = dict(head)
    before, shorter = str(head.get("fingerprint")), str(head.get("extends"))
    if before in names:
        rewritten |= {"fingerprint": names[before], FORMERLY: before}
    if shorter in names:
        rewritten["extends"] = names[shorter]
    return rewritten


def _renamed(folder: Path, before: str, names: Mapping[str, str]) -> Path:
    """Rename the folder to the new fingerprint, unless it had a name of its own or the new name is taken."""
    if folder.name != before or before not in names:
        return folder
    target = folder.with_name(names[before])
    if target.exists():
        return folder
    with written_to(folder.parent):
        folder.rename(target)
        sync_folder(folder.parent)
    return target
