"""The folder of a federated run: one line per round, checkpoints, and a mark at the end; a server app resumes from it.

It is a run folder as the simulator writes them (`fedgma.records.writer`): it can be resumed after a kill at any moment,
and one process writes it at a time. It belongs to one run: other settings, another initial model, other code of a rule
of your own or fewer rounds than it already has are refused.
"""

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Result

from fedgma.aggregation.server import MaskedServer, unpack_state
from fedgma.errors import ConfigError, FedgmaError, IntegrityError
from fedgma.flower.left_out import LeftOut
from fedgma.records.checkpoints import checkpoint_rounds, digest, write_atomic, written_to
from fedgma.records.code import own_code
from fedgma.records.lookup import INITIAL, RULE
from fedgma.records.reader import complete_lines, is_done, read_content, read_head, read_lines
from fedgma.records.state import FAILED, is_running
from fedgma.records.writer import RunFolder, dump

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"  # whose compiler the checksum of code depends on
NONE = LeftOut()
BEFORE = "before"  # name of the initial model's metrics in the line of round 1
PATIENCE = 30.0  # seconds for a server app that lost its SuperLink to let go of the folder


class SavedRun:
    """A run's folder, open for writing; without a folder, nothing is saved."""

    def __init__(
        self,
        folder: str | Path | None,
        settings: Mapping[str, Any],
        params: Mapping[str, np.ndarray],
        rule: object = None,
    ) -> None:
        self.path = None if folder is None or folder == "" else Path(folder)
        shapes = {name: [*np.shape(array), str(array.dtype)] for name, array in params.items()}
        settings = {"engine": "flower", **settings}
        self._head: dict[str, Any] = {"settings": settings, "parameters": shapes}
        self._initial = f"{digest(params)}\n".encode()
        code = own_code(rule)
        self._rule = None if code is None else f"{code} {PYTHON}\n".encode()
        self._folder: RunFolder | None = None

    def __enter__(self) -> "SavedRun":
        if self.path is not None:
            deadline = time.monotonic() + PATIENCE
            while is_running(self.path) and time.monotonic() < deadline:
                time.sleep(0.2)
            (self.path / FAILED).unlink(missing_ok=True)
            try:
                self._folder = RunFolder(self.path, self._head).__enter__()
                self._check_initial_model()
                self._check_rule()
            except FedgmaError as error:
                self.__exit__(type(error), error, None)
                raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, FedgmaError):
            self._explain(error)
        if self._folder is not None:
            self._folder.__exit__()

    def _explain(self, error: FedgmaError) -> None:
        """Leave a note for whoever watches: this end was on purpose, and starting again would not help."""
        if self.path is not None and self.path.is_dir():
            with contextlib.suppress(OSError):
                write_atomic(self.path / FAILED, dump({"exit_code": error.exit_code, "message": str(error)}) + b"\n")

    def _check_initial_model(self) -> None:
        """Compare the initial model with the one that the folder began with."""
        assert self.path is not None
        if list(read_head(self.path)["parameters"]) != list(self._head["parameters"]):
            raise ConfigError(f"{self.path} has the arrays of the model in another order; use another folder")
        file = self.path / INITIAL
        if self._kept(file, self._initial) != self._initial:
            raise ConfigError(
                f"{self.path} began with another initial model; use another folder, or fix the seed of the initial "
                f"model so that each start makes the same one; to go on all the same, delete {file}"
            )

    def _check_rule(self) -> None:
        """Compare the code of a user's own rule with that which the folder began with, if this Python compiled it."""
        assert self.path is not None
        file = self.path / RULE
        if self._rule is None and not file.exists():
            return
        kept = self._kept(file, self._rule or b"")
        if kept != self._rule and kept.endswith(f" {PYTHON}\n".encode()):
            raise ConfigError(
                f"{self.path} began with other code of the rule; use another folder, or restore the code of the rule; "
                f"to go on all the same, delete {file}"
            )

    def _kept(self, file: Path, content: bytes) -> bytes:
        """What a file of the folder says; if there is none yet, it is written."""
        if file.exists():
            return read_content(file)
        assert self.path is not None
        with written_to(self.path):
            write_atomic(file, content)
        return content

    def resume(self, server: MaskedServer, rounds: int) -> tuple[int, dict[str, np.ndarray] | None, Result]:
        """Rounds played, the model after them (None: the initial one), and the metrics so far.

        `rounds` is the number that this run is asked for.
        """
        result = Result()
        if self._folder is None:
            return 0, None, result
        _check_checkpoints(self._folder.path)
        stopped = self._folder.resume(repair=True)
        if stopped is None:
            server.forget()  # a strategy may have been started before, with another folder
            return 0, None, result
        if stopped.round > rounds:
            raise ConfigError(
                f"{self.path} has {stopped.round} rounds, but this run asks for {rounds}; ask for at least "
                f"{stopped.round} or use another folder"
            )
        params = unpack_state(server, stopped.state)
        histories = {
            "train": result.train_metrics_clientapp,
            "evaluate": result.evaluate_metrics_clientapp,
            "server": result.evaluate_metrics_serverapp,
        }
        for line in read_lines(self._folder.path):
            if (metrics := _read_metrics(line.get(BEFORE))) is not None:
                result.evaluate_metrics_serverapp[0] = metrics
            for name, history in histories.items():
                if (metrics := _read_metrics(line.get(name))) is not None:
                    history[line["round"]] = metrics
        return stopped.round, params, result

    def save(
        self,
        round: int,
        state: Mapping[str, np.ndarray],
        metrics: Mapping[str, MetricRecord | None],
        left_out: LeftOut = NONE,
    ) -> None:
        """Publish a round: nothing up to here can be lost any more."""
        if self._folder is not None:
            (self._folder.path / "done").unlink(missing_ok=True)  # a finished run that is given more rounds
            plain = {name: None if record is None else _written(dict(record)) for name, record in metrics.items()}
            self._folder.append({"round": round, **plain, **left_out.record()})
            self._folder.checkpoint(round, state)

    def finish(self, rounds: int, params: Mapping[str, np.ndarray]) -> None:
        """Mark the run as done, with the checksum of its model; the last checkpoint stays."""
        if self._folder is not None:
            self._folder.finish(rounds, params, keep=True)


