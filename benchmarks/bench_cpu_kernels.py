"""The compiled CPU kernels against the plain torch loop, on one and on two threads.

    FASHION_MNIST=folder PYTHONPATH=src python benchmarks/bench_cpu_kernels.py [--repeats 3] [--workloads W1 W2 W3]

First both train three rounds from the same weights on the same batches, and the weights are compared. Then each runs
in a process of its own, in turns. Start-up is everything before the first round: imports, data, kernels from numba's
cache. The time numba takes to compile them is measured apart, with an empty cache.

15 November 2026, 2 cores of an AMD EPYC, torch 2.13.0, numba 0.68.1: W1 0.073 s a round against 0.51 to 0.65 s (7 to 9
times), 340 MB against 540; weights 5e-8 apart after three rounds; compiling 15 s once, then 0.6 s.
"""

import argparse
import datetime
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import workload as work  # noqa: E402
from runner import measure, table  # noqa: E402

from fedgma.training.fast.cpu.clients import evaluate, images, train_clients  # noqa: E402
from network import lenet, train  # noqa: E402

ENGINES = {
    "kernels, 2 threads": (sys.executable, "run_kernels.py", 2),
    "kernels, 1 thread": (sys.executable, "run_kernels.py", 1),
    "torch loop, 2 threads": (sys.executable, "run_plain.py", 2),
    "torch loop, 1 thread": (sys.executable, "run_plain.py", 1),
}


def agreement(rounds: int = 3, clients: int = 4, samples: int = 120) -> str:
    """How far the weights of both are apart after some rounds; raises where it is more than rounding explains."""
    x, y, *_ = work.data()
    data, rng = images(x, y, [work.MEAN], [work.STD]), np.random.default_rng(0)
    pixels, labels, model = torch.from_numpy(work.scaled(x[: clients * samples])), torch.from_numpy(y), lenet()
    ours = theirs = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    first, begun = None, ours
    for _ in range(rounds):
        orders = [rng.permutation(samples) + k * samples for k in range(clients)]
        plans = [np.pad(order, (0, -samples % 32), constant_values=-1).reshape(-1, 32) for order in orders]
        rates = {"lr": work.LR, "momentum": work.MOMENTUM}
        ours = ours + train_clients("lenet", ours, data, plans, classes=10, **rates).updates.mean(0)
        locals_ = []
        for order in orders:
            torch.nn.utils.vector_to_parameters(torch.tensor(theirs), model.parameters())
            train(model, pixels, labels, torch.from_numpy(order))
            locals_.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy())
        theirs = theirs + (np.stack(locals_) - theirs).mean(0)
        first = np.abs(ours - theirs).max() if first is None else first
    apart = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - begun)
    if apart > 1e-2:
        raise SystemExit(f"the two do not compute the same: {apart:.1e} apart")
    last = np.abs(ours - theirs).max()
    return (
        f"weights differ by at most {first:.1e} after 1 round and {last:.1e} after {rounds}, in norm {apart:.1e} of "
        "the way gone (more where rounding decides a max-pool tie)"
    )


def first_compile() -> str:
    """Seconds from nothing, numba's cache empty, to the first trained client."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, NUMBA_CACHE_DIR=folder, PYTHONPATH=str(HERE.parent / "src"))
        code = (
            "import numpy as np; from fedgma.training.fast.cpu.clients import *;"
            "d = images(np.zeros((32, 1, 28, 28), np.uint8), np.zeros(32, int));"
            "train_clients('lenet', np.zeros(61706, 'f'), d, [np.arange(32)[None]], classes=10, lr=0.1)"
        )
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        cold = time.perf_counter() - begun
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        return f"first use on a machine {cold:.1f} s, later {time.perf_counter() - begun:.1f} s"


def evaluation() -> str:
    """10,000 test images: the kernel and torch, two threads each."""
    from network import accuracy

    *_, x, y = work.data()
    data, model = images(x, y, [work.MEAN], [work.STD]), lenet()
    params = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    pixels, labels = torch.from_numpy(work.scaled(x)), torch.from_numpy(y)
    hits = evaluate("lenet", params, data, classes=10)[1] / len(y)
    if abs(hits - accuracy(model, pixels, labels)) > 1e-3:
        raise SystemExit("the two do not evaluate the same")
    times: dict[str, list[float]] = {"kernels": [], "torch": []}
    for _ in range(7):
        begun = time.perf_counter()
        evaluate("lenet", params, data, classes=10, threads=2)
        middle = time.perf_counter()
        accuracy(model, pixels, labels)
        times["kernels"].append(middle - begun)
        times["torch"].append(time.perf_counter() - middle)
    ours, theirs = (float(np.median(values)) for values in times.values())
    return f"kernels {ours:.3f} s, torch {theirs:.3f} s: {theirs / ours:.1f} times"


def processor() -> str:
    names = [line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":")[1].strip() if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=list(work.WORKLOADS))
    asked = parser.parse_args()
    torch.set_num_threads(2)
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"\nSame result: {agreement()}.\n\nCompiling: {first_compile()}.\n\nEvaluation of 10,000: {evaluation()}.\n")
    for name in asked.workloads:
        print(table(measure(ENGINES, name, asked.repeats), name, "kernels, 2 threads") + "\n", flush=True)


if __name__ == "__main__":
    main()
