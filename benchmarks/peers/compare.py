"""fedgma's CPU kernels and threads beside other federated learning engines: same workload, one machine, in turns.

    FASHION_MNIST=folder python benchmarks/peers/compare.py --environments FOLDER [--repeats 3] [--workloads W1 W2 W3]

makes what is missing of the virtual environments in FOLDER (one for each engine, torch first, so that none pulls a
build for CUDA), runs every engine, and prints one table for each workload. Run it with an interpreter that has fedgma's
`sim` and `fast` extras. Accuracies are after the workload's few rounds and only show that all of them learn alike.

15 November 2026, 2 cores of an AMD EPYC, W2: ours 0.0166 s a round; torch loop 8.0 times that, pfl 6.0, FedLab 6.3,
fluke 7.1, FedJAX 11.0, Flower 18.7. All of it in docs/cpu_kernels.md.
"""

import argparse
import datetime
import os
import pathlib
import subprocess
import sys

from runner import measure, table
from workload import WORKLOADS

TORCH = "torch==2.13.0"
# name: what to install after torch, script, torch threads
PEERS: dict[str, tuple[list[str], str, int]] = {
    "flower": (["flwr[simulation]>=1.41"], "run_flower.py", 1),
    "pfl": (["pfl[pytorch]"], "run_pfl.py", 2),
    "fluke": (["fluke-fl"], "run_fluke.py", 2),
    "fedlab": (["fedlab"], "run_fedlab.py", 2),
    "fedjax": (["fedjax"], "run_fedjax.py", 2),
    "blazefl": (["numpy", "tqdm"], "run_blazefl.py", 2),
}
# installed last and without what it asks for: Python 3.12, of which it uses nothing
ALONE = {"blazefl": ["--no-deps", "--ignore-requires-python", "blazefl==2.0.3"]}
OURS = "fedgma kernels"


def environment(folder: pathlib.Path, name: str) -> str:
    """The interpreter of an engine's environment, which is made if it is not there."""
    home = folder / name
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        pins = folder / "pins.txt"
        pins.write_text(TORCH + "\n")
        if name != "fedjax":
            subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, "-c", str(pins), *PEERS[name][0]], check=True)
        if name in ALONE:
            subprocess.run([*pip, *ALONE[name]], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--environments", type=pathlib.Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--wait", type=float, default=30, help="seconds, at most, for a quiet machine before each run")
    asked = parser.parse_args()
    asked.environments.mkdir(parents=True, exist_ok=True)
    ours = {OURS: "run_kernels.py", "fedgma threads": "run_threads.py", "torch loop": "run_plain.py"}
    engines = {name: (sys.executable, script, 2) for name, script in ours.items()}
    for name in asked.peers:
        engines[name] = (environment(asked.environments.resolve(), name), *PEERS[name][1:])
    for name in asked.workloads:
        results = measure(engines, name, asked.repeats, asked.wait)
        good = [runs for runs in results.values() if any("error" not in r for r in runs)]
        versions = {k: v for runs in good for r in runs if "error" not in r for k, v in r["versions"].items()}
        print(f"{datetime.date.today()}, {os.cpu_count()} cores; {', '.join(f'{k} {v}' for k, v in versions.items())}")
        print("\n" + table(results, name, OURS) + "\n", flush=True)


if __name__ == "__main__":
    main()
