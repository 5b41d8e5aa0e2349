"""Gradient masked averaging in plain loops: the paper's Algorithm 1, line by line. Slow, and a good place to start.

LeNet on embedded Fashion-MNIST images, 100 clients with two classes each, ten sampled clients a round. The plain
average (AVG) and the masked one (GMA) start from the same weights and sample the same clients. At the end the library
aggregates the first round again; it must give the same step.

    python examples/plain_fedavg.py [rounds]
"""

import sys

import numpy as np
import torch
from torch import nn

import fedgma
from fedgma.data.files import load
from fedgma.data.partitions import label_skew

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
CLIENTS, SAMPLED, BATCH, LEARNING_RATE, MOMENTUM, TAU = 100, 10, 32, 0.02, 0.9, 0.4


def lenet():
    """LeNet-5 with ReLU and max pooling: 61,706 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def local_training(params, images, labels, rng):
    """One epoch of SGD on a client's own data; returns its update, local - global."""
    model = lenet()
    model.load_state_dict(params)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for batch in torch.split(torch.from_numpy(rng.permutation(len(labels))), BATCH):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: local.detach() - params[name] for name, local in model.state_dict().items()}


def aggregate(updates, counts, masked):
    """The weighted mean of the updates; GMA scales it down where clients disagree."""
    step = {}
    for name in updates[0]:
        mean = sum(count * update[name] for update, count in zip(updates, counts, strict=True)) / sum(counts)
        votes = sum(update[name].sign() for update in updates)  # one client, one vote; a zero is no vote
        agreement = votes.abs() / len(updates)
        mask = torch.where(agreement >= TAU - 1e-6, 1.0, agreement) if masked else 1.0
        step[name] = mask * mean
    return step


def accuracy(params, images, labels):
    """Test accuracy of the global model, in percent."""
    model = lenet()
    model.load_state_dict(params)
    with torch.no_grad():
        return 100 * (model(images).argmax(1) == labels).float().mean().item()


def normalised(split, like):
    """Images as float tensors [n, 1, 28, 28] by the training set's mean and deviation."""
    return torch.from_numpy((split.x / 255.0 - like.x.mean() / 255.0) / (like.x.std() / 255.0)).float()


def main():
    """Run all rounds for AVG and GMA and print their test accuracy."""
    torch.set_num_threads(1)  # small convolutions: a second thread slows them down
    data = load("fmnist-mini")
    images, labels = normalised(data.train, data.train), torch.from_numpy(data.train.y)
    test_images, test_labels = normalised(data.test, data.train), torch.from_numpy(data.test.y)
    clients = label_skew(data.train.y, CLIENTS, classes_per_client=2, seed=0).clients

    arms = {"AVG": lenet().state_dict(), "GMA": lenet().state_dict()}
    print(f"{CLIENTS} clients with two classes each, {SAMPLED} a round, tau = {TAU}; test accuracy, %\n")
    print("round    AVG    GMA")
    for round_ in range(1, ROUNDS + 1):
        rng = np.random.default_rng(round_)
        sampled = rng.choice(CLIENTS, SAMPLED, replace=False)
        counts = [len(clients[client]) for client in sampled]
        for arm, params in arms.items():
            updates = [
                local_training(params, images[clients[c]], labels[clients[c]], np.random.default_rng((round_, c)))
                for c in sampled
            ]
            step = aggregate(updates, counts, masked=arm == "GMA")
            if round_ == 1 and arm == "GMA":
                first = updates, counts, step
            arms[arm] = {name: value + step[name] for name, value in params.items()}
        if round_ % 5 == 0 or round_ == ROUNDS:
            shown = [accuracy(params, test_images, test_labels) for params in arms.values()]
            print(f"{round_:5d}  {shown[0]:5.1f}  {shown[1]:5.1f}", flush=True)

    updates, counts, step = first
    ours = fedgma.masked_mean(tau=TAU)(updates, counts).update
    furthest = max((ours[name] - step[name]).abs().max().item() for name in step)
    print(f"\nfedgma.masked_mean gives the same step for round 1: largest difference {furthest:.1e}")
    print("This is one seed and few rounds: it does not show whether masking helps.")


if __name__ == "__main__":
    main()
