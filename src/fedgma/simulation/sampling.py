"""Random draws for a round: the clients that take part and the order of their samples.

A draw depends only on federation, seed, round and client, so the arms of a comparison have the same draws. Each draw is
made once and shared by all runs that need it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedgma.data.augmentations import draw_variants
from fedgma.seeds import generator, seed, seeds
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.timeline import Attendance
from fedgma.training.batches import batch_order, stack_orders
from fedgma.training.many_orders import batch_orders, generators


class Drawn(NamedTuple):
    """The draws of lanes."""

    batches: tuple[np.ndarray, np.ndarray, np.ndarray]  # order [lane], orders [order, step, batch], counts [lane, step]
    seeds: np.ndarray  # int64 [lane], of dropout masks
    samples: np.ndarray  # int64 [lane], how many a client has


def sample_clients(spec: RunSpec, round: int) -> np.ndarray:
    """The clients sampled in a round, uniformly and without replacement, in rising order.

    Those without samples, or with fewer than the smallest batch, are left out.
    """
    return _sample(generator(spec.seed, "cohort", round), spec)


def _sample(source: np.random.Generator, spec: RunSpec) -> np.ndarray:
    drawn = source.choice(len(spec.sizes), spec.clients_per_round, replace=False)
    drawn.sort()
    return drawn[spec.sizes[drawn] >= spec.smallest_batch]


def sample_all_clients(
    specs: Sequence[RunSpec], rounds: np.ndarray, runs: Sequence[int], attended: Mapping[int, Attendance] | None = None
) -> dict[int, np.ndarray]:
    """The clients of some runs in their rounds [run]; runs with the same draw share one array.

    A run with a clock is in `attended`, which says who is counted.
    """
    known = attended or {}
    numbers = rounds.tolist()
    keys: dict[int, tuple[int, ...]] = {}
    for run in runs:
        if run not in known:
            spec = specs[run]
            keys[run] = (id(spec.federation), spec.seed, numbers[run], spec.clients_per_round, spec.smallest_batch)
    firsts = {key: run for run, key in reversed(keys.items())}
    seeds_of = np.array([seed(specs[run].seed, "cohort", numbers[run]) for run in firsts.values()], np.uint64)
    sources = zip(firsts.items(), generators(seeds_of), strict=True)
    drawn = {key: _sample(source, specs[run]) for (key, run), source in sources}
    return {run: known[run].clients if run in known else drawn[keys[run]] for run in runs}


def lay_lanes(sampled: Mapping[int, np.ndarray], rounds: np.ndarray, attended: Mapping[int, Attendance]) -> np.ndarray:
    """Run, client and round of every lane, int64 [lane, 3]; with a clock, the round in which the client started."""
    lanes = np.empty((sum(map(len, sampled.values())), 3), np.int64)
    begin = 0
    for run, clients in sampled.items():
        part = lanes[begin : begin + len(clients)]
        begin += len(clients)
        part[:, 0], part[:, 1] = run, clients
        part[:, 2] = attended[run].rounds if run in attended else rounds[run]
    return lanes


def chunks(lanes: np.ndarray, size: int, *, whole: bool = False) -> Iterator[np.ndarray]:
    """The lanes [lane, 3] in order, at most `size` at a time and no piece much smaller than the others.

    With `whole`, all clients of a run are in one piece, even if they are more than `size`.
    """
    if not len(lanes):
        return
    ends = np.arange(1, len(lanes) + 1)
    if whole:
        ends = np.append(np.flatnonzero(np.diff(lanes[:, 0])) + 1, len(lanes))
        size = max(1, size // int(np.diff(ends, prepend=0).max()))  # in runs
    pieces = -(-len(ends) // size)
    step = -(-len(ends) // pieces)  # all but the last have the same size: one shape to compile
    begin = 0
    for last in [*range(step - 1, len(ends) - 1, step), len(ends) - 1]:
        yield lanes[begin : ends[last]]
        begin = int(ends[last])


def steps_of_a_round(specs: Sequence[RunSpec], chunk: int) -> tuple[int, int]:
    """How many steps are called one after the other in a round, and how many lanes the largest of them has.

    The steps are those of the largest client, for each chunk of lanes.
    """
    largest: dict[int, int] = {}
    longest = 1
    for spec in specs:
        size = largest.setdefault(id(spec.federation), 0) or max(map(len, spec.federation.clients))
        largest[id(spec.federation)] = size
        steps = spec.local_epochs * -(-size // spec.batch_size)
        longest = max(longest, steps if spec.local_steps is None else min(steps, spec.local_steps))
    lanes = sum(spec.clients_per_round for spec in specs)
    return longest * -(-lanes // chunk), min(lanes, chunk)


def draw_batches(specs: Sequence[RunSpec], rounds: np.ndarray, clients: np.ndarray) -> Drawn:
    """The batches of lanes, given the spec, round and client of each lane; those of one run are distinct."""
    holdings = [spec.federation.clients[client] for spec, client in zip(specs, clients.tolist(), strict=True)]
    order, firsts = _distinct_draws(specs, rounds.tolist(), clients.tolist(), holdings)
    chosen = [specs[lane] for lane in firsts.tolist()]
    for_batches, for_dropout = _seeds_of(("batches", "dropout"), chosen, rounds[firsts], clients[firsts])
    picked = rounds[firsts], clients[firsts], [holdings[lane] for lane in firsts.tolist()]
    orders, counts = _draw_all(chosen, *picked, for_batches.astype(np.uint64))
    samples = np.array([len(samples) for samples in holdings], np.int64)
    return Drawn((order, orders, counts[order]), for_dropout[order], samples)


def _lengths(spec: RunSpec) -> tuple[int | None, ...]:
    """What decides how many batches a client draws; augmentation is the same in a fleet."""
    return spec.local_epochs, spec.batch_size, spec.local_steps, spec.smallest_batch


def _distinct_draws(
    specs: Sequence[RunSpec], rounds: list[int], clients: list[int], holdings: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Which draw every lane has, and the first lane of each."""
    if all(spec is specs[0] for spec in specs):
        return np.arange(len(specs)), np.arange(len(specs))
    same = {spec: (spec.seed, *_lengths(spec)) for spec in set(specs)}
    rows: dict[tuple[object, ...], int] = {}
    firsts: list[int] = []
    order = np.empty(len(specs), np.int64)
    for lane, (spec, round, client) in enumerate(zip(specs, rounds, clients, strict=True)):
        key = (id(holdings[lane]), round, client, same[spec])
        order[lane] = rows.setdefault(key, len(rows))
        if len(rows) > len(firsts):
            firsts.append(lane)
    return order, np.array(firsts, np.int64)


