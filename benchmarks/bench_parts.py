"""What each hand-written part buys: time without it over time with it, for every part, in one call.

    python benchmarks/bench_parts.py --out parts.json           # on a GPU: about 5 minutes, most of it compiling
    python benchmarks/bench_parts.py --groups cpu               # the CPU kernels, on two cores
    python benchmarks/bench_parts.py --device cpu --tiny        # only shows that all sides agree

Each side of a part runs in its own process. The sides of a group are prepared at the same time, because compiling takes
longest, and then timed one at a time, the two sides of a part in turns; the median counts. Before a part is timed its
sides are compared (column "off"): the lanes' updates after two steps, relative to their length. A side that fails or is
not ready in time loses its own rows only. Rows are printed, and written to --out, as they are measured.
"""

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from sides import HostTally, Rounds, Scores, Side, Stack, Tally
from workloads import header, wait

SECONDS = 0.4  # that one timing takes, about
LENET, LENET_64, LOGISTIC_64 = Rounds("W1"), Rounds("W1", runs=64), Rounds("logistic", runs=64)
CNN = Rounds("cnn", precision="tf32")
RESNET, RESNET_4 = Rounds("resnet", precision="bf16"), Rounds("resnet", runs=4, precision="bf16")
IMAGENET, IMAGENET_8 = Rounds("resnet-imagenet", precision="bf16"), Rounds("resnet-imagenet", 8, precision="bf16")
RESNET_BN, RESNET_TF32 = Rounds("resnet-bn", precision="tf32"), Rounds("resnet", precision="tf32")
RESNET_SIZE, LENET_SIZE = 11_173_962, 61_706  # parameters


class Part(NamedTuple):
    """One row of the table."""

    name: str
    workload: str
    used: Side
    without: Side


def written(workload: str, side: Rounds) -> Part:
    return Part("written gradients", workload, side, replace(side, form=False))


def kernel(names: str, workload: str, side: Rounds) -> Part:
    return Part(f"gpu/{names}", workload, side, replace(side, without=tuple(names.split(", "))))


def changed(name: str, workload: str, side: Rounds, change: str) -> Part:
    return Part(name, workload, side, replace(side, change=change))


def tally(workload: str, runs: int, entries: int, way: str) -> Part:
    return Part(f"tally, against {way}", workload, Tally(runs, entries, "fused"), Tally(runs, entries, way))


def stack(workload: str, clients: int, way: str) -> Part:
    sides = (Stack(clients, RESNET_SIZE, "fused"), Stack(clients, RESNET_SIZE, way))
    return Part(f"masked mean of a stack, against {way}", workload, *sides)


def on_cpu(workload: str, work: str) -> Part:
    sides = (Rounds(work, trainer="kernels"), Rounds(work, trainer="loop"))
    return Part("CPU kernels, against the loop", workload, *sides)


