"""Ctrl-C and SIGTERM at random moments of `fedgma run`: a clean exit within seconds, and nothing is lost.

    python benchmarks/faults/signals.py --signals 200 --workers 8

Logistic regression on small arrays and LeNet on the embedded images train without end. A signal comes at a random
moment: every third while the command starts, the others in training; every eighth time a second one follows. A quarter
of the commands are started from nothing, the others are forked from a process that has loaded everything. The command
must exit with 130 or 143, without a traceback, and its newest checkpoint must hold every round that it wrote (after two
signals it may be older). Then the same command must go on, and the first rounds stay as they were. Moments are counted
from when the command handles signals; before that, Python has its own way to end.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "faults")]
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

import numpy as np  # noqa: E402
import typer  # noqa: E402, F401 (loaded before a child is forked)

import crashes  # noqa: E402
from fedgma.cli import app, main  # noqa: E402, F401
from fedgma.records.checkpoints import checkpoint_rounds  # noqa: E402
from fedgma.records.reader import complete_lines, read_runs  # noqa: E402

COMMON = ["aggregator=gma", "seed=0", "clients_per_round=3", "evaluate_every=50", "--device", "cpu"]
LENET = ["model=lenet", "partition.clients=20"]
KINDS = {"INT": signal.SIGINT, "TERM": signal.SIGTERM}
SEED, FOLDER = 0, Path()


def words(number, out, rounds=100_000):
    """The command line: small arrays or LeNet in turns."""
    small = [f"dataset={FOLDER / 'small.npz'}", "model=logistic", "partition.name=iid", "partition.clients=6"]
    return ["run", *(LENET if number % 2 else small), *COMMON, f"rounds={rounds}", "--out", str(out)]


def command(arguments):
    sys.argv = ["fedgma", *arguments]
    main()


def start(arguments, said, fresh):
    """Start the command and wait until it handles signals; returns its process number."""
    if fresh:
        with said.open("w") as stream:
            line = [sys.executable, "-c", "from fedgma.cli import main; main()", *arguments]
            process = os.posix_spawn(
                sys.executable,
                line,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, stream.fileno(), 1), (os.POSIX_SPAWN_DUP2, stream.fileno(), 2)],
            )
    else:
        process = crashes.fork(lambda: command(arguments), said)
    while not handles(process, signal.SIGTERM):
        time.sleep(0.001)
    return process


def handles(process, number):
    """Whether a process has a handler for a signal, or has ended."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (number - 1) & 1) or has_ended(process)


def rounds_of(out):
    """The lines that were written, and the round of the newest checkpoint."""
    files = list(out.glob("*/rounds.jsonl"))
    lines = complete_lines(files[0]) if files else []
    return lines, max(checkpoint_rounds(files[0].parent / "checkpoints"), default=0) if files else 0


def case(number):
    """Signal one command: what went wrong ("" if nothing did), the seconds to its exit, and the rounds it saved."""
    rng = random.Random(f"{SEED} {number}")
    out, said = Path(tempfile.mkdtemp(dir=FOLDER)), FOLDER / f"{number}.txt"
    arguments, fresh, twice = words(number, out), number % 4 == 3, number % 8 == 6
    kind = rng.choice(list(KINDS.values()))
    process = start(arguments, said, fresh)
    if number % 3:  # in training
        wait_for_rounds(process, out, rng.randint(1, 5))
    time.sleep(rng.uniform(0, 3.0 if fresh else 0.5))
    began = time.monotonic()
    os.kill(process, kind)
    if twice:
        time.sleep(rng.uniform(0, 0.1))
        with_one_more(process, kind)
    code = crashes.ended(process)
    seconds = time.monotonic() - began
    text = said.read_text()
    lines, saved = rounds_of(out)
    wrong = ""
    if code != 128 + kind or "Traceback" in text:
        wrong = f"it ended with {code} and said: {text[-1500:]}"
    elif saved != len(lines) and not twice:
        wrong = f"{len(lines)} rounds are written, but the newest checkpoint is of round {saved}"
    wrong = wrong or goes_on(arguments, out, said, lines[:saved])
    shutil.rmtree(out)
    said.unlink()
    return number, wrong, seconds, saved


def with_one_more(process, kind):
    """Send a second signal, unless the process has ended."""
    if not has_ended(process):
        os.kill(process, kind)


def has_ended(process):
    return "State:\tZ" in Path(f"/proc/{process}/status").read_text()


def wait_for_rounds(process, out, count):
    """Wait until so many rounds are written, or the process has ended."""
    while len(rounds_of(out)[0]) < count and not has_ended(process):
        time.sleep(0.005)


def goes_on(arguments, out, said, kept):
    """Run the same command again until it has written one more round: what went wrong."""
    for old in out.glob("*/rounds.jsonl"):
        old.write_bytes(b"".join(kept))  # later lines have no checkpoint, so that the command drops them anyway
    process = start(arguments, said, fresh=False)
    wait_for_rounds(process, out, len(kept) + 1)
    os.kill(process, signal.SIGINT)
    code = crashes.ended(process)
    lines, saved = rounds_of(out)
    if code != 130 or saved != len(lines):
        return f"the resumed command ended with {code} and said: {said.read_text()[-1500:]}"
    read_runs(out)  # compares all lines with the checkpoint
    return "" if lines[: len(kept)] == kept else "the resumed command changed the first rounds"


def summed_up(asked, times, failed):
    times = sorted(times)
    late = sum(seconds > asked.limit for seconds in times)
    middle, most = times[len(times) // 2], times[-1]
    p95 = times[min(len(times) - 1, int(0.95 * len(times)))]
    print(f"seconds from signal to exit: median {middle:.2f}, p95 {p95:.2f}, longest {most:.2f}")
    print(f"{asked.signals - failed} of {asked.signals} clean exits with nothing lost, {late} above {asked.limit} s")
    sys.exit(failed > 0 or late > 0)


def run():
    global SEED, FOLDER
    asked = crashes.options(__doc__, {"kind": ("both", *KINDS)}, signals=20, limit=5)
    SEED = asked.seed
    for name in {*KINDS} - ({*KINDS} if asked.kind == "both" else {asked.kind}):
        del KINDS[name]
    crashes.prepare()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        FOLDER = Path(folder)
        images, labels = crashes.arrays()
        np.savez(FOLDER / "small.npz", x=images, y=labels)
        for number in (0, 1):  # kernels are compiled once a machine
            crashes.ended(crashes.fork(lambda number=number: command(words(number, FOLDER / "warm", 1))))
        times, failed, within = [], 0, 0
        for number, wrong, seconds, saved in crashes.spread(case, asked.signals, asked.workers):
            times.append(seconds)
            failed += bool(wrong)
            within += saved > 0
            if wrong:
                print(f"signal {number}: {wrong}", flush=True)
    print(f"{within} of {asked.signals} came in training, the others before the first round was saved")
    summed_up(asked, times, failed)


if __name__ == "__main__":
    run()
