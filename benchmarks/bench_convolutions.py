"""The GPU convolutions of the small models: first whether each pass is right, then how fast it is, cut in several ways.

    python benchmarks/bench_convolutions.py          # about two minutes; --quick is under one

Each layer of LeNet and of the small CNN is passed through by both families of kernels, "threads" and "matrix" (matrix
units), forward and back. A pass is compared with torch in float64 (column "off") and then timed with CUDA events. At
the end whole rounds of the engine are timed. Bytes and operations are what a perfect pass needs, not what is spent.
"""

import itertools
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import Tensor
from torch.nn import functional as F
from workloads import WORKLOADS, header, make_images, measure, parser, spec_of

from fedgma.kernels import convolutions_matrix_gpu as matrix
from fedgma.kernels import convolutions_thread_gpu as threads
from fedgma.trainers import convolutions
from fedgma.trainers.engine import float32_precision

DEVICE = "cuda"


class Layer(NamedTuple):
    channels: int
    side: int
    outs: int
    kernel: int
    padding: int
    pool: bool
    first: bool  # its input is an image: channels first, and no gradient is wanted


LAYERS = {
    "lenet1": Layer(1, 28, 6, 5, 2, True, True),
    "lenet2": Layer(6, 14, 16, 5, 0, True, False),
    "cnn1": Layer(3, 32, 32, 3, 0, False, True),
    "cnn2": Layer(32, 30, 64, 3, 0, True, False),
}
SIZES = {"lenet": [(1600, 32), (640, 32), (10, 32)], "cnn": [(50, 10)]}
T, M = threads.Tile, matrix.Tile
TILES: dict[tuple[str, str], list[tuple[str, Any]]] = {
    ("lenet", "forward"): [
        ("threads", T(*t)) for t in ((128, 8, 2), (64, 8, 1), (256, 8, 4), (128, 4, 2), (128, 8, 4))
    ],
    ("lenet", "inputs"): [("threads", T(*t)) for t in ((128, 6, 2), (64, 6, 1), (64, 6, 2), (128, 3, 2), (128, 6, 4))],
    ("lenet", "weights"): [("threads", T(*t)) for t in ((32, 6, 1), (32, 4, 1), (32, 2, 1), (64, 2, 1))],
    ("cnn", "forward"): [("matrix", M(*t)) for t in ((128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3), (256, 32, 8, 2))],
    ("cnn", "inputs"): [("matrix", M(*t)) for t in ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 2))],
    ("cnn", "weights"): [("matrix", M(*t)) for t in ((32, 32, 4, 2), (64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 3))],
}
OTHER: dict[tuple[str, str], list[tuple[str, Any]]] = {
    ("lenet", "forward"): [("matrix", M(128, 32, 4, 2))],
    ("lenet", "inputs"): [("matrix", M(128, 32, 4, 2))],
    ("lenet", "weights"): [("matrix", M(64, 32, 4, 2))],
    ("cnn", "forward"): [("threads", T(128, 8, 2))],
    ("cnn", "inputs"): [("threads", T(128, 8, 2))],
    ("cnn", "weights"): [("threads", T(32, 16, 1)), ("threads", T(32, 8, 1))],
}
BOUND = {"fp32": 1e-5, "tf32": 3e-3, "bf16": 2e-2}


