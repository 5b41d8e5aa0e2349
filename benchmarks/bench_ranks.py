"""One run over several processes (ranks): seconds a round with each number of ranks, after comparing their results.

    python benchmarks/bench_ranks.py                                 # the small CNN on CPU cores, 1 and 2 ranks
    python benchmarks/bench_ranks.py --device cuda --ranks 1 2 4     # with fewer GPUs than ranks, ranks share them
    python benchmarks/bench_ranks.py --hashes --ranks 1 2 4 --rounds 200   # all at once, and once more with a kill

Each number of ranks is one `fedgma run` of its own. The final weights are compared first: equal bits, or the largest
relative distance where a lane batch was divided. Seconds are medians over the rounds after the first, with evaluation.
torch has one thread in each process, unless OMP_NUM_THREADS says otherwise.

With `--hashes` nothing is timed: all runs are started at the same time, among them one with the most ranks, of which
rank 1 is killed after ten rounds. A line each gives a checksum of the weights after every run's last round.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch

from fedgma.records.checkpoints import read_checkpoint

SOURCE = Path(__file__).parents[1] / "src"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    made.add_argument("--models", nargs="+", default=["cnn"])
    made.add_argument("--device", default="cpu")
    made.add_argument("--precision", default="fp32")
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--clients", type=int, default=8, help="of a round")
    made.add_argument("--seconds", type=float, default=240.0, help="longest time of one `fedgma run`")
    made.add_argument("--hashes", action="store_true", help="compare weights alone, also after a rank was killed")
    arguments = made.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, ",
        end="",
    )
    print(torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU", end="\n\n")
    titles = "seconds | checksum" if arguments.hashes else "seconds a round | one rank over this"
    print(f"| model | ranks | {titles} | weights |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.hashes:
            report_hashes(arguments, Path(folder))
            return
        for model in arguments.models:
            report(model, arguments, Path(folder))


def report(model: str, arguments: argparse.Namespace, folder: Path) -> None:
    """One line for each number of ranks; a failure is a line too."""
    first = None
    for ranks in arguments.ranks:
        try:
            seconds, weights = played(model, ranks, arguments, folder / f"{model}-{ranks}")
        except (subprocess.SubprocessError, OSError) as error:
            print(
                f"| {model} | {ranks} | failed: {str(getattr(error, 'stderr', '') or error)[-300:]} | | |", flush=True
            )
            continue
        first = first or (seconds, weights)
        ratio = f"{first[0] / seconds:.2f}"
        print(f"| {model} | {ranks} | {seconds:.4f} | {ratio} | {distance(first[1], weights)} |", flush=True)


def played(model: str, ranks: int, arguments: argparse.Namespace, out: Path) -> tuple[float, dict[str, np.ndarray]]:
    """Median seconds of a round, and the final weights."""
    command, environment = command_of(model, ranks, arguments, out)
    limit = {"check": True, "capture_output": True, "text": True, "timeout": arguments.seconds}
    subprocess.run(command, env=environment, **limit)
    (run,) = out.iterdir()
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return statistics.median(line["seconds"] for line in lines[1:]), weights_of(out)


def command_of(model: str, ranks: int, arguments: argparse.Namespace, out: Path) -> tuple[list[str], dict[str, str]]:
    """The command of a run, and its environment."""
    settings = [f"model={model}", f"rounds={arguments.rounds}", f"clients_per_round={arguments.clients}"]
    settings += ["seed=0", "aggregator=gma", "client_test_size=0"]
    options = ["--device", arguments.device, "--precision", arguments.precision, "--out", str(out), "--quiet"]
    options += ["--on", "torchrun", "--ranks", str(ranks)] if ranks > 1 else []
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # their number changes the last bits of large models
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    return [sys.executable, "-m", "fedgma", "run", *settings, *options, "--checkpoint-seconds", "0.2"], environment


def weights_of(out: Path) -> dict[str, np.ndarray]:
    """The last checkpoint's weights of the only run in a folder."""
    (run,) = out.iterdir()
    point = read_checkpoint(run / "checkpoints")
    assert point is not None
    return {name: value for name, value in point.state.items() if name.startswith("params/")}


def report_hashes(arguments: argparse.Namespace, folder: Path) -> None:
    """Play all runs at the same time; one line for each."""
    most = max(arguments.ranks)
    cases = [(model, ranks, kill) for model in arguments.models for kill in (False, True) for ranks in arguments.ranks]
    cases = [(model, ranks, kill) for model, ranks, kill in cases if not kill or ranks == most > 1]
    first: dict[str, dict[str, np.ndarray]] = {}
    with ThreadPoolExecutor(len(cases)) as pool:
        ended = [
            pool.submit(played_through, *case, arguments, folder / str(number)) for number, case in enumerate(cases)
        ]
        for (model, ranks, kill), one in zip(cases, ended, strict=True):
            row = f"| {Path(model).name} | {ranks}{', one killed' if kill else ''} |"
            try:
                seconds, said, weights = one.result()
            except Exception as error:  # the other runs still count
                print(f"{row} failed: {type(error).__name__}: {str(error)[-400:]} | | |", flush=True)
                continue
            text = hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()[:16]
            far = distance(first.setdefault(model, weights), weights)
            print(f"{row} {seconds:.1f} | {text} | {far} | {said}", flush=True)


def played_through(
    model: str, ranks: int, kill: bool, arguments: argparse.Namespace, out: Path
) -> tuple[float, str, dict[str, np.ndarray]]:
    """Seconds of a run with start and end, what it said, and its final weights; with `kill` rank 1 is killed in it."""
    command, environment = command_of(model, ranks, arguments, out)
    begun, pipes = time.monotonic(), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            if kill:
                wait_for_rounds(out, 10, process, begun + arguments.seconds)
                os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
            _, said = process.communicate(timeout=max(1.0, begun + arguments.seconds - time.monotonic()))
        finally:
            process.kill()  # the ranks end with it
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {said.strip()}")
    return time.monotonic() - begun, said.strip().replace("\n", " "), weights_of(out)


def wait_for_rounds(out: Path, rounds: int, process: subprocess.Popen, until: float) -> None:
    """Wait until the run has written so many rounds."""
    while process.poll() is None and time.monotonic() < until:
        if any(lines.read_bytes().count(b"\n") >= rounds for lines in out.glob("*/rounds.jsonl")):
            return
        time.sleep(0.02)
    raise RuntimeError("it ended before its tenth round")


def ranks_of(process: int) -> dict[int, int]:
    """Process ids of the ranks by rank, as Linux lists the children of their launcher."""
    found = {}
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        given = dict(
            pair.split(b"=", 1) for pair in Path(f"/proc/{child}/environ").read_bytes().split(b"\0") if b"=" in pair
        )
        if b"RANK" in given:
            found[int(given[b"RANK"])] = int(child)
    return found


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str:
    """How far two models are apart, in words."""
    if all(np.array_equal(one[name], other[name]) for name in one):
        return "same bits"
    far = [float(np.linalg.norm(one[name] - other[name]) / max(np.linalg.norm(one[name]), 1e-12)) for name in one]
    return f"relative distance {max(far):.1e}"


if __name__ == "__main__":
    main()
