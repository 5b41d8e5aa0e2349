"""Modules that users bring, in lanes beside the plain loop: milliseconds a round, the ratio, and the first round.

    python benchmarks/bench_modules.py --out modules.json    # on a GPU, about 5 minutes, most of it compiling
    python benchmarks/bench_modules.py --device cpu --torch-threads 1   # clients in threads beside the loop, on a CPU
    python benchmarks/bench_modules.py --device cpu --torch-threads 1 --trainer auto --rounds 25 --modules small
    python benchmarks/bench_modules.py --device cpu --trainer lanes --tiny   # only shows that both sides agree

Ten clients a round, each with 10 steps of 32 samples (on a CPU 3). Before the clock starts, the updates of both sides
are compared after two local steps (column "off", relative to their length, in the median of the clients).
"""

import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from own_modules import GPT, GRU, LSTM, MLP, VGG, Bag, ViT, dropout_mlp, hooked_mlp, norm_cnn, ready_vit, tiny_linear
from workloads import BOUND, Workload, header, lane_updates, make_images, parser, spec_of, wait

from fedgma.data.pools import ImagePool
from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.training.tasks import CLASSIFICATION, NEXT_TOKEN

IMAGE, TOKENS, LENGTH = (3, 32, 32), 256, 128
MODULES = {
    "MLP with batch norm": MLP,
    "VGG": VGG,
    "ViT, attention written out": ViT,
    "ViT, TransformerEncoderLayer": ready_vit,
    "GRU": GRU,
    "GPT": GPT,
}
SMALL = {  # shows on a CPU that no module is slower than by the loop
    "tiny linear": tiny_linear,
    "CNN with batch norm": norm_cnn,
    "dropout": dropout_mlp,
    "hooks": hooked_mlp,
    "LSTM": LSTM,
    "embedding bag": Bag,
}


@dataclass(frozen=True, eq=False)
class Text:
    """Random tokens as a federation; the next token follows from the last one, with noise."""

    train: ImagePool
    test: ImagePool
    clients: tuple[np.ndarray, ...]


def make_text(clients: int, samples: int, device: str, length: int) -> Text:
    draw = torch.Generator(device).manual_seed(7)
    whole = torch.randint(0, TOKENS, (clients * samples, length + 1), generator=draw, device=device)
    kept = torch.rand(whole.shape, generator=draw, device=device) < 0.7
    for place in range(1, length + 1):
        whole[:, place] = torch.where(kept[:, place], (whole[:, place - 1] * 5 + 1) % TOKENS, whole[:, place])
    nothing = torch.zeros(1, 1, 1, device=device)
    owner = torch.zeros(len(whole), dtype=torch.int64, device=device)
    pool = ImagePool(whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), TOKENS, owner, nothing, nothing + 1)
    parts = tuple(np.arange(client * samples, (client + 1) * samples) for client in range(clients))
    return Text(pool, pool, parts)


def specs_of(name: str, device: str, tiny: bool) -> list:
    clients, samples, sampled, batch = (4, 8, 2, 4) if tiny else (40, 320 if device == "cuda" else 96, 10, 32)
    work = Workload({**MODULES, **SMALL}[name], IMAGE, clients, samples, sampled, batch, lr=0.01)
    if name == "GPT":
        return [spec_of(work, make_text(clients, samples, device, 16 if tiny else LENGTH), task=NEXT_TOKEN)]
    return [spec_of(work, make_images(work, device), task=CLASSIFICATION)]


def begin(specs: list, **options: object) -> tuple[float, Any, Any]:
    """Seconds to the first round, the fleet, and its state after a second one."""
    begun = time.perf_counter()
    fleet = assemble(specs, compile_after=0, **options)
    state, played = play_round(fleet, start(fleet))
    float(played.records[0].train_loss)
    first = time.perf_counter() - begun
    state, _ = play_round(fleet, state)
    return first, fleet, state


def play_on_demand(pipe: Any, name: str, options: Any, trainer: str) -> None:
    """One side in a process of its own: the seconds to its first round, then of a round whenever it is asked."""
    torch.set_num_threads(options.torch_threads or torch.get_num_threads())
    first, fleet, state = begin(specs_of(name, options.device, options.tiny), trainer=trainer)
    pipe.send(first)
    while pipe.recv():
        seconds, state = timed_round(fleet, state)
        pipe.send(seconds)


