"""Arguments of `Masked` and of its `start`: one that is not of its kind is refused before anything is done."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedgma.errors import ConfigError

FRACTIONS = ("fraction_train", "fraction_evaluate")
COUNTS = ("retries", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes")


def check_strategy(given: Mapping[str, object]) -> None:
    """Raise `ConfigError` for an option of the strategy with another kind of value.

    >>> check_strategy({"retries": -1})
    Traceback (most recent call last):
    ...
    fedgma.errors.ConfigError: retries must be a whole number of at least 0, got -1
    """
    for name, value in given.items():
        if name in FRACTIONS:
            check_number(name, value, 0, 1)
        elif name in COUNTS:
            check_whole(name, value, 0)
        elif name == "seed":
            check_whole(name, value)
        elif name == "wait":
            check_number(name, value, 0)


def check_start(num_rounds: object, timeout: object, folder: object) -> None:
    """Raise `ConfigError` for an argument of `start` with another kind of value, before anything is written."""
    check_whole("num_rounds", num_rounds, 1)
    if timeout is None:
        raise ConfigError("timeout must be a number of seconds, got None; for no limit pass math.inf")
    check_number("timeout", timeout, 0)
    if folder is None:
        return
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"folder must be a path or None, got {folder!r:.60}")
    path = Path(folder)
    if file := next((one for one in (path, *path.parents) if os.path.isfile(one)), None):
        raise ConfigError(f"folder must be a folder, but {str(file)!r} is a file; give another path")


def check_number(name: str, value: object, lowest: float, highest: float = math.inf) -> None:
    """Raise `ConfigError` unless this is a number within the limits."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not lowest <= value <= highest:  # type: ignore[operator]
        limits = f"at least {lowest:g}" if highest == math.inf else f"from {lowest:g} to {highest:g}"
        kind = "" if number else "a number, "
        raise ConfigError(f"{name} must be {kind}{limits}, got {value!r:.60}")


def check_whole(name: str, value: object, lowest: float = -math.inf) -> None:
    """Raise `ConfigError` unless this is a whole number within the limit."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < lowest:  # type: ignore[operator]
        limit = "" if lowest == -math.inf else f" of at least {lowest:g}"
        raise ConfigError(f"{name} must be a whole number{limit}, got {value!r:.60}")
