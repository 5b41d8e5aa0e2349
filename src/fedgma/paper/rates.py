"""Choices made before the experiments: learning rates for each data set and algorithm, and the colouring of digits.

The package uses `chosen.toml` in this folder; `fedgma paper search` writes such a file.
"""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.aggregation.rules import BASELINE
from fedgma.documents import parse_toml, read_bytes
from fedgma.errors import ConfigError, DataError
from fedgma.experiments.grid import LARGEST, check
from fedgma.experiments.settings import Settings, complete
from fedgma.paper.catalogue import CHOSEN, Part
from fedgma.records.reader import flat

Pair = tuple[float, float]  # client rate, server rate
KEYS = ("client_learning_rate", "server_learning_rate")
LIKE = {"fedprox": "fedavg", "fedyogi": "fedadam"}  # whose rates an algorithm takes if its own were not searched


class Chosen(NamedTuple):
    """Pairs of rates by data set (or setting), algorithm and rule (`shared`, or an arm); shift settings by data set."""

    rates: Mapping[tuple[str, str, str], Pair] = {}
    shift: Mapping[str, Mapping[str, Any]] = {}

    def pair(self, dataset: str, algorithm: str, rule: str) -> Pair | None:
        """The pair of rates for a run; an arm without its own pair uses the shared one."""
        pair = self.rates.get((dataset, algorithm, rule))
        return self.rates.get((dataset, algorithm, "shared")) if pair is None else pair


def read_chosen(file: Path | None = None) -> Chosen:
    """Read the choices of the package, or of a file that `fedgma paper search` wrote."""
    name = CHOSEN if file is None else str(file)
    try:
        if file is None:
            text = (resources.files("fedgma.paper") / CHOSEN).read_text(encoding="utf-8")
        else:
            text = read_bytes(file, LARGEST, "the chosen rates").decode("utf-8")
        content = parse_toml(text)
    except DataError as error:
        raise ConfigError(str(error)) from None
    except ValueError as error:
        raise ConfigError(f"{name!r} is not TOML: {error}") from None
    return Chosen(_rates(content.get("rates", {}), name), content.get("shift", {}))


def _rates(tables: Any, name: str) -> dict[tuple[str, str, str], Pair]:
    try:
        rows = [
            (d, a, rule, pair)
            for d, algorithms in tables.items()
            for a, kinds in algorithms.items()
            for rule, pair in kinds.items()
        ]
        pairs = {(d, a, rule): (float(pair[0]), float(pair[1])) for d, a, rule, pair in rows}
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError):
        raise ConfigError(
            f"{name!r}: rates should be [rates.DATASET.ALGORITHM] with pairs such as shared = [0.05, 1.0]"
        ) from None
    for (dataset, algorithm, _), pair in pairs.items():
        check({"dataset": dataset.partition(",")[0], "algorithm": algorithm, **dict(zip(KEYS, pair, strict=True))})
    return pairs


def setting_of(settings: Mapping[str, Any]) -> str:
    """The key of rates that were searched for one setting; the usual local epochs and no augmentation are not named.

    >>> setting_of({"dataset": "mnist", "partition.name": "iid", "partition.clients": 500, "local_epochs": 1})
    'mnist, iid, 500'
    >>> more = {"local_epochs": 5, "augment": "crop_flip"}
    >>> setting_of({"dataset": "cifar10", "partition.name": "iid", "partition.clients": 10, **more})
    'cifar10, iid, 10, 5 epochs, crop_flip'
    """
    usual = complete(Settings(dataset=str(settings["dataset"]))).local_epochs
    epochs, augment = settings.get("local_epochs"), settings.get("augment")
    words = [settings["dataset"], settings["partition.name"], settings["partition.clients"]]
    words += [f"{epochs} epochs"] if epochs not in (None, usual) else []
    words += [augment] if augment not in (None, "none") else []
    return ", ".join(map(str, words))


def where_searched(settings: Mapping[str, Any], part: Part) -> str:
    """The key of rates that were searched for the runs of a part: its name, or their setting."""
    return f"{settings['dataset']}, {part.name}" if part.rates == "part" else setting_of(settings)


def rated(settings: Settings, part: Part, chosen: Chosen) -> tuple[Settings, bool]:
    """A run with its chosen rates, and whether there were any; rates that a part sets itself are kept.

    Where arms have their own rates, every rule but the mean has those of masked averaging.
    """
    if any(key in part.settings for key in KEYS):
        return settings, True
    rule = ("mean" if settings.aggregator == BASELINE else "gma") if part.own_rates else "shared"
    where = where_searched(dict(flat(settings.model_dump())), part) if part.searched else settings.dataset
    pair = chosen.pair(where, settings.algorithm, rule)
    if pair is None and part.searched:
        pair = chosen.pair(where, LIKE.get(settings.algorithm, settings.algorithm), rule)
    if pair is None:
        return settings, False
    return settings.model_copy(update=dict(zip(KEYS, pair, strict=True))), True


def written(rates: Mapping[tuple[str, str, str], Pair], shift: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Chosen rates and shifts as TOML.

    >>> print(written({("mnist", "fedavg", "shared"): (0.05, 1.0)}, {"fedcmnist": {"jitter": 0.2}}), end="")
    [rates.mnist.fedavg]
    shared = [0.05, 1.0]
    <BLANKLINE>
    [shift.fedcmnist]
    jitter = 0.2
    """
    tables: dict[str, list[str]] = {}
    for (dataset, algorithm, rule), pair in rates.items():
        tables.setdefault(f"rates.{_key(dataset)}.{algorithm}", []).append(f"{rule} = [{pair[0]}, {pair[1]}]")
    for dataset, settings in (shift or {}).items():
        tables[f"shift.{dataset}"] = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in tables.items())


def _key(name: str) -> str:
    """A name as a TOML key, quoted if needed."""
    return name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'
