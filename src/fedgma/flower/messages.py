"""Flower's messages: sampling nodes, receiving replies one at a time, and reading them."""

import time
from collections.abc import Callable, Iterable, Iterator
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedgma.aggregation.gate import Refused, read_weight
from fedgma.aggregation.server import Reply
from fedgma.aggregation.server_round import difference
from fedgma.arrays import Array
from fedgma.errors import NotEnoughClients
from fedgma.seeds import generator

PAUSE = 0.5  # seconds between checks for replies
INTRODUCTION = 120.0  # seconds to wait for identities; each node starts a process to reply
IDENTITY = "identity"  # name of the record that holds a node's identity


def send_and_receive(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Send messages and yield each reply as it arrives, until all have arrived or the time is over.

    Replies are fetched one at a time, so that only one model is in memory.
    """
    deadline = time.monotonic() + timeout
    waiting = [message_id for message_id in grid.push_messages(list(messages)) if message_id]
    while waiting and time.monotonic() < deadline:
        for message_id in tuple(waiting):
            for reply in grid.pull_messages([message_id]):
                if message_id in waiting:
                    waiting.remove(message_id)
                yield reply
        if waiting:
            time.sleep(PAUSE)
    if waiting:
        log(WARNING, "%d replies did not arrive within %g s; continuing without them", len(waiting), timeout)


def identify(message: Message, context: Context) -> Message:
    """Reply with a node's identity; register it in a ClientApp: `app.query()(identify)`."""
    key = str(message.content[IDENTITY]["key"])
    answer = ConfigRecord({"value": context.node_config.get(key, "")})
    return Message(content=RecordDict({IDENTITY: answer}), reply_to=message)


class Roster:
    """Orders nodes independently of their ids, which Flower draws anew for every connection.

    By default nodes are ordered by public key, which is the same in every run with node authentication. With
    `identity`, a key of the node config such as "partition-id", each node is asked once for its value, and nodes are
    ordered by it; then a seed samples the same partitions in every federation, simulated or deployed.
    """

    def __init__(self, identity: str | None = None) -> None:
        self.identity = identity
        self._known: dict[int, tuple[bool, float, str]] = {}

    def order_nodes(self, grid: Grid) -> list[int]:
        """All connected nodes, in order; with `identity`, only those that have replied."""
        keys = {int(node.node_id): bytes(node.public_key) for node in grid.get_nodes()}
        if self.identity is not None:
            self._ask_identities(grid, [node for node in sorted(keys) if node not in self._known])
            known = [node for node in keys if node in self._known]  # the others are asked again next time
            return sorted(known, key=lambda node: (self._known[node], keys[node], node))
        return sorted(keys, key=lambda node: (keys[node], node))

    def _ask_identities(self, grid: Grid, nodes: list[int]) -> None:
        content = RecordDict({IDENTITY: ConfigRecord({"key": str(self.identity)})})
        messages = [Message(content=content, message_type=MessageType.QUERY, dst_node_id=node) for node in nodes]
        for reply in send_and_receive(grid, messages, INTRODUCTION) if messages else ():
            node = int(reply.metadata.src_node_id)
            if reply.has_error():
                log(WARNING, "node %s did not send its %r: %s", node, self.identity, reply.error.reason)
            else:
                self._known[node] = _sortable(reply.content[IDENTITY]["value"])


def _sortable(value: object) -> tuple[bool, float, str]:
    """A sort key: numbers by size, then strings."""
    if isinstance(value, int | float):
        return (False, float(value), "")
    return (True, 0.0, str(value))


def sample(
    roster: Roster,
    grid: Grid,
    *,
    draw: tuple[int, str, int],
    wanted: Callable[[int], int],
    available: int,
    wait: float,
) -> list[int]:
    """Draw nodes by (seed, purpose, round), once enough are connected; `wanted` maps connected to drawn nodes."""
    deadline = time.monotonic() + wait
    while True:
        nodes = roster.order_nodes(grid)
        needed = max(available, wanted(len(nodes)))
        if len(nodes) >= needed:
            break
        if time.monotonic() > deadline:
            raise NotEnoughClients(f"round {draw[2]} needs {needed} nodes, got {len(nodes)} after {wait:g} s")
        log(INFO, "waiting for nodes: %d of %d", len(nodes), needed)
        time.sleep(1)
    drawn = generator(*draw).choice(len(nodes), wanted(len(nodes)), replace=False)
    return [nodes[position] for position in sorted(drawn)]


def read_reply(message: Message, sent: dict[str, Array], weighted_by: str, *, cast: bool) -> Reply:
    """A reply's update, weight and node; an unreadable reply becomes an update that the gate refuses."""
    node = int(message.metadata.src_node_id)
    try:
        (arrays,) = message.content.array_records.values()
        (metrics,) = message.content.metric_records.values()
        local = {name: array.numpy() for name, array in arrays.items()}
    except (ValueError, TypeError, KeyError, EOFError) as error:
        return type(error).__name__, None, node  # type: ignore[return-value]
    return difference(local, sent, cast=cast), metrics.get(weighted_by), node


def without_arrays(content: RecordDict) -> RecordDict:
    """A reply without its arrays, to keep after the arrays have been counted."""
    return RecordDict({name: record for name, record in content.items() if not isinstance(record, ArrayRecord)})


def has_valid_weight(content: RecordDict, weighted_by: str) -> bool:
    """Whether a reply has exactly one metric record, with a valid weight."""
    try:
        (metrics,) = content.metric_records.values()
        read_weight(metrics.get(weighted_by), float("inf"))
    except (ValueError, Refused):
        return False
    return True
