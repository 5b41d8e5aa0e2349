"""fedgma's simulator, whole rounds with a masked mean; the network is a module that it does not know: two threads."""

from dataclasses import dataclass

import numpy as np
import torch
import workload

from fedgma.data.pools import ImagePool
from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.simulation.spec import RunSpec
from fedgma.training.stacked import unflatten
from network import accuracy, lenet

settings = workload.Settings()
torch.set_num_threads(1)


@dataclass(frozen=True, eq=False)
class Slices:
    """The federation: client k owns the k-th equal slice."""

    train: ImagePool
    test: ImagePool
    clients: tuple[np.ndarray, ...]


def pool(images: np.ndarray, labels: np.ndarray) -> ImagePool:
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    mean, std = (torch.full((1, 1, 1), value) for value in (workload.MEAN, workload.STD))
    return ImagePool(x, y, 10, torch.zeros_like(y), mean, std)


def own_lenet(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return lenet()


x, y, xt, yt = workload.data()
parts = np.arange(settings.clients * settings.samples).reshape(settings.clients, settings.samples)
spec = RunSpec(
    Slices(pool(x, y), pool(xt, yt), tuple(parts)),
    model=own_lenet,
    clients_per_round=settings.clients_per_round,
    batch_size=workload.BATCH,
    client_learning_rate=workload.LR,
    momentum=workload.MOMENTUM,
    rounds=settings.rounds,
    evaluate_every=0,
)
fleet = assemble([spec], trainer="threads")
state = start(fleet)
clock = workload.Clock(settings)
for _ in range(settings.rounds):
    clock.begin()
    state, _ = play_round(fleet, state)
    clock.end()
model = lenet()
model.load_state_dict({name: value[0] for name, value in unflatten(state.params, fleet.shapes).items()})
clock.report(accuracy(model, torch.from_numpy(workload.scaled(xt)), torch.from_numpy(yt)), torch=torch.__version__)
