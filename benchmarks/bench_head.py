"""LeNet's dense layers with loss, steps from sums and weight gradients of convolutions: every kernel by its cut.

    python benchmarks/bench_head.py --seconds 35

Every cut is compared with torch in float64 before it is timed (column "off"). A time is that of one of many calls in a
CUDA graph, as a step of the engine makes them. At the end a table lists the fastest cut of every kernel, and what the
device does in a step of W1, uncompiled.
"""

import itertools
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import bench_convolutions as layers
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from workloads import WORKLOADS, header, make_images, parser, spec_of, wait

from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.training.cuda_graphs import float32_precision
from fedgma.training.fast import head, together
from fedgma.training.fast.gpu import conv_thread, dense_head, sgd_step

DEVICE = "cuda"
BATCH, FEATURES, CLASSES = 32, 400, 10
BOUND = {"fp32": 1e-5, "tf32": 3e-3}
CALLS = 50  # in a graph
H, S = dense_head.Cut, sgd_step.Cut


T = conv_thread.Tile


class W(NamedTuple):
    """A cut of a convolution's weight gradient."""

    group: int  # outputs of a thread
    pieces: int  # of the batch
    folded: bool = True


CUTS: dict[str, dict[bool, list[Any]]] = {  # to try with few and with many lanes, the present one first
    "first": {False: [H(16, 64, warps=2, stages=4), H(16, 64, stages=4)], True: [H(64), H(128)]},
    "middle": {False: [H(16, 64), H(16, 64, warps=8), H(16)], True: [H(16, warps=2), H(16), H(16, 64)]},
    "inputs": {False: [H(32, warps=2, stages=4), H(32, stages=4)], True: [H(64, stages=4), H(128)]},
    "conv1 weights": {
        False: [W(3, 32), W(3, 32, False), W(2, 32)],
        True: [W(3, 2), W(3, 2, False), W(2, 2), W(3, 1)],
    },
    "conv2 weights": {
        False: [W(4, 4), W(4, 4, False), W(4, 8)],
        True: [W(4, 1), W(4, 1, False), W(2, 1), W(8, 1)],
    },
    "conv1 forward": {
        False: [T(32, 4, 1), T(32, 2, 1), T(32, 6, 1), T(64, 4, 2)],
        True: [T(64, 16, 2), T(64, 3, 2), T(128, 16, 4)],
    },
    "conv2 forward": {
        False: [T(32, 4, 1), T(32, 2, 1), T(32, 1, 1), T(32, 8, 1)],
        True: [T(64, 16, 2), T(64, 8, 2), T(32, 16, 1)],
    },
    "conv2 inputs": {
        False: [T(32, 2, 1), T(32, 1, 1), T(32, 3, 1)],
        True: [T(64, 6, 2), T(64, 3, 2), T(32, 6, 1)],
    },
    "step": {False: [S(), S(64, 32), S(32, 32, 2048, 2)], True: [S(), S(32, 64, 2048), S(32, 64, 4096, 2)]},
}  # fmt: skip
SUMS = [  # shape of a parameter, terms of its sum with few and with many lanes, inputs of a product
    ((6, 1, 5, 5), (32, 2), None), ((6,), (32, 2), None), ((16, 6, 5, 5), (8, 1), None), ((16,), (8, 1), None),
    ((120, 400), (32, 32), 400), ((120,), (32, 32), None), ((84, 120), (32, 32), 120), ((84,), (32, 32), None),
    ((10, 84), (32, 32), 84), ((10,), (32, 32), None),
]  # fmt: skip


class Passes:
    """The passes of one of LeNet's convolutions."""

    def __init__(self, name: str, lanes: int) -> None:
        self.case = layers.Case(layers.LAYERS[name], lanes, BATCH, "fp32")

    def call(self, which: str, cut: Any) -> None:
        if which == "weights":
            return self._weights(cut)
        self.case.call(which, conv_thread, cut)

    def _weights(self, cut: W) -> None:
        case, conv_thread.FOLDED = self.case, cut.folded
        if case.parts.shape[1] != cut.pieces:
            case.parts = case.parts.new_empty((len(case.x), cut.pieces, *case.weight.shape[1:]))
            case.biases = case.parts.new_empty((len(case.x), cut.pieces, case.weight.shape[1]))
        case.call("weights", conv_thread, conv_thread.Tile(32, cut.group, 1))

    def off(self, which: str, cut: Any) -> float:
        self.call(which, cut)
        return self.case.off(which)


