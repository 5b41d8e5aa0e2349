"""Masked averaging on pfl-research: a postprocessor, after the weighting.

    from fedgma.pfl import Masked
    SimulatedBackend(data, val, postprocessors=[WeightByDatapoints(), Masked(tau=0.4)])

Each user's statistics are sent with their signs and a count of one. pfl sums them over users and processes. On the
server the mask is computed from the votes and multiplied with the update. pfl sums in float32, which counts votes
exactly for up to 16 million users; the mean has float32's rounding error, the mask is fedgma's bit for bit.

It must come after the weighting, or votes are weighted too. pfl's central optimiser gets the masked mean: with SGD that
is the paper's algorithm; an adaptive optimiser gets masked gradients (`mask_position="before"` elsewhere in fedgma).

pfl's privacy mechanisms do not protect the votes: a mechanism before this postprocessor adds no noise to them, and one
after it clips votes and update together, which removes almost all of the update. The combination does not give
differential privacy.
"""

import math
from typing import Any

import numpy as np
from pfl.context import CentralContext, UserContext
from pfl.metrics import Metrics, StringMetricName
from pfl.postprocessor.base import Postprocessor
from pfl.stats import ElementWeightedMappedVectorStatistics, MappedVectorStatistics

from fedgma.aggregation.gate import Gate, find_refusal
from fedgma.aggregation.masks import MASKS, signs
from fedgma.aggregation.server import summarise_mask
from fedgma.arrays import Array, cast, is_torch, spec, zeros
from fedgma.errors import ConfigError, DataError, NotEnoughClients

VOTES, COUNTS = "fedgma votes/", "fedgma counts"  # names of entries that are added to the statistics


class Masked(Postprocessor):
    """Gradient masked averaging at `tau` as a pfl postprocessor; `mask` is "soft" (the paper's) or "hard" (AND-mask).

    A user whose statistics the gate refuses (a NaN, an infinity, or a norm above `max_norm`) is left out of the mean
    and of the count; the round's metrics hold the number of refused users and the mean of the mask.
    """

    def __init__(self, tau: float = 0.4, *, mask: str = "soft", max_norm: float | None = None) -> None:
        if mask not in MASKS:
            raise ConfigError(f"unknown mask {mask!r}; known: {', '.join(sorted(MASKS))}")
        self.mask = MASKS[mask](tau)
        self.gate = Gate(max_norm=math.inf if max_norm is None else max_norm)

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Add a user's signs and a count of one."""
        _check(stats)
        entries = dict(stats.items())
        valid = find_refusal(entries, self.gate) is None
        if not valid:
            stats.weight = 0
        for name, array in entries.items():
            kept = array if valid else zeros(tuple(array.shape), spec(array).dtype, array)
            stats[name], stats[VOTES + name] = kept, cast(signs(kept), "float32")
        first = next(iter(entries.values()))
        stats[COUNTS] = zeros(2, "float32", first)
        stats[COUNTS][0 if valid else 1] = 1
        return stats, Metrics()

    def postprocess_server(
        self, *, stats: MappedVectorStatistics, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Multiply the summed update by the mask of the votes; removes votes and counts."""
        if COUNTS not in stats:
            raise DataError(
                "the statistics must hold votes, got none: Masked must be among the postprocessors of every worker"
            )
        counts, _ = stats.pop(COUNTS)
        clients, refused = (round(float(count)) for count in counts)
        if not clients:
            raise NotEnoughClients(f"no valid update to average ({refused} refused); nothing was changed")
        masks = []
        for name in [name for name in stats if not name.startswith(VOTES)]:
            votes, _ = stats.pop(VOTES + name)
            mask = self.mask(_to_integers(votes), clients, spec(stats[name]).dtype)
            stats[name] = stats[name] * mask
            masks.append(mask)
        statistics = {"clients": clients, "refused": refused, "mask mean": summarise_mask(masks)[0]}
        return stats, Metrics([(StringMetricName(f"gma {name}"), value) for name, value in statistics.items()])


def _check(stats: Any) -> None:
    named = isinstance(stats, MappedVectorStatistics) and len(stats) > 0
    if not named or isinstance(stats, ElementWeightedMappedVectorStatistics):
        got = type(stats).__name__
        raise DataError(f"masking needs statistics of named tensors with one weight per user, got {got}")


def _to_integers(votes: Array) -> Array:
    return cast(votes.round() if is_torch(votes) else np.rint(votes), "int32")
