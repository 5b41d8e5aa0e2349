"""Flower's own messages without its processes: a grid that calls the nodes' functions itself."""

import itertools

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")

from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

for name in ("run_id", "node_id", "task_id"):  # messages are made in the name of a running task
    setattr(TaskIdentity, name, 1)


def record(arrays):
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def asked(node):
    message = Message(content=RecordDict(), message_type=MessageType.TRAIN, dst_node_id=node)
    message.metadata.__dict__["_message_id"] = f"m{node}"
    return message


def reply(node, arrays, weight=10, **metrics):
    content = RecordDict({"arrays": record(arrays), "metrics": MetricRecord({"num-examples": weight, **metrics})})
    return Message(content=content, reply_to=asked(node))


def failure(node, reason="out of memory"):
    return Message(error=Error(code=0, reason=reason), reply_to=asked(node))


class Clock:
    """Stands for the module `time`: it moves while somebody sleeps, so no test waits and none runs out of time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Nodes:
    """A grid with these nodes; `answers` maps (node, message) to a reply, to None (never comes) or raises."""

    def __init__(self, ids, answer=None, keys=None):
        self.ids, self.answer, self.keys = list(ids), answer, keys or {}
        self.pushed, self.most_held = {}, 0
        self.numbers = itertools.count()  # several runs may push at once

    def get_nodes(self):
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.ids]

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{next(self.numbers)}"
            self.pushed[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids):
        self.most_held = max(self.most_held, len(ids))
        replies = [self.answer(self.pushed[one].metadata.dst_node_id, self.pushed[one]) for one in ids]
        return [one for one in replies if one is not None]


def running(app, config, partitions):
    """An answer for `Nodes`: what a ClientApp answers on the node that holds a partition."""

    def answer(node, message):
        held = {"partition-id": partitions[node], "num-partitions": len(partitions)}
        return app(message, Context(1, node, held, RecordDict(), dict(config)))

    return answer
