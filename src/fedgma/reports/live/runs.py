"""The runs of folders as a live page shows them: what has changed since a look, as a JSON object, and as a table."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgma.documents import PathLike
from fedgma.records.reader import folders_below
from fedgma.records.tail import PIECE
from fedgma.reports.colours import is_plain
from fedgma.reports.live.run import LiveRun
from fedgma.reports.tables import Table, Value
from fedgma.statistics.arms import grouped
from fedgma.statistics.labels import duration

LEAST_SECONDS = 0.4  # between two looks, however many pages ask
MOST_BYTES = 4 * PIECE  # of rounds that a look reads; the rest is left for the next
HEADER = ("arm", "seed", "state", "round", "score", "loss", "mask", "time left", "name", "run", "advice")


class LiveRuns:
    """All runs at or below some folders, which need not exist yet."""

    def __init__(self, paths: Sequence[PathLike]) -> None:
        self.paths = [Path(path) for path in paths]
        self._runs: dict[Path, LiveRun] = {}  # in the order of arms and seeds
        self._arms: list[str] = []
        self._number = 0  # of the latest look that found something new
        self._listed = 0  # of the latest look after which the list of runs was another
        self._looked = -LEAST_SECONDS
        self._lock = threading.Lock()

    def since(self, number: int) -> dict[str, Any]:
        """Look, and return what has changed since the look of that number; 0 for everything."""
        with self._lock:
            self._look()
            number = number if 0 < number <= self._number else 0  # a number of another server is not ours
            runs = list(self._runs.values())
            return {
                "number": self._number,
                "summary": self._summary(),
                **({"runs": [str(run.folder) for run in runs]} if not number or self._listed > number else {}),
                "changed": [self._shown(run) for run in runs if not number or run.changed > number],
            }

    def table(self, *, whole: bool = False) -> Table:
        """Look, and return a table with a row for each run; `whole`, as often as it takes to read everything."""
        with self._lock:
            self._look()
            while whole and self._unread:
                self._looked = -LEAST_SECONDS
                self._look()
            rows = tuple(self._row(run) for run in self._runs.values())
            return Table("runs", "Runs", HEADER, rows, decimals=(2, 0, 2, 2, 2, 3, 3, 2, 2, 2, 2))

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LEAST_SECONDS:
            return
        self._looked = now
        folders = sorted({folder for path in self.paths for folder in folders_below(path)})
        listed = self._runs.keys() != set(folders)
        if listed:
            self._runs = {folder: self._runs.get(folder) or LiveRun(folder) for folder in folders}
        changed = self._read()
        if listed or any(run.fresh for run in changed):
            changed += self._name_arms()
        if listed or changed:
            self._number += 1
        for run in changed:
            run.changed = self._number
        if listed:
            self._listed = self._number

    def _read(self) -> list[LiveRun]:
        """Read what is new; returns the runs in which something was."""
        changed, left = [], MOST_BYTES
        for run in self._runs.values():
            at = run.offset
            if left > 0 and run.look(PIECE):
                changed.append(run)
                left -= max(0, run.offset - at)
        return changed

    def _name_arms(self) -> list[LiveRun]:
        """Name the arms and put their runs side by side; returns the runs whose arm has another name now."""
        by_folder = {run.folder: run for run in self._runs.values()}
        rows = grouped([run.run for run in by_folder.values() if run.run is not None])
        names = {run.folder: row.name for row in rows for run in row.runs}
        others = [run for folder, run in by_folder.items() if folder not in names]
        names |= {run.folder: f"{run.rule} (Flower)" if run.rule else "" for run in others}
        renamed = [run for folder, run in by_folder.items() if run.arm != names[folder]]
        for folder, run in by_folder.items():
            run.arm, run.fresh = names[folder], False
        self._arms = list(dict.fromkeys(name for name in names.values() if name))
        order = {name: position for position, name in enumerate(self._arms)}
        ordered = sorted(by_folder.items(), key=lambda item: (order.get(item[1].arm, len(order)), item[1].seed or 0))
        self._runs = dict(ordered)
        return renamed

    @property
    def _unread(self) -> bool:
        return any(run.more or not run.state for run in self._runs.values())

    @property
    def _together(self) -> int:
        return sum(run.state == "running" for run in self._runs.values())

    def _summary(self) -> dict[str, Any]:
        """How far all runs are that have begun."""
        runs = self._runs.values()
        planned = [run for run in runs if run.planned is not None]
        lefts = [left for run in runs if (left := run.left(self._together)) is not None]
        return {
            "folders": [str(path) for path in self.paths],
            "missing": [str(path) for path in self.paths if not path.is_dir()],
            "states": dict(Counter(run.state or "reading" for run in runs)),
            "rounds": sum(run.round for run in planned),
            "planned": sum(run.planned or 0 for run in planned),
            "left": max(lefts) if lefts else None,
            "arms": [{"name": name, "plain": is_plain(name)} for name in self._arms],
            "unread": self._unread,
        }

    def _shown(self, run: LiveRun) -> dict[str, Any]:
        """A run as a JSON object."""
        metric = run.metric
        return {
            "key": str(run.folder),
            "id": run.folder.name,
            "name": run.label.name,
            "note": run.label.note,
            "arm": run.arm,
            "seed": run.seed,
            "state": run.state or "reading",
            "problem": run.problem,
            "advice": run.advice,
            "round": run.round,
            "planned": run.planned,
            "metric": {"label": metric.label, "unit": metric.unit, "better": metric.better},
            "lost": run.lost,
            "left": run.left(self._together),
            "curves": {name: curve.points for name, curve in run.curves.items()},
        }

    def _row(self, run: LiveRun) -> tuple[Value, ...]:
        latest = {name: curve.latest for name, curve in run.curves.items()}
        left = run.left(self._together)
        return (
            run.arm,
            run.seed,
            run.state,
            str(run.round) if run.planned is None else f"{run.round} of {run.planned}",
            latest.get("score"),
            "not finite" if run.lost else latest.get("loss"),
            latest.get("mask"),
            "" if left is None else duration(left),
            run.label.name,
            run.folder.name,
            run.problem or run.advice,
        )