class Case:
    """A layer with random numbers: arguments, results and what torch makes of them in float64."""

    def __init__(self, layer: Layer, lanes: int, batch: int, precision: str, like: int | None = None) -> None:
        """With `like` the batch is cut into as many pieces as if there were so many lanes."""
        self.layer = layer
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        generator = torch.Generator(DEVICE).manual_seed(0)
        draw = lambda *shape: torch.randn(shape, generator=generator, device=DEVICE).to(kind)  # noqa: E731
        channels, side, outs, kernel, padding, pool, first = layer
        self.x = draw(lanes, batch, channels, side, side)
        if not first and convolutions._by_matrix(outs):
            self.x = self.x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        self.weight, self.bias = draw(lanes, outs, channels, kernel, kernel) / kernel, draw(lanes, outs)
        self.out, corners = convolutions._plain(self.x, self.weight, self.bias, padding, pool)
        self.seen = convolutions.Seen(self.x, self.weight, corners, padding, pool)
        self.out, self.corners = torch.zeros_like(self.out), torch.zeros_like(corners)
        self.grads = torch.empty_like(self.out).copy_(draw(*self.out.shape))
        self.inner = torch.empty_like(self.x)
        many = torch.empty((like or lanes, *self.weight.shape[1:]), device="meta")
        pieces = convolutions._pieces(self.seen._replace(weight=many))
        self.parts = torch.empty((lanes, pieces, *self.weight.shape[1:]), device=DEVICE)
        self.biases = torch.empty((lanes, pieces, outs), device=DEVICE)
        self.lanes = sorted({0, lanes // 2, lanes - 1})

    def call(self, which: str, family: Any, tile: Any) -> None:
        options = {"padding": self.layer.padding, "pool": self.layer.pool, "tile": tile}
        if which == "forward":
            family.forward(self.x, self.weight, self.bias, self.out, self.corners, **options)
        elif which == "inputs":
            family.backward_inputs(self.grads, self.seen.corners, self.weight, self.inner, **options)
        else:
            family.backward_weights(self.grads, self.seen.corners, self.x, self.parts, self.biases, **options)

    def off(self, which: str) -> float:
        """The largest relative distance from torch over a few lanes."""
        found = {"forward": [self.out], "inputs": [self.inner], "weights": [self.parts.sum(1), self.biases.sum(1)]}
        worst = 0.0
        for lane in self.lanes:
            for one, wanted in zip(found[which], self.wanted(which, lane), strict=True):
                worst = max(worst, ((one[lane].double() - wanted).norm() / wanted.norm()).item())
        if which == "forward":  # near ties may fall to another corner
            strange = (self.corners != self.seen.corners).float().mean().item()
            worst = worst if strange < 0.01 else strange
        return worst

    def wanted(self, which: str, lane: int) -> list[Tensor]:
        x, weight, bias = (t[lane].double().requires_grad_() for t in (self.x, self.weight, self.bias))
        full = F.conv2d(x, weight, bias, padding=self.layer.padding)
        if which == "forward":
            return [F.max_pool2d(full.relu(), 2) if self.layer.pool else full.relu()]
        # the corners as they were found: near ties may fall otherwise in float64
        corners, grads = self.seen.corners[lane], self.grads[lane].double()
        spread = torch.zeros_like(full)
        step = 2 if self.layer.pool else 1
        for corner in range(step * step):
            view = spread[:, :, corner // step :: step, corner % step :: step][..., : grads.shape[2], : grads.shape[3]]
            view.copy_(torch.where(corners == corner, grads, 0.0))
        if which == "inputs":
            return list(torch.autograd.grad(full, [x], spread))
        return list(torch.autograd.grad(full, [weight, bias], spread))

    def cost(self, which: str) -> tuple[float, float]:
        """Bytes and operations."""
        size = lambda *tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
        layer = self.layer
        rows = layer.side + 2 * layer.padding - layer.kernel + 1
        flops = 2.0 * self.x.shape[0] * self.x.shape[1] * rows * rows * layer.outs * layer.channels * layer.kernel**2
        if which == "forward":
            return size(self.x, self.weight, self.out, self.corners), flops
        back = size(self.grads, self.corners)
        return back + (size(self.inner, self.weight) if which == "inputs" else size(self.x, self.parts)), flops


def time_us(call: Any) -> float:
    """Middle of several calls, with the cache washed in between."""
    call()
    wash = torch.empty(2**26, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(7):
        wash.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


class Job(NamedTuple):
    """One row of the table."""

    name: str
    lanes: int
    batch: int
    precision: str
    which: str
    family: str
    tile: Any


FAMILIES = {"matrix": matrix, "threads": threads}


def tiles_of(model: str, which: str, precision: str, few: bool) -> list[tuple[str, Any]]:
    own, other = TILES[model, which], OTHER[model, which]
    if precision == "fp32" and model == "cnn":
        own, other = other, [("matrix", M(64, 32, 4, 2, "tf32x3"))]
    if few and model == "lenet" and which != "weights":
        return [*own[:1], ("threads", T(32, 4, 1)), ("threads", T(32, 2, 1))]
    if few:
        return own[:2]
    return [*own, *other] if precision == "tf32" else [*own[:2], *other]  # the best cut depends on it little


def jobs_of(precisions: list[str], quick: bool) -> list[Job]:
    jobs = []
    for precision in precisions:
        for name, layer in LAYERS.items():
            model = name.rstrip("12")
            for lanes, batch in SIZES[model][: 1 if quick else None]:
                for which in ("forward", "weights") if layer.first else ("forward", "inputs", "weights"):
                    few = quick or lanes in (640, 10)
                    tiles = tiles_of(model, which, precision, few)
                    jobs += [Job(name, lanes, batch, precision, which, *one) for one in tiles]
    return jobs


def build(job: Job) -> None:
    """Compile what a job needs, into triton's cache on disk."""
    with float32_precision(job.precision):
        case = Case(LAYERS[job.name], 2, job.batch, job.precision, like=job.lanes)
        case.call(job.which, FAMILIES[job.family], job.tile)


def build_all(jobs: list[Job], workers: int) -> None:
    """Compile in several processes; what fails there fails again, with its error, in its turn."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(build, job) for job in jobs]:
            future.exception()


def row_of(job: Job, case: Case) -> tuple[str, float | None]:
    """A line of the table, and the time where the pass is right."""
    family = FAMILIES[job.family]
    try:
        case.call(job.which, family, job.tile)
        off = case.off(job.which)
        spent = time_us(lambda: case.call(job.which, family, job.tile))
    except Exception as error:  # a cut that the device has no room for
        return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", None
    (volume, flops), good = case.cost(job.which), off < BOUND[job.precision]
    text = f"{spent:.1f} | {volume / spent / 1e3:.0f} | {flops / spent / 1e6:.2f} | {off:.1e}{'' if good else ' WRONG'}"
    return text, spent if good else None


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="one precision, the largest sizes, two cuts a pass")
    made.add_argument("--precisions", nargs="+", default=["tf32", "fp32", "bf16"])
    made.add_argument("--seconds", type=float, default=100, help="nothing is begun after so many")
    made.add_argument("--workers", type=int, default=12, help="processes that compile")
    made.add_argument(
        "--whole", nargs="*", default=["W3-tf32", "pfl-tf32", "pfl-bf16"], help="rounds to time at the end"
    )
    arguments = made.parse_args()
    begun, bad = time.perf_counter(), 0
    late = lambda: time.perf_counter() - begun > arguments.seconds  # noqa: E731
    jobs = jobs_of(arguments.precisions[: 1 if arguments.quick else None], arguments.quick)
    print(f"{header('cuda')}\n", flush=True)
    build_all(jobs, arguments.workers)
    print(f"{len(jobs)} passes compiled in {time.perf_counter() - begun:.0f} s\n")
    print("| layer | lanes | precision | pass | kernels and cut | us | GB/s | TFLOP/s | off |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    best: dict[str, tuple[float, str]] = {}
    for shape, group in itertools.groupby(jobs, key=lambda job: job[:4]):
        name, lanes, batch, precision = shape
        with float32_precision(precision):
            case = None if late() else Case(LAYERS[name], lanes, batch, precision)
            if case is None:
                print(f"| {name} | {lanes} x {batch} | {precision} | left out: late |", flush=True)
            for job in group if case else ():
                cut = f"{job.family} {'/'.join(str(value) for value in job.tile if value is not None)}"
                text, spent = row_of(job, case)
                bad += spent is None
                print(f"| {name} | {lanes} x {batch} | {precision} | {job.which} | {cut} | {text} |", flush=True)
                key = f"{name} {lanes} x {batch} {precision} {job.which}"
                if spent is not None and spent < best.get(key, (float("inf"), ""))[0]:
                    best[key] = (spent, cut)
    print("\n| case | best | us |\n| --- | --- | --- |")
    for key, (spent, cut) in best.items():
        print(f"| {key} | {cut} | {spent:.1f} |")
    print(f"\n{bad} failed or wrong of {len(jobs)}; {time.perf_counter() - begun:.0f} s\n", flush=True)
    print("| workload | start-up s | ms a round | samples/s |\n| --- | --- | --- | --- |", flush=True)
    for word in arguments.whole:
        print(f"| {word} | {'left out: late' if late() else whole(*word.split('-'), arguments.rounds)} |", flush=True)


def whole(name: str, precision: str, rounds: int) -> str:
    """Whole rounds of the engine."""
    work = WORKLOADS[name]
    try:
        timing = measure(
            [spec_of(work, make_images(work, "cuda"))], rounds=rounds, trainer="engine", precision=precision
        )
    except Exception as error:
        return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"{timing.start_up:.1f} | {timing.round_ms:.2f} | {timing.samples:,.0f}"


if __name__ == "__main__":
    main()
