"""How settings are recorded: which of them a run uses, and what its record and its fingerprint hold.

A setting that the run does not use, such as `tau` with the plain mean, is None in the record and in the fingerprint.
"""

from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from fedgma.aggregation.rules import RULE_SETTINGS, RULES
from fedgma.experiments.settings import attack, clock, local_training, partition, shift, task
from fedgma.experiments.settings.run import Settings, is_path
from fedgma.simulation.algorithms import ALGORITHMS

# settings of algorithms; where one is None, the algorithm has a default of its own
ALGORITHM_SETTINGS = tuple(dict.fromkeys(name for row in ALGORITHMS.values() for name in row.settings))


def _reads(name: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.aggregator in RULES and name in RULES[settings.aggregator].settings


def _may_mask(settings: Settings) -> bool:
    return settings.aggregator not in RULES or RULES[settings.aggregator].may_mask


def _algorithms(*known: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.algorithm in known


# settings that only some runs use; if no run of a file uses one, the file is refused
USED: dict[str, Callable[[Settings], bool]] = {
    **{name: _reads(name) for name in RULE_SETTINGS},
    "unmasked": lambda s: _may_mask(s),
    "mask_position": lambda s: _may_mask(s) and ALGORITHMS[s.algorithm].server != "sgd",
    **{
        name: _algorithms(*(key for key, row in ALGORITHMS.items() if name in row.settings))
        for name in ALGORITHM_SETTINGS
    },
    "beta1": _algorithms("fedadam", "fedyogi", "fedavgm"),
    "beta2": _algorithms("fedadam", "fedyogi"),
    "epsilon": _algorithms("fedadam", "fedyogi", "fedadagrad"),
    **partition.USED,
    **shift.USED,
    **attack.USED,
    **clock.USED,
    **local_training.USED,
    **task.USED,
}
_PLACES = [(*dotted.rpartition(".")[::2], used) for dotted, used in USED.items()]  # section and name of each


# settings that are recorded only where they differ from this: keeps fingerprints from before they existed
LATER = {"augment": "none", "adapters": "apart", "server_average": 0.0, "weighting": "samples"}


def record(settings: Settings) -> dict[str, Any]:
    """Settings as they are recorded: nested, with every default, None for those that the run does not use.

    >>> from fedgma.experiments.settings import Settings, complete
    >>> record(complete(Settings(aggregator="mean")))["tau"] is None
    True
    """
    nested = settings.model_dump()
    for section, name, used in _PLACES:
        if not used(settings):
            (nested[section] if section else nested)[name] = None
    if not settings.inverse_sparsity_scale:  # recorded only when it is on
        nested["inverse_sparsity_scale"] = None
    for name, default in LATER.items():
        if nested[name] == default:
            del nested[name]
    if settings.attack.name == "none":
        nested["attack"] = dict.fromkeys(nested["attack"])
    if is_path(settings.dataset):  # the folder is private, and does not change the run
        nested["dataset"] = PurePath(settings.dataset).name
    named = ((nested, "model"), (nested, "task"), (nested, "aggregator"), (nested["partition"], "name"))
    for held, own in named:
        file, sign, name = str(held.get(own)).rpartition(":")
        if file.endswith(".py"):
            held[own] = f"{PurePath(file).name}{sign}{name}"
    return task.trimmed(local_training.trimmed(clock.trimmed(nested), settings))
