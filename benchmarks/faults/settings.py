"""Random settings, settings files and command lines through the real commands, without training.

    python benchmarks/faults/settings.py --count 100000 --workers 16

A case is settings in words or in a file, a command line, the plan of a run, or a name with one wrong character. It may
end in success or in one sentence with a documented exit code, within a minute and 4 GB. A name with one wrong character
must be refused, and the right name suggested in at least 90 % of the cases. Case N of a seed is always the same:
`--only N` repeats it and prints what it does.
"""

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import random
import resource
import signal
import string
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[2] / "src"
SECTIONS = ("partition", "shift")
CODES = (0, 2, 3, 4, 5)  # documented in docs/faults.md; 1 is a bug
MEMORY = 4 << 30  # bytes that a case may take
SECONDS = 60  # that a case may take
RIGHT = 0.9  # share of the typos whose right name must be suggested


class Seen(NamedTuple):
    """What a case did."""

    kind: str
    fault: str = ""  # what must not happen, with the case; empty if all is well
    suggested: bool | None = None  # for a typo: whether the right name was suggested


# -- values ---------------------------------------------------------------------------------------

FITTING = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "10",
    "100",
    "0.5",
    "1.0",
    "1e-300",
    "1e300",
    "1000000",
    "1000000000",
    "1" + 30 * "0",
]
NUMBERS = ["0", "-0", "1", "-1", "2", "3", "10", "100", "0.0", "0.5", "1.0", "1e308", "-1e308", "5e-324", "1e309"]
NUMBERS += ["nan", "-inf", "inf", "9" * 19, "9" * 400, "9" * 5000, "-" + "9" * 40, "0x7f", "0o17", "0b1", "1_000", "١٢"]
TEXTS = [
    "''",
    '"a"',
    '"\\u0000"',
    '"\\ud800"',
    '"\\U0010ffff"',
    '"~no-such-user/x.npz"',
    '"/dev/null"',
    '"/proc/self/mem"',
]
TEXTS += [
    '"../../x.npz"',
    '"."',
    '"/"',
    '"%s%n{0}"',
    '"[red]x[/red]"',
    '"' + "é" * 300 + '.npz"',
    '"x.npz"',
    '"a b/c.npz"',
]
TEXTS += [
    '"no.py:Net"',
    '"os:getcwd"',
    '"nothing.here:Net"',
    '":"',
    '"a:"',
    '"own:x"',
    '"\\u202e"',
    '"=1+1"',
    '"C:\\\\x.npz"',
]
SHAPES = [
    "[]",
    "[[1]]",
    "[1, 1]",
    "[0, 1, 2]",
    "{}",
    "{name = 1}",
    '{name = "iid"}',
    '[{name = "iid"}, "natural"]',
    "true",
]
SHAPES += [
    "[1, 'a', {}]",
    "1979-05-27",
    "07:32:00",
    "[" * 70 + "]" * 70,
    "[" * 3000,
    "{a=" * 70,
    "[true, false]",
    "[nan, nan]",
]
SHAPES += [
    str(list(range(400))),
    "[0.1, 0.2, 0.3]",
    '["mean", "gma"]',
    "",
    " ",
    "\t",
    ",",
    ",,,",
    "[,]",
    '"""a\nb"""',
    "'a'\nseed = 3",
]


def value(rng: random.Random, name: str, usual: dict[str, list[str]]) -> str:
    """The text of a value: often one that fits the setting."""
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(usual.get(name, NUMBERS))
    if draw < 0.9:
        return rng.choice(rng.choice([NUMBERS, TEXTS, SHAPES]))
    return mutated(rng, rng.choice(usual.get(name, NUMBERS)))


def mutated(rng: random.Random, text: str) -> str:
    """A text with some characters changed, doubled, left out or put in."""
    for _ in range(rng.randint(1, 4)):
        at, strange = rng.randrange(len(text) + 1), rng.choice("\0\n\t\"'\\=[]{}#.,é\ud800\u202e\U0001f600 0aZ-")
        text = rng.choice([text[:at] + strange + text[at:], text[:at] + text[at + 1 :], text[:at] + text, text[:at]])
    return text[:20000]


