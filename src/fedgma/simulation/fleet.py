"""Trains a fleet, round by round: a list of runs that share model, input shape and batch size. One run is also a fleet.

Everything is batched over runs: local training over all sampled clients of all runs; tally, mask and server over
[run, entry]; evaluation over runs. The random draws of a run depend only on its own seed, round and clients, so they
are the same whichever other runs are in the fleet. The state is passed in and returned, so that runs can be resumed.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.data.pools import input_shape
from fedgma.errors import ConfigError
from fedgma.seeds import seed
from fedgma.simulation import timeline, versions
from fedgma.simulation.assembly import assemble as assemble
from fedgma.simulation.batched import adapters, attacks, carried, norm_bounds, optimizers, rules, tallies, votes
from fedgma.simulation.device_round import Round, verdicts
from fedgma.simulation.plans import advanced, lay, plan_round
from fedgma.simulation.plans import lay_lane_batch as lay_lane_batch
from fedgma.simulation.sampling import chunks
from fedgma.simulation.scored_pools import test_pools
from fedgma.simulation.server_part import ServerPart, numbers
from fedgma.simulation.setup import Fleet as Fleet
from fedgma.simulation.setup import Plan
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import State, restored
from fedgma.simulation.versions import ReadyLanes
from fedgma.training.cuda_graphs import float32_precision
from fedgma.training.evaluation import Scorer, client_figure, sample_scores, split_figures
from fedgma.training.gradients import named_tensors
from fedgma.training.lane_batch import Assignment, LocalTrainer, Trained
from fedgma.training.models import build
from fedgma.training.ranks import train_shared
from fedgma.training.stacked import Stacked, flatten, ship, stack, unflatten, without


def start(fleet: Fleet) -> State:
    """The state before the first round: every run's own initial weights."""
    drawn = [_initial(fleet, spec) for spec in fleet.specs]
    params = flatten(stack([p for p, _ in drawn]))
    model = adapters.lift(fleet.space, params)
    return State(
        rounds=np.zeros(len(fleet.specs), np.int64),
        params=params,
        buffers=stack([b for _, b in drawn]),
        moments=optimizers.init_moments(fleet.optimizers, model),
        carried=carried.first(fleet.algorithms, params),
        looks=(None,) * len(fleet.specs),
        medians=None if fleet.bounds is None else norm_bounds.no_medians(len(fleet.specs), fleet.device),
        rule=rules.first_state(fleet.rules, model),
        timelines={run: timeline.START for run, clock in enumerate(fleet.clocks) if clock is not None},
    )


def play(
    specs: Sequence[RunSpec], states: Sequence[dict[str, np.ndarray]] | None = None, **options: object
) -> Iterator[Round]:
    """Train all runs to their last round and yield each round; exported `states` are resumed.

    Options are those of `assemble`. Reading a round's records waits for the device; not reading them does not.
    """
    fleet = assemble(specs, **options)  # type: ignore[arg-type]
    state = start(fleet) if states is None else restore(fleet, states)
    while any(state.rounds[run] < spec.rounds for run, spec in enumerate(fleet.specs)):
        state, played = play_round(fleet, state)
        yield replace(played, state=state)


def play_round(fleet: Fleet, state: State) -> tuple[State, Round]:
    """One round of every run that has rounds left: draw, train, tally, mask, server step, evaluate."""
    # kernels are launched and graphs captured on torch's current device, which need not be that of the data
    with torch.cuda.device(fleet.device) if fleet.device.type == "cuda" else nullcontext():
        return _play_round(fleet, state)


def _play_round(fleet: Fleet, state: State) -> tuple[State, Round]:
    busy = [run for run, spec in enumerate(fleet.specs) if state.rounds[run] < spec.rounds]
    timelines, attended = timeline.attend(fleet.clocks, state.timelines, state.rounds + 1, busy)
    plan = plan_round(fleet, state.rounds, busy, attended)
    pieces = list(chunks(plan.lanes, fleet.chunk, whole=fleet.attackers is not None))
    early = any(state.rounds[run] < fleet.compile_after for run in busy)
    train, score = (fleet.early, fleet.early_score) if early else (fleet.train, fleet.score)
    measured = any(fleet.specs[run].is_measured(int(state.rounds[run]) + 1) for run in busy)
    if fleet.server is not None and len(pieces) == 1 and not measured:
        return _play_plain(fleet, fleet.server, train, score, state, plan)
    model, buffers = adapters.lift(fleet.space, state.params), without(state.buffers, fleet.frozen)
    opened = _open_round(fleet, state, model, buffers)
    counted = [_count_lanes(fleet, state, opened, *lanes) for lanes in _trained(fleet, train, state, plan, pieces)]
    sums = opened.sums
    merged = rules.merge(fleet.rules, sums, opened.kept, buffers, state.rule)
    stepped, arrays = carried.conclude(fleet.algorithms, state.carried, opened.gathered, sums, merged)
    after, moments = optimizers.step(fleet.optimizers, stepped, state.moments, model)
    state = replace(
        state,
        rounds=advanced(state.rounds, busy),
        params=adapters.lower(fleet.space, after, model, state.params),
        buffers={**state.buffers, **merged.buffers},
        moments=moments,
        carried=arrays,
        rule=merged.state,
        timelines=timelines,
        versions=versions.keep(state.versions, timelines, state.rounds + 1, state.params, state.buffers),
    )
    if opened.norms is not None and state.medians is not None:
        state = replace(state, medians=norm_bounds.close_round(opened.norms, state.medians))
    played = _record(fleet, score, state, plan.sampled, sums, merged, opened.zeros)
    state = replace(state, looks=_look(fleet, state, sums))
    return state, replace(played, counted=tuple(counted), attended=attended)


