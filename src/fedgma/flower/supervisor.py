"""Supervises a Flower run: starts the SuperLink, submits the app, watches both, and restarts what dies.

Flower does not resume a run whose SuperLink or server app died. Here the server app saves every round
(`Masked.start(..., folder=...)`), and the supervisor submits it again until the run's folder is marked as done. If the
app ends with a fedgma error (too few clients, invalid settings), it is not restarted; exit code and message are
passed on. Nothing outlives the supervisor, however it ends, and a start begins with an end of what an earlier one left.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedgma.errors import ConfigError, DataError, FedgmaError, InUseError
from fedgma.flower import processes
from fedgma.flower.certificates import as_pem
from fedgma.flower.database import damage, nodes, set_aside
from fedgma.flower.deployment import Deployment
from fedgma.flower.journal import Journal
from fedgma.flower.programs import Programs
from fedgma.flower.status import left_out
from fedgma.flower.submission import saved_nothing, why_not
from fedgma.flower.superlink import OCCUPIED
from fedgma.records.checkpoints import written_to
from fedgma.records.reader import read_lines
from fedgma.records.state import is_running

POLL_INTERVAL = 0.5  # seconds between checks of processes and files
STATUS_INTERVAL = 20.0  # seconds between status requests, each a process; 15 times as long if the app's process is seen
START_TIMEOUT = 300.0  # seconds for a SuperLink to accept connections
PAUSE = 0.5  # seconds before a restart without a round in between; twice as long before every further one
MARGIN = 0.5  # seconds after which a node is started that had to wait
COMPLETED = "finished:completed"  # Flower's status of a run whose app ended without an error
LEAST_FREE, LOW_FREE = 64 * 2**20, 2**30  # bytes of disk without which nothing is started; with which it is reported

Marks = dict[str, tuple[int, int]]


class Supervisor:
    """Supervises one run; calls `say` with each event, and stops when `stopping` returns True."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        restarts: int = 5,
        say: Callable[[str], None] = lambda text: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.deployment, self.restarts, self.stopping, self._show = deployment, restarts, stopping, say
        self.journal = Journal(deployment.state / "logs", deployment.database)
        self.programs = Programs(deployment, stopping)
        self.starts = 0  # number of times the app was submitted
        self._run = ""
        self._before: Marks = {}  # marks that were there when the app was submitted
        self._rounds_before = 0  # rounds that were saved then
        self._status_checked = 0.0
        self._registered: set[Path] = set()  # keys that the SuperLink's database has
        self._node_failures: dict[str, int] = {}  # since the last completed round
        self._node_pauses: dict[str, float] = {}  # when a dead node is restarted
        self._waited: set[str] = set()  # nodes whose start has waited until the SuperLink forgot their predecessor
        self._disk_reported = False

    @property
    def processes(self) -> dict[str, subprocess.Popen[bytes]]:
        """The processes that were started here, by name."""
        return self.programs.processes

    def say(self, text: str) -> None:
        """Tell the user, and the log."""
        self._show(text)
        self.journal.say(text)

    def run(self) -> int:
        """Supervise the run until it ends; returns the exit code, 0 if the run is done."""
        self.deployment.check()
        with written_to(self.deployment.state):
            self.deployment.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            if strays := self.programs.end_strays():
                self.say(f"ended {len(strays)} processes that an earlier start had left")
            with written_to(self.deployment.state):
                self.deployment.write_connection()
            self.journal.say(f"process {os.getpid()} supervises the run: {shlex.join(sys.argv)}")
            try:
                return self._supervise()
            except FedgmaError as error:
                self.journal.say(f"ended: {error}")
                raise
            finally:
                stopped = self.programs.stop()
                self.journal.copy()
                if stopped:
                    self.say(f"stopped: {', '.join(stopped)}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One supervisor for a state folder."""
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.deployment.state / "lock", timeout=0.5, mode=0o600):
                yield
        except Timeout:
            raise InUseError(f"another process supervises {str(self.deployment.state)!r}; stop it first") from None

    def _supervise(self) -> int:
        failed_starts, rounds = 0, self._rounds()
        while not self.stopping():
            problem = self._begin() or self._watch()
            if problem is None or self.stopping():
                return self._conclude()
            failed_starts, rounds = (0, self._rounds()) if self._rounds() > rounds else (failed_starts + 1, rounds)
            if failed_starts > self.restarts:
                logs = self.deployment.state / "logs"
                raise FedgmaError(f"{problem}; no further round after {self.restarts} restarts, see {logs}")
            self.say(f"{problem}; restarting after round {rounds}")
            self._pause(PAUSE * 2 ** (failed_starts - 1) if failed_starts else 0.0)
        return 0  # stopped by the caller, who sets the exit code

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stopping():
            time.sleep(min(POLL_INTERVAL, seconds))

    def _begin(self) -> str | None:
        """Start SuperLink and nodes if they are not running, and submit the app; returns a problem or None."""
        earlier = self.starts > 0 or self.deployment.database.exists()
        problem = self._register_keys() if self.programs.is_alive("superlink") else self._start_superlink()
        if problem is not None:
            return problem
        if earlier:
            self._end_earlier_runs()
        for number in range(self.deployment.nodes):
            self._start_node(number)
        self.starts, self._before, self._rounds_before = self.starts + 1, self._marks(), self._rounds()
        answer = self.programs.command(self.deployment.submit())
        if not answer.get("run-id"):
            return f"the app could not be submitted: {why_not(answer, self.deployment)}"
        self._run, self._status_checked = str(answer["run-id"]), time.monotonic()
        self.say(f"run {self._run} submitted after {self._rounds()} completed rounds")
        if not self.deployment.nodes and self.starts == 1:
            self.say(
                f"no nodes are started here; the run waits for nodes at {self.deployment.address}, or add --nodes 5"
            )
        return None

    def _end_earlier_runs(self) -> None:
        """Stop runs that Flower would start or continue beside the new one, and end their processes.

        Nodes started here are restarted. A node whose SuperLink died while it fetched a message may still produce a
        reply to it; Flower's node then sends that one in place of the next, and stays one reply behind until the end.
        """
        for run in self.programs.command(self.deployment.runs()).get("runs") or []:
            if not str(run.get("status", "")).startswith("finished"):
                self.programs.command(self.deployment.stop(str(run["run-id"])))
        processes.end(self.deployment.state, home="superlink", program="flwr-serverapp")
        self.programs.terminate([f"node-{number}" for number in range(self.deployment.nodes)])

    # -- the SuperLink -------------------------------------------------------------------------------------------------

    def _start_superlink(self) -> str | None:
        self._check_disk()
        self._check_database()
        for address in (self.deployment.address, self.deployment.control):
            if _answers(address):
                raise ConfigError(f"another program answers at {address}; stop it or use another --port")
        had_database = self.deployment.database.exists()
        self._start("superlink", self.deployment.superlink())
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(self.deployment.address):
            if not self.programs.is_alive("superlink"):
                code = self.programs.exit_code("superlink")
                if code == OCCUPIED:
                    return f"the SuperLink cannot listen at {self.deployment.host}:{self.deployment.port}"
                if had_database and code is not None and code > 0:
                    self._replace_database("the SuperLink does not start with it")
                return f"the SuperLink failed to start (exit code {code})"
            if time.monotonic() > deadline or self.stopping():
                self.processes["superlink"].kill()
                return f"the SuperLink did not accept connections within {START_TIMEOUT:g} s"
            time.sleep(POLL_INTERVAL)
        self.say(f"the SuperLink accepts nodes at {self.deployment.host}:{self.deployment.port}")
        return self._register_keys()

    def _register_keys(self) -> str | None:
        """Register the keys that are not in the SuperLink's database yet; returns a problem or None."""
        known = {node.key for node in nodes(self.deployment.database)}
        self._registered.update(key for key in self.deployment.public_keys() if as_pem(key) in known)
        if new := [key for key in self.deployment.public_keys() if key not in self._registered]:
            self.say(f"registering {len(new)} node keys")
        answers = iter(self.programs.answers(self.deployment.register(new)) if new else ())
        for key in new:
            answer = next(answers, {})
            reason = str(answer.get("error-message", "no answer")).splitlines()[-1]
            if not answer.get("success") and "already in use" not in reason:
                return f"{key.name} could not be registered: {reason}"
            self._registered.add(key)
        return None

    def _check_database(self) -> None:
        if (wrong := damage(self.deployment.database)) is not None:
            self._replace_database(wrong)

    def _replace_database(self, wrong: str) -> None:
        """Begin with a new database; nodes and app are registered again."""
        aside = set_aside(self.deployment.database)
        self._registered.clear()
        self.journal.begin_database()
        self.say(f"the SuperLink's database is damaged ({wrong}) and was moved to {aside}; a new one is begun")

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.deployment.state).free
        if free < LEAST_FREE:
            raise DataError(
                f"{str(self.deployment.state)!r} has {free >> 20} MB of free disk; free some and run it again"
            )
        if free < LOW_FREE and not self._disk_reported:
            self._disk_reported = True
            self.say(f"only {free >> 20} MB of disk are free for {self.deployment.state}")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _start_node(self, number: int) -> None:
        """Start a node, unless it runs, waits for its restart or was given up."""
        name = f"node-{number}"
        waits = time.monotonic() < self._node_pauses.get(name, 0.0)
        if self.programs.is_alive(name) or waits or self._is_given_up(name):
            return
        if name not in self._waited and (seconds := self._still_connected(number)) > 0:
            self._waited.add(name)
            self._node_pauses[name] = time.monotonic() + seconds
            self.say(f"{name} is started in {seconds:.0f} s, when the SuperLink no longer takes it for connected")
            return
        self._waited.discard(name)
        self._node_pauses.pop(name, None)
        self._start(name, self.deployment.node(number))

    def _still_connected(self, number: int) -> float:
        """Seconds for which the SuperLink will refuse a node's key, because a process that has died had it."""
        if (key := self.deployment.public_key(number)) is None:
            return 0.0  # each start has a key of its own
        pem = as_pem(key)
        until = [node.until for node in nodes(self.deployment.database) if node.key == pem and node.online]
        return max([0.0, *(moment - time.time() + MARGIN for moment in until)])

    def _is_given_up(self, name: str) -> bool:
        return self._node_failures.get(name, 0) > self.restarts

    def _restart_nodes(self) -> None:
        """Restart dead nodes, each time after a longer pause; give one up that does not stay alive."""
        for number in range(self.deployment.nodes):
            name = f"node-{number}"
            if self.programs.is_alive(name) or self._is_given_up(name):
                continue
            if name not in self._node_pauses:
                failures = self._node_failures[name] = self._node_failures.get(name, 0) + 1
                self._node_pauses[name] = time.monotonic() + PAUSE * 2 ** (failures - 1)
                end = f"it was restarted {self.restarts} times and is given up" if self._is_given_up(name) else ""
                code = self.programs.exit_code(name)
                why = f": {reason}" if code and code > 0 and (reason := self._last_error(name)) else ""
                self.say(f"{name} died (exit code {code}{why}){end and f'; {end}'}")
            else:
                self._start_node(number)
        names = [f"node-{number}" for number in range(self.deployment.nodes)]
        if names and all(self._is_given_up(name) for name in names):
            logs = self.deployment.state / "logs"
            raise FedgmaError(f"no node stays alive after {self.restarts} restarts, see {logs}")

    def _last_error(self, name: str) -> str:
        """Flower's reason for the end of a program, from its log."""
        with contextlib.suppress(OSError):
            lines = (self.deployment.state / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
            return next((line for line in reversed(lines[-40:]) if line.startswith("[code: ")), "").strip()
        return ""

    # -- the run -------------------------------------------------------------------------------------------------------

    def _watch(self) -> str | None:
        """Wait until the run ends; returns None if its folder marks the end, else a problem."""
        rounds, app_seen = self._rounds(), False
        while not self.stopping():
            if self._new_marks() and not is_running(self.deployment.folder):
                return None
            if self._rounds() != rounds:
                rounds = self._rounds()
                self._node_failures.clear()
                self._check_disk()
                self.say(f"round {rounds} is saved{self._without()}")
            if not self.programs.is_alive("superlink"):
                return f"the SuperLink died (exit code {self.programs.exit_code('superlink')})"
            self.programs.guard()
            self.journal.copy()
            self._restart_nodes()
            app_lives = bool(processes.find(self.deployment.state, home="superlink", program="flwr-serverapp"))
            if app_seen and not app_lives:
                return None if self._new_marks() else self._with_reason(self._gone())
            app_seen = app_seen or app_lives
            interval = STATUS_INTERVAL if not app_lives else 15 * STATUS_INTERVAL
            if time.monotonic() - self._status_checked > interval and (ending := self._ended()) is not None:
                return None if self._new_marks() else self._with_reason(ending)
            time.sleep(POLL_INTERVAL)
        return None

    def _gone(self) -> str:
        """What happened to an app whose process is gone: it may have ended without an error."""
        ending = self._ended()
        return ending if ending is not None and COMPLETED in ending else "the server app died"

    def _ended(self) -> str | None:
        """How the run ended according to the SuperLink; None while it is running, or without a SuperLink."""
        if not self.programs.is_alive("superlink"):
            return None
        self._status_checked = time.monotonic()
        runs = self.programs.command(self.deployment.status(self._run)).get("runs") or [{}]
        status = str(runs[0].get("status", ""))
        return f"the server app ended ({status})" if status.startswith("finished") else None

    def _with_reason(self, problem: str) -> str:
        """A problem and the error that ended the app; raises it if it is one of settings, which no restart mends."""
        if not self.programs.is_alive("superlink"):
            return problem
        if COMPLETED in problem and self._rounds() == self._rounds_before:
            raise saved_nothing(self.deployment.folder)
        printed = self.programs.text(self.deployment.log(self._run))
        errors = re.findall(r"^([\w.]+(?:Error|Exception)): ?(.*)$", printed, re.MULTILINE)
        if not errors:
            return problem
        name, message = errors[-1][0].rpartition(".")[2], errors[-1][1].strip()[:400]
        if name == "ConfigError":
            raise ConfigError(f"the app ended: {message}")
        return f"{problem} ({name}: {message})"

    def _conclude(self) -> int:
        """The exit code according to the run's folder."""
        if self.stopping():
            return 0
        marks = self._new_marks()
        if "failed" in marks and "done" not in marks:
            note = json.loads((self.deployment.folder / "failed").read_text(encoding="utf-8"))
            self.say(f"the run failed: {note['message']}")
            return int(note["exit_code"])
        self.say(f"done: {(self.deployment.folder / 'done').read_text(encoding='utf-8').strip()}")
        return 0

    # -- files ---------------------------------------------------------------------------------------------------------

    def _rounds(self) -> int:
        return len(read_lines(self.deployment.folder))

    def _without(self) -> str:
        """Refused, failed and late nodes of the latest round."""
        names = {node.number: node.name for node in nodes(self.deployment.database) if node.name}
        missing = left_out(read_lines(self.deployment.folder)[-1], names)
        return f" without: {', '.join(missing)}" if missing else ""

    def _marks(self) -> Marks:
        """Files that mark the end of the run, with inode and time, which tell a new file from an older one."""
        marks = {}
        for name in ("done", "failed"):
            with contextlib.suppress(FileNotFoundError):
                status = (self.deployment.folder / name).stat()
                marks[name] = (status.st_ino, status.st_mtime_ns)
        return marks

    def _new_marks(self) -> Marks:
        return {name: mark for name, mark in self._marks().items() if mark != self._before.get(name)}

    def _start(self, name: str, command: list[str]) -> None:
        self.say(f"{name} started as process {self.programs.start(name, command)}")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True
