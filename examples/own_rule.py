"""Your own rule: ten lines, and the same step everywhere.

    python examples/own_rule.py
    fedgma run aggregator=mean,examples/own_rule.py:Trust rounds=50

`Trust` moves an entry as far as its clients agreed lately, in size and not in number. It is a function of sums: the
names of its arguments say which. The program takes two rounds with it through every way into a server and compares the
models: a stack of updates, a stream, merged tallies that were sent as bytes, the simulator's fleet on the CPU and on a
GPU if there is one, the server of the Flower strategy, and a secure sum. Replace `Trust` by your own.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import fedgma
from fedgma.aggregation.own import as_rule
from fedgma.aggregation.secure import Encoding, decode, encode
from fedgma.simulation.batched import rules, tallies
from fedgma.training.lane_batch import Trained
from fedgma.training.stacked import flatten, unflatten


class Trust:
    """The mean, times the share of each entry's movement that does not cancel, averaged over rounds."""

    state = {"trust": 1.0}  # handed from round to round, with its first value  # noqa: RUF012

    def __call__(self, mean: Any, total: Any, positive: Any, negative: Any, trust: Any) -> tuple[Any, Any, Any]:
        """(mean, mask, state) of one array of the model."""
        agreement = abs(total) / (positive + negative + 1e-30)
        trust = 0.5 * trust + 0.5 * agreement
        return mean, trust, {"trust": trust}


RULE = as_rule(Trust)
SHAPES = {"conv.weight": (8, 3, 3, 3), "head.weight": (10, 72), "head.bias": (10,)}
CLIENTS, ROUNDS = 6, 2
COUNTS = [40, 10, 25, 60, 5, 30]  # samples of each client
Update = dict[str, np.ndarray]


def updates_of(round: int) -> list[Update]:
    """What each client's training changed in a round; random here."""
    rng = np.random.default_rng(round)
    return [{n: 0.1 * rng.standard_normal(s, dtype=np.float32) for n, s in SHAPES.items()} for _ in range(CLIENTS)]


def stacked() -> Iterator[Update]:
    """All updates of a round at once."""
    state = None
    for round in range(ROUNDS):
        clients = updates_of(round)
        merged = RULE({name: np.stack([c[name] for c in clients]) for name in SHAPES}, COUNTS, state=state)
        state = merged.state
        yield merged.update


def streamed() -> Iterator[Update]:
    """One update after the other, in another order; none is kept."""
    state = None
    for round in range(ROUNDS):
        tally = RULE.open()
        for client in reversed(range(CLIENTS)):
            tally.add(updates_of(round)[client], COUNTS[client])
        merged = RULE.conclude(tally, state)
        state = merged.state
        yield merged.update


def sent_as_bytes() -> Iterator[Update]:
    """Two servers that count half of the clients each; one sends its tally to the other."""
    state = None
    for round in range(ROUNDS):
        halves = [RULE.open(), RULE.open()]
        for client, update in enumerate(updates_of(round)):
            halves[client % 2].add(update, COUNTS[client])
        halves[0].merge(fedgma.from_bytes(fedgma.to_bytes(halves[1])))
        merged = RULE.conclude(halves[0], state)
        state = merged.state
        yield merged.update


def in_a_fleet(device: str) -> Iterator[Update]:
    """The third of three runs that are aggregated together, as the simulator does it."""
    shapes = [(name, torch.Size(shape)) for name, shape in SHAPES.items()]
    laid = rules.lay_out([fedgma.mean(), RULE, RULE], CLIENTS, shapes, torch.device(device))
    run, none = np.repeat(np.arange(3), CLIENTS), torch.zeros(3 * CLIENTS, device=device)
    params = torch.zeros(3, sum(shape.numel() for _, shape in shapes), device=device)
    state = rules.first_state(laid, params)
    for round in range(ROUNDS):
        clients = updates_of(round)
        rows = flatten({name: torch.from_numpy(np.stack([c[name] for c in clients])) for name in SHAPES})
        trained = Trained(rows.repeat(3, 1).to(device), shapes, {}, none, none[:, None])
        sums = tallies.empty(params, {}, further=laid.further)
        rules.add(laid, sums, {}, run, np.tile(COUNTS, 3), trained)
        merged = rules.merge(laid, sums, {}, {}, state)
        state, moved = merged.state, (merged.mean * merged.mask).cpu()
        yield {name: value[2].numpy() for name, value in unflatten(moved, shapes).items()}


def on_flower() -> Iterator[Update]:
    """The server that Flower's strategy hands its replies to."""
    from fedgma.flower import Masked

    server = Masked(aggregator=Trust, norm_factor=None, share_cap=None).server
    for round in range(ROUNDS):
        model = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        moved = server.step(model, zip(updates_of(round), COUNTS, range(CLIENTS), strict=True)).params
        assert moved is not None
        yield moved


def secure() -> Iterator[Update]:
    """Clients encode, a secure sum adds, the server sees the total alone; values are rounded to levels."""
    encoding, state = Encoding(clip=1.0, max_weight=64, bits=30), None
    like = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for round in range(ROUNDS):
        clients = zip(updates_of(round), COUNTS, strict=True)
        total = sum(encode(update, count, encoding, further=RULE.further) for update, count in clients)
        merged = RULE.conclude(decode(total, like, encoding, further=RULE.further).tally, state)
        state = merged.state
        yield merged.update


def distance(actual: Iterator[Update], expected: list[Update]) -> float:
    """The largest difference of an entry over all rounds."""
    pairs = zip(actual, expected, strict=True)
    return max(float(abs(step[name] - other[name]).max()) for step, other in pairs for name in SHAPES)


def main() -> dict[str, float]:
    """Take the step in every way; returns how far each is from that of the stack of updates."""
    expected = list(stacked())
    ways = {"streamed": streamed(), "merged bytes": sent_as_bytes(), "fleet, CPU": in_a_fleet("cpu")}
    if torch.cuda.is_available():
        ways["fleet, GPU"] = in_a_fleet("cuda")
    try:
        import flwr  # noqa: F401

        ways["Flower"] = on_flower()
    except ImportError:
        print("Flower         is not installed")
    ways["secure sum"] = secure()
    print(f"a rule that reads: {', '.join(RULE.reads)}; further sums: {', '.join(RULE.further)}")
    apart = {name: distance(actual, expected) for name, actual in ways.items()}
    for name, difference in apart.items():
        print(f"{name:<14} {'the same bits' if difference == 0 else f'within {difference:.1e}'}")
        assert difference <= (1e-6 if name in ("fleet, GPU", "secure sum") else 0), name
    return apart


if __name__ == "__main__":
    main()
