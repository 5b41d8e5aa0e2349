"""What to say of runs that have stopped, or that another machine may still train: how to go on, where to look."""

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fedgma.records.format import Record
from fedgma.records.state import elsewhere, last_written
from fedgma.reports.tables import printable
from fedgma.statistics.labels import duration


def advice(folder: Path, state: str, head: Record, now: float | None = None) -> str:
    """How to go on with a run that has stopped, or why it is not known whether it has; "" for every other one."""
    if state == "stopped":
        return f"to resume: {_again(head)}"
    if state != "unknown":
        return ""
    machine = elsewhere(folder)
    if machine is None:
        return f"its lock cannot be read here, so it may run or have stopped; {_age(folder, now)}"
    where = printable(machine) or "another machine"
    return f"written on {where}, whose lock may not be seen here; {_age(folder, now)}; `fedgma ls` there knows"


def together(said: Iterable[tuple[str, str]]) -> list[str]:
    """States and advice of runs, each advice once with the number of its runs.

    >>> together([("done", ""), ("stopped", "to resume: fedgma run"), ("stopped", "to resume: fedgma run")])
    ['2 runs stopped; to resume: fedgma run']
    """
    counted = Counter((state, words) for state, words in said if words)
    return [f"{n} run{'s' if n > 1 else ''} {state}; {words}" for (state, words), n in counted.items()]


def _again(head: Record) -> str:
    """The command that made a run, or what to do where no command did."""
    if command := head.get("command"):
        return printable(str(command))
    if head["settings"].get("engine") == "flower":
        return "start the same app with the same folder"
    return "call fedgma.run again with the same arguments"


def _age(folder: Path, now: float | None) -> str:
    """How old the newest line is by this machine's clock."""
    written = last_written(folder)
    if written is None:
        return "it has no line yet"
    seconds = (time.time() if now is None else now) - written
    return f"the last line is {duration(max(0.0, seconds))} old"
