"""Keeps a Flower run going: starts the SuperLink, submits the app, watches both, starts again what dies.

Flower itself does not go on with a run whose SuperLink or server app died. Here the server app saves every round
(`Masked.start(..., folder=...)`), and the supervisor submits it again until the run's folder is marked as done. An end
on purpose (too few clients, settings that cannot be) is not tried again: its exit code and sentence are passed on.
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

LOOK = 0.5  # seconds between looks at processes and files
ASK = 20.0  # seconds between questions to the SuperLink, each of which starts a process
START = 60.0  # seconds for a SuperLink to answer
TALK = 120.0  # seconds for one of Flower's commands
GRACE = 10.0  # seconds for a process to end when it is asked to

Marks = dict[str, tuple[int, int]]


class Supervisor:
    """One run from start to end; `say` is told what happens, `stopping` whether to stop."""

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
        self.starts = 0  # of the run, the first one included
        self._run = ""
        self._asked = 0.0
        self._registered = False

    def run(self) -> int:
        """Play the run to its end; the exit code, 0 where it came to its end."""
        self.deployment.check()
        with written_to(self.deployment.state):
            (self.deployment.state / "logs").mkdir(parents=True, exist_ok=True)
            self.deployment.write_connection()
        try:
            return self._supervise()
        finally:
            self._stop_all()

    def _supervise(self) -> int:
        in_vain, rounds = 0, self._rounds()
        while not self.stopping():
            before = self._marks()
            trouble = self._begin() or self._watch(before)
            if trouble is None:
                return self._conclude(before)
            in_vain, rounds = (0, self._rounds()) if self._rounds() > rounds else (in_vain + 1, rounds)
            if in_vain > self.restarts:
                logs = self.deployment.state / "logs"
                raise FedgmaError(f"{trouble}; {self.restarts} new starts brought no further round, see {logs}")
            self.say(f"{trouble}; starting again after round {rounds}")
        return 0  # whoever asked to stop knows the exit code

    def _begin(self) -> str | None:
        """SuperLink, nodes and app, as far as they are not running; what went wrong, if something did."""
        if not self._is_alive("superlink") and (trouble := self._start_superlink()) is not None:
            return trouble
        for number in range(self.deployment.nodes):
            self._start_node(number)
        answer = self._talk(self.deployment.submit())
        if not answer.get("run-id"):
            return f"the app could not be submitted: {answer.get('error-message', 'no answer')}"
        self._run, self._asked, self.starts = str(answer["run-id"]), time.monotonic(), self.starts + 1
        self.say(f"run {self._run} submitted, {self._rounds()} rounds played before")
        return None

    def _start_superlink(self) -> str | None:
        self._start("superlink", self.deployment.superlink(), "superlink")
        deadline = time.monotonic() + START
        while not _answers(self.deployment.address):
            if not self._is_alive("superlink"):
                return f"the SuperLink ended as it started (exit code {self.processes['superlink'].returncode})"
            if time.monotonic() > deadline or self.stopping():
                return f"the SuperLink did not answer within {START:g} s"
            time.sleep(LOOK)
        for key in self.deployment.public_keys() if not self._registered else ():
            if not self._talk(self.deployment.register(key)).get("success"):
                self.say(f"{key.name} was registered before")
        self._registered = True  # the data base outlives the SuperLink
        return None

    def _start_node(self, number: int) -> None:
        if not self._is_alive(f"node-{number}"):
            (self.deployment.state / f"node-{number}").mkdir(exist_ok=True)
            self._start(f"node-{number}", self.deployment.node(number), f"node-{number}")

    def _watch(self, before: Marks) -> str | None:
        """Wait until the run has an end; None is an end on purpose, else what happened."""
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
            if time.monotonic() - self._asked > ASK and (ended := self._ended()) is not None:
                return None if self._new_marks(before) else ended
            time.sleep(LOOK)
        return None

    def _ended(self) -> str | None:
        """How the run ended, as the SuperLink sees it; None while it goes on."""
        self._asked = time.monotonic()
        runs = self._talk(self.deployment.status(self._run)).get("runs") or [{}]
        status = str(runs[0].get("status", ""))
        return f"the server app ended ({status})" if status.startswith("finished") else None

    def _conclude(self, before: Marks) -> int:
        """The exit code that the run's folder tells."""
        if self.stopping():
            return 0
        if "failed" in self._new_marks(before):
            note = json.loads((self.deployment.folder / "failed").read_text(encoding="utf-8"))
            self.say(f"the run gave up: {note['message']}")
            return int(note["exit_code"])
        self.say(f"done: {(self.deployment.folder / 'done').read_text(encoding='utf-8').strip()}")
        return 0

    # -- files and processes -------------------------------------------------------------------------------------------

    def _rounds(self) -> int:
        return len(read_lines(self.deployment.folder))

    def _losses(self) -> str:
        """What the latest round was played without."""
        line = read_lines(self.deployment.folder)[-1]
        lost = [f"node {one['client']} refused ({one['reason']})" for one in line.get("refused", [])]
        for name in ("failed", "late"):
            if (count := (line.get("train") or {}).get(f"gma-{name}")) is not None and count > 0:
                lost.append(f"{count} {name}")
        return f" without: {', '.join(lost)}" if lost else ""

    def _marks(self) -> Marks:
        """The ends marked in the run's folder; each is written as a new file, so that it is told from an old one."""
        found = {}
        for name in ("done", "failed"):
            with contextlib.suppress(FileNotFoundError):
                held = (self.deployment.folder / name).stat()
                found[name] = (held.st_ino, held.st_mtime_ns)
        return found

    def _new_marks(self, before: Marks) -> Marks:
        return {name: mark for name, mark in self._marks().items() if mark != before.get(name)}

    def _is_alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def _start(self, name: str, command: list[str], home: str) -> None:
        with (self.deployment.state / "logs" / f"{name}.log").open("ab") as log:
            environment = self.deployment.environment(home)
            # a session of its own: Ctrl-C reaches the supervisor, which then ends them in order
            self.processes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.say(f"{name} started as process {self.processes[name].pid}")

    def _talk(self, command: list[str]) -> dict[str, Any]:
        """What one of Flower's commands answers; nothing where it does not."""
        try:
            done = subprocess.run(
                command, env=self.deployment.environment(), capture_output=True, timeout=TALK, check=False, text=True
            )
            answer = json.loads(done.stdout[done.stdout.index("{") :])
        except (subprocess.TimeoutExpired, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _stop_all(self) -> None:
        """End what was started, nodes first; by force after a while."""
        alive = [name for name in reversed(self.processes) if self._is_alive(name)]
        for name in alive:
            self.processes[name].terminate()
        deadline = time.monotonic() + GRACE
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
