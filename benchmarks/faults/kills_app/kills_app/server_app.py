"""The server: a round counts only with all nodes, so that a killed one is waited for and changes nothing."""

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedgma
from fedgma.flower import Masked
from kills_app import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = Masked(
        tau=0.4,
        optimizer=fedgma.yogi(0.1),
        quorum=nodes,
        retries=1000,
        wait=3600,
        fraction_evaluate=0.0,
        min_train_nodes=nodes,
        min_available_nodes=nodes,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(value) for name, value in task.initial().items()}),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        folder=str(config["state"]),
    )
