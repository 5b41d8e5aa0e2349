"""What further sums and a user's own rule cost.

    python benchmarks/bench_rules.py tally                      # memory and time of a tally with further sums
    python benchmarks/bench_rules.py fleet --runs 64            # a user's rule in a fleet of W1, beside GMA

The tally counts 20 clients of 1 M float32 entries, one at a time and as a stack, on the CPU and on a GPU if there is
one. The fleet trains whole rounds with tally, rule and server step.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from bench_engine import options_of
from workloads import WORKLOADS, fleet_specs, header, make_images, measure, parser, wait

import fedgma
from fedgma.aggregation.kernels.plain import FURTHER
from fedgma.aggregation.own import as_rule
from fedgma.simulation.spec import RunSpec

GROUPS = ((), *((name,) for name in FURTHER), tuple(FURTHER))


class Trust:
    """A user's rule of ten lines: agreement by size, averaged over rounds (examples/own_rule.py)."""

    state = {"trust": 1.0}  # noqa: RUF012

    def __call__(self, mean, total, positive, negative, trust):
        trust = 0.5 * trust + 0.5 * abs(total) / (positive + negative + 1e-30)
        return mean, trust, {"trust": trust}


class Everything:
    """A rule that reads every sum, a measure of the model, and state."""

    state = {"last": 0.0}  # noqa: RUF012

    def measure(self, squares):
        return {"size": squares.sum(-1)}

    def __call__(self, mean, magnitude, positives, clients, positive_weight, weight, measured, last):
        mask = 0.5 * positives / clients + 0.5 * positive_weight / weight
        share = magnitude / (1 + measured["size"])
        return mean + 0.1 * last, mask, {"last": mean * share}


def tally_table(device: str, clients: int, size: int, repeats: int) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(clients, size, generator=generator).to(device)
    weights = list(range(1, clients + 1))
    rows = [{"w": row} for row in stack]
    wanted = fedgma.mean()({"w": stack}, weights).mean["w"]
    print(f"\n{header(device)}: {clients} clients x {size:,} float32\n")
    print("| further sums | bytes an entry | models | streamed, ms a client | ratio | stack, ms a client | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    plain = None
    for further in GROUPS:
        tally, streamed, stacked = tally_seconds(rows, stack, weights, further, repeats)
        assert torch.equal(fedgma.finish(tally, mask="none").mean["w"], wanted), further
        held = sum(array.nbytes for array in tally.sums["w"] if array is not None) / size
        plain = plain or (streamed, stacked)
        columns = f"{1e3 * streamed:.3f} | {streamed / plain[0]:.2f} | {1e3 * stacked:.3f} | {stacked / plain[1]:.2f}"
        print(f"| {', '.join(further) or 'none'} | {held:.0f} | {held / 4:.2f} | {columns} |", flush=True)


def tally_seconds(rows, stack, weights, further, repeats):
    """A tally of all clients, and seconds a client: streamed and as a stack; the best of some repeats."""
    cuda = stack.device.type == "cuda"
    best = [np.inf, np.inf]
    for _ in range(repeats + 1):
        tally = fedgma.Tally(further=further)
        tally.add(rows[0], weights[0])  # makes the sums
        wait(cuda)
        begun = time.perf_counter()
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            tally.add(row, weight)
        wait(cuda)
        best[0] = min(best[0], (time.perf_counter() - begun) / (len(rows) - 1))
        other = fedgma.Tally(further=further)
        begun = time.perf_counter()
        other.add_many({"w": stack}, weights)
        wait(cuda)
        best[1] = min(best[1], (time.perf_counter() - begun) / len(rows))
    return tally, *best


def fleet_table(device: str, name: str, runs: int, rounds: int, ways: list[str]) -> None:
    work = WORKLOADS[name]
    images = make_images(work, device)
    print(f"\n{header(device)}: {runs} runs of {name}\n")
    print("| way | rule | ms a round | host ms | samples/s | of GMA's | MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for way in ways:
        gma = None
        for label, rule in {"GMA": None, "own: Trust": as_rule(Trust), "own: every sum": as_rule(Everything)}.items():
            timing = measure(specs_of(work, images, runs, rule), rounds=rounds, warm=2, **options_of(way))
            gma = gma or timing.samples
            columns = (
                f"{timing.round_ms:.2f} | {timing.host_ms:.2f} | {timing.samples:,.0f} | {timing.samples / gma:.3f}"
            )
            print(f"| {way} | {label} | {columns} | {timing.memory:,.0f} |", flush=True)


def specs_of(work, images, runs: int, rule: fedgma.Rule | None) -> list[RunSpec]:
    """The runs of `bench_fleet.py`, all with this rule; None for GMA at their own thresholds."""
    specs = fleet_specs(work, images, runs)
    return specs if rule is None else [replace(spec, rule=rule) for spec in specs]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("part", choices=["tally", "fleet"])
    made.add_argument("--clients", type=int, default=20)
    made.add_argument("--size", type=int, default=1_000_000)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--runs", type=int, default=64)
    made.add_argument("--workload", default="W1")
    made.add_argument("--ways", nargs="+", help="trainers; by default the engine on a GPU, the kernels on a CPU")
    arguments = made.parse_args()
    if arguments.part == "tally":
        for device in ("cpu", "cuda") if arguments.device == "cuda" else ("cpu",):
            tally_table(device, arguments.clients, arguments.size, arguments.repeats)
    else:
        ways = arguments.ways or (["engine"] if arguments.device == "cuda" else ["kernels"])
        fleet_table(arguments.device, arguments.workload, arguments.runs, arguments.rounds, ways)


if __name__ == "__main__":
    main()