def timed_round(fleet: Any, state: Any) -> tuple[float, Any]:
    """The seconds of a round, and the state after it: the next round is another one, as in a run."""
    cuda = fleet.device.type == "cuda"
    wait(cuda)
    begun = time.perf_counter()
    state, _ = play_round(fleet, state)
    wait(cuda)
    return time.perf_counter() - begun, state


def apart(name: str, options: Any) -> tuple[list[float], list[float]]:
    """First rounds (s) and rounds (ms, median) of both sides in turns, on a CPU.

    Each has a process of its own, because the memory that threads keep would make the loop faster too.
    """
    spawn, pipes, processes, firsts = multiprocessing.get_context("spawn"), [], [], []
    for trainer in ("loop", options.trainer):
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=play_on_demand, args=(there, name, options, trainer), daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
        firsts.append(here.recv())  # the next one starts on a quiet machine
    spent = []
    for _ in range(options.rounds):
        for pipe in pipes:
            pipe.send(True)
            spent.append(pipe.recv())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()
    return firsts, [statistics.median(spent[side::2]) * 1e3 for side in (0, 1)]


def together(sides: list, rounds: int) -> tuple[list[float], list[float]]:
    """The same on a GPU, in one process."""
    states, spent = [state for _, _, state in sides], [[], []]
    for _ in range(rounds):
        for side, (_, fleet, _) in enumerate(sides):
            seconds, states[side] = timed_round(fleet, states[side])
            spent[side].append(seconds)
    return [first for first, _, _ in sides], [statistics.median(times) * 1e3 for times in spent]


def compare(specs: list, slow: object, fast: object) -> float:
    """The distance of the clients' updates after two local steps."""
    state = start(slow)
    expected, actual = lane_updates(slow, state, 2), lane_updates(fast, state, 2)
    return ((actual - expected).norm(dim=1) / expected.norm(dim=1)).median().item()


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--modules", nargs="+", default=list(MODULES), choices=[*MODULES, *SMALL, "small"])
    asked.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    asked.add_argument("--out", type=Path)
    asked.add_argument("--tiny", action="store_true")
    asked.add_argument("--trainer", help="the other side; by default the engine on a GPU, threads on a CPU")
    asked.add_argument("--torch-threads", type=int, help="of the loop, on a CPU; `fedgma run` uses 1 for small models")
    asked.set_defaults(rounds=5)
    options = asked.parse_args()
    options.trainer = options.trainer or ("engine" if options.device == "cuda" else "threads")
    torch.set_num_threads(options.torch_threads or torch.get_num_threads())
    print(f"{header(options.device)}\n")
    other = options.trainer
    print(f"| module | precision | loop, ms | {other}, ms | ratio | off | first round: loop, s | {other}, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    rows = []
    for name in [*SMALL] if options.modules == ["small"] else options.modules:
        for precision in options.precisions if options.device == "cuda" else ["fp32"]:
            try:
                rows.append(row_of(name, precision, options))
            except Exception as error:  # the other modules are still of interest
                print(f"| {name} | {precision} | failed: {type(error).__name__}: {str(error)[:200]} |", flush=True)
                rows.append({"module": name, "precision": precision, "off": float("inf")})
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1))
    sys.exit(any(row["off"] > BOUND[row["precision"]] for row in rows))


def row_of(name: str, precision: str, options: Any) -> dict:
    """Both sides of one module, measured, compared and printed."""
    specs, ways = specs_of(name, options.device, options.tiny), (("loop", "fp32"), (options.trainer, precision))
    if options.device == "cuda":
        sides = [begin(specs, trainer=trainer, precision=kind) for trainer, kind in ways]
        (loop_first, first), (loop_ms, ms) = together(sides, options.rounds)
        slow, fast = (fleet for _, fleet, _ in sides)
    else:
        (loop_first, first), (loop_ms, ms) = apart(name, options)
        slow, fast = (assemble(specs, trainer=trainer, precision=kind) for trainer, kind in ways)
    off = compare(specs, slow, fast)
    sure = "" if off <= BOUND[precision] else " TOO FAR"
    print(
        f"| {name} | {precision} | {loop_ms:.1f} | {ms:.1f} | {loop_ms / ms:.2f} | {off:.1e}{sure} "
        f"| {loop_first:.1f} | {first:.1f} |",
        flush=True,
    )
    row = {"module": name, "precision": precision, "loop_ms": loop_ms, "ms": ms, "off": off}
    return row | {"loop_first_s": loop_first, "first_s": first}


if __name__ == "__main__":
    main()
