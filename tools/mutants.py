"""Mutation testing: change the source in small ways and see whether a test fails for each change.

    python tools/mutants.py --workers 15 --out mutants.json
    python tools/mutants.py --only masks --sample 40      # some mutants of one module
    python tools/mutants.py --again mutants.json          # those that survived the last time

Needs pytest, hypothesis and what the tests need. First all tests run once, each file in a process of its own, to learn
which lines each test reaches and how long it takes; tests that fail, are skipped or take too long are left out. Then
each mutant gets a process and a copy of the sources of its own, and the tests that reach its lines, the fastest first,
until one fails. A mutant is killed if a test fails, if the module cannot be imported or if the time runs out.
`tools/mutants_answered.toml` lists mutants that no test can tell from the original, with the reason.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
ANSWERED = Path(__file__).with_name("mutants_answered.toml")
PACKAGE = "src/fedgma/"
AGGREGATION = ("tests/aggregation", "tests/faults", "tests/test_one_algorithm.py", "tests/simulation/test_tallies.py")
TESTS = {  # for each module, files and folders of tests that concern it; its doctests are added
    "aggregation/gate.py": AGGREGATION,
    "aggregation/norms.py": AGGREGATION,
    "aggregation/tally.py": AGGREGATION,
    "aggregation/masks.py": AGGREGATION,
    "aggregation/rule.py": AGGREGATION,
    "aggregation/rules.py": (*AGGREGATION, "tests/statistics", "tests/experiments/test_settings.py"),
    "aggregation/optimizers.py": AGGREGATION,
    "records/checkpoints.py": ("tests/records", "tests/faults", "tests/experiments/test_resume.py"),
    "statistics/verdicts.py": ("tests/statistics",),
}
PRELOADED = ("numpy", "torch", "scipy.special", "safetensors.numpy", "pydantic", "pytest")  # before the processes fork
MEMORY = 8 << 30  # bytes that a mutant may take
FILE_LIMIT = 900.0  # seconds for all tests of one file
GOAL = 0.9  # share of mutants that must be killed


class Test(NamedTuple):
    """A test that passes: its id, its file, its CPU time and the lines of each module that it reaches."""

    id: str
    file: str
    seconds: float
    lines: dict[str, set[int]]


def main() -> int:
    """Run the mutants, print those that survive, and return 1 if too many do."""
    options = read_options()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    modules = [name for name in TESTS if any(word in name for word in options.only.split(","))]
    every = [mutant for name in modules for mutant in mutants((ROOT / PACKAGE / name).read_text(), PACKAGE + name)]
    answered = read_answers(modules)
    for stale in answered - {key(mutant) for mutant in every}:
        print(f"answered, but there is no such mutant: {stale}")
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_tree(Path(folder) / str(worker)) for worker in range(options.workers)]
        tests = learn_tests(find_files(modules, options.tests), modules, trees, options.longest)
        chosen = choose(every, options)
        outcomes = []
        for mutant, outcome in run_mutants(chosen, tests, trees, options.budget):
            outcomes.append(mutant._asdict() | {"source": "", "answered": key(mutant) in answered} | outcome)
            tell(outcomes, len(chosen), Path(options.out))
    return conclude(outcomes, modules)


def tell(outcomes: list[dict[str, Any]], of: int, out: Path) -> None:
    """Print the last mutant if it survived, as a diff; now and then write all results and print how far it is."""
    last = outcomes[-1]
    if last["result"] == "survived" and not last["answered"]:
        print(f"survived {last['module']}:{last['line']} {last['function']} ({last['kind']}, {last['tests']} tests)")
        print(f"  - {last['was']}\n  + {last['now']}", flush=True)
    if len(outcomes) % 50 == 0 or len(outcomes) == of:
        out.write_text(json.dumps(outcomes, indent=1))
        print(f"{len(outcomes)} of {of} mutants, {time.monotonic() - START:.0f} s", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", default="mutants.json")
    parser.add_argument("--only", default="", help="parts of names of modules, with commas")
    parser.add_argument("--tests", default="", help="files and folders of tests in place of the usual, with commas")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants drawn; 0: all")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", default="", help="result of an earlier run: only the mutants that survived it")
    parser.add_argument("--longest", type=float, default=5.0, help="CPU seconds above which a test is left out")
    parser.add_argument("--budget", type=float, default=20.0, help="CPU seconds of tests a mutant")
    return parser.parse_args()


def key(mutant: Mutant | dict[str, Any]) -> tuple[str, str, str, str]:
    """What a mutant is known by; it stays the same when lines move."""
    fields = mutant if isinstance(mutant, dict) else mutant._asdict()
    return fields["module"].removeprefix(PACKAGE), fields["function"], fields["was"], fields["now"]


def read_answers(modules: list[str]) -> set[tuple[str, str, str, str]]:
    """The mutants of these modules that are listed as equivalent; each needs a reason."""
    rows = tomllib.loads(ANSWERED.read_text()).get("equivalent", []) if ANSWERED.exists() else []
    assert all(row["reason"] for row in rows)
    return {key(row) for row in rows if row["module"] in modules}


def choose(every: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    """The mutants to run, in an order that spreads the slow ones."""
    chosen = list(every)
    if options.again:
        rows = json.loads(Path(options.again).read_text())
        survivors = {key(row) for row in rows if row["result"] == "survived"}
        chosen = [mutant for mutant in every if key(mutant) in survivors]
    random.Random(options.seed).shuffle(chosen)
    part, parts = map(int, options.part.split("/"))
    mine = chosen[part - 1 :: parts]
    return mine[: options.sample] if options.sample else mine


def copy_tree(tree: Path) -> Path:
    """A copy of the sources and the tests; everything else in the repository is linked."""
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.name in ("src", "tests"):
            shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith("."):
            (tree / path.name).symlink_to(path)
    return tree


# -- processes ---------------------------------------------------------------------------------------------------------


def fork_each(
    jobs: Sequence[Any], work: Callable[[Any], Any], trees: list[Path], limit: Callable[[Any], float]
) -> Iterator[tuple[Any, Path, Any]]:
    """Run each job in a process of its own, in a free tree; yields (job, tree, result), None if it died or was late."""
    waiting, free, running = deque(jobs), list(trees), {}
    while waiting or running:
        while waiting and free:
            job, tree = waiting.popleft(), free.pop()
            running[_fork(work, job, tree)] = job, tree, time.monotonic() + limit(job)
        time.sleep(0.005)
        for process, (job, tree, deadline) in list(running.items()):
            ended = os.waitpid(process, os.WNOHANG)[0]
            if not ended and time.monotonic() < deadline:
                continue
            with suppress(ProcessLookupError):  # also what the tests started
                os.killpg(process, signal.SIGKILL)
            if not ended:
                os.waitpid(process, 0)
            del running[process]
            free.append(tree)
            answer = tree.with_suffix(".json")
            yield job, tree, json.loads(answer.read_text()) if ended and answer.exists() else None


def _fork(work: Callable[[Any], Any], job: Any, tree: Path) -> int:
    answer, scratch = tree.with_suffix(".json"), tree.with_suffix(".tmp")
    answer.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    if process := os.fork():
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(process, process)
        return process
    try:
        os.setpgid(0, 0)
        with tree.with_suffix(".log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        scratch.mkdir()
        found = os.pathsep.join(filter(None, [str(tree / "src"), os.environ.get("PYTHONPATH")]))
        os.environ |= {"TMPDIR": str(scratch), "PYTHONPATH": found}
        tempfile.tempdir = None
        os.chdir(tree)
        sys.path.insert(0, str(tree / "src"))
        answer.write_text(json.dumps(work(job)))
    finally:
        os._exit(0)


def run_pytest(files: Sequence[str], plugin: "Watcher", *options: str) -> int:
    """Run pytest in this process."""
    import pytest

    quiet = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--basetemp", os.environ["TMPDIR"] + "/p")
    return int(pytest.main([*files, *quiet, *options], plugins=[plugin]))


def cpu_seconds() -> float:
    """CPU time of this process and its children, which hardly depends on what else runs on the machine."""
    return sum(os.times()[:4])


class Watcher:
    """A plugin of pytest: keeps chosen tests in a chosen order; notes outcomes and, if asked, the lines reached."""

    def __init__(self, order: Sequence[str] = (), watched: Sequence[str] = ()) -> None:
        self.place = {name: place for place, name in enumerate(order)}
        self.watched = {os.path.abspath(PACKAGE + name): name for name in watched}
        self.lines: dict[str, set[int]] = {name: set() for name in watched}
        self.at_import: dict[str, set[int]] = {}
        self.tests: dict[str, tuple[float, dict[str, set[int]]]] = {}
        self.failed: list[str] = []
        self.begin = 0.0

    def pytest_collection(self) -> None:
        with suppress(ImportError):
            from hypothesis import Phase, settings

            phases = (Phase.explicit, Phase.generate)  # the first failing example is enough
            settings.register_profile("mutants", settings(), max_examples=25, phases=phases)
            settings.load_profile("mutants")
        self._watch(True)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self._watch(False)
        self.at_import = self._take_lines()
        if self.place:
            items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])

    def pytest_runtest_logstart(self) -> None:
        self.begin = cpu_seconds()
        self._watch(True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            self._watch(False)
            self.tests[report.nodeid] = cpu_seconds() - self.begin, self._take_lines()
        if report.failed:
            self.failed.append(report.nodeid)

    def _take_lines(self) -> dict[str, set[int]]:
        taken, self.lines = self.lines, {name: set() for name in self.lines}
        return {name: lines for name, lines in taken.items() if lines}

    def _watch(self, on: bool) -> None:
        if self.watched:
            sys.settrace(self._enter if on else None)

    def _enter(self, frame: Any, event: str, arg: object) -> Any:
        name = self.watched.get(frame.f_code.co_filename)
        if name is None:
            return None
        lines = self.lines[name]
        lines.add(frame.f_lineno)

        def step(frame: Any, event: str, arg: object) -> Any:
            self.lines[name].add(frame.f_lineno)
            return step

        return step


# -- the tests ---------------------------------------------------------------------------------------------------------


def learn_tests(files: list[str], modules: list[str], trees: list[Path], longest: float) -> list[Test]:
    """All tests in the files that pass quickly, with the lines they reach."""
    tests, left_out = [], []

    def work(file: str) -> Any:
        watcher = Watcher(watched=modules)
        run_pytest([file], watcher)
        passed = {name: test for name, test in watcher.tests.items() if name not in watcher.failed}
        return {
            "failed": watcher.failed,
            "at_import": {name: sorted(lines) for name, lines in watcher.at_import.items()},
            "tests": {
                name: [seconds, {module: sorted(found) for module, found in lines.items()}]
                for name, (seconds, lines) in passed.items()
            },
        }

    for file, _, result in fork_each(files, work, trees, lambda file: FILE_LIMIT):
        if result is None:
            left_out.append(f"{file} (took too long)")
            continue
        left_out += [f"{name} (fails)" for name in result["failed"]]
        for name, (seconds, lines) in result["tests"].items():
            if seconds > longest:
                left_out.append(f"{name} ({seconds:.0f} s)")
            else:  # a test may look at what was made when its file was imported
                reached = {name: {*lines.get(name, ()), *result["at_import"].get(name, ())} for name in modules}
                tests.append(Test(name, file, seconds, reached))
    print(f"{len(tests)} tests in {len(files)} files, {time.monotonic() - START:.0f} s; left out: {len(left_out)}")
    print("".join(f"  {name}\n" for name in sorted(left_out)), end="", flush=True)
    return sorted(tests, key=lambda test: test.seconds)


def find_files(modules: list[str], named: str) -> list[str]:
    """Files of the tests that concern the modules, or of those that are named, and the modules' own doctests."""
    places = named.split(",") if named else [place for name in modules for place in TESTS[name]]
    files = {PACKAGE + name for name in modules}
    for path in (ROOT / place for place in places):
        found = path.rglob("test_*.py") if path.is_dir() else [path]
        files |= {str(file.relative_to(ROOT)) for file in found if file.exists() and "gpu" not in file.name}
    return sorted(files)


