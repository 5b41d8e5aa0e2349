"""How the GPU convolutions of LeNet are cut: every cut of every pass, whether it changes a bit, and its time.

    python benchmarks/bench_tiles.py --lanes 10 640       # about a minute

`bench_convolutions.py` times a pass alone, with a cold cache. In a captured step passes follow each other with a warm
one; here a pass is captured 20 times in one graph. The first cut of a pass is the present one.
"""

import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from bench_convolutions import BOUND, LAYERS, Case, Job, T, build_all, threads
from workloads import graph_seconds, header, parser

FEW = {
    "forward": [
        (32, 4, 1),
        (32, 4, 1, 5),
        (32, 2, 1),
        (32, 2, 1, 5),
        (64, 4, 1),
        (64, 4, 1, 5),
        (64, 4, 2),
        (64, 2, 1, 5),
        (32, 8, 1, 5),
        (32, 1, 1, 5),
    ],
    "inputs": [
        (32, 2, 1),
        (32, 2, 1, 2),
        (32, 1, 1),
        (32, 1, 1, 2),
        (32, 1, 1, 4),
        (64, 2, 1),
        (64, 2, 1, 2),
        (64, 1, 1, 2),
        (64, 3, 1),
        (32, 3, 1, 2),
        (64, 1, 2, 4),
    ],
    "weights": [(32, 6, 1), (32, 3, 1), (32, 2, 1), (32, 1, 1), (32, 2, 1, 2), (32, 1, 1, 2)],
}
MANY = {
    "forward": [(64, 16, 2), (128, 16, 2), (128, 8, 2), (128, 4, 2), (128, 8, 1), (64, 8, 1), (256, 4, 2), (256, 8, 4)],
    "inputs": [(64, 6, 2), (128, 6, 2), (128, 3, 2), (128, 2, 2), (64, 3, 1), (128, 2, 1), (64, 2, 1)],
    "weights": [(32, 6, 1), (32, 3, 1), (32, 2, 1), (32, 4, 1)],
}
PASSES = (
    ("lenet1", "forward"),
    ("lenet1", "weights"),
    ("lenet2", "forward"),
    ("lenet2", "inputs"),
    ("lenet2", "weights"),
)
REPEATS = 20


def results(case: Case, which: str) -> list[torch.Tensor]:
    found = {"forward": [case.out, case.corners], "inputs": [case.inner], "weights": [case.parts, case.biases]}[which]
    return [value.clone() for value in found]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--lanes", type=int, nargs="+", default=[10, 640])
    made.add_argument("--precision", default="fp32")
    made.add_argument("--seconds", type=float, default=60, help="nothing is begun after so many")
    made.add_argument("--workers", type=int, default=14, help="processes that compile")
    arguments = made.parse_args()
    begun = time.perf_counter()
    jobs = [
        Job(name, lanes, 32, arguments.precision, which, "threads", T(*tile))
        for lanes in arguments.lanes
        for name, which in PASSES
        for tile in (MANY if lanes >= 100 else FEW)[which]
    ]
    print(f"{header('cuda')}\n", flush=True)
    build_all(jobs, arguments.workers)
    print(f"{len(jobs)} cuts compiled in {time.perf_counter() - begun:.0f} s\n")
    print("| layer | lanes | pass | cut | us | of the first | off | bits |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, lanes, _, _, which), group in itertools.groupby(jobs, key=lambda job: job[:5]):
        if time.perf_counter() - begun > arguments.seconds:
            print(f"| {name} | {lanes} | {which} | left out: late |", flush=True)
            continue
        case, first, wanted = Case(LAYERS[name], lanes, 32, arguments.precision), None, None
        for job in group:
            cut = "/".join(map(str, job.tile))
            try:
                case.call(which, threads, job.tile)
                found, off = results(case, which), case.off(which)
                wanted = wanted or found
                same = all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))

                def repeat(case=case, which=which, tile=job.tile) -> None:
                    for _ in range(REPEATS):
                        case.call(which, threads, tile)

                spent = 1e6 * graph_seconds(repeat, "cuda") / REPEATS
            except Exception as error:
                print(
                    f"| {name} | {lanes} | {which} | {cut} | failed: {type(error).__name__}: {str(error)[:80]} |",
                    flush=True,
                )
                continue
            first = first or spent
            good, bits = "" if off < BOUND[arguments.precision] else " WRONG", "same" if same else "OTHER"
            times = f"{spent:.2f} | {spent / first:.2f} | {off:.1e}{good} | {bits}"
            print(f"| {name} | {lanes} | {which} | {cut} | {times} |", flush=True)
    print(f"\n{time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
