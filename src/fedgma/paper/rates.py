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
from fedgma.experiments.settings import Settings, complete, record
from fedgma.paper.catalogue import Part
from fedgma.records.reader import flat
from fedgma.statistics.labels import AGGREGATION_SETTINGS, plain, short

Pair = tuple[float, float]  # client rate, server rate
CHOSEN = "chosen.toml"  # in this folder
KEYS = ("client_learning_rate", "server_learning_rate")
USUAL = Settings().model_dump()
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
    """The key of rates that were searched for one setting; usual local epochs and what is not set are not named.

    >>> setting_of({"dataset": "mnist", "partition.name": "iid", "partition.clients": 500, "local_epochs": 1})
    'mnist, iid, 500'
    >>> settings = {"partition.name": "dirichlet", "partition.clients": 100, "partition.alpha": 0.1, "local_steps": 20}
    >>> setting_of({"dataset": "mnist", **settings})
    'mnist, dirichlet, 100, alpha 0.1, 20 steps'
    >>> more = {"local_epochs": 5, "augment": "crop_flip"}
    >>> setting_of({"dataset": "cifar10", "partition.name": "iid", "partition.clients": 10, **more})
    'cifar10, iid, 10, 5 epochs, crop_flip'
    """
    usual = complete(Settings(dataset=str(settings["dataset"]))).local_epochs
    epochs, augment = settings.get("local_epochs"), settings.get("augment")
    words = [settings["dataset"], settings["partition.name"], settings["partition.clients"]]
    words += [f"alpha {alpha:g}"] if (alpha := settings.get("partition.alpha")) is not None else []
    words += [f"{epochs} epochs"] if epochs not in (None, usual) else []
    words += [f"{steps} steps"] if (steps := settings.get("local_steps")) is not None else []
    words += [augment] if augment not in (None, "none") else []
    return ", ".join(str(word) for word in words if word is not None)


def where_searched(settings: Mapping[str, Any], part: Part) -> str:
    """The key of rates that were searched for the runs of a part: its name, or their setting."""
    return f"{settings['dataset']}, {part.name}" if part.rates == "part" else setting_of(settings)


def rule_of(settings: Mapping[str, Any]) -> str:
    """The key of an arm's rates: its rule, with the settings of the aggregation that are not the usual ones.

    >>> rule_of({"aggregator": "gma", "tau": 0.4}), rule_of({"aggregator": "gma", "tau": 0.8, "unmasked": "fc3.*"})
    ('gma', 'gma, tau 0.8, unmasked fc3.*')
    """
    given = {name: settings.get(name) for name in (*AGGREGATION_SETTINGS, "server_average")}
    unusual = [name for name, value in given.items() if value not in (None, False, USUAL.get(name))]
    return ", ".join([str(settings["aggregator"]), *(f"{short(name)} {plain(given[name])}" for name in unusual)])


def rated(settings: Settings, part: Part, chosen: Chosen) -> tuple[Settings, bool]:
    """A run with its chosen rates, and whether there were any; rates that a part sets itself are kept.

    Where arms have their own rates, a rule whose rates were not searched has those of masked averaging.
    """
    if any(key in part.settings for key in KEYS):
        return settings, True
    values = dict(flat(record(settings)))
    like = ("mean" if settings.aggregator == BASELINE else "gma") if part.own_rates else "shared"
    where = where_searched(values, part) if part.searched else settings.dataset
    algorithms = [settings.algorithm, *([LIKE[settings.algorithm]] if _may_borrow(settings, part) else [])]
    own_rates = [chosen.rates.get((where, settings.algorithm, rule_of(values)))] if part.own_rates else []
    pairs = (*own_rates, *(chosen.pair(where, algorithm, like) for algorithm in algorithms))
    pair = next((pair for pair in pairs if pair is not None), None)
    if pair is None:
        return settings, False
    return settings.model_copy(update=dict(zip(KEYS, pair, strict=True))), True


def _may_borrow(settings: Settings, part: Part) -> bool:
    return part.searched and settings.algorithm in LIKE


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
        tables.setdefault(f"rates.{_key(dataset)}.{algorithm}", []).append(f"{_key(rule)} = [{pair[0]}, {pair[1]}]")
    for dataset, settings in (shift or {}).items():
        tables[f"shift.{dataset}"] = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in tables.items())


def _key(name: str) -> str:
    """A name as a TOML key, quoted if needed."""
    return name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'
