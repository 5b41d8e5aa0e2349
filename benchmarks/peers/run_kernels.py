"""fedgma's compiled CPU kernels. torch is imported too, as it is in the simulator, so that memory compares."""

import numba
import numpy as np
import torch
import workload

from fedgma.training.fast.cpu.clients import evaluate, images, train_clients
from network import lenet

settings = workload.Settings()


def batches(orders: np.ndarray, chosen: np.ndarray) -> list[np.ndarray]:
    steps = -(-settings.samples // workload.BATCH)
    rows = np.full((len(chosen), steps * workload.BATCH), -1)
    rows[:, : settings.samples] = orders + chosen[:, None] * settings.samples
    return list(rows.reshape(len(chosen), steps, workload.BATCH))


def play(params: np.ndarray, data: object, n: int) -> np.ndarray:
    chosen, orders = workload.draw(settings, n)
    result = train_clients(
        "lenet",
        params,
        data,
        batches(orders, chosen),
        classes=10,
        lr=workload.LR,
        momentum=workload.MOMENTUM,
        threads=settings.threads,
    )
    return params + result.updates.mean(0)


if __name__ == "__main__":
    x, y, xt, yt = workload.data()
    train, test = (images(a, b, [workload.MEAN], [workload.STD]) for a, b in ((x, y), (xt, yt)))
    params = torch.nn.utils.parameters_to_vector(lenet().parameters()).detach().numpy()
    one = [np.zeros((1, workload.BATCH), np.int64)]
    train_clients("lenet", params, train, one, classes=10, lr=0.1)  # compiled, or read from the cache, before the clock
    clock = workload.Clock(settings)
    for n in range(settings.rounds):
        clock.begin()
        params = play(params, train, n)
        clock.end()
    hits = evaluate("lenet", params, test, classes=10)[1]
    clock.report(hits / len(yt), numba=numba.__version__, torch=torch.__version__)
