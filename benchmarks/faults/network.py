"""Flower on a bad network: whole runs through proxies that delay, cut, duplicate and replay the nodes' requests.

    python benchmarks/faults/network.py                            # five runs, each with another seed
    python benchmarks/faults/network.py --count 1 --rounds 2       # a short one

Needs fedgma[flower]. A SuperLink, nodes and apps run as processes on 127.0.0.1 in a temporary folder. The final model
of each run must have the hash of the undisturbed run, which is computed in this process: no reply is lost, and none is
counted twice. With `--lossy`, also faults that make Flower lose a message; those rounds are repeated. The last line
says how many runs held; the exit code is 1 if one did not.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
APP = HERE / "network_app"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers"), str(APP), str(HERE)]

from proxy import Faults, Proxy  # noqa: E402

PROGRAMS = Path(sys.executable).parent
LOSSY = "retries=20 timeout=60.0"  # of the app: a lost reply costs an attempt
FAULTS = {"delay": 0.05, "cut_request": 0.05, "cut_response": 0.1, "duplicate": 0.2, "replay": 0.2}
RARE = {"cut_response": 0.01, "duplicate": 0.01}  # each of these loses a reply, which takes minutes to notice


def undisturbed(nodes: int, rounds: int) -> str:
    """The hash of the model without a network."""
    from fake_grids import Nodes, running
    from fedgma.records.checkpoints import digest
    from network_app import client_app, server_app

    partitions = {number + 1: number for number in range(nodes)}
    grid = Nodes(partitions, running(client_app.app, {}, partitions))
    result = server_app.strategy(nodes).start(grid, server_app.initial(), rounds)
    return digest({name: array.numpy() for name, array in result.arrays.items()})


def environment(folder: Path, home: str) -> dict[str, str]:
    """No telemetry, no installation at run time, and a home for each process."""
    own = {"FLWR_HOME": str(folder / home), "PATH": f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"}
    off = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
    off["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **off, **own}


@contextlib.contextmanager
def process(folder: Path, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its own group, which is ended by its number."""
    with (folder / f"{name}.log").open("wb") as log:
        words = [str(PROGRAMS / command[0]), *command[1:]]
        running = subprocess.Popen(words, env=environment(folder, name), stdout=log, stderr=log, start_new_session=True)
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, 15)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, 9)
            running.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at the moment."""
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


async def reachable(port: int, limit: float) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.2)
    raise SystemExit(f"nobody listens on port {port} after {limit:g} s")


async def federate(folder: Path, faults: Faults, nodes: int, rounds: int, limit: float) -> tuple[str, Counter[str]]:
    """Play a run through proxies; the hash of its model (or why there is none), and how often each fault happened."""
    port, *others = free_ports(nodes + 1)
    shared = ["--insecure", "--host", "127.0.0.1", "--port"]
    with contextlib.ExitStack() as started:
        link = ["flower-superlink", *shared, str(port), "--disable-runtime-dependency-installation"]
        started.enter_context(process(folder, "superlink", *link))
        await reachable(port, limit)
        proxies = []
        async with contextlib.AsyncExitStack() as opened:
            for number, own in enumerate(others):
                drawn = replace(faults, seed=faults.seed * 1000 + number)
                proxies.append(await opened.enter_async_context(Proxy(("127.0.0.1", port), drawn)))
                words = ["--superlink", f"127.0.0.1:{proxies[-1].port}", *shared, str(own)]
                config = f"partition-id={number} num-partitions={nodes}"
                node = ["flower-supernode", *words, "--node-config", config]
                started.enter_context(process(folder, f"node{number}", *node))
            submit(folder, started, port, f"rounds={rounds} nodes={nodes} {LOSSY if faults.lossy else ''}")
            found = await ended(folder / "state", limit)
    return found, sum((proxy.seen for proxy in proxies), Counter())


def submit(folder: Path, started: contextlib.ExitStack, port: int, settings: str) -> None:
    """Hand the app to the SuperLink, past the proxies."""
    home = folder / "submit"
    home.mkdir()
    address = f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n{address}')
    config = f'state="{folder / "state"}" {settings}'
    started.enter_context(process(folder, "submit", "flwr", "run", str(APP), "here", "--run-config", config))


async def ended(state: Path, limit: float) -> str:
    """Wait for the end of the run; the hash of its model, or why there is none."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if (state / "done").exists():
            return str(json.loads((state / "done").read_text())["sha256"])
        if (state / "failed").exists():
            return (state / "failed").read_text().strip()
        await asyncio.sleep(0.2)
    return f"no end after {limit:g} s"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--count", type=int, default=5, help="runs")
    asked.add_argument("--nodes", type=int, default=3)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--limit", type=float, default=600.0, help="seconds for a run")
    asked.add_argument("--lossy", action="store_true", help="also faults by which Flower loses a message")
    asked.add_argument("--keep", action="store_true", help="leave the temporary folders")
    options = asked.parse_args()
    expected = undisturbed(options.nodes, options.rounds)
    held = 0
    for number in range(options.count):
        folder, began = Path(tempfile.mkdtemp(prefix="flower-network-")), time.monotonic()
        drawn = FAULTS | RARE if options.lossy else FAULTS
        faults = Faults(**drawn, lossy=options.lossy, seed=options.seed + number)
        actual, seen = asyncio.run(federate(folder, faults, options.nodes, options.rounds, options.limit))
        held += actual == expected
        said = "same" if actual == expected else f"DIFFERENT: {actual}, expected {expected}"
        print(f"run {number + 1}: {dict(seen)}, {time.monotonic() - began:.0f} s: {said}", flush=True)
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{held} of {options.count} runs on a bad network ended in the undisturbed model")
    sys.exit(held != options.count)


if __name__ == "__main__":
    main()