GROUPS = {
    "training": [
        written("LeNet, 10 lanes, fp32", LENET),
        written("LeNet, 640 lanes, fp32", LENET_64),
        written("small CNN, 50 lanes, tf32", CNN),
        written("logistic regression, 640 lanes, fp32", LOGISTIC_64),
        written("ResNet18-GN, 10 lanes, bf16", RESNET),
        kernel("conv_thread", "LeNet, 10 lanes, fp32", LENET),
        kernel("conv_thread", "LeNet, 640 lanes, fp32", LENET_64),
        kernel("conv_matrix", "small CNN, 50 lanes, tf32", CNN),
        changed("dense gradients not multiplied out", "small CNN, 50 lanes, tf32", CNN, "multiplied out"),
    ],
    "head": [
        kernel("dense_head, sgd_step", "LeNet, 10 lanes, fp32", LENET),
        kernel("dense_head, sgd_step", "LeNet, 640 lanes, fp32", LENET_64),
        kernel("dense_head, sgd_step", "LeNet, 10 lanes, fp32, not compiled", replace(LENET, compiled=False)),
        kernel("dense_head", "LeNet, 10 lanes, fp32", LENET),
        kernel("sgd_step", "LeNet, 10 lanes, fp32", LENET),
        changed("sums of threads by halves", "LeNet, 10 lanes, fp32", LENET, "thread by thread"),
    ],
    "residual": [
        part
        for lanes, side in (("10 lanes", RESNET), ("40 lanes", RESNET_4))
        for part in (
            kernel("conv_3x3", f"ResNet18-GN, {lanes}, bf16", side),
            kernel("group_norm", f"ResNet18-GN, {lanes}, bf16", side),
            changed("weights in the order of the convolutions", f"ResNet18-GN, {lanes}, bf16", side, "torch's order"),
        )
    ],
    "more": [
        written("ResNet18-GN, 40 lanes, bf16", RESNET_4),
        written("ResNet18-BN, 10 lanes, tf32", RESNET_BN),
        changed("lanes on four streams", "ResNet18-GN, 10 lanes, tf32", RESNET_TF32, "one stream"),
        Part("written evaluation", "LeNet, 64 runs, fp32", Scores("W1", 64), Scores("W1", 64, form=False)),
        Part("written evaluation", "ResNet18-GN, 4 runs, fp32", Scores("resnet", 4), Scores("resnet", 4, form=False)),
        tally("64 runs x 10 clients of LeNet", 64, LENET_SIZE, "torch"),
        tally("64 runs x 10 clients of LeNet", 64, LENET_SIZE, "compiled"),
        tally("10 clients of ResNet18", 1, RESNET_SIZE, "torch"),
        tally("10 clients of ResNet18", 1, RESNET_SIZE, "compiled"),
        stack("10 clients of ResNet18", 10, "torch"),
        stack("10 clients of ResNet18", 10, "compiled"),
    ],
    "literature": [
        Part("products with windows", "ResNet18-GN as for ImageNet, 80 lanes, bf16", IMAGENET_8,
             replace(IMAGENET_8, change="one call a lane")),
        Part("products with windows", "ResNet18-GN as for ImageNet, 10 lanes, bf16", IMAGENET,
             replace(IMAGENET, change="one call a lane")),
    ],
    "cpu": [
        on_cpu("LeNet, 10 clients x 600", "W1"),
        on_cpu("LeNet, 100 clients x 60", "W3"),
        on_cpu("logistic regression, 10 clients x 600", "logistic"),
        Part("tally, against numpy", "20 clients x 1 M parameters", HostTally(20, 1_000_000, "numba"),
             HostTally(20, 1_000_000, "numpy")),
    ],
}  # fmt: skip


def sides_of(parts: list[Part]) -> list[Side]:
    """Every side once; those that take longest to compile first."""
    sides = dict.fromkeys(side for part in parts for side in (part.used, part.without))
    return sorted(sides, key=lambda side: not getattr(side, "work", "").startswith("resnet"))


class Worker:
    """A side in its own process: prepares itself, then answers every request with the seconds of one call."""

    def __init__(self, side: Side, group: str, options: argparse.Namespace, folder: Path, number: int) -> None:
        self.log, self.result = folder / f"{number}.log", folder / f"{number}.npy"
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.seconds: float | None = None  # to prepare
        self.error = ""
        command = [sys.executable, __file__, "--child", group, str(number), str(self.result)]
        command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
        threads = 3 if getattr(side, "work", "").startswith("resnet") else 1
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
                process_group=0,
            )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put({"error": "the process ended"})

    def wait_until_ready(self, end: float) -> None:
        if self.seconds is None and not self.error:
            self.seconds = self._answer(max(1.0, end - time.monotonic()), "not ready in time").get("ready")

    def time(self) -> float:
        """Seconds of one call."""
        if not self.error:
            try:
                self.process.stdin.write("\n")
                self.process.stdin.flush()
            except OSError:
                self.error = "the process ended"
        return self._answer(120, "no answer")["seconds"] if not self.error else float("nan")

    def _answer(self, seconds: float, late: str) -> dict[str, Any]:
        try:
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            answer = {"error": late}
        self.error = self.error or answer.get("error", "")
        return {"seconds": float("nan"), **answer}

    def stop(self) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(15 if not self.error else 1)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes of its compiler
        self.process.wait()


