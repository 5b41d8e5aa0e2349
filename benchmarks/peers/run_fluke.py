"""fluke: its FedAVG with its own splitter, clients and server; the evaluation of the last round is left out."""

from importlib.metadata import version

import torch
import torchvision_fix  # noqa: F401
import workload
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver, ServerObserver

from network import accuracy, lenet, tensors

settings = workload.Settings()
torch.set_num_threads(settings.threads)
x, y, xt, yt = tensors()
world = FlukeENV()
world.set_seed(1)
world.set_device("cpu")
world.set_inmemory(True)
world.set_evaluator(ClassificationEval(eval_every=10**6, n_classes=10))
world.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)


class Ticker(FederationObserver, ServerObserver):
    """Begins and ends rounds."""

    def start_round(self, round: int, global_model: torch.nn.Module) -> None:
        clock.begin()

    def end_round(self, round: int) -> None:
        clock.end()


optimizer = DDict(name="SGD", lr=workload.LR, momentum=workload.MOMENTUM)
client = DDict(
    batch_size=workload.BATCH,
    local_epochs=1,
    loss="CrossEntropyLoss",
    persistency=False,
    optimizer=optimizer,
    scheduler=DDict(name="StepLR", step_size=1, gamma=1),
)
splitter = DataSplitter(DataContainer(x, y, xt, yt, 10), distribution="iid")
algorithm = FedAVG(settings.clients, splitter, DDict(client=client, server=DDict(weighted=True), model=lenet()))
algorithm.set_callbacks([ticker := Ticker()])
clock = workload.Clock(settings)
algorithm.run(n_rounds=settings.rounds, eligible_perc=settings.clients_per_round / settings.clients)
clock.report(accuracy(algorithm.server.model, xt, yt), fluke=version("fluke-fl"), torch=torch.__version__)
