"""The rules of many runs at once, over [run, entry] tensors: the same functions that a server calls for one run.

Masks made of votes (`VoteMask`, the paper's and most others) have a batched form: two small tables hold the thresholds
of all runs, and one pass makes all masks. For everything else the rule's own functions are called: `compute`, a
function of sums, once for all runs that share it; `prepare` for all lanes where it has a form for `rows`, else client
by client; `select`, `combine` and a user-defined mask run by run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation import kernels
from fedgma.aggregation.kernels import plain
from fedgma.aggregation.kernels.plain import FURTHER
from fedgma.aggregation.masks import Mask, VoteMask
from fedgma.aggregation.rule import Prepare, Rule
from fedgma.aggregation.rules import Clip
from fedgma.aggregation.view import FUSED, View, own_memory, read_only, total_measures
from fedgma.arrays import Array, to_native
from fedgma.simulation.batched import tallies
from fedgma.simulation.batched.norm_bounds import norms
from fedgma.simulation.batched.tallies import Broken, Merged, Sums
from fedgma.training.lane_batch import Trained
from fedgma.training.stacked import Shapes, Stacked, ship, unflatten

# run -> updates [client, entry] of rules that need all of them, with the clients' weights and ids
Kept = dict[int, list[tuple[Tensor, np.ndarray, np.ndarray]]]


class Rules(NamedTuple):
    """The rules of all runs, with their tables on the device."""

    rules: tuple[Rule, ...]
    tables: tuple[Tensor, Tensor] | None  # votes needed [run, clients + 1], mask below them [run]; None: no vote mask
    computed: tuple[tuple[Rule, np.ndarray], ...]  # rules with a function of sums, and the runs that share it
    scaled: Tensor | None  # runs whose changed mask keeps the length of the step
    further: tuple[str, ...]  # the sums that some rule asks for beside weighted updates and votes
    most: int  # the largest number of clients that one run samples
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
    groups: list[tuple[Rule, list[int]]] = []
    for run, rule in enumerate(rules):
        if rule.compute is not None:
            group = next((rows for other, rows in groups if _is_alike(rule, other)), None)
            if group is None:
                groups.append((rule, [run]))
            else:
                group.append(run)
    return Rules(
        rules=tuple(rules),
        tables=_tables(rules, clients, device),
        computed=tuple((rule, np.array(rows)) for rule, rows in groups),
        scaled=_rows([rule.keep_length for rule in rules], device),
        further=tuple(group for group in FURTHER if any(group in rule.further for rule in rules)),
        most=clients,
        shapes=shapes,
    )


def _is_alike(rule: Rule, other: Rule) -> bool:
    """Whether two rules have the same functions of sums, so that one call serves both."""
    try:
        return bool((rule.compute, rule.measure, rule.state) == (other.compute, other.measure, other.state))
    except Exception:  # a user's class may hold what cannot be compared, such as arrays
        return rule is other


def _rows(flags: Sequence[bool], device: torch.device) -> Tensor | None:
    rows = [row for row, flag in enumerate(flags) if flag]
    return torch.tensor(rows, device=device) if rows else None


def first_state(rules: Rules, params: Tensor) -> Stacked:
    """The state of rules before the first round, [run, entry] by name."""
    state: Stacked = {}
    for run, rule in enumerate(rules.rules):
        for name, first in rule.state.items():
            state.setdefault(name, torch.zeros_like(params))[run] = first
    return state


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
    owners: tallies.Owners | None = None,
) -> Added:
    """Add trained lanes to the sums as their runs' rules ask; `run` and `clients` [lane] are those of each lane.

    `find_long` says which lanes are refused for the norm of their update, given (run, updates). `owners` are run and
    weights, where these have been sent to the device before.
    """
    updates = _prepared(rules, run, trained.flat)
    longer = None if find_long is None else find_long(run, updates)
    metrics = torch.cat([trained.loss[:, None], trained.measures], 1)
    counted = tallies.add(sums, run, weights, updates, trained.buffers, metrics, longer, owners)
    names = np.arange(len(run)) if clients is None else clients
    _keep(rules, kept, run, (updates, weights, names), counted)
    return Added(updates, counted, longer)


def _prepared(rules: Rules, run: np.ndarray, updates: Tensor) -> Tensor:
    """The updates [lane, entry] after each rule's `prepare`; `run` [lane] is the run of each lane."""
    groups: dict[int, list[int]] = {}
    functions: dict[int, Prepare] = {}
    for lane, owner in enumerate(run.tolist()):
        if (function := rules.rules[owner].prepare) is not None:
            key = next((key for key, known in functions.items() if known == function), len(functions))
            functions[key] = function
            groups.setdefault(key, []).append(lane)
    if not groups:
        return updates
    prepared = updates.clone()
    for key, lanes in groups.items():
        rows = ship(np.array(lanes), updates.device)
        prepared[rows] = _prepare_rows(functions[key], updates[rows], rules.shapes)
    return prepared


