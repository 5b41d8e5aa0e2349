"""Runs that were made by code which has been corrected since: they are kept, and have to be made again."""

from collections.abc import Mapping
from typing import Any

from fedgma.simulation.algorithms import ALGORITHMS, AlgorithmRow

CONTROLS_SINCE = "2026-11-16T07"  # when runs with controls of the length of the server's step began
CONTROLS = {
    "shuffled_mask": "took steps about 20 % shorter than the masked ones",
    "damped_mean": "did not have the length of the masked step under an adaptive server",
}


def why_outdated(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Why a run has to be made again, in words; empty if it has not.

    >>> why_outdated({"aggregator": "damped_mean", "algorithm": "fedadam"}, {"started": "2026-11-15T20:00:00Z"})
    'damped_mean before 2026-11-16 did not have the length of the masked step under an adaptive server'
    >>> why_outdated({"aggregator": "damped_mean", "algorithm": "fedavg"}, {"started": "2026-11-15T20:00:00Z"})
    ''
    """
    rule = str(settings.get("aggregator"))
    plain = ALGORITHMS.get(str(settings.get("algorithm")), AlgorithmRow()).server == "sgd"
    if rule not in CONTROLS or (rule == "damped_mean" and plain) or str(facts.get("started", "")) >= CONTROLS_SINCE:
        return ""
    return f"{rule} before {CONTROLS_SINCE[:10]} {CONTROLS[rule]}"