class OpenRound(NamedTuple):
    """What the lanes of a round are added to."""

    sums: tallies.Sums
    kept: rules.Kept  # updates for rules that need all of them at once
    gathered: carried.RoundSums | None  # for algorithms that carry arrays from round to round
    zeros: Tensor  # int64 [run, layer], updates that are zero
    norms: norm_bounds.RoundNorms | None


def _open_round(fleet: Fleet, state: State, model: Tensor, buffers: Stacked) -> OpenRound:
    sums = tallies.empty(model, buffers, fleet.columns.number, fleet.rules.further)
    norms = None
    if fleet.bounds is not None and state.medians is not None:
        norms = norm_bounds.open_round(fleet.bounds, state.medians, model)
    return OpenRound(
        sums=sums,
        kept={},
        gathered=carried.open_round(fleet.algorithms, state.carried, sums),
        zeros=torch.zeros(len(fleet.specs), len(fleet.layers.names), dtype=torch.int64, device=fleet.device),
        norms=norms,
    )


def _play_plain(
    fleet: Fleet,
    server: ServerPart,
    train: LocalTrainer,
    score: Scorer,
    state: State,
    plan: Plan,
) -> tuple[State, Round]:
    """A round of a fleet for which `server` is all that follows training."""
    ((ready, trained),) = _trained(fleet, train, state, plan, [plan.lanes])
    batch = ready.batch
    done = server(batch.run, ready.weights, trained, state.params, state.moments, state.buffers)
    state = replace(
        state,
        rounds=advanced(state.rounds, [*plan.sampled]),
        params=done.params,
        moments=done.moments,
        buffers={**state.buffers, **done.buffers},
    )
    counted = ((batch.run, batch.client, verdicts(done.counted, None)),)
    return state, _round(fleet, score, state, plan.sampled, done.table, counted=counted)


def _trained(
    fleet: Fleet, train: LocalTrainer, state: State, plan: Plan, pieces: Sequence[np.ndarray]
) -> Iterator[tuple[ReadyLanes, Trained]]:
    """Pieces of the lanes of a round with the results of their training, in order."""
    starts = carried.starts(fleet.algorithms, state.params, state.moments.z)

    def lay_out(lanes: np.ndarray) -> ReadyLanes:
        begun = versions.begin(state.versions, state.rounds + 1, lanes, starts, state.buffers)
        drawn = plan.laid if plan.laid is not None and len(lanes) == len(plan.lanes) else lay(fleet, lanes)
        return ReadyLanes(lanes, *drawn, begun)

    def train_lanes(ready: ReadyLanes) -> Trained:
        terms = carried.lane_terms(fleet.algorithms, state.carried, ready.batch)
        rest = (fleet.pools, unflatten(ready.begun.params, fleet.shapes), ready.begun.buffers, *terms)
        return train(Assignment(fleet.model, replace(ready.batch, run=ready.begun.rows), *rest))

    return train_shared(fleet.ranks, map(lay_out, pieces), train_lanes, state.params)