class Case:
    """Random numbers of one round's size: arguments, results, and what torch makes of them in float64."""

    def __init__(self, lanes: int, like: int | None = None) -> None:
        """With `like` the kernels are those of so many lanes."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        draw = lambda *shape: torch.randn((lanes, *shape), generator=generator, device=DEVICE)  # noqa: E731
        self.many = (like or lanes) >= dense_head.MANY
        sizes = list(itertools.pairwise((FEATURES, 120, 84, CLASSES)))
        self.x, self.weights = draw(BATCH, FEATURES), [draw(out, ins) / ins**0.5 for ins, out in sizes]
        self.biases = [draw(out) for _, out in sizes]
        self.y = torch.randint(CLASSES, (lanes, BATCH), generator=generator, device=DEVICE)
        self.count = torch.full((lanes,), BATCH, device=DEVICE)
        self.given = (self.x, self.weights, self.biases, self.y, self.count, 0.0)
        h1, h2, g1, g2, g3, inner, total, hits = self.filled = head._plain(*self.given)
        self.losses, self.right = torch.zeros_like(h1[..., 0]), torch.zeros_like(self.y, dtype=torch.uint8)
        self.calls = {
            "first": lambda cut: dense_head.first(self.x, self.weights[0], self.biases[0], h1, cut=cut),
            "middle": lambda cut: dense_head.middle(
                h1, *zip(self.weights[1:], self.biases[1:], strict=True), self.y, self.count, h2, (g1, g2, g3),
                self.losses, self.right, smoothing=0.0, cut=cut,
            ),
            "inputs": lambda cut: dense_head.inputs(
                g1, self.weights[0], self.losses, self.right, inner, total, hits, cut=cut
            ),
            "step": lambda cut: sgd_step.step(self.parameters, *self.rates, self.count, cut=cut),
        }  # fmt: skip
        self.layer = cache(lambda number: Passes(f"lenet{number}", lanes))
        self.results = {"first": [h1], "middle": [h2, g1, g2, g3], "inputs": [inner]}
        terms = lambda few: few[self.many]  # noqa: E731
        self.step = (
            [draw(*shape) for shape, *_ in SUMS], [draw(*shape) for shape, *_ in SUMS],
            [draw(terms(few), *(shape[:1] if ins else shape)) / 100 for shape, few, ins in SUMS],
            [draw(terms(few), ins) if ins else None for _, few, ins in SUMS],
        )  # fmt: skip
        self.rates = (torch.full((lanes,), 0.01, device=DEVICE), torch.full((lanes,), 0.9, device=DEVICE))
        self.parameters = [sgd_step.Parameter(*given) for given in zip(*self.step, strict=True)]

    def call(self, which: str, cut: Any) -> None:
        if which in self.calls:
            return self.calls[which](cut)
        self.layer(which[4]).call(which[6:], cut)  # "conv1 weights"

    def off(self, which: str, cut: Any) -> float:
        """The largest relative distance of the results from torch's; the other kernels find torch's results."""
        if which == "step":
            return self._off_step(cut)
        if which not in self.calls:
            return self.layer(which[4]).off(which[6:], cut)
        for value, plain in zip(self.filled, head._plain(*self.given), strict=True):
            value.copy_(plain)
        for value in self.results[which]:
            value.fill_(77)
        self.call(which, cut)
        exact = head._plain(*(as_double(value) for value in self.given))
        named = {id(value): expected for value, expected in zip(self.filled, exact, strict=True)}
        return max(off(value, named[id(value)]) for value in self.results[which])

    def _off_step(self, cut: Any) -> float:
        before = [[value.clone() for value in part] for part in self.step[:2]]
        exact = as_double(self.step)
        together._plain(*exact, *as_double(self.rates), self.count)
        self.call("step", cut)
        worst = max(
            off(value, expected)
            for part, other in zip(self.step[:2], exact[:2], strict=True)
            for value, expected in zip(part, other, strict=True)
        )
        for part, old in zip(self.step[:2], before, strict=True):
            for value, kept in zip(part, old, strict=True):
                value.copy_(kept)
        return worst


def as_double(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [as_double(one) for one in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def off(value: Tensor, expected: Tensor) -> float:
    """Of the lanes, without the worst of fifty: a ReLU at zero within rounding may fall the other way."""
    lanes = (value.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return lanes.sort().values[-1 - len(lanes) // 50].item()


def graph_us(call: Any) -> float:
    """Microseconds of a call, one of many in a graph."""
    call()
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), CALLS
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


class Job(NamedTuple):
    """One row of the table."""

    lanes: int
    precision: str
    which: str
    cut: Any


def jobs_of(lanes: list[int], precisions: list[str]) -> list[Job]:
    return [
        Job(number, precision, which, cut)
        for number in lanes
        for precision in precisions
        for which, cuts in CUTS.items()
        for cut in cuts[number >= dense_head.MANY]
        if precision == "fp32" or getattr(cut, "precision", None) is None
    ]


def build(job: Job) -> None:
    """Compile what a job needs, into triton's cache on disk."""
    with float32_precision(job.precision):
        Case(2, job.lanes).call(job.which, job.cut)


