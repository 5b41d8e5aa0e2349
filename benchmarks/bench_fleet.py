"""Many runs as one job, and many clients in one round.

    python benchmarks/bench_fleet.py --runs 1 8 64            # W1, whole rounds with tally, mask and server step
    python benchmarks/bench_fleet.py --scale 100 1000 10000   # clients sampled of 100,000: linear time, flat memory
    python benchmarks/bench_fleet.py --host 1 64 --device cpu # what the host does in a round; nothing is trained

Runs of a fleet differ in seed, threshold, learning rate and server. Every second one is evaluated apart, not here.
"""

import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from bench_engine import options_of
from torch import nn
from workloads import SERVERS, WORKLOADS, fleet_specs, header, make_images, measure, parser, spec_of

from fedgma.aggregation.optimizers import server_optimizer
from fedgma.aggregation.rules import masked_mean
from fedgma.experiments.lines import line_of
from fedgma.records.writer import RunFolder
from fedgma.simulation import assembly
from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.training import replay, stations
from fedgma.training.cuda_graphs import Engine


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workload", default="W1")
    made.add_argument("--runs", type=int, nargs="*", default=[])
    made.add_argument("--scale", type=int, nargs="*", default=[])
    made.add_argument("--ways", nargs="+", default=["engine", "engine-tf32", "engine-bf16"])
    made.add_argument("--host", type=int, nargs="*", default=[])
    made.add_argument("--seeds", type=int, help="that the runs share; else each has its own, with --host 4")
    arguments = made.parse_args()
    if arguments.host:
        report_host(arguments.host, arguments.seeds or 4, arguments.rounds, arguments.device)
        return
    work = WORKLOADS[arguments.workload]
    print(f"{header(arguments.device)}\n")
    print("| runs | clients a round | way | start-up s | ms a round | host ms | samples/s | MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    images = make_images(work, arguments.device) if arguments.runs else None
    for way in arguments.ways:
        for runs in arguments.runs:
            report(fleet_specs(work, images, runs, arguments.seeds), work.clients_per_round, way, arguments.rounds)
        for clients in arguments.scale:
            large = make_images(work, arguments.device, clients=100_000)
            report(
                [spec_of(work, large, clients_per_round=clients)],
                clients,
                way,
                max(1, arguments.rounds // clients),
            )


def report(specs, clients: int, way: str, rounds: int) -> None:
    timing = measure(specs, rounds=rounds, warm=1, **options_of(way))
    print(
        f"| {len(specs)} | {clients} | {way} | {timing.start_up:.1f} | {timing.round_ms:.2f} | {timing.host_ms:.2f} "
        f"| {timing.samples:,.0f} | {timing.memory:,.0f} |",
        flush=True,
    )


def report_host(counts: list[int], seeds: int, rounds: int, device: str) -> None:
    """Milliseconds a round of everything but what a GPU does: tiny models, steps not taken, graphs not replayed.

    The ends of a round count as captured where those of the real model are, the server's part always does.
    """
    assembly.can_replay = lambda *_: True
    replay._capture = lambda function, device: replay.Captured(list(function()), nothing)
    print("| workload | runs | draw, launch, server ms | records ms | lines ms | together |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, arrays, entries in (("W1", 10, 61_706), ("W2", 10, 61_706), ("pfl", 8, 1_626_442)):
        work = replace(WORKLOADS[name], model=partial(Tiny, arrays), shape=(1, 1, 1))
        images = make_images(work, device)
        for runs in counts:
            small = runs * work.clients_per_round * entries <= replay.LARGEST
            stations.LARGEST = replay.LARGEST if small else 0
            arms = [(run % seeds, 0.1 * (run % 10), SERVERS[run // seeds % 4]) for run in range(runs)]
            specs = [
                spec_of(work, images, seed=s, rule=masked_mean(t), optimizer=server_optimizer(*server, "after"))
                for s, t, server in arms
            ]
            spent = [1e3 * part for part in host_seconds(specs, rounds)]
            columns = " | ".join(f"{part:.2f}" for part in (*spent, sum(spent)))
            print(f"| {name} | {runs} | {columns} |", flush=True)


def host_seconds(specs, rounds: int) -> list[float]:
    """Seconds a round: playing it, reading its records, writing a line a run."""
    fleet = replace(assemble(specs, trainer="lanes", chunk=10**6), train=Idle(nothing, compile=False))
    state = start(fleet)
    for _ in range(2 + replay.WARM_UP):
        state, _ = play_round(fleet, state)
    spent = np.zeros(3)
    with tempfile.TemporaryDirectory() as out:
        folders = [RunFolder(Path(out) / str(run), {"settings": {}, "parameters": 1}) for run in range(len(specs))]
        for folder in folders:
            folder.__enter__()
            folder.resume()
        for _ in range(rounds):
            begun = time.perf_counter()
            state, played = play_round(fleet, state)
            launched = time.perf_counter()
            records = played.sent().records
            read = time.perf_counter()
            for record in records:
                folders[record.run].append(line_of(record, 0.1))
            spent += np.diff([begun, launched, read, time.perf_counter()])
        for folder in folders:
            folder.__exit__()
    return list(spent / rounds)


def nothing(*_) -> None:
    """Stands for gradients that nobody asks for, and for graphs that a CPU has none of."""


class Tiny(nn.Module):
    """As many parameters as a real model has, of two entries each."""

    def __init__(self, arrays: int, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(arrays)])
        self.classes = classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, :1] * sum(part.sum() for part in self.parts) + torch.zeros(self.classes)


class Idle(Engine):
    """Everything that the host does for an engine whose steps are captured, and no step."""

    def _is_replayed(self, *_) -> bool:
        return True

    def _play(self, *_) -> None:
        pass


if __name__ == "__main__":
    main()
