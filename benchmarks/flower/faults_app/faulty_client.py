"""The example's client with faults: `faults = "nan:1@2 late:0@7"` is kind:partition@round."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fmnist_gma import client_app

from fedgma.flower import identify

app = ClientApp()
app.query()(identify)


@app.train()
def train(message: Message, context: Context) -> Message:
    partition, round = context.node_config["partition-id"], message.content["config"]["server-round"]
    faults = dict(word.split(":")[::-1] for word in str(context.run_config["faults"]).split())
    kind = faults.get(f"{partition}@{round}", "")
    if kind == "killed":
        Path(str(context.run_config["signs"]), f"node-{partition}").touch()  # whoever waits for it kills this node
        time.sleep(600)
    if kind == "late":
        time.sleep(float(context.run_config["timeout"]) + 30)
    return spoiled(kind, client_app.train(message, context), message)


def spoiled(kind: str, answer: Message, message: Message) -> Message:
    arrays = {name: array.numpy() for name, array in answer.content["arrays"].items()}
    metrics = dict(answer.content["metrics"])
    last = list(arrays)[-1]
    if kind == "nan":
        arrays[last] = np.full_like(arrays[last], np.nan)
    if kind == "shape":
        arrays[last] = arrays[last][:1] + np.float32(9)  # numpy would broadcast it
    if kind == "weight":
        metrics["num-examples"] = 10**18
    record = ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=message)