def _prepare_rows(function: Prepare, updates: Tensor, shapes: Shapes) -> Tensor:
    """The updates [lane, entry] of rules that share their `prepare`."""
    if isinstance(function, Clip):
        inner = updates if function.inner is None else _prepare_rows(function.inner, updates, shapes)
        return _clipped(inner, torch.full_like(inner[:, 0], function.norm, dtype=torch.float64), shapes)
    if hasattr(function, "rows"):
        arrays = torch.split(updates, [shape.numel() for _, shape in shapes], 1)
        return torch.cat([_tensor(function.rows(to_native(array)), updates) for array in arrays], 1)
    changed = torch.empty_like(updates)
    for lane in range(len(updates)):
        named = function({name: value[0] for name, value in unflatten(updates[lane : lane + 1], shapes).items()}, ())
        changed[lane] = torch.cat([_tensor(named[name], updates).flatten() for name, _ in shapes])
    return changed


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
            picked = np.flatnonzero((run == owner) & counted.cpu().numpy())
            rows = torch.from_numpy(picked).to(updates.device)
            kept.setdefault(int(owner), []).append((updates[rows], weights[picked], clients[picked]))


def merge(rules: Rules, sums: Sums, kept: Kept, like: Stacked, state: Stacked | None = None) -> Merged:
    """Mean and mask of each run by its rule, its buffers, and the state for the next round.

    `like` holds the buffers before the round, `state` what the rules returned in the round before.
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
    if rules.scaled is not None:
        merged = merged._replace(length=mask, scaled=rules.scaled)
    merged = merged._replace(mean=mean, mask=mask, state=state or {})
    for rule, rows in rules.computed:
        merged = _computed(rules, rule, rows, sums, merged)
    return merged


def _combined(rules: Rules, kept: Kept, mean: Tensor) -> Tensor:
    """The means; for rules that read all updates, what their `combine` returns."""
    if not kept:
        return mean
    mean = mean.clone()
    for run, parts in kept.items():
        stack, rule = torch.cat([updates for updates, _, _ in parts]), rules.rules[run]
        weights, clients = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
        if rule.select is not None and len(stack):
            rows = np.asarray(rule.select(to_native(stack)))
            stack, weights, clients = stack[ship(rows, stack.device)], weights[rows], clients[rows]
        if rule.combine is not None and len(stack):
            arrays = {"": stack} if rule.entrywise else unflatten(stack, rules.shapes)
            named = {
                name: rule.combined(to_native(value), weights.tolist(), clients.tolist())
                for name, value in arrays.items()
            }
            mean[run] = torch.cat([_tensor(value, mean).flatten() for value in named.values()])
    return mean


def _vote_masks(rules: Rules, sums: Sums) -> Tensor | None:
    """The vote masks of all runs in one pass; ones for runs without."""
    if rules.tables is None:
        return None
    if sums.votes.device.type == "cpu" and bool((sums.clients > 0).all()):  # without a client, tables have the answer
        masks = zip((rule.mask for rule in rules.rules), to_native(sums.votes), sums.clients.tolist(), strict=True)
        return tallies.one_stack([_vote_mask_of(*run) for run in masks])
    needed, below = rules.tables
    return _masks_of(sums.votes, sums.clients, needed.gather(1, sums.clients[:, None]), below[:, None])


def _vote_mask_of(mask: Mask | None, votes: np.ndarray, clients: int) -> np.ndarray:
    """The vote mask of one run, by the kernel of a single tally; ones if it has none."""
    if not isinstance(mask, VoteMask):
        return np.ones(votes.shape, np.float32)
    return np.asarray(kernels.mask(mask, votes, clients, "float32"))


def _masks_of(votes: Tensor, clients: Tensor, needed: Tensor, below: Tensor) -> Tensor:
    """Masks [run, entry] of votes, given the votes needed and the mask below them, as columns."""
    size = votes.abs()
    agreement = size.float() / clients.clamp(min=1).float()[:, None]
    under = torch.where(below.isnan(), agreement, below)
    return torch.where(size >= needed, 1.0, under)


def _computed(rules: Rules, rule: Rule, runs: np.ndarray, sums: Sums, merged: Merged) -> Merged:
    """Mean, mask and state of the runs that share a function of sums, by that function, array by array."""
    rows = slice(None) if len(runs) == len(merged.mean) else ship(runs, merged.mean.device)
    views = [view for view in _views(rules, rule, rows, sums, merged) if view.mean.shape[-1]]
    measured = total_measures([rule.measured(view) for view in views])
    steps = [rule.step(replace(view, measured=measured)) for view in views]
    mean, mask, state = merged.mean, merged.mask, dict(merged.state)
    if any(step.mean is not view.mean for step, view in zip(steps, views, strict=True)):
        mean = mean.clone()
        mean[rows] = _joined([step.mean for step in steps], mean)
    if mask is not None or any(step.mask is not None for step in steps):
        mask = torch.ones_like(mean) if mask is None else mask.clone()
        masks = [view.mean * 0 + 1 if step.mask is None else step.mask for step, view in zip(steps, views, strict=True)]
        mask[rows] = _joined(masks, mask)
    alive = merged.alive[rows]
    for name in rule.state:
        after = [step.state.get(name, view.state[name]) for step, view in zip(steps, views, strict=True)]
        table = state[name].clone()
        table[rows] = torch.where(alive[:, None], _joined(after, table), table[rows])
        state[name] = table
    sound = mean[rows].isfinite().all(1) & (True if mask is None else mask[rows].isfinite().all(1))
    broken = torch.zeros_like(merged.alive) if merged.broken is None else merged.broken.runs.clone()
    broken[rows] = alive & ~sound
    named = Broken(broken, tuple(each.name for each in rules.rules))
    return merged._replace(mean=mean, mask=mask, state=state, broken=named)


def _views(rules: Rules, rule: Rule, rows: slice | Tensor, sums: Sums, merged: Merged) -> Iterator[View]:
    """What a rule reads of these runs, array by array."""
    sizes = [shape.numel() for _, shape in rules.shapes]

    def split(table: Tensor | None) -> Sequence[Array | None]:
        parts = [None] * len(sizes) if table is None else torch.split(table[rows], sizes, 1)
        return [None if part is None else read_only(to_native(part)) for part in parts]

    alive = merged.alive[rows, None]
    clients = to_native(torch.where(alive, sums.clients[rows, None], 1).double())
    weight = to_native(torch.where(alive, sums.weight[rows, None], 1.0))
    needed = not {*rule.reads, *rule.measures} <= FUSED
    kept = [plain.Sums(*parts) for parts in zip(*map(split, sums.entries), strict=True)] if needed else None
    state = {name: split(merged.state[name]) for name in rule.state}
    vote_parts = torch.split(sums.votes[rows], sizes, 1)
    for position, (name, mean, mask) in enumerate(
        zip([name for name, _ in rules.shapes], split(merged.mean), split(merged.mask), strict=True)
    ):
        entries = None if kept is None else kept[position]
        votes = partial(_vote_mask, vote_parts[position], sums.clients[rows], rules.most)
        before = {key: parts[position] for key, parts in state.items()}
        yield View(name, mean, mask, clients, weight, entries, votes, before)


def _vote_mask(votes: Tensor, clients: Tensor, most: int, function: Mask) -> Array:
    """The mask that a function makes of the votes [run, entry] of each run."""
    if isinstance(function, VoteMask):
        tables = _tables_of(function, most, votes.device)
        return to_native(_masks_of(votes, clients, tables[0][clients][:, None], tables[1]))
    rows = [function(to_native(row), max(1, n), "float32") for row, n in zip(votes, clients.tolist(), strict=True)]
    return to_native(torch.stack([torch.as_tensor(row, device=votes.device) for row in rows]))


@lru_cache(maxsize=256)
def _tables_of(mask: VoteMask, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Votes needed by number of clients, and the mask below them."""
    needed = [mask.needed(count) for count in range(most + 1)]
    below = math.nan if mask.below is None else mask.below
    return torch.tensor(needed, device=device), torch.tensor([[below]], device=device)


def _joined(arrays: Sequence[Array], like: Tensor) -> Tensor:
    return torch.cat([_tensor(array, like) for array in arrays], 1)


def _tensor(array: Array, like: Tensor) -> Tensor:
    return torch.as_tensor(own_memory(array), dtype=like.dtype, device=like.device)
