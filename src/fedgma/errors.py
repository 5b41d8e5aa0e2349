"""The errors that fedgma raises on purpose.

    FedgmaError                 1
    ├── ConfigError             2   an invalid setting or argument
    │   └── InUseError          2   a folder that another process is using; it will be free
    ├── DataError               3   an invalid file or array
    │   └── IntegrityError      3   bytes that do not match their checksum or manifest
    ├── NotEnoughMemory         3   the memory is full; what was saved stays
    ├── NotEnoughClients        4   too few valid updates for a round
    ├── Diverged                5   a result that is not finite; nothing was committed
    └── RankLost                6   another process of the same run ended; it can be resumed

The number is the exit code of the command line. `FedgmaError` catches them all. Each message is one sentence: what was
expected, what came, what to do.
"""

import difflib
from collections.abc import Iterable


class FedgmaError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 1


class ConfigError(FedgmaError, ValueError):
    """An invalid setting or argument."""

    exit_code = 2


class InUseError(ConfigError):
    """A folder that another process is using; it is free when that process ends."""


class DataError(FedgmaError, ValueError):
    """An invalid file or array."""

    exit_code = 3


class IntegrityError(DataError):
    """Bytes that do not match their checksum or manifest."""


class NotEnoughMemory(FedgmaError, MemoryError):
    """The memory is full; what was saved stays."""

    exit_code = 3


class NotEnoughClients(FedgmaError):
    """Too few valid updates for a round."""

    exit_code = 4


class Diverged(FedgmaError, ArithmeticError):
    """A result that is not finite; nothing was committed."""

    exit_code = 5


class RankLost(FedgmaError):
    """Another process of the same run ended; the run can be resumed."""

    exit_code = 6


def nearest(name: object, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names that are most like an unknown one, in capitals or not; none if no name is near.

    >>> nearest("GMA", ["mean", "gma"])
    ['gma']
    """
    small: dict[str, str] = {}
    for one in known:
        small.setdefault(one.lower(), one)
    return [small[match] for match in difflib.get_close_matches(str(name).lower(), small, most, cutoff)]


def did_you_mean(names: Iterable[str]) -> str:
    """How the sentence about an unknown name ends: with the names that may be meant, if there are any.

    >>> "unknown rule 'gmaa'" + did_you_mean(nearest("gmaa", ["mean", "gma"]))
    "unknown rule 'gmaa'; did you mean 'gma'?"
    """
    meant = " or ".join(map(repr, names))
    return f"; did you mean {meant}?" if meant else ""
