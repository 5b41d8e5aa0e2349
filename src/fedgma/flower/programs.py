"""The programs of a deployment as processes: started, watched, stopped, and nothing left of them afterwards."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from fedgma.flower import processes
from fedgma.flower.deployment import Deployment, private

COMMAND_TIMEOUT = 300.0  # seconds for one of Flower's commands
COMMAND_POLL = 0.2  # seconds between looks at whether a stop was requested
STOP_TIMEOUT = 10.0  # seconds for a process to end after SIGTERM
GUARD, NODE = "guard", "node-"


class Programs:
    """Processes by name (`superlink`, `node-0`), and a guard that ends them if this process dies."""

    def __init__(self, deployment: Deployment, stopping: Callable[[], bool] = lambda: False) -> None:
        self.deployment, self.stopping = deployment, stopping
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def is_alive(self, name: str) -> bool:
        """Whether a program was started and still runs."""
        return name in self.processes and self.processes[name].poll() is None

    def exit_code(self, name: str) -> int | None:
        """Exit code of a program that has ended."""
        return self.processes[name].returncode

    def start(self, name: str, command: list[str]) -> int:
        """Start a program, after an end of what its predecessor left; returns the process id."""
        self.guard()
        processes.end(self.deployment.state, home=name)
        (self.deployment.state / name).mkdir(mode=0o700, exist_ok=True)
        with open(self.deployment.state / "logs" / f"{name}.log", "ab", opener=private) as log:
            # a new session: Ctrl-C only reaches the supervisor, which then stops all processes in order
            self.processes[name] = subprocess.Popen(
                command,
                env=self.deployment.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o077,
            )
        return self.processes[name].pid

    def guard(self) -> None:
        """Start the guard if it does not run."""
        if not self.is_alive(GUARD):
            state, addresses = str(self.deployment.state), self.deployment.addresses()
            self.processes[GUARD] = subprocess.Popen(
                [sys.executable, "-I", str(processes.__file__), state, *addresses],
                env=self.deployment.environment(GUARD),
                stdin=subprocess.PIPE,  # closed by the system when this process ends
                start_new_session=True,
            )

    def command(self, command: list[str]) -> dict[str, Any]:
        """The JSON output of one of Flower's commands; empty if there is none, or if a stop was requested meanwhile."""
        return next(iter(self.answers(command)), {})

    def answers(self, command: list[str]) -> list[dict[str, Any]]:
        """All JSON objects that a command prints."""
        output, found, start = self.text(command), [], 0
        while (start := output.find("{", start)) >= 0:
            try:
                answer, start = json.JSONDecoder().raw_decode(output, start)
            except ValueError:
                break
            found.append(answer)
        return found

    def text(self, command: list[str]) -> str:
        """What one of Flower's commands prints."""
        process = subprocess.Popen(
            command,
            env=self.deployment.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            umask=0o077,
        )
        return self._output(process)

    def _output(self, process: subprocess.Popen[str]) -> str:
        deadline = time.monotonic() + COMMAND_TIMEOUT
        while True:
            try:
                return process.communicate(timeout=COMMAND_POLL)[0]
            except subprocess.TimeoutExpired:
                if self.stopping() or time.monotonic() > deadline:
                    process.kill()

    def end_strays(self) -> list[int]:
        """Kill all other processes of this state folder, which an earlier supervisor or a dead program left."""
        return processes.end(self.deployment.state, self.deployment.addresses())

    def terminate(self, names: list[str]) -> list[str]:
        """Ask these programs to end, kill those that do not end in time; returns the names of those that ran."""
        alive = [name for name in names if self.is_alive(name)]
        for name in alive:
            self.processes[name].terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for name in alive:
            try:
                self.processes[name].wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.processes[name].kill()
                self.processes[name].wait()
        return alive

    def stop(self) -> list[str]:
        """Stop all programs; kill those that do not end in time, and everything they started.

        The server app ends first: it would count nodes that sign off as failed, and save a round without them. The rest
        is asked to end after the nodes have: a node signs off at the SuperLink, which otherwise counts it as connected
        for a minute, also after the next start.
        """
        processes.end(self.deployment.state, home="superlink", program="flwr-serverapp")
        names = [name for name in reversed(self.processes) if name != GUARD]
        nodes = [name for name in names if name.startswith(NODE)]
        alive = self.terminate(nodes) + self.terminate([name for name in names if name not in nodes])
        self.end_strays()
        for process in self.processes.values():
            if process.stdin is not None:
                process.stdin.close()  # where there is no /proc, the guard ends now
            process.wait()
        return alive
