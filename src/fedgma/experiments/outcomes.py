"""What a sweep has to say: summaries of runs, arms over seeds, paired verdicts (no torch)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.verdicts import Verdict, paired

LAST = 10
NAMES = {"gma": "GMA", "mean": "the mean", "and_mask": "the AND-mask"}
SUMMARIES = ("best", "last10", "final")


class Summary(NamedTuple):
    """Test accuracy of one run in percent: `best` selects on test data, `last10` does not."""

    best: float
    last10: float  # mean of the evaluated ones among the last ten rounds
    final: float


class Arm(NamedTuple):
    """Runs that differ in their seed alone."""

    settings: dict[str, Any]  # of the keys that differ between arms
    runs: dict[int, Summary]  # seed -> summary

    @property
    def label(self) -> str:
        """The arm in a few words."""
        return ", ".join(_word(key, value) for key, value in self.settings.items() if value is not None) or "run"

    def spread(self, summary: str) -> tuple[float, float]:
        """Mean and sample standard deviation over seeds; 0 for a single one."""
        values = [getattr(run, summary) for run in self.runs.values()]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


class Comparison(NamedTuple):
    """Two arms that differ in their aggregator, and what their paired seeds say."""

    where: str
    first: Arm
    second: Arm
    verdicts: dict[str, Verdict]  # one for each summary


def summarise(lines: Sequence[Mapping[str, Any]]) -> Summary | None:
    """Best, last ten and final test accuracy in percent; None where nothing was evaluated.

    >>> summarise([{"round": r, "test": {"accuracy": r / 100}} for r in range(1, 13)])
    Summary(best=12.0, last10=7.5, final=12.0)
    """
    found = {line["round"]: line["test"]["accuracy"] for line in lines if line.get("test")}
    curve = {round: 100 * value for round, value in found.items() if value is not None}
    if not curve:
        return None
    last = lines[-1]["round"]
    tail = [value for round, value in curve.items() if round > last - LAST] or [curve[max(curve)]]
    return Summary(max(curve.values()), statistics.fmean(tail), curve[max(curve)])


def gather(runs: Sequence[tuple[Mapping[str, Any], Summary]], axes: Sequence[str]) -> list[Arm]:
    """Arms out of runs (their recorded settings and summaries); `axes` are the dotted keys that differ."""
    arms: dict[tuple[str, ...], Arm] = {}
    keys = [axis for axis in axes if axis != "seed"]
    for settings, summary in runs:
        differing = {key: _without_seed(look_up(settings, key)) for key in keys}
        arm = arms.setdefault(tuple(map(repr, differing.values())), Arm(differing, {}))
        arm.runs[settings["seed"]] = summary
    return list(arms.values())


def compare(arms: Sequence[Arm]) -> list[Comparison]:
    """Every masked arm against the plain mean with the same other settings, paired by seed."""
    found = []
    plain = {_others(arm): arm for arm in arms if arm.settings.get("aggregator") == "mean"}
    for arm in arms:
        second = plain.get(_others(arm))
        if second is None or arm is second:
            continue
        seeds = sorted(set(arm.runs) & set(second.runs))
        if not seeds:
            continue
        names = NAMES[arm.settings["aggregator"]], NAMES["mean"]
        verdicts = {
            name: paired([getattr(arm.runs[s], name) - getattr(second.runs[s], name) for s in seeds], names)
            for name in SUMMARIES
        }
        where = ", ".join(_word(key, value) for key, value in arm.settings.items() if key != "aggregator" and value)
        found.append(Comparison(where, arm, second, verdicts))
    return found


def look_up(settings: Mapping[str, Any], dotted: str) -> Any:
    """A nested setting by its dotted name."""
    value: Any = settings
    for part in dotted.split("."):
        value = value[part]
    return value


def _without_seed(value: Any) -> Any:
    """A section is dealt anew for every seed unless told otherwise; that makes no arm of its own."""
    return {k: v for k, v in value.items() if k != "seed"} if isinstance(value, Mapping) else value


def _others(arm: Arm) -> str:
    """What an arm and its plain counterpart share."""
    return repr([(k, v) for k, v in arm.settings.items() if k not in ("aggregator", "tau", "mask_position")])


def _word(key: str, value: Any) -> str:
    if key in ("aggregator", "algorithm", "dataset", "model", "partition.name"):
        return str(value)
    if isinstance(value, Mapping):
        rest = [f"{k} {v}" for k, v in value.items() if v is not None and k not in ("name", "mode", "min_size")]
        return " ".join([str(value["name"]), *rest])
    return f"{key.rsplit('.', 1)[-1]} {value}"