def _count_lanes(
    fleet: Fleet, state: State, opened: OpenRound, ready: ReadyLanes, trained: Trained
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Add trained lanes to the sums of the round; returns the run and client of each, and which were counted."""
    sums, norms = opened.sums, opened.norms
    lanes, lane_batch, weights, begun = ready
    updates = carried.sent(fleet.algorithms, state.carried, lane_batch, trained.flat)
    if fleet.attackers is not None:
        updates = attacks.send(fleet.attackers, lane_batch, state.rounds + 1, updates)
    updates = adapters.lift_updates(fleet.space, begun.params, begun.rows, updates)
    updates = versions.discount(fleet.clocks, state.rounds + 1, lanes, updates)
    sent = trained._replace(flat=updates, buffers=without(trained.buffers, fleet.frozen))
    find_long = None if fleet.bounds is None or norms is None else partial(norm_bounds.find_long, fleet.bounds, norms)
    added = rules.add(fleet.rules, sums, opened.kept, lane_batch.run, weights, sent, lane_batch.client, find_long)
    versions.silence(fleet.clocks, state.rounds + 1, lanes, sums.votes, added.updates, added.counted)
    measured = [run for run, spec in enumerate(fleet.specs) if spec.is_measured(int(state.rounds[run]) + 1)]
    rows = np.flatnonzero(np.isin(lane_batch.run, measured))
    if len(rows):
        picked: slice | Tensor = slice(None) if len(rows) == lane_batch.size else ship(rows, fleet.device)
        owner = ship(lane_batch.run[rows], fleet.device)
        votes.count_zeros(opened.zeros, owner, fleet.layers, added.updates[picked], added.counted[picked])
    carried.gather(fleet.algorithms, state.carried, opened.gathered, lane_batch, weights, trained, added.counted)
    return lane_batch.run, lane_batch.client, verdicts(added.counted, added.longer)


def _record(
    fleet: Fleet,
    score: Scorer,
    state: State,
    sampled: dict[int, np.ndarray],
    sums: tallies.Sums,
    merged: tallies.Merged,
    zeros: Tensor,
) -> Round:
    """The round's numbers with those of its votes, still on the device."""
    measured = {
        run: _count_votes(fleet, state, run, sums, merged, zeros[run])
        for run in sampled
        if fleet.specs[run].is_measured(int(state.rounds[run]))
    }
    table = numbers(fleet.task, fleet.columns, sums, merged)
    return _round(fleet, score, state, sampled, table, votes=measured, broken=merged.broken)


def _round(
    fleet: Fleet, score: Scorer, state: State, sampled: dict[int, np.ndarray], table: Tensor, **more: Any
) -> Round:
    """A round with its scores."""
    scores, clients = _evaluate(fleet, score, state, sorted(sampled))
    return Round(state.rounds.copy(), sampled, table, scores, client_scores=clients, names=fleet.task.names, **more)


def _count_votes(
    fleet: Fleet, state: State, run: int, sums: tallies.Sums, merged: tallies.Merged, zeros: Tensor
) -> votes.VoteCounts:
    rule = fleet.rules.votes_needed(run)
    mask = None if rule is None or merged.mask is None else merged.mask[run]
    counts, clients, mean, before = sums.votes[run], sums.clients[run], merged.mean[run], state.looks[run]
    most = fleet.specs[run].clients_per_round
    return votes.count(counts, clients, fleet.layers, mean, mask, most=most, zeros=zeros, rule=rule, before=before)


def _look(fleet: Fleet, state: State, sums: tallies.Sums) -> tuple[tuple[Tensor, Tensor] | None, ...]:
    """The entries that passed the threshold, for runs whose votes are measured in this round.

    The extra measurement of a last round is not kept: a run extended to more rounds must not depend on it.
    """
    looks = list(state.looks)
    for run, spec in enumerate(fleet.specs):
        round, rule = int(state.rounds[run]), fleet.rules.votes_needed(run)
        if rule is not None and spec.is_measured(round, extra=False):
            looks[run] = votes.look(sums.votes[run], sums.clients[run], rule[0], round, looks[run])
    return tuple(looks)


def _evaluate(
    fleet: Fleet, score: Scorer, state: State, runs: list[int]
) -> tuple[dict[str, tuple[np.ndarray, Tensor]], dict[int, Tensor]]:
    """Evaluate the runs that are due on their test pools: name -> (runs, [run, figure]), and run -> [client]."""
    scores: dict[str, list[tuple[np.ndarray, Tensor]]] = {}
    clients: dict[int, Tensor] = {}
    due = [run for run in runs if fleet.specs[run].is_due(int(state.rounds[run]))]
    for name, pool, rows in test_pools(fleet.tests, due):
        picked = ship(rows, fleet.device)
        params = unflatten(optimizers.evaluated(fleet.optimizers, state.moments, state.params)[picked], fleet.shapes)
        buffers = {key: value[picked] for key, value in state.buffers.items()}
        with float32_precision(fleet.precision):
            loss, measured = sample_scores(score, params, buffers, pool, batch=fleet.eval_batch, over=fleet.ranks.map)
        scores.setdefault(name, []).append((rows, split_figures(fleet.task, fleet.columns, loss, measured, pool.y)))
        for row, run in enumerate(rows.tolist()):
            if name == "test" and (samples := fleet.client_tests[run]) is not None:
                clients[run] = client_figure(fleet.task, fleet.columns, loss[row], measured[row], pool.y, samples)
    return {n: (np.concatenate([r for r, _ in v]), torch.cat([m for _, m in v])) for n, v in scores.items()}, clients


def restore(fleet: Fleet, states: Sequence[dict[str, np.ndarray]]) -> State:
    """The fleet's state from one exported state for each run."""
    if len(states) != len(fleet.specs):
        raise ConfigError(f"expected one state for each of {len(fleet.specs)} runs, got {len(states)}")
    return restored(fleet, start(fleet), states)


def _initial(fleet: Fleet, spec: RunSpec) -> tuple[Stacked, Stacked]:
    sample = spec.federation.train
    model = build(spec.model, input_shape(sample), sample.classes, seed(spec.seed, "init")).to(fleet.device)
    params, buffers = named_tensors(model)
    return {name: value.detach() for name, value in params.items()}, buffers
