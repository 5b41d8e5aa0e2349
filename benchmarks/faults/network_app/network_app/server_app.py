"""The server: masked averaging with a server optimiser, so that a reply that counts twice shows in the model."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedgma
from fedgma.flower import Masked

app = ServerApp()


def initial() -> ArrayRecord:
    values = np.linspace(-1, 1, 50_000, dtype=np.float32)
    return ArrayRecord({"w": Array(values.reshape(250, 200)), "b": Array(values[:200].copy())})


def strategy(nodes: int, retries: int = 0) -> Masked:
    counts = {"min_train_nodes": nodes, "min_available_nodes": nodes}
    return Masked(optimizer=fedgma.yogi(0.1), fraction_evaluate=0.0, retries=retries, quorum=nodes, **counts)


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    run = strategy(int(config["nodes"]), int(config["retries"]))
    run.start(grid, initial(), int(config["rounds"]), timeout=float(config["timeout"]), folder=str(config["state"]))