def child(group: str, index: int, result: str, device: str, tiny: bool) -> None:
    """Prepare a side and write its result; then time it once for every line that comes in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    if group == "cpu":
        device = "cpu"
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        torch.set_num_threads(2)

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        begun = time.perf_counter()
        ready = sides_of(GROUPS[group])[index].prepare(device, tiny)
        wait(device == "cuda")
        np.save(result, ready.result)
        spent = seconds_of(ready.call, 1, device == "cuda")
        answer(ready=time.perf_counter() - begun)
        count = min(1000, max(1, round(SECONDS / spent)))
        for _ in sys.stdin:
            answer(seconds=seconds_of(ready.call, count, device == "cuda"))
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")


def seconds_of(call: Any, count: int, cuda: bool) -> float:
    """Seconds of one call out of so many, with one before the clock starts."""
    call()
    wait(cuda)
    begun = time.perf_counter()
    for _ in range(count):
        call()
    wait(cuda)
    return (time.perf_counter() - begun) / count


def measure(part: Part, workers: dict[Side, Worker], repeats: int) -> dict[str, Any]:
    """Compare the two sides of a part, then time them in turns."""
    pair = [workers[part.used], workers[part.without]]
    row: dict[str, Any] = {"part": part.name, "workload": part.workload, "ready_s": [worker.seconds for worker in pair]}
    if not any(worker.error for worker in pair):
        off = distance(*(np.load(worker.result) for worker in pair))
        times = [[worker.time() * 1e3 for worker in pair] for _ in range(repeats)]
        used, without = zip(*times, strict=True)
        middle = statistics.median(used), statistics.median(without)
        row |= {"off": off, "bound": part.used.bound, "same": bool(off <= part.used.bound)}
        row |= {"with": used, "without": without, "with_ms": middle[0], "without_ms": middle[1]}
        row["ratio"] = middle[1] / middle[0]
    errors = [f"{way}: {worker.error}" for way, worker in zip(("with", "without"), pair, strict=True) if worker.error]
    if errors:
        row |= {"error": "; ".join(errors), "logs": [worker.log.read_text()[-2000:] for worker in pair]}
    return row


def distance(result: np.ndarray, other: np.ndarray) -> float:
    """The distance of two results [row, entry], relative to their length, in the median of the rows."""
    rows = np.linalg.norm(result - other, axis=1) / np.maximum(np.linalg.norm(other, axis=1), 1e-300)
    return float(np.median(rows))


def line_of(row: dict[str, Any]) -> str:
    begin = f"| {row['part']} | {row['workload']} |"
    if "error" in row:
        return f"{begin} left out: {row['error']} | | | |"
    note = f"{row['off']:.1e}" + ("" if row["same"] else f", more than {row['bound']:.0e}: DIFFERENT")
    return f"{begin} {row['with_ms']:.3g} | {row['without_ms']:.3g} | {row['ratio']:.2f} | {note} |"


def run_group(group: str, options: argparse.Namespace, folder: Path) -> Any:
    """Prepare the sides of a group together, then give the row of each part."""
    parts, workers = GROUPS[group], {}
    end = time.monotonic() + options.prepare
    try:
        for number, side in enumerate(sides_of(parts)):
            workers[side] = worker = Worker(side, group, options, folder, number)
            if group == "cpu":  # one at a time: they share two cores
                worker.wait_until_ready(end)
        for worker in workers.values():
            worker.wait_until_ready(end)
            if worker.error:
                worker.stop()
        for part in parts:
            yield measure(part, workers, options.repeats)
    finally:
        for worker in workers.values():
            worker.stop()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, help="the rows as JSON")
    asked.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("--prepare", type=float, default=200, help="seconds that a group may take to be ready")
    asked.add_argument("--tiny", action="store_true", help="small sizes, to compare the sides without a GPU")
    asked.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = asked.parse_args()
    if options.child:
        group, index, result = options.child
        return child(group, int(index), result, options.device, options.tiny)
    begun, rows, head = time.monotonic(), [], header(options.device)
    print(
        f"{head}\n\n| part | workload | with, ms | without, ms | ratio | off |\n| --- | --- | --- | --- | --- | --- |"
    )
    for group in options.groups:
        with tempfile.TemporaryDirectory() as folder:
            for row in run_group(group, options, Path(folder)):
                rows.append(row)
                print(line_of(row), flush=True)
                if options.out:
                    options.out.write_text(json.dumps({"machine": head, "rows": rows}, indent=1))
        print(f"{group}: done after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
