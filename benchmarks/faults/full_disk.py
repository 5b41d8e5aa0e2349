"""A full disk at random writes of small runs: one sentence and exit code 3, and later the same results.

    python benchmarks/faults/full_disk.py --sizes 500 --workers 14

In half of the cases no file may grow beyond a random size (RLIMIT_FSIZE). In the others a random call to the file
system fails, once or from then on, after half of what it writes: no space left, quota exceeded, input/output error or
read-only file system. The run must stop with one sentence, or go on if the failure did not matter. Then there is
space again, and the same run must be resumed to the results of an undisturbed one.
"""

import errno
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "faults")]
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import crashes  # noqa: E402

ERRORS = (errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
LARGEST = 9000  # bytes; no file of a small run is larger
SEED, FOLDER, REFERENCES = 0, Path(), []


def with_small_files(arm, out, size):
    """Train while no file may be larger than so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        crashes.play(arm, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def with_a_failure(arm, out, act):
    with crashes.on_each_call(act):
        crashes.play(arm, out)


def case(number):
    """Train on a full disk and then with space: what went wrong ("" if nothing did), and the first exit code."""
    rng = random.Random(f"{SEED} {number}")
    place = number % len(crashes.ARMS)
    arm, (wanted, calls, _) = crashes.ARMS[place], REFERENCES[place]
    out, said = Path(tempfile.mkdtemp(dir=FOLDER)), FOLDER / f"{number}.txt"
    if number // len(crashes.ARMS) % 2:
        size = rng.randrange(LARGEST)
        first = crashes.ended(crashes.fork(lambda: with_small_files(arm, out, size), said))
    else:
        act = crashes.fail_at(rng.randint(1, calls), rng.choice(ERRORS), ever_after=rng.random() < 0.5)
        first = crashes.ended(crashes.fork(lambda: with_a_failure(arm, out, act), said))
    wrong = bad_end(first, said.read_text())
    code = crashes.ended(crashes.fork(lambda: crashes.play(arm, out), said))
    if code:
        wrong = wrong or f"the resumed run ended with {code}: {said.read_text()[-2000:]}"
    elif crashes.outcome(out) != wanted:
        wrong = wrong or "the results differ from those of the undisturbed run"
    shutil.rmtree(out)
    said.unlink()
    return number, arm, wrong, first


def bad_end(code, text):
    """Why the end of a run on a full disk is not a good one."""
    if code == 0:
        return ""
    lines = text.strip().splitlines()
    if code != 3 or not lines or not lines[-1].startswith("fedgma: cannot write to") or "Traceback" in text:
        return f"on a full disk it ended with {code} and said: {text[-2000:]}"
    return ""


def main():
    global SEED, FOLDER
    asked = crashes.options(__doc__, sizes=50)
    SEED, began = asked.seed, time.monotonic()
    crashes.prepare()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        FOLDER = Path(folder)
        REFERENCES.extend(crashes.reference(arm, folder) for arm in crashes.ARMS)
        failed, stopped = 0, 0
        for number, arm, wrong, code in crashes.spread(case, asked.sizes, asked.workers):
            failed += bool(wrong)
            stopped += code == 3
            if wrong:
                print(f"case {number}, {arm}: {wrong}", flush=True)
    print(f"{stopped} of {asked.sizes} runs were stopped by the disk, in {time.monotonic() - began:.0f} s")
    print(f"{asked.sizes - failed} of {asked.sizes} resumed to the same bits")
    sys.exit(failed > 0 or stopped < asked.sizes // 4)


if __name__ == "__main__":
    main()
