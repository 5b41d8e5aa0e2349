"""Starts the processes of one run (ranks) on this machine, watches them, and goes on with fewer when one is killed.

All processes run the same command. The first one prints, writes the records and receives the signals. A rank that is
killed ends the others, and the command is started again: it continues from the checkpoints. An error of any rank ends
all. The ranks hold one end of a pipe: when this process ends, however that happens, they end too. This module imports
no torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from fedgma.errors import ConfigError, RankLost
from fedgma.experiments.ranks.places import STORE

PIPE = "FEDGMA_RANKS_PIPE"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
RETRIES = 8  # starts after the first
POLL = 0.05  # seconds
FOLLOWING = (None, 0, RankLost.exit_code)  # codes of ranks that did not fail themselves
GRACE = 10.0  # seconds for ranks to end by themselves after the first has


class Ended(NamedTuple):
    """How the ranks ended: an exit code, and which ranks were killed by which signal."""

    code: int
    killed: dict[int, int]


class Forwarding:
    """Sends the signals that this process receives on to the first rank, which finishes its round."""

    def __init__(self) -> None:
        self.code: int | None = None  # of the last signal, as a shell reports it
        self.first: subprocess.Popen[bytes] | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.code = 128 + number
        if self.first is not None:
            with contextlib.suppress(OSError):
                self.first.send_signal(number)


def launch(command: Sequence[str], ranks: int, *, replace: bool = False, say: Callable[[str], None]) -> int:
    """Run a command as so many ranks on this machine until it is done; returns its exit code.

    When ranks are killed, the command is started again with the others, or with as many as before (`replace`). `say`
    tells the user.
    """
    if os.name == "nt":
        raise ConfigError("--on torchrun starts processes on Linux and macOS only; on Windows start it by torchrun")
    with tempfile.TemporaryDirectory(prefix="fedgma-ranks-") as folder, _forwarding() as signals:
        for attempt in range(RETRIES + 1):
            ended = _play(command, ranks, Path(folder) / str(attempt), signals, say)
            if ended.code == RankLost.exit_code and not ended.killed:
                say("the ranks lost each other; nothing saved is lost, run the same command again to continue")
            if signals.code is not None or not ended.killed:
                return ended.code
            left = ranks if replace else ranks - len(ended.killed)
            if left < 1 or attempt == RETRIES:
                break
            now = "one rank" if left == 1 else f"{left} ranks"
            say(f"{_killed(ended.killed, ranks)}; the runs go on from their last checkpoints with {now}")
            ranks = left
    say(f"{_killed(ended.killed, ranks)}; nothing saved is lost, run the same command again to continue")
    return RankLost.exit_code


def _killed(killed: Mapping[int, int], ranks: int) -> str:
    """Which ranks were killed, in words.

    >>> _killed({1: 9}, 4), _killed({0: 9, 2: 9}, 4)
    ('rank 1 of 4 was killed (SIGKILL)', 'ranks 0 and 2 of 4 were killed (SIGKILL)')
    """
    which = " and ".join(map(str, killed))
    names = ", ".join(dict.fromkeys(_name(number) for number in killed.values()))
    return f"rank{'s' * (len(killed) > 1)} {which} of {ranks} {'were' if len(killed) > 1 else 'was'} killed ({names})"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _forwarding() -> Iterator[Forwarding]:
    signals = Forwarding()
    before = {number: signal.signal(number, signals.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _play(command: Sequence[str], ranks: int, folder: Path, signals: Forwarding, say: Callable[[str], None]) -> Ended:
    """Start the ranks, wait until they have ended, and end what is left of them."""
    folder.mkdir()
    held, ours = os.pipe()
    crew: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            crew.append(_start(command, rank, ranks, folder, held))
        signals.first = crew[0]
        ended = _watch(crew, signals)
    finally:
        signals.first = None
        for process in crew:
            process.kill()
        for process in crew:
            process.wait()
        os.close(held)
        os.close(ours)
    if ended.code and not ended.killed and signals.code is None and (failed := _speaker(crew)):
        say((folder / str(failed)).read_text(errors="replace").strip().removeprefix("fedgma: "))
    return ended


def _start(command: Sequence[str], rank: int, ranks: int, folder: Path, held: int) -> subprocess.Popen[bytes]:
    """A rank: a group of its own, so that a terminal's Ctrl-C reaches it through this process alone."""
    given: dict[str, object] = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    given |= {STORE: folder / "store", PIPE: held}
    network = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    environment = {**os.environ, **network, **{name: str(value) for name, value in given.items()}}
    with (folder / str(rank)).open("wb") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if rank else None,  # the first rank speaks
            stderr=errors if rank else None,
            pass_fds=[held],
            process_group=0,
        )
    _pin(process.pid, rank, ranks)
    return process


def _pin(process: int, rank: int, ranks: int) -> None:
    """Give a rank its share of the cores, so that ranks do not start more threads than there are cores."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    share = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
    if share and ranks > 1:
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(process, share)


def _watch(crew: Sequence[subprocess.Popen[bytes]], signals: Forwarding) -> Ended:
    """Wait until the first rank has ended, or a rank has failed and the others had time to end."""
    until = None
    while True:
        codes = [process.poll() for process in crew]
        if None not in codes or (until is not None and time.monotonic() > until):
            break
        if until is None and (codes[0] is not None or any(codes)):
            until = time.monotonic() + GRACE
        time.sleep(POLL)
    return _ended(codes, signals.code)


def _ended(codes: Sequence[int | None], stopped: int | None) -> Ended:
    """What the exit codes of ranks mean; None for one that is still running, `stopped` after a signal.

    >>> _ended([0, 0], None), _ended([6, -9], None), _ended([None, 3], None), _ended([2, 6], None)
    (Ended(code=0, killed={}), Ended(code=6, killed={1: 9}), Ended(code=3, killed={}), Ended(code=2, killed={}))
    """
    if stopped is not None:
        return Ended(stopped if codes[0] != 0 else 0, {})
    killed = {rank: -code for rank, code in enumerate(codes) if code is not None and code < 0}
    if codes[0] == 0:
        return Ended(0, {})
    failures = [code for code in codes if code not in FOLLOWING and code > 0]
    if failures:
        return Ended(failures[0], {})
    return Ended(RankLost.exit_code if any(codes) else 0, killed)


def _speaker(crew: Sequence[subprocess.Popen[bytes]]) -> int:
    """The rank whose error the user has to see; 0 for the first, which has said it itself."""
    failed = [
        rank for rank, process in enumerate(crew) if process.returncode not in FOLLOWING and process.returncode > 0
    ]
    return failed[0] if failed else 0


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """In a rank: end this process as soon as the process that started it has ended."""
    if PIPE not in environment:
        return

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(int(environment[PIPE]), 1)
        os._exit(RankLost.exit_code)

    threading.Thread(target=wait, daemon=True).start()