@functools.cache
def usual() -> dict[str, list[str]]:
    """Values that fit each setting."""
    from fedgma.aggregation.rules import RULES
    from fedgma.experiments.grid import every_name
    from fedgma.experiments.settings.run import ALGORITHMS, MODELS

    some = {name: [text for text in FITTING if _fits(name, text)] or NUMBERS for name in every_name()}
    named = {
        "dataset": ["fmnist-mini", "mnist", "mine.npz"],
        "model": [*MODELS, "net.py:Net"],
        "algorithm": list(ALGORITHMS),
        "aggregator": list(RULES),
        "mask_position": ["after", "before"],
        "augment": ["none", "crop_flip"],
        "inverse_sparsity_scale": ["true", "false"],
        "partition.name": ["iid", "label_skew", "dirichlet", "quantity", "natural"],
        "partition.mode": ["exact", "shards"],
        "shift.name": ["none", "colour", "rotation"],
        "shift.palette": ["shared", "private"],
        "shift.coloring": ["foreground", "foreground_background"],
        "shift.test_coloring": ["unseen", "permuted", "random"],
    }
    return some | {
        name: [f'"{text}"' if text not in ("true", "false") else text for text in named[name]] for name in named
    }


def _fits(name: str, text: str) -> bool:
    from fedgma.errors import ConfigError
    from fedgma.experiments.grid import check

    value, (section, _, key) = (float(text) if set(text) & set(".e") else int(text)), name.rpartition(".")
    try:
        check({section: {key: value}} if section else {key: value})
    except ConfigError:
        return False
    return True


# -- cases ----------------------------------------------------------------------------------------


def words(rng: random.Random, most: int = 5) -> list[str]:
    """Some `key=value` words, a few of them damaged."""
    names = list(usual())
    made = []
    for _ in range(rng.randint(0, most)):
        name = rng.choice(names)
        text = value(rng, name, usual())
        word = f"{name}={text.strip(chr(34)) if rng.random() < 0.5 else text}"
        made.append(mutated(rng, word) if rng.random() < 0.1 else word)
    return made


def toml(rng: random.Random) -> bytes:
    """A settings file, sometimes damaged."""
    names = rng.sample(list(usual()), rng.randint(0, 8))
    lines = [f"{name} = {value(rng, name, usual())}" for name in names]
    text = "\n".join(lines)
    if rng.random() < 0.3:
        text = mutated(rng, text)
    if rng.random() < 0.1:
        odd = [
            "[partition]",
            "[[partition]]",
            "[a.b]",
            "a." * 5000 + "a = 1",
            "\ufeff",
            "[partition]\n[partition]",
            "\r",
            "#" * 9999,
        ]
        text += "\n" + rng.choice(odd)
    content = text.encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace")
    if rng.random() < 0.1:
        content = rng.choice([b"\xff\xfe", b"\x00", b"\x80", b"\xef\xbb\xbf"]) + content
    return content


def from_words(rng: random.Random, folder: Path) -> list[str]:
    return ["run", *words(rng), "--show"]


def from_file(rng: random.Random, folder: Path) -> list[str]:
    file = folder / "s.toml"
    file.write_bytes(toml(rng))
    return ["run", str(file), *words(rng, 1), "--show"]


