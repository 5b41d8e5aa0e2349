"""One run over several processes (ranks): seconds a round with each number of ranks, after comparing their results.

    python benchmarks/bench_ranks.py                                 # the small CNN on CPU cores, 1 and 2 ranks
    python benchmarks/bench_ranks.py --device cuda --ranks 1 2 4     # with fewer GPUs than ranks, ranks share them

Each number of ranks is one `fedgma run` of its own. The final weights are compared first: equal bits, or the largest
relative distance where a lane batch was divided. Seconds are medians over the rounds after the first, with evaluation.
torch has one thread in each process, unless OMP_NUM_THREADS says otherwise.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
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
    arguments = made.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, ",
        end="",
    )
    print(torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU", end="\n\n")
    print("| model | ranks | seconds a round | one rank over this | weights |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
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
    command = [sys.executable, "-m", "fedgma", "run", *settings, *options]
    limit = {"check": True, "capture_output": True, "text": True, "timeout": arguments.seconds}
    subprocess.run(command, env=environment, **limit)
    (run,) = out.iterdir()
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    point = read_checkpoint(run / "checkpoints")
    assert point is not None
    weights = {name: value for name, value in point.state.items() if name.startswith("params/")}
    return statistics.median(line["seconds"] for line in lines[1:]), weights


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str:
    """How far two models are apart, in words."""
    if all(np.array_equal(one[name], other[name]) for name in one):
        return "same bits"
    far = [float(np.linalg.norm(one[name] - other[name]) / max(np.linalg.norm(one[name]), 1e-12)) for name in one]
    return f"relative distance {max(far):.1e}"


if __name__ == "__main__":
    main()
