"""The client."""

import time

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from kills_app import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    local = task.train(model, int(message.content["config"]["server-round"]), client)
    time.sleep(float(context.run_config["pause"]))
    arrays = ArrayRecord({name: Array(value) for name, value in local.items()})
    metrics = MetricRecord({"num-examples": task.SAMPLES})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