def build_all(jobs: list[Job], workers: int) -> None:
    """Compile in several processes; what fails there fails again, with its error, in its turn."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(build, job) for job in jobs]:
            future.exception()


def row_of(job: Job, case: Case) -> tuple[str, float | None]:
    """A line of the table, and the time where the results are right."""
    try:
        distance = case.off(job.which, job.cut)
        spent = graph_us(lambda: case.call(job.which, job.cut))
    except Exception as error:  # a cut that the device has no room for
        return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}", None
    good = distance < BOUND[job.precision]
    return f"{spent:.2f} | {distance:.1e}{'' if good else ' WRONG'}", spent if good else None


def by_torch(case: Case) -> str:
    """Head and step by torch, not compiled."""
    whole, rates = graph_us(lambda: head._plain(*case.given)), (*case.rates, case.count)
    return f"head {whole:.1f} us, step {graph_us(lambda: together._plain(*case.step, *rates)):.1f} us"


def kernels_of_a_step(rounds: int = 3) -> None:
    """Print what the device does in a step of W1."""
    work = WORKLOADS["W1"]
    fleet = assemble([spec_of(work, make_images(work, DEVICE))], trainer="engine", compile_after=10**9)
    state = start(fleet)
    for _ in range(5):
        state, _ = play_round(fleet, state)
    wait(True)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            state, _ = play_round(fleet, state)
        wait(True)
    steps = rounds * -(-work.samples // work.batch)
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    print("\n| kernel of W1, uncompiled | us a step | times a step |\n| --- | --- | --- |")
    for event in events[:24]:
        print(f"| {event.key[:80]} | {event.self_device_time_total / steps:.2f} | {event.count / steps:.2f} |")
    print(f"| all | {sum(event.self_device_time_total for event in events) / steps:.1f} | |", flush=True)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--lanes", nargs="+", type=int, default=[10, 640])
    made.add_argument("--precisions", nargs="+", default=["fp32"])
    made.add_argument("--seconds", type=float, default=60, help="nothing is begun after so many")
    made.add_argument("--workers", type=int, default=12, help="processes that compile")
    arguments = made.parse_args()
    begun, best = time.perf_counter(), {}
    jobs = jobs_of(arguments.lanes, arguments.precisions)
    print(f"{header(DEVICE)}\n", flush=True)
    build_all(jobs, arguments.workers)
    print(f"{len(jobs)} cuts compiled in {time.perf_counter() - begun:.0f} s\n")
    print("| lanes | precision | kernel | cut | us | off |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    for (lanes, precision), group in itertools.groupby(jobs, key=lambda job: job[:2]):
        with float32_precision(precision):
            case = Case(lanes)
            for job in group:
                if time.perf_counter() - begun > arguments.seconds:
                    print(f"| {lanes} | {precision} | {job.which} | left out: late |")
                    continue
                text, spent = row_of(job, case)
                print(f"| {lanes} | {precision} | {job.which} | {tuple(job.cut)} | {text} |", flush=True)
                key = f"{lanes} lanes, {precision}, {job.which}"
                if spent is not None and spent < best.get(key, (float("inf"), None))[0]:
                    best[key] = (spent, job.cut)
            print(f"| {lanes} | {precision} | by torch | | {by_torch(case)} | |", flush=True)
    print("\n| case | best | us |\n| --- | --- | --- |")
    for key, (spent, cut) in best.items():
        print(f"| {key} | {cut} | {spent:.2f} |")
    kernels_of_a_step()


if __name__ == "__main__":
    main()
