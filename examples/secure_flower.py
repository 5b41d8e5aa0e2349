"""Masked averaging with Flower's SecAgg+: five clients, three rounds; the server sees only sums.

    pip install 'fedgma[flower]' 'flwr[simulation]'
    python examples/secure_flower.py

Each client trains a small linear model on its own data. The same rounds are also computed without secure aggregation,
and the two models are compared.
"""

import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.workflow import DefaultWorkflow
from flwr.simulation import run_simulation

import fedgma
from fedgma.aggregation.secure import Encoding
from fedgma.flower.secagg import SecureMasked, encoding_mod, secure_workflow

CLIENTS, ROUNDS = 5, 3
START = [np.zeros((4, 2)), np.zeros(2)]
ENCODING = Encoding(clip=0.5, max_weight=64)


def data(client: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples of client `client`: more of them for higher numbers."""
    rng = np.random.default_rng(client)
    x = rng.normal(size=(20 + 10 * client, 4))
    return x, x @ np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.0]]) + rng.normal(size=(len(x), 2))


def train(model: list[np.ndarray], client: int) -> list[np.ndarray]:
    """Five steps of least squares."""
    (x, y), (weights, bias) = data(client), model
    for _ in range(5):
        error = x @ weights + bias - y
        weights, bias = weights - 0.05 * x.T @ error / len(x), bias - 0.05 * error.mean(0)
    return [weights, bias]


class Client(NumPyClient):
    """An ordinary Flower client."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, parameters, config):  # noqa: D102
        return train(parameters, self.number), len(data(self.number)[0]), {}


class Kept(SecureMasked):
    """Keeps the last model, to compare it after the run."""

    def aggregate_fit(self, server_round, results, failures):  # noqa: D102
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        FINAL[:] = parameters_to_ndarrays(parameters)
        print(f"round {server_round}: {metrics}")
        return parameters, metrics


FINAL: list[np.ndarray] = []
server_app = ServerApp()
client_app = ClientApp(
    lambda context: Client(int(context.node_config["partition-id"])).to_client(),
    mods=[secaggplus_mod, encoding_mod(ENCODING)],
)


@server_app.main()
def main(grid, context) -> None:  # noqa: D103
    strategy = Kept(
        ENCODING,
        tau=0.4,
        min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS,
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters(START),
    )
    workflow = secure_workflow(ENCODING, num_shares=5, reconstruction_threshold=3)
    legacy = LegacyContext(context, config=ServerConfig(num_rounds=ROUNDS), strategy=strategy)
    DefaultWorkflow(fit_workflow=workflow)(grid, legacy)


def in_the_clear() -> list[np.ndarray]:
    """The same rounds without secure aggregation."""
    model = {"0": START[0], "1": START[1]}
    for _ in range(ROUNDS):
        locals_ = [dict(zip("01", train(list(model.values()), client), strict=True)) for client in range(CLIENTS)]
        model = fedgma.server_round(model, locals_, [len(data(client)[0]) for client in range(CLIENTS)]).params
    return list(model.values())


if __name__ == "__main__":
    run_simulation(server_app, client_app, CLIENTS, backend_config={"client_resources": {"num_cpus": 1}})
    apart = max(float(abs(secure - clear).max()) for secure, clear in zip(FINAL, in_the_clear(), strict=True))
    print(f"the models with and without secure aggregation differ by at most {apart:.1e} after {ROUNDS} rounds")
    assert apart < ROUNDS * ENCODING.error(CLIENTS, sum(len(data(client)[0]) for client in range(CLIENTS)))
