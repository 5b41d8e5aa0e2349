"""Supervises a Flower run: starts the SuperLink, submits the app, watches both, and restarts what dies.

Flower does not resume a run whose SuperLink or server app died. Here the server app saves every round
(`Masked.start(..., folder=...)`), and the supervisor submits it again until the run's folder is marked as done. If the
app ends with a fedgma error (too few clients, invalid settings), it is not restarted; exit code and message are
passed on.
"""

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from fedgma.errors import FedgmaError
from fedgma.flower.deployment import Deployment
from fedgma.records.checkpoints import written_to
from fedgma.records.reader import read_lines
from fedgma.records.writer import is_running

POLL_INTERVAL = 0.5  # seconds between checks of processes and files
STATUS_INTERVAL = 20.0  # seconds between status requests to the SuperLink; each starts a process
START_TIMEOUT = 60.0  # seconds for a SuperLink to accept connections
COMMAND_TIMEOUT = 120.0  # seconds for one of Flower's commands
STOP_TIMEOUT = 10.0  # seconds for a process to end after SIGTERM

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
        self.deployment, self.restarts, self.say, self.stopping = deployment, restarts, say, stopping
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.starts = 0  # number of times the app was submitted
        self._run = ""
        self._status_checked = 0.0
        self._registered = False

    def run(self) -> int:
        """Supervise the run until it ends; returns the exit code, 0 if the run is done."""
        self.deployment.check()
        with written_to(self.deployment.state):
            (self.deployment.state / "logs").mkdir(parents=True, exist_ok=True)
            self.deployment.write_connection()
        try:
            return self._supervise()
        finally:
            self._stop_all()

    def _supervise(self) -> int:
        failed_starts, rounds = 0, self._rounds()
        while not self.stopping():
            before = self._marks()
            problem = self._begin() or self._watch(before)
            if problem is None:
                return self._conclude(before)
            failed_starts, rounds = (0, self._rounds()) if self._rounds() > rounds else (failed_starts + 1, rounds)
            if failed_starts > self.restarts:
                logs = self.deployment.state / "logs"
                raise FedgmaError(f"{problem}; no further round after {self.restarts} restarts, see {logs}")
            self.say(f"{problem}; restarting after round {rounds}")
        return 0  # stopped by the caller, who sets the exit code

    def _begin(self) -> str | None:
        """Start SuperLink and nodes if they are not running, and submit the app; returns a problem or None."""
        if not self._is_alive("superlink") and (problem := self._start_superlink()) is not None:
            return problem
        for number in range(self.deployment.nodes):
            self._start_node(number)
        answer = self._run_command(self.deployment.submit())
        if not answer.get("run-id"):
            return f"the app could not be submitted: {answer.get('error-message', 'no answer')}"
        self._run, self._status_checked, self.starts = str(answer["run-id"]), time.monotonic(), self.starts + 1
        self.say(f"run {self._run} submitted after {self._rounds()} completed rounds")
        return None

    def _start_superlink(self) -> str | None:
        self._start("superlink", self.deployment.superlink(), "superlink")
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(self.deployment.address):
            if not self._is_alive("superlink"):
                return f"the SuperLink failed to start (exit code {self.processes['superlink'].returncode})"
            if time.monotonic() > deadline or self.stopping():
                return f"the SuperLink did not accept connections within {START_TIMEOUT:g} s"
            time.sleep(POLL_INTERVAL)
        for key in self.deployment.public_keys() if not self._registered else ():
            if not self._run_command(self.deployment.register(key)).get("success"):
                self.say(f"{key.name} is registered already")
        self._registered = True  # a restarted SuperLink reads it from its database
        return None

    def _start_node(self, number: int) -> None:
        if not self._is_alive(f"node-{number}"):
            (self.deployment.state / f"node-{number}").mkdir(exist_ok=True)
            self._start(f"node-{number}", self.deployment.node(number), f"node-{number}")

    def _watch(self, before: Marks) -> str | None:
        """Wait until the run ends; returns None if its folder marks the end, else a problem."""
        rounds = self._rounds()
        while not self.stopping():
            if self._new_marks(before) and not is_running(self.deployment.folder):
                return None
            if self._rounds() != rounds:
                rounds = self._rounds()
                self.say(f"round {rounds} is saved{self._losses()}")
            if not self._is_alive("superlink"):
                return f"the SuperLink died (exit code {self.processes['superlink'].returncode})"
            for number in range(self.deployment.nodes):
                if not self._is_alive(f"node-{number}"):
                    self.say(f"node-{number} died (exit code {self.processes[f'node-{number}'].returncode})")
                    self._start_node(number)
            if time.monotonic() - self._status_checked > STATUS_INTERVAL and (ending := self._ended()) is not None:
                return None if self._new_marks(before) else ending
            time.sleep(POLL_INTERVAL)
        return None

    def _ended(self) -> str | None:
        """How the run ended according to the SuperLink; None while it is running."""
        self._status_checked = time.monotonic()
        runs = self._run_command(self.deployment.status(self._run)).get("runs") or [{}]
        status = str(runs[0].get("status", ""))
        return f"the server app ended ({status})" if status.startswith("finished") else None

    def _conclude(self, before: Marks) -> int:
        """The exit code according to the run's folder."""
        if self.stopping():
            return 0
        if "failed" in self._new_marks(before):
            note = json.loads((self.deployment.folder / "failed").read_text(encoding="utf-8"))
            self.say(f"the run failed: {note['message']}")
            return int(note["exit_code"])
        self.say(f"done: {(self.deployment.folder / 'done').read_text(encoding='utf-8').strip()}")
        return 0

    # -- files and processes -------------------------------------------------------------------------------------------

    def _rounds(self) -> int:
        return len(read_lines(self.deployment.folder))

    def _losses(self) -> str:
        """Refused, failed and late nodes of the latest round."""
        line = read_lines(self.deployment.folder)[-1]
        losses = [f"node {refusal['client']} refused ({refusal['reason']})" for refusal in line.get("refused", [])]
        for name in ("failed", "late"):
            if (count := (line.get("train") or {}).get(f"gma-{name}")) is not None and count > 0:
                losses.append(f"{count} {name}")
        return f" without: {', '.join(losses)}" if losses else ""

    def _marks(self) -> Marks:
        """Files that mark the end of the run, with inode and time, which tell a new file from an older one."""
        marks = {}
        for name in ("done", "failed"):
            with contextlib.suppress(FileNotFoundError):
                status = (self.deployment.folder / name).stat()
                marks[name] = (status.st_ino, status.st_mtime_ns)
        return marks

    def _new_marks(self, before: Marks) -> Marks:
        return {name: mark for name, mark in self._marks().items() if mark != before.get(name)}

    def _is_alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def _start(self, name: str, command: list[str], home: str) -> None:
        with (self.deployment.state / "logs" / f"{name}.log").open("ab") as log:
            environment = self.deployment.environment(home)
            # a new session: Ctrl-C only reaches the supervisor, which then stops all processes in order
            self.processes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.say(f"{name} started as process {self.processes[name].pid}")

    def _run_command(self, command: list[str]) -> dict[str, Any]:
        """The JSON output of one of Flower's commands; empty if there is none."""
        try:
            done = subprocess.run(
                command,
                env=self.deployment.environment(),
                capture_output=True,
                timeout=COMMAND_TIMEOUT,
                check=False,
                text=True,
            )
            answer = json.loads(done.stdout[done.stdout.index("{") :])
        except (subprocess.TimeoutExpired, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _stop_all(self) -> None:
        """Stop all processes, nodes first; kill those that do not end in time."""
        alive = [name for name in reversed(self.processes) if self._is_alive(name)]
        for name in alive:
            self.processes[name].terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for name in alive:
            process = self.processes[name]
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if alive:
            self.say(f"stopped: {', '.join(alive)}")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True
