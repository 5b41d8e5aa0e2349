"""How fast a round is: W1, W2 and W3, pfl-research's CIFAR10 benchmark, ResNet18; every way of training it.

    python benchmarks/bench_engine.py --workloads W1 pfl --ways loop engine engine-tf32 engine-bf16

A way is trainer[-precision][-generic]: "engine-bf16" is the compiled and captured engine in bfloat16; "-generic" leaves
the hand-written gradients aside, "-early" does not compile, as in the first rounds of a run. Before anything is timed,
each way plays a short round or two and its weights are compared with those of the loop (column "off"). One round of
warm-up is in the start-up, two more before the clock.
Images are random; times do not depend on them. What is going on is told on stderr, with the seconds since the start.

    python benchmarks/bench_engine.py --profile --workloads W1 --ways engine

`--profile` times nothing else: it prints what the host and the device do in a round (torch's profiler), and which
functions of the host take longest (cProfile).
"""

import cProfile
import io
import logging
import pstats
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch.profiler import ProfilerActivity
from workloads import WORKLOADS, header, make_images, measure, parser, progress, spec_of, wait

from fedgma.simulation.fleet import assemble, play, play_round, start

DEFAULT = ["engine", "engine-tf32", "engine-bf16", "engine-generic"]


def options_of(way: str) -> dict[str, object]:
    trainer, *rest = way.split("-")
    options: dict[str, object] = {"trainer": trainer, "compile_after": 0}
    for word in rest:
        if word == "generic":
            options["form"] = False
        elif word == "early":
            options["compile_after"] = 10**9
        else:
            options["precision"] = word
    return options


def weights_after(spec, options) -> torch.Tensor:
    *_, played = play([spec], **options)
    return played.state.params[0]


def profile(specs, options, rounds: int) -> None:
    """What a round consists of: operations of the device, operations of the host, functions of the host."""
    cuda = specs[0].federation.train.y.device.type == "cuda"
    fleet = assemble(specs, **options)
    state = start(fleet)
    for _ in range(3):
        state, played = play_round(fleet, state)
    wait(cuda)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(rounds):
            state, played = play_round(fleet, state)
            played.sent()
        wait(cuda)
    table = seen.key_averages()
    for order in ("self_device_time_total", "self_cpu_time_total") if cuda else ("self_cpu_time_total",):
        print(f"{rounds} rounds by {order}\n{table.table(sort_by=order, row_limit=25, max_name_column_width=70)}\n")
    counted, text = cProfile.Profile(), io.StringIO()
    counted.enable()
    for _ in range(rounds):
        state, played = play_round(fleet, state)
        played.sent()
    counted.disable()
    wait(cuda)
    for order in ("tottime", "cumulative"):
        pstats.Stats(counted, stream=text).sort_stats(order).print_stats(30)
    print(f"{rounds} rounds by function of the host\n{text.getvalue()}", flush=True)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "pfl", "resnet"])
    made.add_argument("--ways", nargs="+", default=DEFAULT)
    made.add_argument("--no-check", action="store_true")
    made.add_argument("--profile", action="store_true")
    made.add_argument("--verbose", action="store_true", help="tell why a step could not be compiled")
    arguments, log = made.parse_args(), progress()
    if arguments.verbose:
        log.setLevel(logging.DEBUG)
    print(f"{header(arguments.device)}\n")
    if arguments.profile:
        for name in arguments.workloads:
            for way in arguments.ways:
                print(f"## {name} {way}\n")
                spec = spec_of(WORKLOADS[name], make_images(WORKLOADS[name], arguments.device))
                profile([spec], options_of(way), arguments.rounds)
        return
    print("| workload | way | start-up s | ms a round | host ms | samples/s | MiB | accuracy | off |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.workloads:
        work = WORKLOADS[name]
        log.info("%s: making images", name)
        images = make_images(work, arguments.device)
        rounds, steps = work.check
        short, expected = spec_of(work, images, rounds=rounds, local_steps=steps), None
        if not arguments.no_check:
            log.info("%s: %d rounds of %d steps by the loop", name, rounds, steps)
            expected = weights_after(short, {"trainer": "loop"})
        for way in arguments.ways:
            try:
                off = float("nan")
                if expected is not None:
                    log.info("%s %s: checking", name, way)
                    actual = weights_after(short, options_of(way))
                    off = ((actual - expected).norm() / expected.norm()).item()
                log.info("%s %s: timing", name, way)
                timing = measure([spec_of(work, images)], rounds=arguments.rounds, **options_of(way))
            except Exception as error:
                traceback.print_exc(limit=-4)
                print(f"| {name} | {way} | failed: {type(error).__name__} |", flush=True)
                continue
            print(
                f"| {name} | {way} | {timing.start_up:.1f} | {timing.round_ms:.2f} | {timing.host_ms:.2f} "
                f"| {timing.samples:,.0f} | {timing.memory:,.0f} | {timing.accuracy:.4f} | {off:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
