"""The folder of a federated run: one line a round, checkpoints, a mark at the end; what a server app goes on from.

It is a run folder as the simulator writes them (`fedgma.records.writer`): killed at any moment it can be gone on
from, one process writes it at a time, and settings other than those it began with are refused.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedgma.aggregation.gate import Refusal
from fedgma.aggregation.server import MaskedServer, unpack_state
from fedgma.errors import FedgmaError
from fedgma.records.checkpoints import write_atomic
from fedgma.records.reader import read_lines
from fedgma.records.writer import RunFolder, dump, is_running

PATIENCE = 30.0  # seconds for a server app that lost its SuperLink to let go of the folder
FAILED = "failed"  # the file that says why a server app gave up


class SavedRun:
    """A run's folder, open for writing; without a folder, nothing is saved."""

    def __init__(
        self, folder: str | Path | None, settings: Mapping[str, Any], params: Mapping[str, np.ndarray]
    ) -> None:
        self.path = None if folder is None or folder == "" else Path(folder)
        shapes = {name: [*np.shape(array), str(array.dtype)] for name, array in params.items()}
        self._head = {"settings": {"engine": "flower", **settings}, "parameters": shapes}
        self._folder: RunFolder | None = None

    def __enter__(self) -> "SavedRun":
        if self.path is not None:
            deadline = time.monotonic() + PATIENCE
            while is_running(self.path) and time.monotonic() < deadline:
                time.sleep(0.2)
            (self.path / FAILED).unlink(missing_ok=True)
            try:
                self._folder = RunFolder(self.path, self._head).__enter__()
            except FedgmaError as error:
                self._explain(error)
                raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._folder is not None:
            if isinstance(error, FedgmaError):
                self._explain(error)
            self._folder.__exit__()

    def _explain(self, error: FedgmaError) -> None:
        """Leave a note for whoever watches: this end was on purpose, and starting again would not help."""
        if self.path is not None and self.path.is_dir():
            with contextlib.suppress(OSError):
                write_atomic(self.path / FAILED, dump({"exit_code": error.exit_code, "message": str(error)}) + b"\n")

    def resume(self, server: MaskedServer) -> tuple[int, dict[str, np.ndarray] | None, Result]:
        """Rounds played, the model after them (None: the initial one), and the metrics so far."""
        found = None if self._folder is None else self._folder.resume()
        if found is None or self._folder is None:
            return 0, None, Result()
        params = unpack_state(server, found.state)
        result = Result()
        histories = {
            "train": result.train_metrics_clientapp,
            "evaluate": result.evaluate_metrics_clientapp,
            "server": result.evaluate_metrics_serverapp,
        }
        for line in read_lines(self._folder.path):
            for name, history in histories.items():
                if line.get(name) is not None:
                    history[line["round"]] = MetricRecord({key: _number(value) for key, value in line[name].items()})
        return found.round, params, result

    def save(
        self,
        round: int,
        state: Mapping[str, np.ndarray],
        metrics: Mapping[str, MetricRecord | None],
        refused: Iterable[Refusal] = (),
    ) -> None:
        """Publish a round: nothing up to here can be lost any more."""
        if self._folder is not None:
            (self._folder.path / "done").unlink(missing_ok=True)  # a finished run that is given more rounds
            plain = {name: None if record is None else dict(record) for name, record in metrics.items()}
            left_out = [refusal._asdict() for refusal in refused]
            self._folder.append({"round": round, **plain, "refused": left_out})
            self._folder.checkpoint(round, state)

    def finish(self, rounds: int, params: Mapping[str, np.ndarray]) -> None:
        """Mark the run as done, with the checksum of its model; the last checkpoint stays."""
        if self._folder is not None:
            self._folder.finish(rounds, params, keep=True)


def _number(value: Any) -> Any:
    """JSON has no NaN: it was written as null."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    return float("nan") if value is None else value
