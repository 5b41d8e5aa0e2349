"""Names of runs, arms and settings in tables, titles and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedgma.aggregation.rules import RULE_SETTINGS, RULES
from fedgma.records.reader import Run

NAMES = {name: row.label for name, row in RULES.items()}
# settings that belong to the aggregation: those of the rules and the position of the mask, without the seed
AGGREGATION_SETTINGS = (
    *RULE_SETTINGS,
    "mask_position",
    "unmasked",
    "rule_version",
)
AGGREGATION = ("aggregator", *AGGREGATION_SETTINGS)
ARM = (*AGGREGATION, "server_average")  # settings that name an arm; the others say where it was tried
# parts of a run's identity, and their names in labels
VERSIONS = {
    "data": "data_version",
    "clients": "client_ids",
    "model": "model_version",
    "task": "task_version",
    "rule": "rule_version",
    "clock": "clock_version",
    "precision": "precision",
    "version": "version",
}
# settings that a record leaves out, and what they are then
LEFT_OUT = {
    "adapters": "apart",
    "weighting": "samples",
    "server_average": 0.0,
    "client_optimizer": "sgd",
    "nesterov": False,
    "weight_decay": 0.0,
    "label_smoothing": 0.0,
    **{f"{axis}.name": "constant" for axis in ("round_schedule", "step_schedule")},
    **{f"{axis}.warm_up": 0 for axis in ("round_schedule", "step_schedule")},
}
# groups of clients in records, and in words
CLIENTS = {
    "worst_decile": "worst tenth of clients",
    "mean": "all clients",
    "participating": "sampled clients",
    "non_participating": "other clients",
}
DIGITS = 8  # of a checksum, in a label
ALONE = (
    "dataset",
    "partition.name",
    "shift.name",
    "model",
    "algorithm",
    "client_optimizer",
    "aggregator",
    "attack.name",
    "clock.name",
)  # shown without their name
FIRST = (
    "dataset",
    "partition.name",
    "partition.alpha",
    "partition.beta",
    "shift.name",
    "model",
    "algorithm",
    "client_optimizer",
    "attack.name",
    "attack.share",
    "attack.scale",
    "clock.name",
)  # in labels


def versions(run: Run) -> dict[str, str]:
    """The versions of a run's data and model, shortened, under names that no setting has.

    >>> from pathlib import Path
    >>> versions(Run(Path(), {"format": 2, "settings": {}, "identity": {"data": "ab" * 32}}, {}, (), None))
    {'data_version': 'abababab'}
    """
    return {VERSIONS[part]: _short_sum(str(value)) for part, value in run.identity.items()}


def arm(run: Run, names: Sequence[str] = ()) -> str:
    """The name of a run's aggregation, with those of the settings of an arm that are in `names`.

    >>> from pathlib import Path
    >>> arm(Run(Path(), {}, {"aggregator": "gma", "tau": 0.4}, (), None), ["tau"])
    'GMA, tau 0.4'
    """
    held = {**run.settings, **versions(run)}
    named = [name for name in names if name in ARM[1:] and held.get(name) is not None]
    aggregator = str(run.settings["aggregator"])
    return ", ".join([NAMES.get(aggregator, aggregator), *(f"{short(name)} {plain(held[name])}" for name in named)])


def in_sentence(aggregator: str) -> str:
    """The name of an aggregator in a sentence.

    >>> in_sentence("gma"), in_sentence("mean"), in_sentence("median")
    ('GMA', 'the mean', 'the median')
    """
    row = RULES.get(aggregator)
    return aggregator if row is None else row.noun or row.label


def is_rule(aggregator: str) -> bool:
    """Whether a run names a rule of the library, or a user's own as `file.py:name`.

    >>> is_rule("gma"), is_rule("mine.py:rule"), is_rule("gmaa")
    (True, True, False)
    """
    return aggregator in RULES or ":" in aggregator


def in_title(name: str, value: Any) -> str:
    """A setting in a title: the value alone for some settings, else name and value.

    >>> in_title("algorithm", "fedadam"), in_title("partition.alpha", 0.3)
    ('fedadam', 'alpha 0.3')
    """
    return plain(value) if name in ALONE else f"{short(name)} {plain(value)}"


def capitalised(text: str) -> str:
    """A text with a capital first, as a heading or a sentence begins; the name of a file stays as it is.

    >>> capitalised("the median against the mean"), capitalised("mine.py:rule against the mean")
    ('The median against the mean', 'mine.py:rule against the mean')
    """
    return text if ".py:" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def title_of(label: Mapping[str, Any]) -> str:
    """The label of a row without the name of its arm, and without settings that it does not use.

    >>> title_of({"attack.name": "no attack", "attack.scale": "", "aggregator": "gma"})
    'no attack'
    """
    shown = {name: value for name, value in label.items() if name not in ARM and value != ""}
    return ", ".join(in_title(name, value) for name, value in shown.items())


def plain(value: Any) -> str:
    """The value of a setting as text.

    >>> plain(0.4), plain(None), plain([1, 2]), plain(True), plain(1e-3)
    ('0.4', 'none', '1, 2', 'yes', '0.001')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration in words.

    >>> duration(40), duration(400), duration(40_000)
    ('40 s', '7 min', '11.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def short(name: str) -> str:
    """The name of a setting in a heading.

    >>> short("partition.name"), short("partition.alpha"), short("step_schedule.decay"), short("lambda_")
    ('partition', 'alpha', 'step schedule decay', 'lambda')
    """
    section, _, last = name.removesuffix(".name").rpartition(".")
    return (f"{section} {last}" if section.endswith("_schedule") else last).replace("_", " ").strip()


def rank(name: str) -> int:
    """The order of names in a label: those of the arm last, so that the arms of one setting are adjacent."""
    if name in ARM:
        return len(FIRST) + (2 if name == "aggregator" else 3)
    return FIRST.index(name) if name in FIRST else len(FIRST) + (name in VERSIONS.values())


def sortable(value: Any) -> tuple[int, float, str]:
    """A sort key: numbers by value, also those written as text, then words.

    >>> sorted(["0.5", "b", 10, "2"], key=sortable)
    ['0.5', '2', 10, 'b']
    """
    try:
        return (0, float(value), "")
    except (TypeError, ValueError, OverflowError):
        return (1, 0.0, plain(value))


def _short_sum(value: str) -> str:
    """The first digits of a checksum; any other text unchanged."""
    is_checksum = len(value) == 64 and all(digit in "0123456789abcdef" for digit in value)
    return value[:DIGITS] if is_checksum else value
