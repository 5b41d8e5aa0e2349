"""The Flower client, in a module of its own: Ray then ships its name and not its data."""

import numpy as np
import torch
import workload
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from network import lenet, train

settings = workload.Settings()
app = ClientApp()
held: dict[str, torch.Tensor] = {}


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """The data set, read once in each worker process."""
    if not held:
        x, y, *_ = workload.data()
        held.update(x=torch.from_numpy(workload.scaled(x)), y=torch.from_numpy(y))
    return held["x"], held["y"]


@app.train()
def fit(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    x, y = samples()
    torch.set_num_threads(1)  # two workers on two cores: the faster of Flower's ways here
    model = lenet()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    order = np.random.default_rng(client).permutation(settings.samples) + client * settings.samples
    train(model, x, y, torch.from_numpy(order))
    metrics = MetricRecord({"num-examples": settings.samples})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
