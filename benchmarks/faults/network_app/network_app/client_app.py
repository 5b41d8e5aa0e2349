"""A client whose update depends on the model, the round and its partition, and on nothing else."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition, round = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    local = {}
    for name, array in message.content["arrays"].items():
        before = array.numpy()
        change = np.sin(np.arange(before.size) * (partition + 1) + round).reshape(before.shape)
        local[name] = Array((before * 0.9 + change).astype(before.dtype))
    metrics = MetricRecord({"num-examples": 10 * (partition + 1)})
    return Message(RecordDict({"arrays": ArrayRecord(local), "metrics": metrics}), reply_to=message)
