"""Colours of arms, after Okabe and Ito: safe for colour-blind readers, with enough contrast on white and on black."""

from collections.abc import Sequence

from fedgma.aggregation.rules import BASELINE

BASE = "#d07c00"  # the plain mean
COLOURS = ("#2b83c6", "#159a73", "#c3609b", "#8b6fd4", "#a3760c", "#2f93a6")  # the others


def place_of(name: str, names: Sequence[str]) -> int | None:
    """The place of an arm's colour in `COLOURS`; None for the plain mean, which always has the colour `BASE`.

    >>> place_of("mean", ["GMA", "mean"]), place_of("GMA", ["mean", "GMA"])
    (None, 0)
    """
    if is_plain(name):
        return None
    return [other for other in names if not is_plain(other)].index(name) % len(COLOURS)


def is_plain(name: str) -> bool:
    """Whether an arm is the plain mean."""
    return name == BASELINE
