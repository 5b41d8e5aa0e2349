"""Small runs that die: what the tests of crashes and the harnesses in benchmarks/faults share.

A prepared process has loaded everything and forks a child for each run, so that a run takes a fraction of a second.
`on_each_call` gives every call that a run makes to the file system to a function, which may kill the process, fail the
call or note it.
"""

import argparse
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import MappingProxyType

import numpy as np

from fedgma.errors import FedgmaError
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import missing, plan
from fedgma.experiments.play import play_fleet
from fedgma.records.checkpoints import checkpoint_rounds, digest, read_checkpoint
from fedgma.records.reader import complete_lines

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")  # of the module os
ALGORITHMS = ("fedavg", "fedprox", "fedadam", "fedyogi", "scaffold")
ARMS = [{"algorithm": algorithm, "aggregator": rule} for algorithm in ALGORITHMS for rule in ("mean", "gma")]
SETTINGS = {
    "model": "logistic",
    "rounds": 5,
    "partition": {"name": "iid", "clients": 6},
    "clients_per_round": 3,
    "batch_size": 8,
    "evaluate_every": 2,
    "mask_every": 1,
    "client_test_size": 0,
    "client_learning_rate": 0.1,
    "seed": 0,
}


def arrays(samples=96):
    """Images and labels of three classes."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 3, samples)
    images = rng.normal(size=(samples, 1, 4, 4)) + labels[:, None, None, None]
    return images.astype(np.float32), labels


@functools.cache
def materials():
    """The data and the model of the small runs."""
    return Materials("cpu", data=arrays())


def play(arm, out, *, every=0.0, stop=lambda played: False, **options):
    """Train one small run, or go on with it; returns the rounds that were played."""
    left = missing(plan(expand({**SETTINGS, **arm}), materials(), Path(out)))
    seen = []
    if not left:  # it is done
        return seen
    for played in play_fleet(left, materials(), checkpoint_seconds=every, stop=lambda: stop(len(seen)), **options):
        seen.append(played.line["round"])
    return seen


def outcome(out):
    """Everything that must not depend on how often a run was stopped: final hash, records, mask statistics, state."""
    found = {}
    for folder in sorted(Path(out).iterdir()):
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == list(range(1, len(lines) + 1)), folder
        state = read_checkpoint(folder / "checkpoints").state
        kept = checkpoint_rounds(folder / "checkpoints")
        ended = (folder / "done").read_text(), [{**line, "seconds": 0} for line in lines]
        found[folder.name] = *ended, list(state), digest(state), kept
    return found


def left_behind(out):
    """How many rounds a dead run had written, and how many its newest checkpoint holds."""
    folders = [folder for folder in Path(out).glob("*") if folder.is_dir()]
    written = sum(len(complete_lines(folder / "rounds.jsonl")) for folder in folders)
    return written, sum(max(checkpoint_rounds(folder / "checkpoints"), default=0) for folder in folders)


@contextlib.contextmanager
def on_each_call(act):
    """Inside, `act(number, name, call, arguments)` takes the place of every call to the file system."""
    real, number = {name: getattr(os, name) for name in CALLS}, [0]

    def replaced(name):
        def call(*arguments, **options):
            number[0] += 1
            return act(number[0], name, functools.partial(real[name], *arguments, **options), arguments)

        return call

    for name in CALLS:
        setattr(os, name, replaced(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def kill_at(place, how):
    """An act that kills this process: before or after the call, or after half of what it writes."""

    def act(number, name, call, arguments):
        if number == place:
            if how == "half" and name == "write":
                write_half(call, arguments)
            elif how == "after":
                call()
            os.kill(os.getpid(), signal.SIGKILL)
        return call()

    return act


def fail_at(place, error, *, ever_after):
    """An act that fails a call with an error number, after half of what it writes; once, or from then on."""

    def act(number, name, call, arguments):
        if number == place or (ever_after and number > place):
            if name == "write" and number == place:
                write_half(call, arguments)
            raise OSError(error, os.strerror(error))
        return call()

    return act


def write_half(call, arguments):
    handle, content = arguments
    call.func(handle, bytes(content)[: len(content) // 2])


def contents(folder):
    """What the files of a folder hold."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


class Death(BaseException):
    """Stands for kill -9: nothing catches it."""


def dying_at(place, how):
    """An act that stands for the death of the process: before or after the call, or after half of what it writes."""

    def act(number, name, call, arguments):
        if number < place:
            return call()
        if number == place and how == "half" and name == "write":
            write_half(call, arguments)
        elif number == place and how == "after":
            call()
        raise Death  # what a dying process would do to clean up does not happen either

    return act


def calls_of(work, folder):
    """The calls that some work makes to the file system, with paths below a folder."""
    seen, paths = [], {}

    def named(path):
        path = paths.get(path, path)
        return os.path.relpath(path, folder) if isinstance(path, str | os.PathLike) else str(path)

    def act(number, name, call, arguments):
        result = call()
        if name == "open":
            paths[result] = arguments[0]
        places = arguments[: 2 if name in ("rename", "replace") else 1]
        seen.append((name, *map(named, places)))
        return result

    with RunFolderHandles(paths), on_each_call(act):
        work()
    return seen


class RunFolderHandles(contextlib.AbstractContextManager):
    """Files that are open already: their paths by handle."""

    def __init__(self, paths):
        for handle in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
            with contextlib.suppress(OSError):
                paths[int(handle)] = os.readlink(f"/proc/self/fd/{handle}")

    def __exit__(self, *_):
        return None


def fork(work, said=None):
    """Do some work in a forked process; what it says goes to the file `said`. Returns its process number.

    Its exit code is 0, that of a `FedgmaError` with its sentence, or 1 with a traceback.
    """
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with open(said or os.devnull, "w", buffering=1) as stream:
            os.dup2(stream.fileno(), 2)
            os.dup2(stream.fileno(), 1)
            sys.stdout = sys.stderr = stream
            logging.lastResort = logging.StreamHandler(stream)
            try:
                work()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except FedgmaError as error:
                print(f"fedgma: {error}", file=stream)
                code = error.exit_code
            except BaseException:
                traceback.print_exc(file=stream)
    finally:
        os._exit(code)


def ended(process):
    """Wait for a process; its exit code, or minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def prepare():
    """Load everything a small run needs, so that a forked child begins at once."""
    with tempfile.TemporaryDirectory() as out:
        play(ARMS[-1], out)


def reference(arm, folder):
    """What an undisturbed run leaves, the calls that it makes to the file system, and the seconds that it takes."""
    out = Path(tempfile.mkdtemp(dir=folder))
    counted = [0]

    def act(number, name, call, arguments):
        counted[0] = number
        return call()

    began = time.monotonic()
    with on_each_call(act):
        play(arm, out)
    return outcome(out), counted[0], time.monotonic() - began


def options(about, choices=MappingProxyType({}), **figures):
    """The options of a harness: the number of cases, workers, a seed and a folder."""
    asked = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in figures.items():
        asked.add_argument(f"--{name}", type=int, default=number)
    for name, known in choices.items():
        asked.add_argument(f"--{name}", choices=known, default=known[0])
    asked.add_argument("--workers", type=int, default=2)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--folder", help="where runs are written; a temporary folder by default")
    return asked.parse_args()


def spread(work, count, workers):
    """Results of `work(0)`, `work(1)`, ... in forked workers, as they come, with a line of progress now and then."""
    said = time.monotonic()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for done, result in enumerate(pool.imap_unordered(work, range(count)), 1):
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{done} of {count}", flush=True)  # noqa: T201
            yield result
