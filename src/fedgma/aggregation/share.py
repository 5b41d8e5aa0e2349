"""A cap on one client's share of a round's weight, for servers that count replies one at a time.

Weights come from the clients, so a client that overstates its samples would own the mean. Only one client can have
more than half of the weight: the one with the largest. It is held back until the others are counted, at the cost of one
more update in memory, and then counts with at most its share.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from fedgma.aggregation.gate import Gate, Refused, check_norms, read_mapping, read_weight
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.tally import Tally

Reply = tuple[Any, object, Hashable]  # update, weight, client


class Capped(NamedTuple):
    """A client that counted with less than its own weight."""

    client: Hashable
    weight: float
    counted: float


def cap_share(
    replies: Iterable[Reply], tally: Tally, rule: Rule, share: float, capped: list[Capped]
) -> Iterator[Reply]:
    """Pass replies on to the tally, the valid one with the largest weight last and with at most this share.

    `share` is at least one half and below one. A client whose weight was cut is added to `capped`.
    """
    held: Reply | None = None
    largest = 0.0
    known: set[Hashable] = set()
    again: list[Reply] = []  # further replies of the client held back, which the tally refuses as duplicates
    for reply in replies:
        client, weight = reply[2], _read(reply[1], tally.gate)
        if held is not None and client == held[2]:
            again.append(({}, 1, client))
        elif client in known or weight <= largest or not _is_valid(reply[0], tally, rule):
            yield reply
        else:
            if held is not None:
                yield held
            held, largest = reply, weight
        known.add(client)
    if held is not None:
        yield _capped(held, largest, share / (1 - share) * tally.weight, capped)
    yield from again


def _capped(reply: Reply, weight: float, limit: float, capped: list[Capped]) -> Reply:
    """The reply with at most this weight; a client alone (limit 0) counts in full."""
    if not 0 < limit < weight:
        return reply
    capped.append(Capped(reply[2], weight, limit))
    return reply[0], limit, reply[2]


def _read(weight: object, gate: Gate) -> float:
    """A weight, or 0 for one that the gate will refuse."""
    try:
        return read_weight(weight, gate.max_weight)
    except Refused:
        return 0.0


def _is_valid(update: Any, tally: Tally, rule: Rule) -> bool:
    """Whether the gate will let an update pass; else it would be held back in the place of a valid one."""
    try:
        _, arrays = tally.read(read_mapping(rule.prepared(update, tally.buffers)))
        check_norms(tally.parts(arrays), tally.gate, ([], []))
    except Refused:
        return False
    return True
