"""The server: gradient masked averaging with the server optimiser of the settings."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedgma.flower import Masked
from fedgma.simulation.spec import RunSpec
from fmnist_gma import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or those that are left."""
    config = context.run_config
    words = task.words_of(config)
    spec = task.spec_of(words)
    strategy = masked(spec, wait=float(config["wait"]), quorum=int(config["quorum"]))
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.initial_model(words)),
        num_rounds=spec.rounds,
        timeout=float(config["timeout"]),
        folder=config["state"],
    )


def masked(spec: RunSpec, wait: float, quorum: int = 1) -> Masked:
    """The strategy with the rule and optimiser of the simulator's run."""
    clients = len(spec.federation.clients)
    return Masked(
        aggregator=spec.rule,
        optimizer=spec.optimizer,
        lookahead=spec.algorithm.lookahead,
        seed=spec.seed,
        identity="partition-id",
        share_cap=None,  # as in the simulator; drop this line if you do not trust the nodes' numbers of samples
        wait=wait,
        quorum=quorum,
        fraction_train=spec.clients_per_round / clients,
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=clients,
    )
