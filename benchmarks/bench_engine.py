"""How fast a round is: W1, W2 and W3, pfl-research's CIFAR10 benchmark, ResNet18; every way of training it.

    python benchmarks/bench_engine.py --workloads W1 pfl --ways loop engine engine-tf32 engine-bf16

A way is trainer[-precision][-generic]: "engine-bf16" is the compiled and captured engine in bfloat16; "-generic" leaves
the hand-written gradients aside. Before anything is timed, each way plays a short round or two and its weights are
compared with those of the loop (column "off"). One round of warm-up is in the start-up, two more before the clock.
Images are random; times do not depend on them. What is going on is told on stderr, with the seconds since the start.
"""

import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from workloads import WORKLOADS, header, make_images, measure, parser, progress, spec_of

from fedgma.simulation.fleet import play

DEFAULT = ["engine", "engine-tf32", "engine-bf16", "engine-generic"]


def options_of(way: str) -> dict[str, object]:
    trainer, *rest = way.split("-")
    options: dict[str, object] = {"trainer": trainer}
    for word in rest:
        if word == "generic":
            options["form"] = False
        else:
            options["precision"] = word
    return options


def weights_after(spec, options) -> torch.Tensor:
    *_, played = play([spec], **options)
    return played.state.params[0]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "pfl", "resnet"])
    made.add_argument("--ways", nargs="+", default=DEFAULT)
    made.add_argument("--no-check", action="store_true")
    arguments, log = made.parse_args(), progress()
    print(f"{header(arguments.device)}\n")
    print("| workload | way | start-up s | ms a round | host ms | samples/s | MiB | accuracy | off |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.workloads:
        work = WORKLOADS[name]
        log.info("%s: making images", name)
        images = make_images(work, arguments.device)
        rounds, steps = work.check
        short, wanted = spec_of(work, images, rounds=rounds, local_steps=steps), None
        if not arguments.no_check:
            log.info("%s: %d rounds of %d steps by the loop", name, rounds, steps)
            wanted = weights_after(short, {"trainer": "loop"})
        for way in arguments.ways:
            try:
                off = float("nan")
                if wanted is not None:
                    log.info("%s %s: checking", name, way)
                    found = weights_after(short, options_of(way))
                    off = ((found - wanted).norm() / wanted.norm()).item()
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