def from_options(rng: random.Random, folder: Path) -> list[str]:
    """A command line of any command; a last option that does not exist keeps it from training or downloading."""
    commands = [["run"], ["sweep"], ["report"], ["compare"], ["convert"], ["doctor"], ["data", "list"], ["data", "get"]]
    commands += [
        ["data", "show"],
        ["paper", "run"],
        ["paper", "compare"],
        ["paper", "list"],
        ["flower", "up"],
        ["ls"],
        ["show"],
        ["export"],
        ["rm"],
        ["nothing"],
        [],
    ]
    options = ["--out", "--device", "--precision", "--json", "--quiet", "-q", "--status", "--on", "--metric", "--where"]
    options += [
        "--runs",
        "--partition",
        "--clients",
        "--alpha",
        "--seed",
        "--format",
        "--port",
        "--seconds",
        "--cells",
        "--rates",
    ]
    options += [
        "--checkpoint-seconds",
        "--help",
        "--no-state",
        "--",
        "-",
        "--unfinished",
        "--statistic",
        "--nodes",
        "--run-config",
        "--name",
        "--note",
        "--dry-run",
        "--yes",
        "--version",
    ]
    command = rng.choice(commands)
    rest = []
    for _ in range(rng.randint(0, 5)):
        rest += rng.choice(
            [[rng.choice(options)], [rng.choice(NUMBERS)], [mutated(rng, "a=b")], words(rng, 1), [str(folder)]]
        )
    harmless = command in (["report"], ["compare"], ["convert"], ["data", "list"], ["ls"], ["show"])
    return [*command, *rest, *([] if harmless else ["--no-such-option"])]


def planned(rng: random.Random, folder: Path) -> Callable[[], None]:
    """What `fedgma run` does before it trains: data, partition, model and specification of the runs."""
    from fedgma.errors import ConfigError
    from fedgma.experiments.grid import read_grid
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.plan import plan

    names = rng.sample([name for name in usual() if name not in ("dataset", "model")], rng.randint(0, 6))
    few = {
        name: rng.choice(usual()[name]) for name in ["partition.name", "shift.name", "algorithm", "aggregator", *names]
    }
    few |= {
        "seed": rng.choice(usual()["seed"]),
        "dataset": "fmnist-mini",
        "model": rng.choice(["logistic", "cnn", "lenet"]),
    }
    for name in ("dataset", "model"):
        few[name] = rng.choice(TEXTS) if rng.random() < 0.1 else few[name]
    for name in names:  # leave out what the chosen rule, algorithm or partition does not use
        with contextlib.suppress(ConfigError):
            read_grid(None, [f"{name}={few[name]}", *(f"{key}={few[key]}" for key in few if key not in names)])
            continue
        del few[name]
    words = [f"{name}={text}" for name, text in few.items()]

    def make() -> None:
        materials, grid = Materials("cpu"), read_grid(None, words)
        for run in plan(grid._replace(runs=grid.runs[:2]), materials, folder / "runs"):
            materials.spec(run.settings)

    make.__doc__ = f"plan {words!r}"
    return make


def typo(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """A word whose name, or whose value that is a name, has one wrong character; and the right one."""
    names = usual()
    while True:
        name = rng.choice(list(names))
        is_value = rng.random() < 0.3 and name.rsplit(".", 1)[-1] in (
            "algorithm",
            "aggregator",
            "name",
            "mode",
            "augment",
            "model",
        )
        right = rng.choice(names[name]).strip('"') if is_value else name
        wrong = one_edit(rng, right)
        known = {text.strip('"') for texts in names.values() for text in texts} | set(names) | {*SECTIONS}
        if wrong not in known and wrong.strip() and ":" not in right and right not in ("", "."):
            break
    return ["run", f"{name}={wrong}" if is_value else f"{wrong}=1", "--show"], right


def one_edit(rng: random.Random, word: str) -> str:
    """A word with one character left out, put in, changed or swapped with its neighbour."""
    at, letter = rng.randrange(len(word)), rng.choice(string.ascii_lowercase + "_")
    edits = [word[:at] + word[at + 1 :], word[:at] + letter + word[at:], word[:at] + letter + word[at + 1 :]]
    return rng.choice([*edits, word[:at] + word[at : at + 2][::-1] + word[at + 2 :]])


# -- running --------------------------------------------------------------------------------------


def call(line: list[str]) -> tuple[int, str]:
    """Exit code of a command line in this process, and what it wrote to the standard error."""
    from fedgma.cli import app

    before = sys.argv, sys.stdout, sys.stderr
    sys.argv = [
        "fedgma",
        *(word.replace("\0", "").replace("\ud800", "\udc80") for word in line),
    ]  # what a system passes
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # strict, as a terminal or a pipe is
    sys.stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    code: Any = 0
    try:
        app.run_app()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        said, (sys.argv, sys.stdout, sys.stderr) = sys.stderr, before
    said.flush()
    return code, said.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]


