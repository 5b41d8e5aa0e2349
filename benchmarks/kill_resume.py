"""kill -9 at random moments of a small run, resumed: the final hashes must be those of the run that never stopped.

    python benchmarks/kill_resume.py --kills 30

FedYogi with GMA and SCAFFOLD with GMA (its control variates are state too) play LeNet on the embedded images as one
fleet, a checkpoint after every round. Each trial starts a process, kills it at a random moment (every fifth while it
starts up, the others some milliseconds after a random round was written), and runs the same command again. Compared:
SHA-256 of the final weights and every record of every round, apart from the seconds it took.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
SETTINGS = ["algorithm=fedyogi,scaffold", "aggregator=gma", "seed=0", "partition.clients=20", "clients_per_round=5"]
COMMAND = [sys.executable, "-c", "from fedgma.cli import main; main()", "run", "--quiet", "--checkpoint-seconds", "0"]


def start(out: Path, rounds: int) -> subprocess.Popen[bytes]:
    words = [*SETTINGS, f"rounds={rounds}", "evaluate_every=2", "--out", str(out), "--device", "cpu"]
    return subprocess.Popen([*COMMAND, *words], env={**os.environ, "PYTHONPATH": str(SOURCE)})


def written(out: Path) -> int:
    return sum(lines.read_bytes().count(b"\n") for lines in out.glob("*/rounds.jsonl"))


def wait_for(out: Path, rounds: int) -> None:
    """Wait until so many rounds of both runs are written."""
    while written(out) < rounds:
        time.sleep(0.003)


def outcome(out: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for folder in sorted(out.iterdir()):
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        found[folder.name] = json.loads((folder / "done").read_text()), [{**line, "seconds": 0} for line in lines]
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--kills", type=int, default=30)
    asked.add_argument("--rounds", type=int, default=30)
    asked.add_argument("--seed", type=int, default=0)
    arguments = asked.parse_args()
    rng = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    start(folder / "warm", arguments.rounds).wait()  # kernels are compiled once a machine
    began = time.monotonic()
    assert start(folder / "whole", arguments.rounds).wait() == 0
    takes = time.monotonic() - began
    wanted = outcome(folder / "whole")
    same, during = 0, 0
    for trial in range(arguments.kills):
        out = folder / f"trial-{trial}"
        process = start(out, arguments.rounds)
        if trial % 5:
            wait_for(out, rng.randrange(1, 2 * arguments.rounds))
        time.sleep(rng.uniform(0, 0.1 if trial % 5 else takes / 2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        played = written(out)
        during += 0 < played < 2 * arguments.rounds
        assert start(out, arguments.rounds).wait() == 0
        equal = outcome(out) == wanted
        same += equal
        print(
            f"killed after {played:3d} of {2 * arguments.rounds} rounds: {'same' if equal else 'DIFFERENT'}", flush=True
        )
        shutil.rmtree(out)
    print(f"{same} of {arguments.kills} the same as the uninterrupted run ({during} killed in the middle of training)")
    shutil.rmtree(folder)
    sys.exit(same != arguments.kills)


if __name__ == "__main__":
    main()
