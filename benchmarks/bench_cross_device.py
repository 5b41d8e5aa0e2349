"""How rounds grow from ten clients to 100,000: clients a second and peak memory, LeNet, 20 samples a client.

    python benchmarks/bench_cross_device.py                               # on two cores: 10 to 10,000 clients a round
    python benchmarks/bench_cross_device.py --clients 10 100 1000 10000 100000 --seconds 60       # on a GPU
    python benchmarks/bench_cross_device.py --clock                       # the same with slow clients, asynchronous

A federation of `--population` clients (or as many as a round samples, if those are more), whole rounds from draws to
server step, without evaluation. Before timing, a round in pieces of seven clients is compared with a round in one
piece: the same bits on a CPU, the distance of rounding on a GPU (there without the compiler, to save its time). Sizes
go up, and memory is the peak of the process so far, so a row that is no larger than the one before it shows that memory
is flat. `host` is the processor time of this process; on a CPU that is training too. No size is begun that would pass
`--seconds`, as the one before predicts.
"""

import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from workloads import WORKLOADS, header, make_images, parser, progress, spec_of, wait

from fedgma.simulation.clock import Clock, Delays
from fedgma.simulation.fleet import assemble, play_round, start

WORK = replace(WORKLOADS["W3"], samples=20, batch=10)
MIB = 2**20


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    made.add_argument("--population", type=int, default=10_000)
    made.add_argument("--seconds", type=float, default=600.0)
    made.add_argument("--precision", default="fp32")
    made.add_argument("--compile-after", type=int, default=0, help="rounds; by default all are compiled on a GPU")
    made.add_argument("--clock", action="store_true", help="asynchronous rounds with twice as many clients at work")
    arguments = made.parse_args()
    progress()
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # as in experiments; the kernels have threads of their own
    begun, device = time.perf_counter(), arguments.device
    print(f"{header(device)}, {arguments.precision}, {WORK.samples} samples a client, batches of {WORK.batch}\n")
    population = max(arguments.population, (2 if arguments.clock else 1) * max(arguments.clients))
    images = make_images(WORK, device, clients=population)
    check(images, arguments.precision)
    print("\n| clients a round | lanes at a time | ms a round | clients/s | host us/client | peak MiB, host | device |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    predicted = 0.0
    for clients in arguments.clients:
        if time.perf_counter() - begun + predicted > arguments.seconds:
            print(f"| {clients:,} | not begun: it would take about {predicted:.0f} s |", flush=True)
            continue
        try:
            predicted = row(clients, images, arguments)
        except RuntimeError as error:  # out of memory: the other sizes still count
            print(f"| {clients:,} | failed: {str(error).splitlines()[0][:90]} |", flush=True)


def check(images, precision: str) -> None:
    """A round in pieces and in one piece: the same model."""
    spec = spec_of(WORK, images, clients_per_round=50, local_steps=2)
    models = []
    for chunk in (7, 50):
        trainer = "lanes" if images.train.y.is_cuda else "auto"
        fleet = assemble([spec], trainer=trainer, precision=precision, chunk=chunk)
        models.append(play_round(fleet, start(fleet))[0].params)
    first = start(fleet).params
    apart = ((models[0] - models[1]).norm() / (models[1] - first).norm()).item()
    assert apart <= (0.0 if first.device.type == "cpu" else 1e-3), apart
    print(
        f"50 clients in pieces of 7 and at once: {'the same bits' if apart == 0 else f'{apart:.1e} apart'}", flush=True
    )


def row(clients: int, images, arguments) -> float:
    """Time rounds of one size; returns the seconds that ten times as many clients would take, start-up included."""
    cuda = arguments.device == "cuda"
    clock = None
    if arguments.clock:
        clock = Clock(
            compute=Delays("lognormal", 0.1, 1.0), network=Delays("exponential", 2.0), concurrency=2 * clients
        )
    spec = spec_of(WORK, images, clients_per_round=clients, clock=clock)
    begun = time.perf_counter()
    fleet = assemble([spec], precision=arguments.precision, compile_after=arguments.compile_after)
    state, played = play_round(fleet, start(fleet))
    assert played.records[0].clients == clients  # waits
    begun_rounds = time.perf_counter()
    rounds = max(1, min(arguments.rounds, 10_000 // clients))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    state, _ = play_round(fleet, state)
    wait(cuda)
    begin, host = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        state, played = play_round(fleet, state)
    wait(cuda)
    spent, host = (time.perf_counter() - begin) / rounds, (time.process_time() - host) / rounds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    device = f"{torch.cuda.max_memory_allocated() / MIB:,.0f}" if cuda else ""
    lanes = -(-clients // -(-clients // fleet.chunk))  # pieces of equal size
    print(
        f"| {clients:,} | {lanes:,} | {spent * 1e3:,.1f} | {clients / spent:,.0f} | {host / clients * 1e6:,.0f} "
        f"| {peak:,.0f} | {device} |",
        flush=True,
    )
    return (begun_rounds - begun) + 10 * 3 * spent


if __name__ == "__main__":
    main()
