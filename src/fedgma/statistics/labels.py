"""What runs, arms and settings are called in tables, titles and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedgma.aggregation.rules import RULES
from fedgma.records.reader import Run

NAMES = {name: row.label for name, row in RULES.items()}
# settings that belong to the aggregation: those of the rules, and where a mask is put; the seed is the run's
AGGREGATION_SETTINGS = (
    *dict.fromkeys(name for row in RULES.values() for name in row.settings if name != "seed"),
    "mask_position",
)
AGGREGATION = ("aggregator", *AGGREGATION_SETTINGS)
# parts of a run's identity, by the names that they have beside settings
VERSIONS = {
    "data": "data_version",
    "clients": "client_ids",
    "model": "model_version",
    "precision": "precision",
    "version": "version",
}
DIGITS = 8  # of a checksum, in a label
ALONE = ("dataset", "partition.name", "shift.name", "model", "algorithm", "aggregator")  # words that need no name
FIRST = (
    "dataset",
    "partition.name",
    "partition.alpha",
    "partition.beta",
    "shift.name",
    "model",
    "algorithm",
)  # in labels


def versions(run: Run) -> dict[str, str]:
    """Which data and which model a run is of, in short, by names that no setting has.

    >>> from pathlib import Path
    >>> versions(Run(Path(), {"format": 2, "settings": {}, "identity": {"data": "ab" * 32}}, {}, (), None))
    {'data_version': 'abababab'}
    """
    return {VERSIONS[part]: _short_sum(str(value)) for part, value in run.identity.items()}


def arm(run: Run, names: Sequence[str] = ()) -> str:
    """What to call a run's aggregation, with those of its own settings that are named.

    >>> from pathlib import Path
    >>> arm(Run(Path(), {}, {"aggregator": "gma", "tau": 0.4}, (), None), ["tau"])
    'GMA, tau 0.4'
    """
    named = [name for name in names if name in AGGREGATION_SETTINGS and run.settings.get(name) is not None]
    aggregator = str(run.settings["aggregator"])
    return ", ".join([NAMES.get(aggregator, aggregator), *(f"{name} {plain(run.settings[name])}" for name in named)])


def spoken(aggregator: str) -> str:
    """An aggregator in a sentence.

    >>> spoken("gma"), spoken("mean"), spoken("median")
    ('GMA', 'the mean', 'the median')
    """
    row = RULES.get(aggregator)
    return aggregator if row is None else row.noun or row.label


def spelt(name: str, value: Any) -> str:
    """A setting in a title: known words alone, everything else with its name.

    >>> spelt("algorithm", "fedadam"), spelt("partition.alpha", 0.3)
    ('fedadam', 'alpha 0.3')
    """
    return plain(value) if name in ALONE else f"{short(name)} {plain(value)}"


def title_of(label: Mapping[str, Any]) -> str:
    """What a row's label says besides its aggregation."""
    return ", ".join(spelt(name, value) for name, value in label.items() if name not in AGGREGATION)


def plain(value: Any) -> str:
    """A setting as a reader writes it.

    >>> plain(0.4), plain(None), plain([1, 2]), plain(True), plain(1e-3)
    ('0.4', 'none', '1, 2', 'yes', '0.001')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def short(name: str) -> str:
    """A setting's name for a heading.

    >>> short("partition.name"), short("partition.alpha"), short("client_learning_rate")
    ('partition', 'alpha', 'client learning rate')
    """
    return name.removesuffix(".name").rsplit(".", 1)[-1].replace("_", " ")


def rank(name: str) -> int:
    """The order of names in a label: the aggregation last, so that the arms of one setting stand together."""
    if name in AGGREGATION:
        return len(FIRST) + (2 if name == "aggregator" else 3)
    return FIRST.index(name) if name in FIRST else len(FIRST) + (name in VERSIONS.values())


def sortable(value: Any) -> tuple[int, float, str]:
    """A key that puts numbers in their order, also those written as text, before words.

    >>> sorted(["0.5", "b", 10, "2"], key=sortable)
    ['0.5', '2', 10, 'b']
    """
    try:
        return (0, float(value), "")
    except (TypeError, ValueError):
        return (1, 0.0, plain(value))


def _short_sum(value: str) -> str:
    """The first digits of a checksum; anything else as it is."""
    whole = len(value) == 64 and all(digit in "0123456789abcdef" for digit in value)
    return value[:DIGITS] if whole else value
