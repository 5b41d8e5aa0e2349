"""A user's rule before the start: a small round of two runs, together and each alone.

A fleet calls a rule once for all runs that share it, with one row for each run. A function that reduces over all axes
in place of the last one would mix the runs, and what a run learns would depend on which others train beside it.
"""

import copy

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation.rule import Rule
from fedgma.errors import ConfigError
from fedgma.seeds import generator
from fedgma.simulation.batched import rules, tallies
from fedgma.training.lane_batch import Trained
from fedgma.training.stacked import Shapes

CLIENTS = 3  # of each run
LARGEST = 100_000  # entries of an array; larger ones are left out, unless all are
CLOSE = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}


def try_rule(rule: Rule, shapes: Shapes, device: torch.device | str = "cpu") -> None:
    """Raise `ConfigError` if a rule fails on arrays of these shapes, or mixes the runs that train together.

    `device` is that of the runs: on a GPU a rule is given tensors, elsewhere numpy arrays.
    """
    try:
        rule = copy.deepcopy(rule)  # a user's object may count its calls
    except Exception:  # or hold what cannot be copied
        return
    some = tuple((name, shape) for name, shape in shapes if shape.numel() <= LARGEST) or tuple(shapes[:1])
    entries = sum(shape.numel() for _, shape in some)
    drawn = generator(0, "rule trial").normal(size=(2 * CLIENTS, entries)).astype(np.float32)
    drawn[CLIENTS:] = 10 * drawn[CLIENTS:] + 20  # the second run differs in length and in agreement
    updates = torch.from_numpy(drawn).to(device)
    together = _step(rule, updates, some)
    if not torch.equal(together.nan_to_num(), _step(rule, updates, some).nan_to_num()):
        return  # it draws numbers of its own: two calls cannot be compared
    apart = torch.cat([_step(rule, of_run, some) for of_run in (updates[:CLIENTS], updates[CLIENTS:])])
    if not np.allclose(together.cpu(), apart.cpu(), **CLOSE):  # type: ignore[arg-type]
        raise ConfigError(
            f"rule {rule.name!r} mixes runs that train together: arrays have one row for each run, so reduce over the "
            "last axis, such as mean.sum(-1, keepdims=True)"
        )


def _step(rule: Rule, updates: Tensor, shapes: Shapes) -> Tensor:
    """The masked means [run, entry] of the first round of runs, each with `CLIENTS` of these updates."""
    lanes = len(updates)
    run = np.arange(lanes) // CLIENTS
    params = updates.new_zeros(lanes // CLIENTS, updates.shape[1])
    laid = rules.lay_out([rule] * len(params), CLIENTS, shapes, params.device)
    sums, kept = tallies.empty(params, {}, 1, laid.further), rules.Kept()
    trained = Trained(updates, shapes, {}, updates.new_zeros(lanes), updates.new_zeros(lanes, 1))
    rules.add(laid, sums, kept, run, np.ones(lanes), trained, np.arange(lanes) % CLIENTS)
    merged = rules.merge(laid, sums, kept, {}, rules.first_state(laid, params))
    return merged.mean if merged.mask is None else merged.mean * merged.mask
