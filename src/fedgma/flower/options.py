"""Options that an app may still have from another strategy of Flower: each is refused with what takes its place."""

import inspect
from collections.abc import Iterable

from fedgma.errors import ConfigError, did_you_mean, nearest

ADAPTIVE = ("eta", "eta_l", "beta_1", "beta_2")  # of FedAdam, FedYogi and FedAdagrad
RENAMED = {  # between Flower's two interfaces
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
}


def check_options(given: Iterable[str], strategy: type) -> None:
    """Raise `ConfigError` for an option that a strategy and its base do not have."""
    known = {name for kind in strategy.__mro__[:2] for name in inspect.signature(kind.__init__).parameters}  # type: ignore[misc]
    both = {**RENAMED, **{new: old for old, new in RENAMED.items()}}
    for name in given:
        if name in known:
            continue
        if name in ADAPTIVE:
            raise ConfigError(
                f"{name} belongs to the server optimiser; give it there, such as optimizer=fedgma.yogi(0.01)"
            )
        hint = did_you_mean([both[name]] if both.get(name) in known else nearest(name, known))
        raise ConfigError(f"unknown option {name!r} of {strategy.__name__}{hint}")