# -- the mutants -------------------------------------------------------------------------------------------------------


def run_mutants(
    chosen: list[Mutant], tests: list[Test], trees: list[Path], budget: float
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Run each mutant; yields it with its result, the seconds it took and the test that killed it."""
    picked = {key(mutant): _tests_of(mutant, tests, budget) for mutant in chosen}

    def work(mutant: Mutant) -> Any:
        begin, mine = time.monotonic(), picked[key(mutant)]
        most = 20 + int(3 * sum(test.seconds for test in mine))
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        path = Path(mutant.module)
        Path(os.path.join(path.parent, "__pycache__", f"{path.stem}.{sys.implementation.cache_tag}.pyc")).unlink(True)
        path.write_text(mutant.source)
        watcher = Watcher(order=[test.id for test in mine])
        status = run_pytest(list(dict.fromkeys(test.file for test in mine)), watcher, "-x") if mine else 0
        result = "killed" if status else "survived"
        killer = watcher.failed[0] if watcher.failed else "import" if status else ""
        return {"result": result, "by": killer, "tests": len(mine), "seconds": round(time.monotonic() - begin, 2)}

    def limit(mutant: Mutant) -> float:
        return 60 + 20 * sum(test.seconds for test in picked[key(mutant)])

    for mutant, tree, outcome in fork_each(chosen, work, trees, limit):
        shutil.copy2(ROOT / mutant.module, tree / mutant.module)
        yield mutant, outcome or {"result": "killed", "by": "time", "tests": 0, "seconds": limit(mutant)}


def _tests_of(mutant: Mutant, tests: list[Test], budget: float) -> list[Test]:
    """The tests that reach a mutant's lines, the fastest first, as far as the budget goes."""
    module, lines = mutant.module.removeprefix(PACKAGE), set(range(mutant.line, mutant.last_line + 1))
    reaching = [test for test in tests if lines & test.lines.get(module, set())]
    totals = accumulate(test.seconds for test in reaching)
    return [test for test, total in zip(reaching, totals, strict=True) if total <= budget]


# -- the result --------------------------------------------------------------------------------------------------------


def conclude(outcomes: list[dict[str, Any]], modules: list[str]) -> int:
    """Print the scores; 1 if the goal is missed."""
    print(f"\n{'module':28} {'mutants':>8} {'killed':>8} {'answered':>8} {'survive':>8} {'score':>8}")
    for name in (*modules, ""):
        mine = [row for row in outcomes if name in row["module"]]
        killed = sum(row["result"] == "killed" for row in mine)
        answered = sum(row["result"] == "survived" and row["answered"] for row in mine)
        score = killed / max(len(mine) - answered, 1)
        rest = len(mine) - killed - answered
        print(f"{name or 'all':28} {len(mine):8} {killed:8} {answered:8} {rest:8} {score:8.1%}")
    for row in outcomes:
        if row["answered"] and row["result"] == "killed":
            print(f"answered, but killed: {row['module']} {row['function']}: {row['now']}")
    print(f"mutants: {killed} of {len(mine) - answered} killed, {score:.1%}, in {time.monotonic() - START:.0f} s")
    return 0 if score >= GOAL else 1


START = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())
