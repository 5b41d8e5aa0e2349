"""Many runs as one job, and many clients in one round.

    python benchmarks/bench_fleet.py --runs 1 8 64            # W1, whole rounds with tally, mask and server step
    python benchmarks/bench_fleet.py --scale 100 1000 10000   # clients sampled of 100,000: linear time, flat memory

Runs of a fleet differ in seed, threshold, learning rate and server. Every second one is evaluated apart, not here.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from bench_engine import options_of
from workloads import WORKLOADS, header, make_images, measure, parser, spec_of

SERVERS = [("sgd", 1.0), ("adam", 0.01), ("momentum", 0.5), ("yogi", 0.01)]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workload", default="W1")
    made.add_argument("--runs", type=int, nargs="*", default=[])
    made.add_argument("--scale", type=int, nargs="*", default=[])
    made.add_argument("--ways", nargs="+", default=["engine", "engine-tf32", "engine-bf16"])
    arguments = made.parse_args()
    work = WORKLOADS[arguments.workload]
    print(f"{header(arguments.device)}\n")
    print("| runs | clients a round | way | start-up s | ms a round | host ms | samples/s | MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    images = make_images(work, arguments.device) if arguments.runs else None
    for way in arguments.ways:
        for runs in arguments.runs:
            specs = []
            for run in range(runs):
                server, rate = SERVERS[run % 4]
                tau = 0.1 * (run % 10)
                specs.append(spec_of(work, images, seed=run, tau=tau, server=server, server_lr=rate))
            report(specs, work.cohort, way, arguments.rounds)
        for cohort in arguments.scale:
            large = make_images(work, arguments.device, clients=100_000)
            report([spec_of(work, large, cohort=cohort)], cohort, way, max(1, arguments.rounds // cohort))


def report(specs, cohort: int, way: str, rounds: int) -> None:
    timing = measure(specs, rounds=rounds, warm=1, **options_of(way))
    print(
        f"| {len(specs)} | {cohort} | {way} | {timing.start_up:.1f} | {timing.round_ms:.2f} | {timing.host_ms:.2f} "
        f"| {timing.samples:,.0f} | {timing.memory:,.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
