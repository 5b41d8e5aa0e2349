"""Updates that a rule has changed before they are counted; a tally of such a rule takes no others."""

from collections.abc import Mapping
from typing import Any

from fedgma.errors import DataError


class Prepared(dict[str, Any]):
    """An update that a rule's `prepare` has changed."""


def check_prepared(update: object, rule: str) -> None:
    """Raise `DataError` for an update that the rule (none: empty) has not changed; what is no update is refused later.

    >>> check_prepared({"w": [1.0]}, "")
    >>> check_prepared(Prepared({"w": [1.0]}), "clipped_mean")
    """
    if rule and isinstance(update, Mapping) and not isinstance(update, Prepared):
        raise DataError(
            f"{rule} changes every update before it is counted; add each by tally.add(rule.prepared(update, buffers), "
            "...)"
        )
