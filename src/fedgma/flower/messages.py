"""Flower's messages: sampling nodes, and receiving replies one at a time from the nodes that were asked."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from logging import INFO, WARNING

import httpx
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.app.exception import AppExitException
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedgma.errors import NotEnoughClients
from fedgma.flower.left_out import listed
from fedgma.flower.replies import shorten
from fedgma.seeds import generator

PAUSE = 0.5  # seconds between checks for replies
INTRODUCTION = 120.0  # seconds to wait for identities; each node starts a process to reply
SILENCE = 900.0  # seconds until a node that did not reply is asked again, since that holds up the round
IDENTITY = "identity"  # name of the record that holds a node's identity
LONGEST = 200  # characters of an identity


def send_and_receive(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Send messages and yield each reply as it arrives, until all have arrived or the time is over.

    Replies are fetched one at a time, so that only one model is in memory. Each message has one reply, and it is that
    of the node that was asked: a reply that cannot be read or that names another node, run or message is yielded as
    the error reply of the node that was asked.
    """
    deadline = time.monotonic() + timeout
    sent = list(messages)
    waiting = {message_id: sent[position] for position, message_id in enumerate(grid.push_messages(sent)) if message_id}
    while waiting and time.monotonic() < deadline:
        for message_id, message in tuple(waiting.items()):
            reply = _pull(grid, message_id, message)
            if reply is not None:
                del waiting[message_id]
                yield reply
        if waiting:
            time.sleep(PAUSE)
    if waiting:
        late = listed(tuple(message.metadata.dst_node_id for message in waiting.values()))
        log(WARNING, "%d replies did not arrive within %g s; continuing without %s", len(waiting), timeout, late)


def _pull(grid: Grid, message_id: str, message: Message) -> Message | None:
    """The reply to a message, if it has arrived; without a SuperLink, raises what Flower raises."""
    try:
        pulled = list(grid.pull_messages([message_id]))
    except (httpx.HTTPError, OSError, AppExitException):
        raise
    except Exception as error:  # Flower builds the reply from untrusted bytes
        return _failure(message, f"the reply cannot be read: {type(error).__name__}: {error}")
    if not pulled:
        return None
    reply = pulled[0]
    if reply.has_error():  # Flower's own error replies do not name the node
        return _failure(message, reply.error.reason, reply.error.code)
    claimed, asked = reply.metadata, message.metadata
    if claimed.src_node_id != asked.dst_node_id:
        return _failure(message, f"the reply claims to come from node {claimed.src_node_id}")
    if (claimed.run_id, claimed.reply_to_message_id) != (asked.run_id, message_id):
        return _failure(message, "the reply is to another message")
    return reply


def _failure(message: Message, reason: str | None, code: int = 0) -> Message:
    return Message(error=Error(code=code, reason=shorten(reason)), reply_to=message)


def identify(message: Message, context: Context) -> Message:
    """Reply with a node's identity; register it in a ClientApp: `app.query()(identify)`."""
    key = str(message.content[IDENTITY]["key"])
    answer = ConfigRecord({"value": context.node_config.get(key, "")})
    return Message(content=RecordDict({IDENTITY: answer}), reply_to=message)


class Roster:
    """Orders nodes independently of their ids, which Flower draws anew for every connection.

    By default nodes are ordered by public key, which is the same in every run with node authentication. With
    `identity`, a key of the node config such as "partition-id", each node is asked once for its value, and nodes are
    ordered by it; then a seed samples the same partitions in every federation, simulated or deployed. No two connected
    nodes have the same identity.
    """

    def __init__(self, identity: str | None = None) -> None:
        self.identity = identity
        self._known: dict[int, tuple[bool, float, str]] = {}
        self._silent: dict[int, float] = {}  # when to ask a node again that did not reply

    def order_nodes(self, grid: Grid) -> list[int]:
        """All connected nodes, in order; with `identity`, only those that have one of their own."""
        keys = {int(node.node_id): bytes(node.public_key) for node in grid.get_nodes()}
        if self.identity is None:
            return sorted(keys, key=lambda node: (keys[node], node))
        self._known = {node: value for node, value in self._known.items() if node in keys}
        now = time.monotonic()
        new = [node for node in sorted(keys) if node not in self._known and now >= self._silent.get(node, now)]
        self._ask_identities(grid, new)
        return sorted(self._known, key=lambda node: (self._known[node], keys[node], node))

    def _ask_identities(self, grid: Grid, nodes: list[int]) -> None:
        """Ask nodes for their identities; those without a valid one of their own are asked again next time.

        A node keeps its identity while it is connected. If several new nodes claim the same one, none of them gets it:
        at most one of them tells the truth.
        """
        content = RecordDict({IDENTITY: ConfigRecord({"key": str(self.identity)})})
        messages = [Message(content=content, message_type=MessageType.QUERY, dst_node_id=node) for node in nodes]
        claims: dict[tuple[bool, float, str], list[int]] = {}
        silent = set(nodes)
        for reply in send_and_receive(grid, messages, INTRODUCTION) if messages else ():
            node = int(reply.metadata.src_node_id)
            silent.discard(node)
            try:
                claims.setdefault(_read_identity(reply), []).append(node)
            except Exception as error:  # untrusted bytes may raise anything
                log(WARNING, "node %s has no valid %r and is not sampled: %s", node, self.identity, shorten(error))
        self._silent.update(dict.fromkeys(silent, time.monotonic() + SILENCE))
        holders = {value: node for node, value in self._known.items()}
        for value, claimants in claims.items():
            others = [*claimants, *([holders[value]] if value in holders else [])]
            if len(others) == 1:
                self._known[claimants[0]] = value
                continue
            message = "nodes %s claim the same %r; %s not sampled"
            log(WARNING, message, sorted(others), self.identity, f"{sorted(claimants)} are")


def _read_identity(reply: Message) -> tuple[bool, float, str]:
    """A node's identity as a sort key: numbers by size, then strings."""
    if reply.has_error():
        raise ValueError(reply.error.reason)
    value = reply.content[IDENTITY]["value"]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return (False, float(value), "")
    if isinstance(value, str) and 0 < len(value) <= LONGEST:
        return (True, 0.0, value)
    raise ValueError(f"expected a number or a text of at most {LONGEST} characters, got {shorten(repr(value)[:100])}")


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
