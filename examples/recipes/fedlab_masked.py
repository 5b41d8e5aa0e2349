"""Masked averaging in FedLab: a synchronous handler. Running it checks it.

python examples/recipes/fedlab_masked.py
"""

import logging

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import SerializationTool
from torch.utils.data import DataLoader, TensorDataset

import fedgma


# recipe
class MaskedHandler(SyncServerHandler):
    tau = 0.4

    def global_update(self, buffer):
        start = self.model_parameters
        counts = [int(rest[0]) if rest else 1 for _, *rest in buffer]  # where clients send their number of samples
        updates = [{"model": parameters - start} for parameters, *_ in buffer]
        step = fedgma.masked_mean(self.tau)(updates, counts).update["model"]
        SerializationTool.deserialize_model(self._model, start + step)


class CountingTrainer(SGDSerialClientTrainer):
    def train(self, model_parameters, train_loader):
        return [*super().train(model_parameters, train_loader), torch.tensor(len(train_loader.dataset))]


# end of the recipe

SIZES = [6, 10, 20, 14]


class Watched(MaskedHandler):
    """Compares each round with the masked mean of plain numbers, entry by entry."""

    tau, rounds = 0.6, 0

    def global_update(self, buffer):
        before = self.model_parameters.clone()
        super().global_update(buffer)
        updates = torch.stack([parameters - before for parameters, _ in buffer]).double()
        counts = torch.tensor([float(count) for _, count in buffer])
        assert sorted(counts.tolist()) == sorted(SIZES)
        agreement = torch.sign(updates).mean(0).abs()
        mask = torch.where(agreement >= self.tau, 1.0, agreement)
        expected = before + mask * (counts[:, None] * updates).sum(0) / counts.sum()
        torch.testing.assert_close(self.model_parameters, expected.float())
        Watched.rounds += 1


class Slices:
    """The data set as FedLab asks for it: a loader for each client."""

    def get_dataloader(self, client, batch_size):
        generator = torch.Generator().manual_seed(client)
        x = torch.randn(SIZES[client], 4, generator=generator)
        y = torch.randint(0, 2, (SIZES[client],), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=batch_size)


class Quiet(StandalonePipeline):
    def evaluate(self):
        """Nothing to evaluate here."""


def main() -> None:
    """Two rounds of FedLab."""
    logging.disable(logging.INFO)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    trainer = CountingTrainer(model, len(SIZES))
    trainer.setup_dataset(Slices())
    trainer.setup_optim(1, 4, 0.1)
    Quiet(Watched(model, 2, 1.0), trainer).main()
    print(f"FedLab: {Watched.rounds} rounds of {len(SIZES)} clients, equal to the masked mean")


if __name__ == "__main__":
    main()
