"""What a round of lanes consists of, kernel by kernel: ResNet18 in fleets, and modules that users bring.

    python benchmarks/bench_lanes.py                       # on a GPU: about 100 s, most of it compiling
    python benchmarks/bench_lanes.py --jobs resnet:8:engine-bf16 VGG:1:engine-bf16
    python benchmarks/bench_lanes.py --device cpu --tiny   # only shows that it works

A job is WORK:RUNS:WAY. Work is `resnet` or a word of a module of `bench_modules.py`; a way is as in `bench_engine.py`,
with `-grouped` with the compiler's own convolutions.
Each job has a process of its own. All are prepared at the same time, because compiling takes longest, and then timed
one after the other. "busy" is the sum of the kernels' times: less than a round where the device waits for the host,
more where kernels run side by side.
"""

import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from bench_engine import options_of
from bench_modules import MODULES, specs_of
from torch.profiler import ProfilerActivity
from workloads import WORKLOADS, fleet_specs, header, make_images, parser, wait

from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.training import choose

WORDS = {"MLP": 0, "VGG": 1, "ViT": 2, "encoder": 3, "GRU": 4, "GPT": 5}  # places in MODULES
JOBS = [f"{work}:{runs}:engine-bf16" for work in ("resnet", "resnet-imagenet") for runs in (8, 1)]
JOBS += [f"{word}:1:engine-bf16" for word in WORDS]
JOBS += ["VGG:1:engine-bf16-grouped"]


def specs_for(work: str, runs: int, device: str, tiny: bool) -> list:
    if work in WORDS:
        return specs_of(list(MODULES)[WORDS[work]], device, tiny)
    return fleet_specs(WORKLOADS[work], make_images(WORKLOADS[work], device), runs)


def child(job: str, device: str, rounds: int, tiny: bool, lines: int) -> None:
    """Prepare a job, wait for a line, then time it."""
    work, runs, way = job.split(":")
    if way.endswith("-grouped"):
        choose.with_lanes = None
    way = way.removesuffix("-grouped")
    specs, cuda, begun = specs_for(work, int(runs), device, tiny), device == "cuda", time.perf_counter()
    fleet = assemble(specs, **options_of(way))
    state = start(fleet)
    for _ in range(4):
        state, played = play_round(fleet, state)
    float(played.records[0].train_loss)
    ready = time.perf_counter() - begun
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(2):
        state, played = play_round(fleet, state)
    wait(cuda)
    spans, begun = [], time.perf_counter()
    for _ in range(rounds):
        state, played = play_round(fleet, state)
    host = (time.perf_counter() - begun) / rounds
    wait(cuda)
    spans.append((time.perf_counter() - begun) / rounds)
    samples = sum(float(record.weight) * spec.local_epochs for record, spec in zip(played.records, specs, strict=True))
    alone = []
    for _ in range(5):
        begun = time.perf_counter()
        state, played = play_round(fleet, state)
        wait(cuda)
        alone.append(time.perf_counter() - begun)
    loop = "" if work not in WORDS else f", plain loop {loop_seconds(specs, cuda) * 1e3:.0f}"
    print(
        f"## {job}: {spans[0] * 1e3:.2f} ms a round (one alone {statistics.median(alone) * 1e3:.2f}{loop}), "
        f"host {host * 1e3:.2f}, {samples / spans[0]:,.0f} samples/s, first {ready:.0f} s"
    )
    if cuda:
        report_kernels(fleet, state, lines)


def loop_seconds(specs: list, cuda: bool) -> float:
    """Seconds a round of the plain loop."""
    fleet = assemble(specs, trainer="loop")
    state, _ = play_round(fleet, start(fleet))
    wait(cuda)
    begun = time.perf_counter()
    for _ in range(2):
        state, _ = play_round(fleet, state)
    wait(cuda)
    return (time.perf_counter() - begun) / 2


def report_kernels(fleet: object, state: object, lines: int, rounds: int = 2) -> None:
    """Milliseconds and calls a round of the kernels that take longest."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            state, _ = play_round(fleet, state)
        wait(True)
    rows = [(row.self_device_time_total / 1e3 / rounds, row.count / rounds, row.key) for row in seen.key_averages()]
    rows = sorted((row for row in rows if row[0] > 0), reverse=True)
    print(f"busy {sum(row[0] for row in rows):.2f} ms, {sum(row[1] for row in rows):.0f} kernels a round")
    for spent, count, name in rows[:lines]:
        print(f"{spent:9.3f} ms {count:7.0f} x {spent / count * 1e3:8.1f} us  {name[:110]}")
    print(flush=True)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--jobs", nargs="+", default=JOBS)
    made.add_argument("--lines", type=int, default=30)
    made.add_argument("--prepare", type=float, default=70, help="seconds that all jobs may take to be ready")
    made.add_argument("--tiny", action="store_true")
    made.add_argument("--child")
    made.set_defaults(rounds=6)
    asked = made.parse_args()
    if asked.child:
        return child(asked.child, asked.device, asked.rounds, asked.tiny, asked.lines)
    print(header(asked.device), flush=True)
    shared = ["--device", asked.device, "--rounds", str(asked.rounds), "--lines", str(asked.lines)]
    shared += ["--tiny"] if asked.tiny else []
    environment, end = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}, time.monotonic() + asked.prepare
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    running = {job: subprocess.Popen([sys.executable, __file__, "--child", job, *shared], **pipe) for job in asked.jobs}
    try:
        for job, process in running.items():
            late = not select.select([process.stdout], [], [], max(0.1, end - time.monotonic()))[0]
            if late or process.stdout.readline() != "ready\n":
                print(f"## {job}: {'not ready in time' if late else 'failed'}", flush=True)
                process.kill()
        for process in running.values():
            if process.poll() is None:
                print(process.communicate("\n")[0], flush=True)
    finally:
        for process in running.values():
            process.kill()


if __name__ == "__main__":
    main()
