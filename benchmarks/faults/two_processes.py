"""Several processes on one run folder: one of them trains, the others are refused, and the results are the same.

    python benchmarks/faults/two_processes.py --count 200 --workers 14

Two to four processes start the same small run within moments of each other; in every third case the first one is killed
with -9 on the way, so that its lock is that of a dead process. Each ends with 0, because it trained or found the run
done, or with 2 and the sentence that another process is writing. A last process finishes what is left, and the results
must be those of an undisturbed run.
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
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import crashes  # noqa: E402

SEED, FOLDER, REFERENCES = 0, Path(), []


def case(number):
    """Start several processes on one folder: what went wrong ("" if nothing did), and how many were refused."""
    rng = random.Random(f"{SEED} {number}")
    place = number % len(crashes.ARMS)
    arm, (wanted, _, seconds) = crashes.ARMS[place], REFERENCES[place]
    out, processes = Path(tempfile.mkdtemp(dir=FOLDER)), {}
    for which in range(rng.randint(2, 4)):
        said = FOLDER / f"{number}-{which}.txt"
        processes[crashes.fork(lambda: crashes.play(arm, out, wait=0.0), said)] = said
        time.sleep(rng.uniform(0, seconds / 2))
    if number % 3 == 0:
        os.kill(next(iter(processes)), signal.SIGKILL)
    ends = [(crashes.ended(process), said.read_text()) for process, said in processes.items()]
    refused = sum(code == 2 and "another process is writing" in text for code, text in ends)
    fine = refused + sum(code in (0, -signal.SIGKILL) for code, _ in ends)
    wrong = "" if fine == len(ends) else f"the processes ended with {ends}"
    last = FOLDER / f"{number}.txt"
    if crashes.ended(crashes.fork(lambda: crashes.play(arm, out), last)):
        wrong = wrong or f"the last process said: {last.read_text()[-2000:]}"
    elif crashes.outcome(out) != wanted:
        wrong = wrong or "the results differ from those of the undisturbed run"
    shutil.rmtree(out)
    return number, wrong, refused


def main():
    global SEED, FOLDER
    asked = crashes.options(__doc__, count=20)
    SEED, began = asked.seed, time.monotonic()
    crashes.prepare()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        FOLDER = Path(folder)
        REFERENCES.extend(crashes.reference(arm, folder) for arm in crashes.ARMS)
        failed, refused = 0, 0
        for number, wrong, away in crashes.spread(case, asked.count, asked.workers):
            failed += bool(wrong)
            refused += away
            if wrong:
                print(f"case {number}: {wrong}", flush=True)
    print(f"{refused} processes were refused, in {time.monotonic() - began:.0f} s")
    print(f"{asked.count - failed} of {asked.count} folders with several processes have the same bits")
    sys.exit(failed > 0 or refused == 0)


if __name__ == "__main__":
    main()
