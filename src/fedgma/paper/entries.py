"""The numbers of a run that a comparison needs, read from its folder or from a thinned export of many runs.

<results>/<ID>/runs.json     settings that all runs share, and software, device and data of the runs
               runs.jsonl    one JSON object per run: what differs, summaries, thinned curves

`results/README.md` describes every field.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from fedgma.documents import parse_json, read_bytes
from fedgma.errors import DataError
from fedgma.paper.outdated import why_outdated
from fedgma.records.format import FORMAT, Done, Head, renamed
from fedgma.records.reader import Run, curve, flat, number, numbers, read_runs
from fedgma.statistics.arms import Summary, common, summarise

POINTS = 40  # of a thinned curve
SCALE = 10_000  # accuracies are stored as integers, in ten-thousandths
ANALYSES_FOLDER = "analyses"  # next to run folders: the results of analyses
CIRCUMSTANCES = ("versions", "device", "precision", "data", "parameters", "command")  # facts that many runs share
FACTS = ("fingerprint", "started", *CIRCUMSTANCES)
HOLDINGS = ("classes", "counts")  # of the data: long tables that the settings imply
# checksums of files that hold the same data: those of Fashion-MNIST, unpacked and packed again
SAME_DATA = {
    "10cd6cec06657d50ef47c584014880f199807596c2870bb653c93ee5e19a5cd9": (
        "f37bf62265b0989968a94c78e420344f1ede1007dabf032a0dc5e88371fef370"
    )
}


class Entry(NamedTuple):
    """A run: settings by dotted name, summaries and curves by split, mean mask statistics."""

    settings: Mapping[str, Any]
    scores: Mapping[str, Summary]
    curves: Mapping[str, Mapping[int, float]]  # split -> round -> share, thinned
    mask: Mapping[str, Any]  # agreement and histogram, means over the measured rounds; empty if not measured
    facts: Mapping[str, Any]  # of run.json, and seconds
    done: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """The seed; runs with the same seed are paired."""
        return int(self.settings["seed"])

    @property
    def played(self) -> int:
        """Completed rounds; fewer than in the settings if the run was stopped."""
        return int(self.done.get("rounds", self.settings["rounds"]))

    @property
    def run(self) -> Run:
        """The entry as a `Run` without rounds."""
        name = str(self.facts.get("fingerprint", ""))
        head = {**self.facts, "format": FORMAT, "settings": dict(self.settings)}
        return Run(Path(name), cast(Head, head), dict(self.settings), (), cast(Done, self.done))

    @property
    def data(self) -> str:
        """The checksum of its data; runs on different data are not compared."""
        checksum = str(self.run.identity.get("data", ""))
        return SAME_DATA.get(checksum, checksum)


def read_entries(paths: Iterable[Path], least: float = 1.0) -> tuple[list[Entry], int]:
    """The finished runs in folders of runs or of results, and how many are unfinished.

    A stopped run counts if it completed at least the share `least` of its rounds.
    """
    entries: list[Entry] = []
    unfinished = 0
    for path in paths:
        exported = sorted(path.rglob("runs.jsonl")) if path.is_dir() else []
        for file in exported:
            entries += read_export(file.parent)
        others = exported or (path / ANALYSES_FOLDER).is_dir()
        if others and not any(path.rglob("run.json")):
            continue
        runs = read_runs([path])
        late = [run for run in runs if run.finished or (least < 1 and len(run.rounds) >= least * run.planned)]
        unfinished += len(runs) - len(late)
        entries += [entry_of(run) for run in late]
    return entries, unfinished


def merged(entries: Iterable[Entry]) -> list[Entry]:
    """Every run once, with the curves of all its copies: exports of experiments that share a run hold copies of it.

    Of two runs with the same settings and data one that is not outdated counts, then the longer one, then the first.
    """
    runs: dict[str, Entry] = {}
    for position, entry in enumerate(entries):
        name = str(entry.facts.get("fingerprint", position))
        runs[name] = _better(runs[name], entry) if name in runs else entry
    return list(runs.values())


def _better(first: Entry, second: Entry) -> Entry:
    if _made(first) == _made(second):
        curves, scores = ({**getattr(second, kind), **getattr(first, kind)} for kind in ("curves", "scores"))
        return first._replace(curves=curves, scores=scores, mask=first.mask or second.mask)
    ranks = [(not why_outdated(entry.settings, entry.facts), entry.played) for entry in (first, second)]
    return first if ranks[0] >= ranks[1] else second


def _made(entry: Entry) -> tuple[Any, ...]:
    """What tells a run from a repetition of it: when it began, how far it came, and with which final model."""
    return entry.facts.get("started"), entry.played, entry.done.get("sha256")


def entry_of(run: Run) -> Entry:
    """The entry of a run folder."""
    splits = dict.fromkeys(
        name for record in run.rounds for name, held in record.items() if isinstance(held, dict) and "accuracy" in held
    )
    full_curves = {split: scores_by_round for split in splits if (scores_by_round := curve(run, split, "accuracy"))}
    seconds = sum(number(record, "seconds") or 0.0 for record in run.rounds)
    facts: dict[str, Any] = {name: value for name, value in run.head.items() if name in FACTS}
    facts = {name: facts[name] for name in FACTS if name in facts} | {"seconds": round(seconds, 3)}
    if isinstance(data := facts.get("data"), Mapping):
        facts["data"] = {name: value for name, value in data.items() if name not in HOLDINGS}
    scores = {split: summarise(scores_by_round) for split, scores_by_round in full_curves.items()}
    # thinned and rounded as in an export, so that both give the same results
    curves = {
        split: {at: round(SCALE * value) / SCALE for at, value in thinned(scores_by_round).items()}
        for split, scores_by_round in full_curves.items()
    }
    done = run.done or {"rounds": len(run.rounds)}
    return Entry(run.settings, scores, curves, _mask(run), facts, done)


def _mask(run: Run) -> dict[str, Any]:
    agreements = curve(run, "mask", "agreement")
    histograms = [shares for record in run.rounds if (shares := numbers(record, "mask", "histogram")) is not None]
    if not agreements or not histograms:
        return {}
    same = [histogram for histogram in histograms if len(histogram) == len(histograms[0])]
    histogram = [round(sum(column) / len(same), 6) for column in zip(*same, strict=True)]
    return {"agreement": round(sum(agreements.values()) / len(agreements), 6), "histogram": histogram}


def thinned(points: Mapping[int, float], most: int = POINTS) -> dict[int, float]:
    """A curve with at most `most` points, evenly spaced, including the last.

    >>> list(thinned({r: r / 100 for r in range(1, 11)}, most=4))
    [1, 4, 7, 10]
    """
    rounds = sorted(points)
    if len(rounds) <= most:
        return {index: points[index] for index in rounds}
    indices = [round(index * (len(rounds) - 1) / (most - 1)) for index in range(most)]
    return {rounds[index]: points[rounds[index]] for index in dict.fromkeys(indices)}


def write_export(entries: Sequence[Entry], folder: Path, splits: Sequence[str] = ("test",)) -> None:
    """Write many runs to two small files: what they share, and a line per run with its curves on these splits."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {json.dumps(kind, sort_keys=True): kind for kind in map(_circumstances, entries)}
    names = list(dict.fromkeys(name for entry in entries for name in entry.settings))
    older = dict.fromkeys(tuple(name for name in names if name not in entry.settings) for entry in entries)
    shared: dict[str, Any] = {
        "names": names,  # of all settings; a setting that a line leaves out is None
        "settings": common([entry.settings for entry in entries]),
        "circumstances": list(kinds.values()),
        "columns": {"scores": list(Summary._fields), "curves": ["round", "accuracy in ten-thousandths"]},
    }
    if any(older):
        shared["absent"] = [list(names) for names in older if names]  # settings that did not exist when a run was made
    lines = [json.dumps(_line(entry, shared, splits), separators=(",", ":")) for entry in entries]
    (folder / "runs.json").write_text(json.dumps(shared, indent=1) + "\n", encoding="utf-8")
    (folder / "runs.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _circumstances(entry: Entry) -> dict[str, Any]:
    return {name: entry.facts[name] for name in CIRCUMSTANCES if name in entry.facts}


def _line(entry: Entry, shared: Mapping[str, Any], splits: Sequence[str]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "settings": {k: v for k, v in entry.settings.items() if k not in shared["settings"] and v is not None},
        "circumstances": shared["circumstances"].index(_circumstances(entry)),
        "facts": {k: v for k, v in entry.facts.items() if k not in CIRCUMSTANCES},
    }
    if absent := [name for name in shared["names"] if name not in entry.settings]:
        line["absent"] = shared["absent"].index(absent)
    scores = {split: [round(value, 4) for value in summary] for split, summary in entry.scores.items()}
    curves = {split: _packed(points) for split, points in entry.curves.items() if split in splits}
    return {**line, "scores": scores, "curves": curves, "mask": dict(entry.mask), "done": dict(entry.done)}


def _packed(points: Mapping[int, float]) -> list[list[int]]:
    return [list(points), [round(SCALE * value) for value in points.values()]]


def read_export(folder: Path) -> list[Entry]:
    """The runs of an export."""
    try:
        shared, lines = (read_bytes(folder / name) for name in ("runs.json", "runs.jsonl"))
    except DataError as error:
        raise _unreadable(str(folder), error) from None
    return parse_export(shared, lines, str(folder))


def parse_export(shared: bytes, lines: bytes, where: str) -> list[Entry]:
    """The runs of an export from the contents of `runs.json` and `runs.jsonl`; `where` names it in an error."""
    try:
        same = parse_json(shared, "runs.json")
        rows = enumerate(lines.splitlines(), 1)
        return [_read_line(parse_json(line, f"line {number}"), same) for number, line in rows]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(where, error) from None


def _unreadable(where: str, error: Exception) -> DataError:
    return DataError(f"expected exported runs in {where}, but they cannot be read ({error}); export them again")


def _read_line(line: Mapping[str, Any], shared: Mapping[str, Any]) -> Entry:
    absent = shared["absent"][line["absent"]] if "absent" in line else ()
    names = [name for name in shared["names"] if name not in absent]
    settings = renamed({**dict.fromkeys(names), **shared["settings"], **line["settings"]})
    curves = {
        split: {round: value / SCALE for round, value in zip(rounds, values, strict=True)}
        for split, (rounds, values) in line["curves"].items()
    }
    scores = {split: Summary(*values) for split, values in line["scores"].items()}
    facts = {**shared["circumstances"][line["circumstances"]], **line["facts"]}
    return Entry(dict(flat(settings)), scores, curves, line["mask"], facts, line["done"])
