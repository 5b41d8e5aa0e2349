"""The rules of many runs at once, over [run, entry] tensors: the same functions that a server calls for one run.

Masks made of votes (`VoteMask`, the paper's and most others) have a batched form: two small tables hold the thresholds
of all runs, and one pass makes all masks. Clipping has one too. For everything else the rule's own functions are
called: `change` once for all runs that share a rule, `prepare` client by client, `select`, `combine` and a user-defined
mask run by run.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation.masks import VoteMask
from fedgma.aggregation.rule import Change, Rule
from fedgma.aggregation.rules import Clip
from fedgma.arrays import Array, to_native
from fedgma.simulation.batched import tallies
from fedgma.simulation.batched.norm_bounds import norms
from fedgma.simulation.batched.tallies import Merged, Sums
from fedgma.training.lane_batch import Trained
from fedgma.training.stacked import Shapes, Stacked, ship, unflatten

# run -> updates [client, entry] of rules that need all of them, with the clients' weights and ids
Kept = dict[int, list[tuple[Tensor, np.ndarray, np.ndarray]]]


class Rules(NamedTuple):
    """The rules of all runs, with their tables on the device."""

    rules: tuple[Rule, ...]
    tables: tuple[Tensor, Tensor] | None  # votes needed [run, clients + 1], mask below them [run]; None: no vote mask
    changed: tuple[tuple[Rule, Tensor], ...]  # rules that change their mask, and the runs that have them
    scaled: Tensor | None  # runs whose changed mask keeps the length of the step
    late: Tensor | None  # runs that apply a mask one round later
    shapes: Shapes

    def votes_needed(self, run: int) -> tuple[Tensor, Tensor] | None:
        """A run's row of the tables; None where it has no mask made of votes."""
        if self.tables is None or not isinstance(self.rules[run].mask, VoteMask):
            return None
        return self.tables[0][run], self.tables[1][run]


class Added(NamedTuple):
    """Lanes that were added: their updates as the rules prepared them, and which were counted."""

    updates: Tensor  # [lane, entry]
    counted: Tensor  # bool [lane]
    longer: Tensor | None  # bool [lane], refused for their norm; None where no run bounds it


def lay_out(rules: Sequence[Rule], clients: int, shapes: Shapes, device: torch.device) -> Rules:
    """Copy the tables to the device once; `clients` is the largest number that one run samples."""
    groups: dict[Hashable, list[int]] = {}
    for run, rule in enumerate(rules):
        if rule.change is not None:
            groups.setdefault(_key(rule.change), []).append(run)
    changed = tuple((rules[rows[0]], torch.tensor(rows, device=device)) for rows in groups.values())
    scaled, late = (_rows([getattr(rule, name) for rule in rules], device) for name in ("keep_length", "late"))
    return Rules(tuple(rules), _tables(rules, clients, device), changed, scaled, late, shapes)


def _rows(flags: Sequence[bool], device: torch.device) -> Tensor | None:
    rows = [row for row, flag in enumerate(flags) if flag]
    return torch.tensor(rows, device=device) if rows else None


def _key(function: Change) -> Hashable:
    """A key that is equal for functions that do the same; partials are compared by function and arguments."""
    if isinstance(function, partial):
        return function.func, function.args, tuple(sorted(function.keywords.items()))
    return function