def _check_checkpoints(folder: Path) -> None:
    """Each round has a checkpoint: a folder with rounds and none is damaged, and not a run that was killed early."""
    if checkpoint_rounds(folder / "checkpoints"):
        return
    if len(complete_lines(folder / "rounds.jsonl")) > 1 or is_done(folder):
        raise IntegrityError(f"{folder} has rounds but no checkpoint; restore it, or delete it to start again")


def _read_metrics(recorded: Any) -> MetricRecord | None:
    """Metrics of a line; None if there are none or they are damaged."""
    try:
        return None if recorded is None else MetricRecord({key: _number(value) for key, value in recorded.items()})
    except (TypeError, ValueError, AttributeError):
        log(WARNING, "the recorded metrics %.200r cannot be read and are left out", recorded)
        return None


def _written(value: Any) -> Any:
    """Metrics as JSON has them: infinities are texts, and NaN is written as null.

    >>> _written({"worst": math.inf, "losses": [1.0, -math.inf]})
    {'worst': 'inf', 'losses': [1.0, '-inf']}
    """
    if isinstance(value, dict):
        return {name: _written(number) for name, number in value.items()}
    if isinstance(value, list):
        return [_written(number) for number in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _number(value: Any) -> Any:
    """A number as it was before it was written."""
    if isinstance(value, list):
        return [_number(number) for number in value]
    if value in ("inf", "-inf"):
        return float(value)
    return float("nan") if value is None else value
