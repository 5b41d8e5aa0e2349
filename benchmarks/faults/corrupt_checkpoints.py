"""Damage to every file of a run folder: none is accepted silently.

    python benchmarks/faults/corrupt_checkpoints.py --count 60000 --workers 14

A finished and a stopped run of FedYogi with the mask are damaged, one file at a time: bits are flipped, the file is
truncated, extended, partly overwritten with zeros, spliced with the same file of another run, replaced by it, or
deleted; lines of `rounds.jsonl` are exchanged, repeated or lost. The finished run is then read as for a report, and its
last checkpoint as for an extension. The stopped run is read, and resumed up to its first round. Damage is found if
there is an error of one sentence, or a warning and an older checkpoint whose state and lines are intact. Damage is
harmless if everything that is read is as it was before. Everything else is accepted silently.
"""

import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "faults")]
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import crashes  # noqa: E402
from fedgma.errors import FedgmaError  # noqa: E402
from fedgma.records.checkpoints import digest, read_checkpoint  # noqa: E402
from fedgma.records.reader import read_run  # noqa: E402
from fedgma.records.writer import RunFolder, mismatch_in  # noqa: E402

ARM = {"algorithm": "fedyogi", "aggregator": "gma"}
SEED, FOLDER, INTACT = 0, Path(), {}


class Warnings(logging.Handler):
    """Counts warnings."""

    count = 0

    def emit(self, record):
        self.count += 1


WARNINGS = Warnings()


def flip(content, other, rng):
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        bit = rng.randrange(8 * len(content))
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def truncate(content, other, rng):
    return content[: rng.randrange(len(content))]


def extend(content, other, rng):
    return content + rng.choice([rng.randbytes(rng.randint(1, 50)), content, b"\n", b"{}\n"])


def zero(content, other, rng):
    first = rng.randrange(len(content))
    size = rng.choice([1, 16, 512])
    return content[:first] + bytes(len(content[first : first + size])) + content[first + size :]


def splice(content, other, rng):
    first, last = sorted(rng.sample(range(max(len(content), len(other)) + 1), 2))
    return content[:first] + other[first:last] + content[last:]


def replace(content, other, rng):
    return other


def delete(content, other, rng):
    return None


def lines(content, other, rng):
    rows = content.splitlines(keepends=True)
    first, second = rng.randrange(len(rows)), rng.randrange(len(rows))
    how = rng.choice(["exchange", "repeat", "lose"])
    if how == "exchange":
        rows[first], rows[second] = rows[second], rows[first]
    elif how == "repeat":
        rows.insert(first, rows[first])
    else:
        del rows[first]
    return b"".join(rows)


KINDS = (flip, flip, flip, flip, truncate, truncate, extend, zero, splice, splice, replace, delete, lines)


def seen(which, folder):
    """What a report and a resumed run take from a folder; the warnings are counted."""
    run = read_run(folder)
    found = [run.head, run.rounds, run.done]
    if which == "finished":
        point = read_checkpoint(folder / "checkpoints", lambda round: round == len(run.rounds), mismatch_in(folder))
        return [*found, None if point is None else (point.round, list(point.state), digest(point.state))]
    return found


def resumed(folder, head):
    """The checkpoint that a stopped run goes on from, and the lines that it keeps."""
    with RunFolder(folder, head) as opened:
        point = opened.resume()
    state = None if point is None else (point.round, list(point.state), digest(point.state))
    return state, (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)


def compared(read, intact):
    """Whether what was read is intact; a finished run without `done` is reported as unfinished, which it then is."""
    if read == intact:
        return "harmless"
    marked = [*read[:2], intact[2], *read[3:]]
    return "found" if read[2] is None and marked == intact else "SILENT when read"


def judge(which, folder):
    """found, harmless or SILENT: what happened to a damaged folder, first when read and then when resumed."""
    try:
        read = compared(seen(which, folder), INTACT[which]["seen"])
    except FedgmaError as error:
        read = "found" if "\n" not in str(error) else "SILENT: an error of several lines"
    if which == "finished" or read.startswith("SILENT"):
        return read
    before = WARNINGS.count
    try:
        state, kept = resumed(folder, INTACT[which]["head"])
    except FedgmaError:
        return "found"
    states, wanted = INTACT[which]["states"], INTACT[which]["lines"]
    intact = state is not None and state == states[state[0]] and kept == wanted[: state[0]]
    if not intact:
        return "SILENT when resumed"
    if state[0] == max(states):
        return read
    return "found" if WARNINGS.count > before else "SILENT: an older checkpoint without a warning"


def case(number):
    """Damage one file: which, how, and what became of it."""
    rng = random.Random(f"{SEED} {number}")
    which = rng.choice(list(INTACT))
    folder = FOLDER / f"case-{number}" / INTACT[which]["folder"].name
    shutil.copytree(INTACT[which]["folder"], folder)
    file = rng.choice(INTACT[which]["files"])
    content, other = (folder / file).read_bytes(), (INTACT[which]["other"] / file).read_bytes()
    kind = rng.choice(KINDS if file == "rounds.jsonl" else KINDS[:-1])
    damaged = kind(content, other, rng)
    if damaged is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(damaged)
    said = "unchanged" if damaged == content else ""
    try:
        said = said or judge(which, folder)
    except Exception as error:
        said = f"SILENT: {type(error).__name__} {error} instead of a sentence"
    shutil.rmtree(folder.parent)
    return number, f"{which} {file} {kind.__name__}", said


def make(which, folder):
    """A run folder, the same of another seed, and everything that is read from the former."""
    last = crashes.SETTINGS["rounds"] if which == "finished" else 4
    for seed in (0, 1):
        crashes.play({**ARM, "seed": seed}, folder / which / str(seed), stop=lambda played: played == last)
    (run,), (other,) = ((folder / which / str(seed)).iterdir() for seed in (0, 1))
    (run / "lock").unlink(missing_ok=True)
    checkpoints = {int(path.name) for path in (run / "checkpoints").iterdir()}
    states = {}
    for round in checkpoints:
        point = read_checkpoint(run / "checkpoints", round.__eq__)
        states[round] = point.round, list(point.state), digest(point.state)
    return {
        "folder": run,
        "other": other,
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()),
        "seen": seen(which, run),
        "states": states,
        "lines": (run / "rounds.jsonl").read_bytes().splitlines(keepends=True),
        "head": json.loads((run / "run.json").read_text()),
    }


def main():
    global SEED, FOLDER
    asked = crashes.options(__doc__, count=500)
    SEED, began = asked.seed, time.monotonic()
    log = logging.getLogger("fedgma")
    log.addHandler(WARNINGS)
    log.propagate = False
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=asked.folder or memory) as folder:
        FOLDER = Path(folder)
        INTACT.update((which, make(which, FOLDER)) for which in ("finished", "stopped"))
        counts, harmless, silent = Counter(), Counter(), 0
        for number, what, said in crashes.spread(case, asked.count, asked.workers):
            counts[said.split()[0]] += 1
            harmless.update([what] if said == "harmless" else [])
            if said.startswith("SILENT"):
                silent += 1
                print(f"case {number}, {what}: {said}", flush=True)
    print(f"harmless: {dict(harmless)}")
    print(f"{dict(counts)} in {time.monotonic() - began:.0f} s")
    print(f"{silent} of {asked.count - counts['unchanged']} damaged run folders accepted silently")
    sys.exit(silent > 0 or counts["found"] < asked.count // 2)


if __name__ == "__main__":
    main()
