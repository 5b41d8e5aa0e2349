"""pfl-research on the same workloads, through its own public interface: run it with the Python that has pfl.

    path/to/pfl/python benchmarks/peers/pfl_gpu.py --workloads pfl W1 --rounds 20

Prints rows of the table of bench_engine.py. The model, the images and the clients' shares are the same; pfl samples
clients in its own order and does not shuffle inside a client. Where its privacy packages are missing, empty ones take
their place: nothing here calls them.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
if "PFL_SITE" in os.environ:
    sys.path.insert(0, os.environ["PFL_SITE"])

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from workloads import WORKLOADS, Workload, header, make_images, parser

from fedgma.training.models import build

PRIVACY = [
    "dp_accounting",
    "dp_accounting.dp_event",
    "dp_accounting.pld",
    "dp_accounting.pld.pld_privacy_accountant",
    "dp_accounting.pld.privacy_loss_distribution",
    "dp_accounting.rdp",
    "dp_accounting.rdp.rdp_privacy_accountant",
    "prv_accountant",
    "prv_accountant.dpsgd",
]


STATISTICS = ["scipy", "scipy.special", "scipy.stats"]


def stand_in() -> None:
    for names in (PRIVACY, STATISTICS):
        if importlib.util.find_spec(names[0]) is None:
            sys.modules.update({name: MagicMock() for name in names})


class Scored(nn.Module):
    """A network with the two methods that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)

    def loss(self, x, y, eval=False):
        self.train(not eval)
        return F.cross_entropy(self.network(x), y)

    @torch.no_grad()
    def metrics(self, x, y, eval=True):
        return {}


def run(work: Workload, device: str, rounds: int) -> tuple[float, float, float]:
    """Seconds to the end of the first round, seconds a round after that, and accuracy at the end."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    images, ticks = make_images(work, device), [time.perf_counter()]
    shares = [torch.from_numpy(part).to(device) for part in images.clients]
    held = [images.train.batch(share, share) for share in shares]  # on the device, normalised, as pfl likes them best

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            if device == "cuda":
                torch.cuda.synchronize()
            ticks.append(time.perf_counter())
            return False, Metrics()

    network = Scored(build(work.model, work.shape, 10, seed=0)).to(device)
    model = PyTorchModel(
        network,
        lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=work.momentum),
        torch.optim.SGD(network.parameters(), lr=1.0),
    )
    users = get_user_sampler("minimize_reuse", list(range(work.clients)))
    data = FederatedDataset(lambda user: Dataset(list(held[user]), user_id=str(user)), users)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 3,
            evaluation_frequency=10**9,
            train_cohort_size=work.clients_per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr),
        NNEvalHyperParams(local_batch_size=1000),
        [Clock()],
        send_metrics_to_platform=False,
    )
    network.eval()
    every = torch.arange(len(images.test.y), device=device)
    with torch.no_grad():
        hits = [(network(x).argmax(1) == y).float() for x, y in (images.test.batch(i, i) for i in every.split(1000))]
    return ticks[1] - ticks[0], float(np.median(np.diff(ticks[3:]))), torch.cat(hits).mean().item()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workloads", nargs="+", default=["pfl", "W1"])
    arguments = made.parse_args()
    os.environ["PFL_PYTORCH_DEVICE"] = arguments.device
    stand_in()
    print(header(arguments.device))
    for name in arguments.workloads:
        work = WORKLOADS[name]
        first, each, accuracy = run(work, arguments.device, arguments.rounds)
        rate = work.clients_per_round * work.samples / each
        print(
            f"| {name} | pfl-research | {first:.1f} | {each * 1e3:.2f} | | {rate:,.0f} | | {accuracy:.4f} | |",
            flush=True,
        )


if __name__ == "__main__":
    main()
