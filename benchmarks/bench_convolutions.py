"""The GPU convolutions of the small models: first whether each pass is right, then how fast it is, cut in several ways.

    python benchmarks/bench_convolutions.py          # about a minute; --quick is under half of one

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

from fedgma.training.cuda_graphs import float32_precision
from fedgma.training.fast import convolutions
from fedgma.training.fast.gpu import conv_matrix as matrix
from fedgma.training.fast.gpu import conv_thread as threads

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
MANY = {  # cuts to try, the present one first
    ("lenet", "forward"): [T(64, 16, 2), T(128, 8, 2), T(64, 8, 1), T(64, 8, 2), T(128, 16, 2)],
    ("lenet", "inputs"): [T(64, 6, 2), T(128, 3, 2), T(128, 6, 2), T(64, 3, 1), T(64, 3, 2)],
    ("lenet", "weights"): [T(32, 6, 1), T(32, 4, 1), T(32, 2, 1), T(64, 4, 2)],
    ("cnn1", "forward"): [M(128, 32, 8, 2), M(64, 32, 4, 2), M(128, 32, 4, 3), M(256, 32, 8, 2)],
    ("cnn2", "forward"): [M(128, 32, 8, 2), M(128, 32, 4, 2), M(128, 64, 4, 2), M(256, 32, 8, 2), M(128, 32, 4, 1)],
    ("cnn", "spread"): [M()],
    ("cnn", "inputs"): [M(128, 32, 4, 3), M(128, 32, 4, 2), M(128, 64, 4, 2), M(128, 64, 4, 3), M(256, 32, 8, 3)],
    ("cnn1", "weights"): [M(64, 32, 4, 2), M(64, 32, 4, 1), M(128, 32, 4, 2), M(32, 32, 2, 3), M(128, 32, 8, 1)],
    ("cnn2", "weights"): [M(32, 64, 2, 3), M(32, 32, 2, 3), M(64, 64, 4, 1), M(64, 32, 4, 3), M(64, 64, 2, 2)],
}
FEW = [T(32, 2, 1), T(32, 4, 1), T(32, 1, 1), T(64, 2, 2)]  # forward and inputs of few lanes
EXACT = {  # three products instead of one need more registers
    "forward": [M(64, 32, 4, 2), M(128, 32, 8, 2), M(128, 32, 4, 2)],
    "spread": [M()],
    "inputs": [M(128, 32, 8, 2), M(128, 32, 4, 3), M(128, 32, 4, 2)],
    "weights": [M(64, 64, 4, 2), M(32, 64, 4, 2), M(64, 32, 4, 2), M(32, 32, 4, 2)],
}
OTHER = {"lenet": M(128, 32, 4, 2), "cnn": T(128, 8, 2)}  # of the other family
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
        if not first and convolutions._channels_last(outs):
            self.x = self.x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        self.weight, self.bias = draw(lanes, outs, channels, kernel, kernel) / kernel, draw(lanes, outs)
        self.out, corners = convolutions._plain(self.x, self.weight, self.bias, padding, pool)
        self.seen = convolutions.Saved(self.x, self.weight, corners, padding, pool)
        self.out, self.corners = torch.zeros_like(self.out), torch.zeros_like(corners)
        self.grads = torch.empty_like(self.out).copy_(draw(*self.out.shape))
        self.inner = torch.empty_like(self.x)
        many = torch.empty((like or lanes, *self.weight.shape[1:]), device="meta")
        pieces = convolutions._pieces(self.seen._replace(weight=many))
        self.parts = torch.empty((lanes, pieces, *self.weight.shape[1:]), device=DEVICE)
        self.biases = torch.empty((lanes, pieces, outs), device=DEVICE)
        self.lanes = sorted({0, lanes // 2, lanes - 1})
        self.dense: Tensor | None = None

    def call(self, which: str, family: Any, tile: Any) -> None:
        options = {"padding": self.layer.padding, "pool": self.layer.pool, "tile": tile}
        if which == "forward":
            family.forward(self.x, self.weight, self.bias, self.out, self.corners, **options)
            return
        if which == "spread":
            self.dense = family.spread(self.grads, self.seen.corners, pool=self.layer.pool)
            return
        grads, corners = self.grads, self.seen.corners
        if family is matrix and (self.layer.pool or not self.layer.first):  # spread once for both passes
            if self.dense is None:
                self.dense = matrix.spread(grads, corners, pool=self.layer.pool)
            grads, corners = self.dense, None
        if which == "inputs":
            family.backward_inputs(grads, corners, self.weight, self.inner, **options)
        else:
            family.backward_weights(grads, corners, self.x, self.parts, self.biases, **options)

    def off(self, which: str) -> float:
        """The largest relative distance from torch over a few lanes."""
        actual = {"forward": [self.out], "inputs": [self.inner], "weights": [self.parts.sum(1), self.biases.sum(1)]}
        actual["spread"] = [self.dense]
        worst = 0.0
        for lane in self.lanes:
            for one, expected in zip(actual[which], self.wanted(which, lane), strict=True):
                worst = max(worst, ((one[lane].double() - expected).norm() / expected.norm()).item())
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
        if which == "spread":
            return [spread[:, :, : step * grads.shape[2], : step * grads.shape[3]]]
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
        if which == "spread":
            return back + size(self.dense), 0.0
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


def tiles_of(name: str, which: str, precision: str, lanes: int, quick: bool) -> list[Any]:
    model = name.rstrip("12")
    tiles = MANY.get((name, which)) or MANY[model, which]
    if model == "cnn" and precision == "fp32":
        tiles = EXACT[which]
    if (name, which, precision) == ("cnn2", "weights", "bf16"):
        tiles = [M(64, 64, 4, 3), *tiles]
    if lanes < 100 and model == "lenet" and which != "weights":
        tiles = FEW
    if quick or lanes == 640 or precision == "bf16" or (model, precision) == ("lenet", "fp32"):
        return tiles[:2]  # the best cut depends on it little
    return [*tiles, OTHER[model]] if precision == "tf32" and lanes == 1600 and which == "forward" else tiles


def passes_of(layer: Layer) -> list[str]:
    if layer.first:
        return ["forward", "weights"]
    return ["forward", *(["spread"] if convolutions._channels_last(layer.outs) else []), "inputs", "weights"]


def jobs_of(precisions: list[str], quick: bool) -> list[Job]:
    return [
        Job(name, lanes, batch, precision, which, "matrix" if isinstance(tile, M) else "threads", tile)
        for precision in precisions
        for name, layer in LAYERS.items()
        for lanes, batch in SIZES[name.rstrip("12")][: 1 if quick else None]
        for which in passes_of(layer)
        for tile in tiles_of(name, which, precision, lanes, quick)
    ]


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
    made.add_argument("--workers", type=int, default=14, help="processes that compile")
    made.add_argument(
        "--whole", nargs="*", default=["pfl-tf32", "pfl-fp32", "pfl-bf16"], help="rounds to time at the end"
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
            [spec_of(work, make_images(work, "cuda"))],
            rounds=rounds,
            trainer="engine",
            precision=precision,
            compile_after=0,
        )
    except Exception as error:
        return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"{timing.start_up:.1f} | {timing.round_ms:.2f} | {timing.samples:,.0f}"


if __name__ == "__main__":
    main()
