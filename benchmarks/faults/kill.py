"""kill -9 at random system calls and moments of small runs, resumed: the results must be those of an undisturbed run.

    python benchmarks/faults/kill.py --points 1000 --workers 14

FedAvg, FedProx, FedAdam, FedYogi and SCAFFOLD, each with and without the mask, write a checkpoint after every round. A
point is a run that is killed and then resumed. Half of the points are system calls of the run's writer: the process
dies before the call, after it, or after half of what it writes. The others are moments after a random round was
written. At every tenth point, the resumed run is killed as well, three times in a row. Compared are the final hash,
every record of every round with its mask statistics (not the seconds it took), and the state in the last checkpoint. At
most the round in progress may be lost.
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

ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
SEED, FOLDER, REFERENCES = 0, Path(), []


def killed(arm, out, rng, by_call):
    """Kill a run; whether it died before its end."""
    _, calls, seconds = REFERENCES[crashes.ARMS.index(arm)]
    if by_call:
        act = crashes.kill_at(rng.randint(1, calls), rng.choice(["before", "after", "half"]))

        def run():
            with crashes.on_each_call(act):
                crashes.play(arm, out)

        return crashes.ended(crashes.fork(run)) == -signal.SIGKILL
    process, rounds = crashes.fork(lambda: crashes.play(arm, out)), rng.randrange(crashes.SETTINGS["rounds"])
    while crashes.left_behind(out)[0] < rounds and os.waitid(os.P_PID, process, ENDED) is None:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, seconds / 3))
    os.kill(process, signal.SIGKILL)
    return crashes.ended(process) == -signal.SIGKILL


def point(number):
    """Kill and resume one run: what went wrong ("" if nothing did), and how many rounds it had written when it died."""
    rng = random.Random(f"{SEED} {number}")
    arm, out = crashes.ARMS[number % len(crashes.ARMS)], Path(tempfile.mkdtemp(dir=FOLDER))
    died, wrong = False, ""
    for _ in range(3 if number % 10 == 9 else 1):
        died = killed(arm, out, rng, by_call=number // len(crashes.ARMS) % 2 == 0) or died
        written, saved = crashes.left_behind(out)
        if not 0 <= written - saved <= 1:
            wrong = f"{written} rounds are written, but the newest checkpoint is of round {saved}"
    said = FOLDER / f"{number}.txt"
    code = crashes.ended(crashes.fork(lambda: crashes.play(arm, out), said))
    if code:
        wrong = wrong or f"the resumed run ended with {code}: {said.read_text()[-2000:]}"
    elif crashes.outcome(out) != REFERENCES[crashes.ARMS.index(arm)][0]:
        wrong = wrong or "the results differ from those of the undisturbed run"
    shutil.rmtree(out)
    said.unlink()
    return number, arm, wrong, written if died else None


def main():
    global SEED, FOLDER
    asked = crashes.options(__doc__, points=30)
    SEED, began = asked.seed, time.monotonic()
    crashes.prepare()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        FOLDER = Path(folder)
        REFERENCES.extend(crashes.reference(arm, folder) for arm in crashes.ARMS)
        died, within, failed = 0, 0, 0
        for number, arm, wrong, written in crashes.spread(point, asked.points, asked.workers):
            died += written is not None
            within += written is not None and 0 < written < crashes.SETTINGS["rounds"]
            failed += bool(wrong)
            if wrong:
                print(f"point {number}, {arm}: {wrong}", flush=True)
    middle = f"{died} died, {within} of them between their first and last round"
    print(f"{asked.points} points over {len(crashes.ARMS)} arms in {time.monotonic() - began:.0f} s: {middle}")
    print(f"{asked.points - failed} of {asked.points} resumed to the same bits")
    sys.exit(failed > 0 or died < asked.points // 2)


if __name__ == "__main__":
    main()
