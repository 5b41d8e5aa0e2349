"""Fuzz every parser of files and messages: it returns, or raises a `FedgmaError`.

    python benchmarks/faults/fuzz/fuzz.py --count 20000 --workers 16         # seeded mutations, plain Python
    python benchmarks/faults/fuzz/fuzz.py --seconds 60 --targets idx leaf     # guided by coverage, needs atheris

Mutation N of a target and a seed is always the same. Inputs that fail are written to --out.
"""

import argparse
import contextlib
import importlib.util
import logging
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
MEMORY = 4 << 30  # bytes that a parser may take
NUMBERS = [
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x00" * 8,
    b"1e999",
    b"-1",
    b"null",
    b"NaN",
    b"9" * 40,
]
NUMBERS += [
    b"[" * 200,
    b"{" * 3,
    b'"\\ud800"',
    b"true",
    b"\n",
    b"'",
    b"9" * 5000,
    b"\xc3",
    b"(1,)",
    b"|O",
    b"[[],[[]]]",
    b"1.5",
]


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A valid input with some bytes changed, left out, doubled, or joined with another."""
    content = bytearray(rng.choice(seeds))
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at, length = rng.randrange(len(content) + 1), rng.choice([1, 2, 4, 64])
        kind = rng.randrange(7)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            content[at : at + length] = rng.choice(NUMBERS)
        elif kind == 3:
            content[at:at] = rng.choice(NUMBERS)
        elif kind == 4:
            del content[at : at + rng.choice([1, 8, len(content)])]
        elif kind == 5:
            content[at:at] = content[at : at + 64]
        else:
            other = rng.choice(seeds)
            content[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(content)


def attempt(name: str, content: bytes, folder: Path) -> str:
    """Parse an input; the traceback if it ends in anything but success or an error of ours."""
    from parsers import PARSERS

    from fedgma.errors import FedgmaError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            PARSERS[name].parse(content, folder)
    except FedgmaError:
        return ""
    except Exception:
        return traceback.format_exc(limit=-5)
    return ""


def plain(name: str, seed: int, numbers: range, out: Path | None = None) -> list[str]:
    """Faults among some mutations of a target, each with its number."""
    from parsers import PARSERS

    seeds, faults = PARSERS[name].seeds(), []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for number in numbers:
            content = mutated(random.Random(f"{seed}/{name}/{number}"), seeds)
            if fault := attempt(name, content, Path(folder)):
                faults.append(f"{name}, mutation {number}: {content[:200]!r}\n{fault}")
                if out is not None:
                    out.mkdir(parents=True, exist_ok=True)
                    (out / f"{name}-{seed}-{number}").write_bytes(content)
    return faults


def prepare() -> None:
    """Once in a process: find the sources, limit the memory, keep warnings of damaged checkpoints quiet."""
    sys.path[:0] = [str(SOURCE), str(HERE)]
    logging.disable(logging.CRITICAL)
    import parsers  # noqa: F401

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))


def available() -> list[str]:
    """The targets whose packages are installed."""
    from parsers import PARSERS

    missing = {
        "parquet": "pyarrow",
        "table": "pyarrow",
        "image": "PIL",
        "tinyimagenet": "PIL",
        "checkpoint": "safetensors",
    }
    missing["checkpoint_manifest"] = "safetensors"
    return [name for name in PARSERS if name not in missing or importlib.util.find_spec(missing[name]) is not None]


def _job(job: tuple[str, int, range, Path]) -> tuple[int, list[str]]:
    return len(job[2]), plain(*job)


def all_plain(names: list[str], arguments: argparse.Namespace) -> int:
    """Mutations of every target over several processes; the number of faults."""
    parts = [range(at, min(at + 500, arguments.count)) for at in range(0, arguments.count, 500)]
    jobs = [(name, arguments.seed, part, arguments.out) for part in parts for name in names]
    began, done, faults = time.monotonic(), 0, 0
    with multiprocessing.get_context("spawn").Pool(arguments.workers, prepare) as pool:
        for count, found in pool.imap_unordered(_job, jobs):
            done, faults = done + count, faults + len(found)
            for fault in found[:3]:
                print(fault, flush=True)
            if done % 20000 < count:
                print(f"{done} mutations, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{faults} faults in {done} mutations of {len(names)} parsers")
    return faults


def guided(name: str, seconds: int) -> None:
    """Fuzz one target with atheris in this process, which it ends."""
    import atheris

    with atheris.instrument_imports(include=["fedgma", "tomllib", "json"]):
        prepare()
        from parsers import PARSERS

        import fedgma.experiments.grid  # noqa: F401

    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    (folder / "corpus").mkdir()
    for number, content in enumerate(PARSERS[name].seeds()):
        (folder / "corpus" / str(number)).write_bytes(content)

    def one(content: bytes) -> None:
        if fault := attempt(name, content, folder / "files"):
            raise RuntimeError(f"{name}: {content[:200]!r}\n{fault}")

    (folder / "files").mkdir()
    os.chdir(folder)
    options = [
        f"-max_total_time={seconds}",
        "-max_len=20000",
        "-rss_limit_mb=8000",
        "-timeout=60",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder / "corpus")], one)
    atheris.Fuzz()


def all_guided(names: list[str], seconds: int) -> int:
    """Fuzz each target in a process of its own; the number of targets with a fault."""
    failed = []
    for name in names:
        ended = subprocess.run(
            [sys.executable, __file__, "--seconds", str(seconds), "--one", name], capture_output=True, text=True
        )
        counts = [line.split()[-1] for line in ended.stderr.splitlines() if "number_of_executed_units" in line]
        print(
            f"{name}: {counts[0] if counts else '?'} inputs, {'fault' if ended.returncode else 'no fault'}", flush=True
        )
        if ended.returncode:
            print(ended.stdout[-3000:], ended.stderr[-3000:], sep="\n")
            failed.append(name)
    print(f"{len(failed)} of {len(names)} parsers have a fault")
    return len(failed)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--targets", nargs="*", help="some of the parsers (default: all)")
    asked.add_argument("--count", type=int, default=2000, help="mutations of each parser")
    asked.add_argument("--workers", type=int, default=os.cpu_count())
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--seconds", type=int, help="fuzz each parser with atheris for so long")
    asked.add_argument("--out", type=Path, help="folder for the inputs that fail")
    asked.add_argument("--one", help=argparse.SUPPRESS)
    arguments = asked.parse_args()
    if arguments.one:
        guided(arguments.one, arguments.seconds)
        return
    sys.path[:0] = [str(SOURCE), str(HERE)]
    names = arguments.targets or available()
    with contextlib.suppress(KeyboardInterrupt):
        faults = all_plain(names, arguments) if arguments.seconds is None else all_guided(names, arguments.seconds)
        sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
