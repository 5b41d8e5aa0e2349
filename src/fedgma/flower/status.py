"""What a deployment is doing, read from its state folder alone: its processes are asked nothing, nothing is changed."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.errors import ConfigError
from fedgma.flower import processes
from fedgma.flower.database import nodes
from fedgma.flower.journal import PRINTED, SAID
from fedgma.records.reader import is_done, read_lines
from fedgma.records.state import FAILED, is_running

LATEST = 5  # messages of the supervisor that are shown
PROGRAMS = {"SuperLink": "fedgma.flower.superlink", "server app": "flwr-serverapp", "nodes here": "flower-supernode"}
ENDINGS = {
    "running": "going on",
    "done": "done",
    "failed": "given up",
    "stopped": "stopped; the same command continues it",
}


class Status(NamedTuple):
    """The state of a deployment."""

    state: str  # running, done, failed or stopped
    message: str  # of a run that failed
    rounds: int  # that are saved
    seconds: float | None  # since the last one was saved
    left_out: list[str]  # nodes of the last round, with reasons
    processes: dict[str, list[int]]  # of this machine, by program
    connected: list[str]  # nodes
    absent: list[str]  # nodes that are registered and not connected
    free: int  # bytes of disk
    said: list[str]  # the latest messages of the supervisor
    logs: str

    @property
    def is_well(self) -> bool:
        """Whether the run is done or goes on."""
        return self.state in ("running", "done")


def status_of(state: Path) -> Status:
    """The status of the deployment with this state folder."""
    if not (state / "superlink").is_dir():
        raise ConfigError(f"there is no state of `fedgma flower up` in {str(state)!r}; name its folder by --state")
    run, logs, supervised = state / "run", state / "logs", is_running(state)
    running = {name: processes.find(state, program=program) for name, program in PROGRAMS.items()}
    lines = read_lines(run)
    known = nodes(state / "superlink" / "superlink.db")
    online = {node.number for node in known if node.online and node.until > time.time() and running["SuperLink"]}
    names = {node.number: node.name or str(node.number) for node in known}
    failed = (run / FAILED).exists()
    word = "running" if supervised else "done" if is_done(run) else "failed" if failed else "stopped"
    return Status(
        word,
        str(json.loads((run / FAILED).read_text(encoding="utf-8"))["message"]) if word == "failed" else "",
        len(lines),
        time.time() - (run / "rounds.jsonl").stat().st_mtime if lines else None,
        left_out(lines[-1], names) if lines else [],
        running,
        sorted(names[number] for number in online),
        sorted(name for number, name in names.items() if number not in online),
        shutil.disk_usage(state).free,
        _last_lines(logs / SAID),
        str(logs),
    )


def in_words(status: Status) -> list[str]:
    """A status as lines for a person."""
    ago = "" if status.seconds is None else f", the last one {_ago(status.seconds)} ago"
    ending = ENDINGS[status.state] + (f": {status.message}" if status.message else "")
    programs = ", ".join(f"{name} {_pids(pids)}" for name, pids in status.processes.items())
    known = [*status.connected, *status.absent]
    connected = f"{len(status.connected)} of {len(known)} connected"
    if status.absent and status.processes["SuperLink"]:
        connected += f"; not connected: {', '.join(status.absent)}"
    lines = [
        f"run        {ending}; {status.rounds} rounds are saved{ago}",
        f"processes  {programs}",
        f"nodes      {connected}",
    ]
    if status.left_out:
        lines.append(f"last round without: {', '.join(status.left_out)}")
    lines.append(f"disk       {status.free / 2**30:.1f} GB free")
    lines.append(f"logs       {status.logs}: {SAID}, {PRINTED} (what the server app prints), superlink.log, node-N.log")
    return [*lines, *(f"           {line}" for line in status.said)]


def left_out(line: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    """Refused, failed and late nodes of a round, from its record; `names` are those of the nodes' keys."""
    refused = line.get("refused", [])
    losses = [f"node {_named(refusal['client'], names)} refused ({refusal['reason']})" for refusal in refused]
    for name in ("failed", "late"):
        nodes = line.get(name)
        if isinstance(nodes, list):
            losses += [f"node {_named(node, names)} {name}" for node in nodes]
        elif (count := (line.get("train") or {}).get(f"gma-{name}")) is not None and count > 0:
            losses.append(f"{count} {name}")  # of a folder from before nodes were named
    return losses


def _named(node: Any, names: Mapping[int, str]) -> str:
    name = names.get(node, str(node))
    return name if name == str(node) else f"{node} ({name})"


def _pids(pids: list[int]) -> str:
    return f"({', '.join(map(str, pids))})" if pids else "not running"


def _ago(seconds: float) -> str:
    """A time for a person.

    >>> _ago(59.4), _ago(600), _ago(90000)
    ('59 s', '10 min', '25 h')
    """
    return next(
        f"{seconds / size:.0f} {unit}"
        for size, unit in ((3600, "h"), (60, "min"), (1, "s"))
        if seconds >= 2 * size or size == 1
    )


def _last_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-LATEST:]
    except OSError:
        return []
