"""Run many numbered cases over several processes, with progress, and exit 1 if one of them fails."""

import argparse
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial

BATCH = 500


def main(run_case, failing, description, count):
    """Run `run_case(number)`, which returns what went wrong or None, over the numbers that are asked for."""
    asked = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--count", type=int, default=count)
    asked.add_argument("--first", type=int, default=0)
    asked.add_argument("--seed", type=int, default=0, help="other cases")
    asked.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = asked.parse_args()
    first = arguments.first + arguments.seed * 10**9
    batches = [
        range(start, min(start + BATCH, first + arguments.count))
        for start in range(first, first + arguments.count, BATCH)
    ]
    began, done, failed = time.monotonic(), 0, 0
    with ProcessPoolExecutor(arguments.workers) as pool:
        for batch, problems in zip(batches, pool.map(partial(run_batch, run_case), batches), strict=True):
            done, failed = done + len(batch), failed + len(problems)
            for problem in problems[:5]:
                print(problem, flush=True)
            if done % 10_000 < BATCH:
                print(f"{done:,} of {arguments.count:,}, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{failed} of {done:,} {failing} ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if failed else 0)


def run_batch(run_case, numbers):
    """What went wrong in these cases."""
    return [problem for number in numbers if (problem := guarded(run_case, number)) is not None]


def guarded(run_case, number):
    try:
        return run_case(number)
    except Exception:
        return f"case {number}: {traceback.format_exc()}"
