"""Masked averaging in DiLoCo with torch.distributed: the votes are a second all-reduce. Running it checks it.

    torchrun --nproc-per-node 2 examples/recipes/diloco_masked.py

Each worker takes a few steps on its own data; what they changed is averaged, masked, and handed to the outer optimiser
as its gradient.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import fedgma
from fedgma.aggregation.masks import soft_mask


# recipe
def masked_all_reduce(gradient, tau=0.4):
    workers = dist.get_world_size()
    votes = gradient.sign().to(torch.int8 if workers < 127 else torch.int32)  # a quarter of the bytes, and exact
    for work in (dist.all_reduce(gradient, async_op=True), dist.all_reduce(votes, async_op=True)):
        work.wait()
    gradient.div_(workers).mul_(soft_mask(tau)(votes, workers, "float32"))


def outer_step(model, start, outer, tau=0.4):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.grad = start[name] - parameter  # DiLoCo's pseudo-gradient
            masked_all_reduce(parameter.grad, tau)
            parameter.copy_(start[name])
    outer.step()


# end of the recipe

ROUNDS, STEPS, TAU = 2, 3, 0.6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def local_steps(model: nn.Module, worker: int, round: int) -> None:
    """What a worker does between two all-reduces, on data of its own."""
    generator = torch.Generator().manual_seed(100 * worker + round)
    x, y = torch.randn(16, 4, generator=generator), torch.randint(2, (16,), generator=generator)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        inner.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        inner.step()


def outer_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def together(worker: int) -> dict[str, torch.Tensor]:
    """The model that this worker has after all rounds of the distributed run."""
    model = network()
    outer = outer_optimizer(model)
    for round in range(ROUNDS):
        start = copied(model)
        local_steps(model, worker, round)
        outer_step(model, start, outer, TAU)
    return copied(model)


def alone(workers: int) -> dict[str, torch.Tensor]:
    """The same run in one process: `fedgma.masked_mean` over the workers' updates."""
    model = network()
    outer = outer_optimizer(model)
    for round in range(ROUNDS):
        start, updates = copied(model), []
        for worker in range(workers):
            model.load_state_dict(start)
            local_steps(model, worker, round)
            updates.append({name: value - start[name] for name, value in copied(model).items()})
        step = fedgma.masked_mean(TAU)(updates, [1] * workers).update
        model.load_state_dict(start)
        for name, parameter in model.named_parameters():
            parameter.grad = -step[name]
        outer.step()
    return copied(model)


def main() -> None:
    """Run as one of the workers; the first one compares."""
    torch.set_num_threads(1)
    worker, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ.get("INIT_METHOD", "env://")
    dist.init_process_group("gloo", init_method=address, rank=worker, world_size=workers)
    trained = together(worker)
    if worker == 0:
        for name, value in alone(workers).items():
            torch.testing.assert_close(trained[name], value)
        print(f"DiLoCo: {ROUNDS} rounds of {workers} workers, equal to fedgma.masked_mean")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
