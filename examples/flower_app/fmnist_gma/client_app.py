"""The client: trains the global model on its own part of the data."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgma.flower import identify
from fmnist_gma import task

app = ClientApp()
app.query()(identify)  # tells the server which part this node holds, so that a seed samples the same parts anywhere


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train, and send the whole model back with the number of samples."""
    local = task.train(
        task.words_of(context.run_config),
        message.content["arrays"].to_torch_state_dict(),
        round=int(message.content["config"]["server-round"]),
        client=int(context.node_config["partition-id"]),
    )
    metrics = MetricRecord({"num-examples": local.samples, "loss": local.loss})
    return Message(RecordDict({"arrays": ArrayRecord(local.model), "metrics": metrics}), reply_to=message)
