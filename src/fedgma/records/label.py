"""Name and note of a run, in the file `label.json` of its folder: for people, and no part of the run's identity."""

from pathlib import Path
from typing import NamedTuple

from fedgma.errors import ConfigError
from fedgma.records.checkpoints import make_folder, write_atomic, written_to
from fedgma.records.reader import check_intact, read_object
from fedgma.records.writer import head_text

LABEL = "label.json"
LONGEST_NAME, LONGEST_NOTE = 80, 10_000  # characters


class Label(NamedTuple):
    """What a user calls a run, and what they wrote about it; empty if nothing."""

    name: str = ""
    note: str = ""


def make_label(name: str | None, note: str | None) -> Label:
    """A label, checked.

    >>> make_label("wide nets", None)
    Label(name='wide nets', note='')
    """
    label = Label((name or "").strip(), (note or "").strip())
    if len(label.name) > LONGEST_NAME or not label.name.isprintable():
        raise ConfigError(f"a name is one line of at most {LONGEST_NAME} characters, got {label.name[:40]!r}...")
    if len(label.note) > LONGEST_NOTE:
        raise ConfigError(f"a note has at most {LONGEST_NOTE} characters, got {len(label.note)}")
    return label


def read_label(folder: Path) -> Label:
    """The label of a run; an empty one if it has none."""
    file = folder / LABEL
    if not file.exists():
        return Label()
    content = read_object(file)
    check_intact(content, file)
    return Label(str(content.get("name", "")), str(content.get("note", "")))


def write_label(folder: Path, label: Label) -> None:
    """Label a run, started or not; what the label leaves empty stays as it is."""
    before = read_label(folder)
    merged = Label(label.name or before.name, label.note or before.note)
    if merged != before:
        with written_to(folder):
            make_folder(folder)
            write_atomic(folder / LABEL, head_text(merged._asdict()))
