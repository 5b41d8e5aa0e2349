"""Find and end the processes of a deployment, also those that outlived the process that started them.

Flower's programs start others, partly in sessions of their own, so that ending a program does not end its children.
Every process of a deployment has the state folder in its environment (`MARK`), which its children inherit. Only
Flower's SuperExec hides its environment; it is known by the address that it talks to.

Run as a program, this module is the guard: it waits until its standard input closes, which also happens when the
supervisor is killed, and then ends all processes of the deployment. It imports the standard library alone. Without
/proc (other systems than Linux) nothing is found, and only the processes that the supervisor started are ended.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

MARK = "FEDGMA_FLOWER_STATE"
PROC = Path("/proc")
END_TIMEOUT = 10.0  # seconds for killed processes to disappear


def find(state: Path, addresses: Iterable[str] = (), *, home: str = "", program: str = "") -> list[int]:
    """Process ids of the deployment with this state folder, without the caller's.

    `addresses` are those of the deployment's SuperLink and nodes on this machine. `home` limits the search to the
    processes of one program (`superlink`, `node-0`), `program` to one name of a program.
    """
    marks = {f"{MARK}={os.path.realpath(state)}".encode()} | ({f"FLWR_HOME={state / home}".encode()} if home else set())
    known = {address.encode() for address in addresses}
    processes = []
    for folder in PROC.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if program and not any(Path(os.fsdecode(word)).name == program for word in words[:3]):
                continue
            ours = marks <= set(_environment(folder)) or _is_superexec_of(known, words)
        except OSError:  # it has ended
            continue
        if ours and int(folder.name) != os.getpid():
            processes.append(int(folder.name))
    return processes


def end(state: Path, addresses: Sequence[str] = (), *, home: str = "", program: str = "") -> list[int]:
    """Kill the processes that `find` finds, and those that they start meanwhile; returns their process ids."""
    ended: set[int] = set()
    deadline = time.monotonic() + END_TIMEOUT
    while (alive := find(state, addresses, home=home, program=program)) and time.monotonic() < deadline:
        for process in alive:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                continue
        ended.update(alive)
        time.sleep(0.02)
    return sorted(ended)


def _environment(folder: Path) -> list[bytes]:
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except PermissionError:
        return []


def _is_superexec_of(addresses: set[bytes], words: list[bytes]) -> bool:
    """Whether a command line is that of a SuperExec which talks to one of these addresses."""
    if not any(word.endswith(b"flower-superexec") for word in words[:2]) or b"--runtime-api-address" not in words:
        return False
    after = words.index(b"--runtime-api-address") + 1
    return after < len(words) and words[after] in addresses


def main() -> None:
    """Wait for the end of the supervisor, then end what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    end(Path(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    main()
