"""SuperLink, server app and nodes of a supervised Flower run are killed (-9) at random moments.

    python benchmarks/faults/flower_kills.py --count 50 --workers 2 --seed 0

Each run is one `fedgma flower up` on loopback with two nodes. The SuperLink, the server app, a node and the command
itself are killed in turn, one in each run or several with `--a-run`, at random moments: after the start, after the
submission or after a round. Every run must finish by itself with the model that the same rounds give without Flower,
and leave no process behind. After a kill of the command nothing may stay alive, and the same command must finish the
run. Needs fedgma[flower,sim].
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
APP = HERE / "kills_app"
sys.path[:0] = [str(SOURCE), str(APP)]

import fedgma  # noqa: E402
from fedgma.flower import processes  # noqa: E402
from fedgma.records.checkpoints import digest  # noqa: E402
from kills_app import task  # noqa: E402

TARGETS = ("superlink", "server app", "node", "supervisor")
NODES = 2
COMMAND = [sys.executable, "-c", "from fedgma.cli import main; main()", "flower", "up", str(APP), "--insecure"]
PORTS: Iterator[int] = count(10000 + os.getpid() % 500 * 40, NODES + 2)  # below those of outgoing connections


class Outcome(NamedTuple):
    """What became of a run."""

    killed: list[str]
    code: int
    sha256: str
    left: list[int]
    seconds: float
    said: str


def undisturbed(rounds: int) -> str:
    """SHA-256 of the model after the same rounds, without Flower."""
    params, state = task.initial(), None
    for round in range(1, rounds + 1):
        models = [task.train(params, round, client) for client in range(NODES)]
        weights = [task.SAMPLES] * NODES
        params, state, _ = fedgma.server_round(
            params, models, weights, aggregator=fedgma.masked_mean(0.4), optimizer=fedgma.yogi(0.1), state=state
        )
    return digest(params)


def free_port() -> int:
    """The first of the ports in a row that a deployment takes."""
    for first in PORTS:
        try:
            for port in range(first, first + NODES + 2):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError


def start(state: Path, rounds: int, timeout: float) -> subprocess.Popen[str]:
    """The command that supervises the run."""
    settings = f"rounds={rounds} nodes={NODES} timeout={timeout} pause=0.5"
    words = ["--state", str(state), "--port", str(free_port()), "--nodes", str(NODES), "-c", settings]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    with (state.with_suffix(".log")).open("a") as log:
        return subprocess.Popen([*COMMAND, *words], env=environment, stdout=log, stderr=log, text=True)


def victim(state: Path, supervisor: int, target: str, rng: random.Random) -> int | None:
    """A process of this kind, if there is one."""
    if target == "supervisor":
        return supervisor
    home = f"node-{rng.randrange(NODES)}" if target == "node" else "superlink"
    alive = processes.find(state, home=home, program="flwr-serverapp" if target == "server app" else "")
    if target != "server app":
        started = re.findall(rf"{home} started as process (\d+)", state.with_suffix(".log").read_text())
        alive = [process for process in alive if str(process) in started]
    return alive[0] if alive else None


def kill(process: subprocess.Popen[str], state: Path, target: str, after: int, rng: random.Random, pace: float) -> str:
    """Kill a process of the run a random time after an event; says which, or that the run had ended before."""
    log, lines = state.with_suffix(".log"), state / "run" / "rounds.jsonl"
    sign = {-1: "superlink started", 0: "submitted"}.get(after, f"round {after}")
    while process.poll() is None:
        if sign in log.read_text() if after < 1 else lines.exists() and lines.read_bytes().count(b"\n") >= after:
            break
        time.sleep(0.02)
    time.sleep(rng.uniform(0, pace if after < 1 else min(pace, 3.0)))
    while process.poll() is None:
        if (found := victim(state, process.pid, target, rng)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found, signal.SIGKILL)
                return f"{target} after {sign!r}"
        time.sleep(0.02)
    return f"{target} too late"


def trial(folder: Path, number: int, targets: list[str], rounds: int, seed: int) -> Outcome:
    """One run with a kill of each of these targets; repeated with other moments if a kill came after its end."""
    rng = random.Random(seed * 1000 + number)
    for attempt in count():
        outcome = disturbed(folder / f"run-{number}-{attempt}", targets, rounds, rng)
        if not any("too late" in one for one in outcome.killed) or outcome.code != 0:
            break
    return outcome


def disturbed(state: Path, targets: list[str], rounds: int, rng: random.Random) -> Outcome:
    """One run with a kill of each of these targets."""
    moments = sorted(rng.sample(range(-1, rounds), len(targets)))
    pace, began = measured_pace(), time.monotonic()
    process = start(state, rounds, timeout=max(10.0, 10 * pace))
    killed = []
    for target, after in zip(targets, moments, strict=True):
        killed.append(kill(process, state, target, after, rng, pace))
        if target == "supervisor" and process.wait() == -signal.SIGKILL:
            while processes.find(state):
                time.sleep(0.1)
            process = start(state, rounds, timeout=max(10.0, 10 * pace))
    code = process.wait()
    left = processes.find(state)
    done = state / "run" / "done"
    sha256 = json.loads(done.read_text())["sha256"] if done.exists() else "none"
    said = state.with_suffix(".log").read_text()
    return Outcome(killed, code, sha256, left, time.monotonic() - began, said)


def measured_pace() -> float:
    """Seconds that one of Flower's processes needs to start on this machine now; a round takes longer."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import flwr.clientapp, flwr.serverapp, numpy"], check=True)
    return time.monotonic() - began


def main() -> None:
    global NODES
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--count", type=int, default=3, help="kills in all")
    asked.add_argument("--a-run", type=int, default=1, help="kills in each run, at most one more than rounds")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--nodes", type=int, default=NODES)
    asked.add_argument("--only", nargs="+", choices=TARGETS, default=TARGETS, help="what is killed, in turn")
    asked.add_argument("--workers", type=int, default=1, help="runs at a time")
    asked.add_argument("--seed", type=int, default=0)
    own = asked.parse_args()
    NODES = own.nodes
    wanted, folder = undisturbed(own.rounds), Path(tempfile.mkdtemp(prefix="flower-kills-"))
    targets = [own.only[number % len(own.only)] for number in range(own.count)]
    runs = [targets[first : first + own.a_run] for first in range(0, own.count, own.a_run)]
    right = 0
    with ThreadPoolExecutor(own.workers) as pool:
        for number, outcome in enumerate(
            pool.map(lambda number: trial(folder, number, runs[number], own.rounds, own.seed), range(len(runs)))
        ):
            holds = outcome.code == 0 and outcome.sha256 == wanted and not outcome.left
            right += len(runs[number]) * holds
            print(
                f"{number:3d} {', '.join(outcome.killed):45s} exit code {outcome.code}, {outcome.seconds:4.0f} s, "
                f"{'same model' if outcome.sha256 == wanted else 'ANOTHER MODEL'}, left: {outcome.left or 'nothing'}",
                flush=True,
            )
            if not holds:
                print(outcome.said, flush=True)
    print(f"{right} of {own.count} kills: the run finished with the undisturbed model and left no process", flush=True)
    if right == own.count:
        shutil.rmtree(folder)
    sys.exit(right != own.count)


if __name__ == "__main__":
    main()