def _draw_all(
    specs: Sequence[RunSpec], rounds: np.ndarray, clients: np.ndarray, holdings: Sequence[np.ndarray], keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The batches of distinct draws [draw, step, batch] and their counts [draw, step]; at once where they are many."""
    first = specs[0]
    if first.augment == "none" and all(_lengths(spec) == _lengths(first) for spec in set(specs)):
        lengths = {"epochs": first.local_epochs, "batch": first.batch_size, "least": first.smallest_batch}
        if (together := batch_orders(holdings, keys, steps=first.local_steps, **lengths)) is not None:
            return together
    lanes = zip(specs, rounds.tolist(), clients.tolist(), holdings, strict=True)
    return stack_orders([_draw(*lane) for lane in lanes], first.batch_size)


def _seeds_of(
    purposes: Sequence[str], specs: Sequence[RunSpec], rounds: np.ndarray, clients: np.ndarray
) -> list[np.ndarray]:
    """The seeds of every lane for each purpose, int64."""
    groups: dict[tuple[int, int], list[int]] = {}
    for lane, (spec, round) in enumerate(zip(specs, rounds.tolist(), strict=True)):
        groups.setdefault((spec.seed, round), []).append(lane)
    drawn = [np.empty(len(specs), np.int64) for _ in purposes]
    for (root, round), lanes in groups.items():
        last = clients[lanes].tolist()
        for purpose, of_purpose in zip(purposes, drawn, strict=True):
            of_purpose[lanes] = seeds(root, purpose, round, last=last)
    return drawn


def _draw(spec: RunSpec, round: int, client: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A client's batches of a round, and how many samples of each are real."""
    key = {"seed": spec.seed, "round": round, "client": client}
    size, epochs, steps, least = spec.batch_size, spec.local_epochs, spec.local_steps, spec.smallest_batch
    index, counts = batch_order(samples, **key, epochs=epochs, batch=size, steps=steps, least=least)
    return draw_variants(index, spec.augment, **key), counts
