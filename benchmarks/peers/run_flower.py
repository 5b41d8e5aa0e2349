"""Flower: its own FedAvg strategy on its simulation engine, two workers."""

from importlib.metadata import version

import flower_app
import torch
import workload
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from network import accuracy, lenet

settings = workload.Settings()
server = ServerApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    *_, xt, yt = workload.data()
    xt, yt, model = torch.from_numpy(workload.scaled(xt)), torch.from_numpy(yt), lenet()
    clock = workload.Clock(settings)

    def after(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if round:
            clock.end()
        if round == settings.rounds:
            model.load_state_dict(arrays.to_torch_state_dict())
            clock.report(accuracy(model, xt, yt), flwr=version("flwr"), ray=version("ray"), torch=torch.__version__)
        clock.begin()
        return None

    share = settings.clients_per_round / settings.clients
    strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=settings.clients)
    start = ArrayRecord(model.state_dict())
    strategy.start(grid=grid, initial_arrays=start, num_rounds=settings.rounds, evaluate_fn=after)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, flower_app.app, num_supernodes=settings.clients, backend_config=resources)