def case(seed: int, number: int, folder: Path) -> Seen:
    """Make and run one case."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(["words", "file", "options", "plan", "typo"], [32, 32, 15, 5, 16])[0]
    made: Any = {"words": from_words, "file": from_file, "options": from_options, "plan": planned, "typo": typo}[kind](
        rng, folder
    )
    line, right = made if kind == "typo" else (made, "")
    shown = line.__doc__ if kind == "plan" else line
    if kind == "file":
        shown = f"{line} with {(folder / 's.toml').read_bytes()!r}"
    where = f"case {number} ({kind}): {str(shown)[:600]}"
    try:
        with limited():
            code, said = attempt(line) if kind == "plan" else call(line)
    except BaseException:
        return Seen(kind, f"{where}\n{traceback.format_exc(limit=-6)}")
    if code not in CODES or "Traceback" in said:
        return Seen(kind, f"{where}: exit code {code}: {said[:500]}")
    if kind == "typo" and code != 2:
        return Seen(kind, f"{where}: a typo of {right!r} was accepted")
    usage = "Usage:" in said or "─ Error ─" in said
    if code and len(said.strip().splitlines()) != 1 and not usage:
        return Seen(kind, f"{where}: expected one sentence, got {said[:500]!r}")
    return Seen(kind, suggested=f"did you mean '{right}'" in said.replace('"', "'") if kind == "typo" else None)


def attempt(plan: Callable[[], None]) -> tuple[int, str]:
    from fedgma.errors import FedgmaError

    try:
        plan()
    except FedgmaError as error:
        return error.exit_code, f"{error}"
    return 0, ""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """End what takes too long, and turn warnings into errors."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def prepare(limit: bool = True) -> None:
    """Once in a process: build the commands, keep the embedded images, limit the memory."""
    sys.path.insert(0, str(SOURCE))
    import torch
    import typer.main

    from fedgma.cli import app
    from fedgma.data.files import locate

    torch.set_num_threads(1)
    if isinstance(app.app, typer.Typer):
        app.app = typer.main.get_command(app.app)  # `app()` builds it anew for every call
        locate.load_mini = functools.cache(locate.load_mini)
    if limit:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))


def some(job: tuple[int, range]) -> list[Seen]:
    """A few cases, in a folder of their own."""
    seed, numbers = job
    with tempfile.TemporaryDirectory(prefix="fuzz-settings-") as folder, contextlib.chdir(folder):
        return [case(seed, number, Path(folder)) for number in numbers]


def judge(seen: list[Seen]) -> tuple[list[str], float]:
    """The faults, and the share of typos whose right name was suggested."""
    suggested = [one.suggested for one in seen if one.suggested is not None]
    return [one.fault for one in seen if one.fault], sum(suggested) / max(len(suggested), 1)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--count", type=int, default=2000)
    asked.add_argument("--workers", type=int, default=os.cpu_count())
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--only", type=int, help="the number of one case")
    arguments = asked.parse_args()
    if arguments.only is not None:
        prepare()
        print(some((arguments.seed, range(arguments.only, arguments.only + 1)))[0])
        return
    jobs = [(arguments.seed, range(at, min(at + 100, arguments.count))) for at in range(0, arguments.count, 100)]
    began, seen = time.monotonic(), []
    with multiprocessing.get_context("spawn").Pool(arguments.workers, prepare) as pool:
        for done in pool.imap_unordered(some, jobs):
            for one in done:
                if one.fault:
                    print(one.fault, flush=True)
            seen += done
            if len(seen) % 5000 < len(done):
                print(f"{len(seen)} cases, {time.monotonic() - began:.0f} s", flush=True)
    faults, right = judge(seen)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(one.kind for one in seen).items()))
    print(f"{len(faults)} faults in {len(seen)} cases ({kinds}); right name suggested for {right:.1%} of the typos")
    sys.exit(1 if faults or right < RIGHT else 0)


if __name__ == "__main__":
    main()
