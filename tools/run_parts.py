"""Run a search of learning rates and its test part by part, in several processes that share one GPU.

python tools/run_parts.py --out runs/multiverse --workers 8 --minutes 5               # the multiverse: C19 and C24
python tools/run_parts.py C26 C27 --out runs/fedadam --workers 6 --precision tf32     # other plans with equal parts
python tools/run_parts.py --quick --rounds 12 --parts 12 --out /tmp/tiny              # a trial on the CPU

A part is searched, its rates are chosen, and its arms are compared before the next one begins. Universes are taken in
their order, which is random, so those that are complete when the time is over are a random sample. The same command
resumes; `--done` names exports or folders of another machine whose runs are not made again. `fedgma paper search --plan
C19` and `fedgma paper run C24` make the same runs in one process.
"""

import argparse
import gc
import logging
import multiprocessing
import re
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.experiments import plan as plans
from fedgma.experiments.grid import Grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.play import play_fleet
from fedgma.paper.catalogue import Experiment, experiment
from fedgma.paper.compare import compare
from fedgma.paper.entries import Entry, merged, read_entries
from fedgma.paper.plans import Cut, plan_runs
from fedgma.paper.queue import not_made
from fedgma.paper.rates import Chosen, read_chosen, written
from fedgma.paper.search import choose

MULTIVERSE = ("C19", "C24")
CHOSEN = "chosen.toml"


class Options(NamedTuple):
    """The options of the command line."""

    out: Path
    cut: Cut
    device: str
    precision: str
    deadline: float  # by `time.time`
    done: tuple[Path, ...]
    plans: tuple[str, str] = MULTIVERSE  # the search, and the test of its rates


def play_part(place: int, options: Options, materials: Materials, earlier: Sequence[Entry]) -> str:
    """Search the rates of a part, choose them, and compare its arms; returns what was done in words."""
    search, test = (_only(experiment(name), place) for name in options.plans)
    folder, chosen = options.out / re.sub(r"\W+", "-", search.parts[0].name), read_chosen()
    began = time.monotonic()
    searched = _play(search, Chosen(shift=chosen.shift), folder, options, materials, earlier)
    entries = merged([*(read_entries([folder])[0] if any(folder.glob("*/done")) else []), *earlier])
    rates = choose(compare(search, entries, chosen, options.cut), by_setting=True)
    (folder / CHOSEN).write_text(written(rates), encoding="utf-8")
    middle = time.monotonic()
    tested = _play(test, Chosen(rates, chosen.shift), folder, options, materials, earlier)
    times = f"{middle - began:.1f} + {time.monotonic() - middle:.1f} s"
    return f"{search.parts[0].name}: {searched} + {tested} runs in {times}"


def _only(one: Experiment, place: int) -> Experiment:
    return one._replace(parts=one.parts[place : place + 1])


def _play(
    one: Experiment, chosen: Chosen, folder: Path, options: Options, materials: Materials, earlier: Sequence[Entry]
) -> int:
    """Train the missing runs of one part; returns their number."""
    runs = tuple(not_made(plan_runs(one, chosen, options.cut).grid.runs, earlier))
    folder.mkdir(parents=True, exist_ok=True)
    left = plans.missing(plans.plan(Grid(runs, ("seed",)), materials, folder))
    for members in plans.pack(left, materials):
        for _ in play_fleet(members, materials, checkpoint_seconds=300.0, keep_state=False):
            pass
        _free(materials)
    return len(left)


def _free(materials: Materials) -> None:
    """Return the memory of a fleet: other processes share the device."""
    gc.collect()
    if materials.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def work(number: int, following: Any, last: int, options: Options) -> None:
    """Take part after part until all are taken or the time is over."""
    logging.basicConfig(level=logging.WARNING)
    materials = Materials(options.device, precision=options.precision)
    earlier = merged(read_entries(options.done)[0]) if options.done else []
    while time.time() < options.deadline:
        with following.get_lock():
            place = following.value
            following.value += 1
        if place >= last:
            return
        try:
            print(f"worker {number}: {play_part(place, options, materials, earlier)}", flush=True)
        except Exception:  # one part must not cost the others
            print(f"worker {number}: part {place + 1} failed\n{traceback.format_exc()}", flush=True)


def main() -> None:
    """Start the workers and wait for them."""
    parser = argparse.ArgumentParser(description="Run a search and its test, part by part.")
    parser.add_argument("plans", nargs="*", default=MULTIVERSE, metavar="SEARCH TEST", help="default: C19 C24")
    parser.add_argument("--out", type=Path, default=Path("runs/multiverse"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no part after this time")
    parser.add_argument("--first", type=int, default=1, help="the part to begin with")
    parser.add_argument("--parts", type=int, default=None, help="only those up to this one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--done", type=Path, action="append", default=[])
    parser.add_argument("--quick", action="store_true", help="embedded images in place of the data sets")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=None)
    given = parser.parse_args()
    if len(given.plans) != 2:
        parser.error(f"expected a search and its test, such as C26 C27, got {' '.join(given.plans)}")
    cut = Cut(given.rounds, given.seeds, "", given.quick)
    deadline = time.time() + 60 * given.minutes
    options = Options(given.out, cut, given.device, given.precision, deadline, tuple(given.done), tuple(given.plans))
    parts = len(experiment(given.plans[1]).parts)
    last = min(parts, given.parts or parts)
    context = multiprocessing.get_context("spawn")
    following = context.Value("i", given.first - 1)
    arguments = [(number, following, last, options) for number in range(given.workers)]
    workers = [context.Process(target=work, args=one) for one in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"parts up to {min(following.value, last)} of {last} were begun", flush=True)


if __name__ == "__main__":
    main()
