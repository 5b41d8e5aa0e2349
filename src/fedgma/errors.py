"""Everything that fedgma raises on purpose, in one tree.

    FedgmaError                 1
    ├── ConfigError             2   a setting that cannot be
    ├── DataError               3   a file or array that is not what it should be
    │   └── IntegrityError      3   bytes that do not match their checksum or manifest
    ├── NotEnoughClients        4   too few valid updates to make a round of
    └── Diverged                5   a result that is not finite; nothing was committed

The number is the exit code of the command line. Catch `FedgmaError` to catch them all. Each message is one sentence:
what was expected, what came, what to do.
"""


class FedgmaError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 1


class ConfigError(FedgmaError, ValueError):
    """A setting or argument that cannot be."""

    exit_code = 2


class DataError(FedgmaError, ValueError):
    """A file or array that is not what it should be."""

    exit_code = 3


class IntegrityError(DataError):
    """Bytes that do not match their checksum or manifest."""


class NotEnoughClients(FedgmaError):
    """Too few valid updates to make a round of."""

    exit_code = 4


class Diverged(FedgmaError, ArithmeticError):
    """A result that is not finite; nothing was committed."""

    exit_code = 5
