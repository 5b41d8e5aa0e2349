"""The plain loop: one model object, clients one after the other, batches by index."""

import torch
import workload

from network import accuracy, lenet, tensors, train

settings = workload.Settings()
torch.set_num_threads(settings.threads)
x, y, xt, yt = tensors()
model = lenet()
start = {name: value.clone() for name, value in model.state_dict().items()}
clock = workload.Clock(settings)
for n in range(settings.rounds):
    clock.begin()
    chosen, orders = workload.draw(settings, n)
    mean = {name: torch.zeros_like(value) for name, value in start.items()}
    for client, order in zip(chosen, orders, strict=True):
        model.load_state_dict(start)
        train(model, x, y, torch.from_numpy(order) + int(client) * settings.samples)
        for name, value in model.state_dict().items():
            mean[name].add_(value, alpha=1 / len(chosen))
    start = mean
    clock.end()
model.load_state_dict(start)
clock.report(accuracy(model, xt, yt), torch=torch.__version__)