def _tables(rules: Sequence[Rule], clients: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Votes needed and mask below them, for each run; a run without a vote mask gets a mask of ones."""
    masks = {run: rule.mask for run, rule in enumerate(rules) if isinstance(rule.mask, VoteMask)}
    if not masks:
        return None
    needed = np.zeros((len(rules), clients + 1), np.int32)
    below = np.zeros(len(rules), np.float32)
    for run, mask in masks.items():
        needed[run] = [mask.needed(count) for count in range(clients + 1)]
        below[run] = math.nan if mask.below is None else mask.below  # NaN: the agreement itself
    return torch.from_numpy(needed).to(device), torch.from_numpy(below).to(device)


def add(
    rules: Rules,
    sums: Sums,
    kept: Kept,
    run: np.ndarray,
    weights: np.ndarray,
    trained: Trained,
    clients: np.ndarray | None = None,
    find_long: Callable[[np.ndarray, Tensor], Tensor] | None = None,
) -> Added:
    """Add trained lanes to the sums as their runs' rules ask; `run` and `clients` [lane] are those of each lane.

    `find_long` says which lanes are refused for the norm of their update, given (run, updates).
    """
    updates = _prepared(rules, run, trained.flat)
    longer = None if find_long is None else find_long(run, updates)
    metrics = torch.cat([trained.loss[:, None], trained.measures], 1)
    counted = tallies.add(sums, run, weights, updates, trained.buffers, metrics, longer)
    names = np.arange(len(run)) if clients is None else clients
    _keep(rules, kept, run, (updates, weights, names), counted)
    return Added(updates, counted, longer)


def _prepared(rules: Rules, run: np.ndarray, updates: Tensor) -> Tensor:
    """The updates [lane, entry] after each rule's `prepare`; `run` [lane] is the run of each lane."""
    lanes = [lane for lane, owner in enumerate(run.tolist()) if rules.rules[owner].prepare is not None]
    if not lanes:
        return updates
    prepared = updates.clone()
    limits = {lane: f.norm for lane in lanes if isinstance(f := rules.rules[run[lane]].prepare, Clip) and not f.inner}
    if limits:
        rows = ship(np.array(list(limits)), updates.device)
        prepared[rows] = _clipped(updates[rows], ship(np.array(list(limits.values())), updates.device), rules.shapes)
    for lane in [lane for lane in lanes if lane not in limits]:
        function = rules.rules[run[lane]].prepare
        assert function is not None
        named = {name: value[0] for name, value in unflatten(updates[lane : lane + 1], rules.shapes).items()}
        changed = function(named, ())
        prepared[lane] = torch.cat([changed[name].flatten() for name, _ in rules.shapes])
    return prepared


def _clipped(updates: Tensor, limits: Tensor, shapes: Shapes) -> Tensor:
    """The updates [lane, entry] scaled down to their limits [lane], as `aggregation.rules.clip` does for one."""
    lengths = norms(updates, shapes)
    factors = torch.where((lengths > limits) & lengths.isfinite(), limits / lengths, 1.0)
    return (updates.double() * factors[:, None]).float()


def _keep(
    rules: Rules, kept: Kept, run: np.ndarray, lanes: tuple[Tensor, np.ndarray, np.ndarray], counted: Tensor
) -> None:
    """Keep the counted updates of runs whose rules need all of them at once, with weights and client ids."""
    updates, weights, clients = lanes
    for owner in np.unique(run):
        if not rules.rules[owner].streams:
            own = np.flatnonzero((run == owner) & counted.cpu().numpy())
            rows = torch.from_numpy(own).to(updates.device)
            kept.setdefault(int(owner), []).append((updates[rows], weights[own], clients[own]))


def merge(rules: Rules, sums: Sums, kept: Kept, like: Stacked, masks: Tensor | None = None) -> Merged:
    """Mean and mask of each run by its rule, and its buffers.

    `like` holds the buffers before the round, `masks` those that late runs apply now.
    """
    merged = tallies.merge(sums, like)
    mean, mask = _combined(rules, kept, merged.mean), _vote_masks(rules, sums)
    for run, rule in enumerate(rules.rules):
        if rule.mask is not None and not isinstance(rule.mask, VoteMask):
            mask = torch.ones_like(mean) if mask is None else mask
            clients = int(sums.clients[run])
            if clients:
                mask[run] = torch.as_tensor(
                    rule.mask(to_native(sums.votes[run]), clients, "float32"), device=mean.device
                )
    length = mask
    if mask is not None and rules.changed:
        mask = _changed(rules, mean, mask)
    if mask is not None and rules.late is not None:
        masks, mask = _one_round_late(rules.late, mask, masks, merged.alive)
    if rules.scaled is not None:
        merged = merged._replace(length=length, scaled=rules.scaled)
    return merged._replace(mean=mean, mask=mask, masks=masks)


def _one_round_late(late: Tensor, mask: Tensor, masks: Tensor | None, alive: Tensor) -> tuple[Tensor, Tensor]:
    """The masks for the next round, and those of this one: late runs apply the last round's, at first none."""
    before = torch.ones_like(mask) if masks is None else masks
    now = mask.clone()
    now[late] = before[late]
    return torch.where(alive[:, None], mask, before), now


def _combined(rules: Rules, kept: Kept, mean: Tensor) -> Tensor:
    """The means; for rules that read all updates, what their `combine` returns."""
    if not kept:
        return mean
    mean = mean.clone()
    for run, parts in kept.items():
        stack, rule = torch.cat([updates for updates, _, _ in parts]), rules.rules[run]
        weights, clients = (np.concatenate([part[place] for part in parts]) for place in (1, 2))
        if rule.select is not None and len(stack):
            rows = np.asarray(rule.select(to_native(stack)))
            stack, weights, clients = stack[ship(rows, stack.device)], weights[rows], clients[rows]
        if rule.combine is not None and len(stack):
            named = {
                name: rule.combined(to_native(value), weights.tolist(), clients.tolist())
                for name, value in unflatten(stack, rules.shapes).items()
            }
            mean[run] = torch.cat([_tensor(value, mean).flatten() for value in named.values()])
    return mean


def _vote_masks(rules: Rules, sums: Sums) -> Tensor | None:
    """The vote masks of all runs in one pass; ones for runs without."""
    if rules.tables is None:
        return None
    needed, below = rules.tables
    size = sums.votes.abs()
    agreement = size.float() / sums.clients.clamp(min=1).float()[:, None]
    under = torch.where(below.isnan()[:, None], agreement, below[:, None])
    passed = size >= needed.gather(1, sums.clients[:, None])
    return torch.where(passed, 1.0, under)


def _changed(rules: Rules, mean: Tensor, mask: Tensor) -> Tensor:
    """The masks; for rules that change theirs, what `change` returns for each array."""
    mask = mask.clone()
    sizes = [shape.numel() for _, shape in rules.shapes]
    for rule, rows in rules.changed:
        assert rule.change is not None
        parts = zip(torch.split(mean[rows], sizes, 1), torch.split(mask[rows], sizes, 1), strict=True)
        arrays = [
            rule.change(name, to_native(part), to_native(values))
            for (name, _), (part, values) in zip(rules.shapes, parts, strict=True)
        ]
        mask[rows] = torch.cat([_tensor(array, mask) for array in arrays], 1)
    return mask


def _tensor(array: Array, like: Tensor) -> Tensor:
    return torch.as_tensor(array, dtype=like.dtype, device=like.device)
