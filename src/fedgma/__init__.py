"""Gradient masked averaging for federated learning: exact, streaming, and a drop-in for any server.

    import fedgma

    step = fedgma.masked_mean(tau=0.4)(updates, counts).update     # what the server adds

`updates` are `local - global`, client axis first (or a list of clients); `counts` are raw sample counts.

`fedgma.run` and `fedgma.rounds` play experiments; they need the extra `sim` and bring torch in when first used.
"""

from typing import Any as _Any

from fedgma.aggregation.adapters import in_products
from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.controls import cross_fitted, damped_mean, shuffled_mask, stale_mask
from fedgma.aggregation.elections import magnitude_agreement, majority_sign, ties, voters_only
from fedgma.aggregation.gate import Gate, Refusal
from fedgma.aggregation.optimizers import OPTIMIZERS, ServerOptimizer, adagrad, adam, averaged, momentum, sgd, yogi
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import (
    AGGREGATORS,
    RULES,
    and_mask,
    clip,
    clipped,
    masked_extra,
    masked_mean,
    mean,
    median,
    multi_krum,
    norm_kept,
    rlr,
    sign_test,
    trimmed_mean,
)
from fedgma.aggregation.scales import fedexp, james_stein, wiener
from fedgma.aggregation.server_round import ServerRound, server_round
from fedgma.aggregation.tally import Tally
from fedgma.aggregation.wire import from_bytes, pack, to_bytes, unpack
from fedgma.aggregation.wrappers import by_array, keep_norm, smoothed, unmasked
from fedgma.errors import ConfigError, DataError, Diverged, FedgmaError, IntegrityError, NotEnoughClients
from fedgma.machine import not_installed as _not_installed

Aggregator = Rule

__version__ = "0.1.0"

__all__ = [
    "AGGREGATORS",
    "OPTIMIZERS",
    "RULES",
    "Aggregate",
    "Aggregator",
    "ConfigError",
    "DataError",
    "Diverged",
    "FedgmaError",
    "Gate",
    "IntegrityError",
    "NotEnoughClients",
    "Refusal",
    "Rule",
    "ServerOptimizer",
    "ServerRound",
    "Tally",
    "adagrad",
    "adam",
    "and_mask",
    "averaged",
    "by_array",
    "clip",
    "clipped",
    "cross_fitted",
    "damped_mean",
    "fedexp",
    "finish",
    "from_bytes",
    "in_products",
    "james_stein",
    "keep_norm",
    "magnitude_agreement",
    "majority_sign",
    "masked_extra",
    "masked_mean",
    "mean",
    "median",
    "momentum",
    "multi_krum",
    "norm_kept",
    "pack",
    "rlr",
    "rounds",
    "run",
    "server_round",
    "sgd",
    "shuffled_mask",
    "sign_test",
    "smoothed",
    "stale_mask",
    "ties",
    "to_bytes",
    "trimmed_mean",
    "unmasked",
    "unpack",
    "voters_only",
    "wiener",
    "yogi",
]


def __getattr__(name: str) -> _Any:
    if name in ("rounds", "run"):
        try:
            from fedgma.experiments import play
        except ModuleNotFoundError as error:
            if (refusal := _not_installed(error)) is None:
                raise
            raise refusal from error
        return getattr(play, name)
    raise AttributeError(f"module 'fedgma' has no attribute {name!r}")
