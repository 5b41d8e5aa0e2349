"""Masked averaging in fluke: a server, and FedAVG that uses it. Running it checks it.

python examples/recipes/fluke_masked.py
"""

import copy

import numpy as np
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.evaluation import ClassificationEval
from fluke.server import Server

import fedgma


# recipe
class MaskedServer(Server):
    @torch.no_grad()
    def aggregate(self, eligible, client_models):
        counts = [client.n_examples for client in eligible]
        rule = fedgma.masked_mean(self.hyper_params.get("tau", 0.4))
        models = [model.state_dict() for model in client_models]
        result = fedgma.server_round(self.model.state_dict(), models, counts, aggregator=rule)
        self.model.load_state_dict(result.params)


class MaskedFedAVG(FedAVG):
    def get_server_class(self):
        return MaskedServer


# end of the recipe


class Watched(MaskedServer):
    """Compares each round with `fedgma.masked_mean` over the updates that the clients made."""

    rounds = 0

    def aggregate(self, eligible, client_models):
        before = copy.deepcopy(self.model.state_dict())
        client_models = [copy.deepcopy(model) for model in client_models]
        super().aggregate(eligible, client_models)
        updates = [{name: model.state_dict()[name] - before[name] for name in before} for model in client_models]
        expected = fedgma.masked_mean(0.6)(updates, [client.n_examples for client in eligible]).update
        for name, after in self.model.state_dict().items():
            np.testing.assert_array_equal(after, before[name] + expected[name])
        Watched.rounds += 1


class WatchedFedAVG(MaskedFedAVG):
    def get_server_class(self):
        return Watched


def main() -> None:
    """Two rounds of fluke."""
    world = FlukeENV()
    world.set_seed(1)
    world.set_device("cpu")
    world.set_evaluator(ClassificationEval(eval_every=100, n_classes=2))
    world.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    x, y = torch.randn(60, 4), torch.randint(0, 2, (60,))
    optimizer = DDict(name="SGD", lr=0.1)
    scheduler = DDict(name="StepLR", step_size=1, gamma=1)
    client = DDict(
        batch_size=8,
        local_epochs=1,
        loss="CrossEntropyLoss",
        persistency=False,
        optimizer=optimizer,
        scheduler=scheduler,
    )
    splitter = DataSplitter(DataContainer(x, y, x, y, 2), distribution="iid")
    settings = DDict(client=client, server=DDict(weighted=True, tau=0.6), model=torch.nn.Linear(4, 2))
    WatchedFedAVG(5, splitter, settings).run(n_rounds=2, eligible_perc=1.0)
    print(f"fluke: {Watched.rounds} rounds of 5 clients, equal to fedgma.masked_mean")


if __name__ == "__main__":
    main()
