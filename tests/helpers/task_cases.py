"""A model, a federation and a task for each of the library's tasks, small enough to train in a moment."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedgma.data.files.own.targets import PADDING
from fedgma.training.tasks import MULTI_LABEL, NEXT_TOKEN, REGRESSION
from plain_pools import make_federation

TASKS = {task.name: task for task in (REGRESSION, MULTI_LABEL, NEXT_TOKEN)}
FEATURES, OUTPUTS, LENGTH, TOKENS = 5, 3, 6, 7


class Reader(nn.Module):
    """Logits for every token: an embedding, the mean of the tokens so far, a dense layer."""

    def __init__(self, shape, classes):
        super().__init__()
        self.embedding, self.out = nn.Embedding(classes, 4), nn.Linear(4, classes)

    def forward(self, x):
        seen = self.embedding(x).cumsum(-2)
        return self.out(seen / torch.arange(1, x.shape[-1] + 1, device=x.device)[:, None])


def pool_of(pool, name, seed=0):
    """The pool with targets of the task of that name."""
    rng, samples = np.random.default_rng(seed), len(pool.y)
    if name == "next_token":
        tokens = torch.from_numpy(rng.integers(TOKENS, size=(samples, LENGTH + 1)))
        real = torch.from_numpy(rng.integers(1, LENGTH + 1, size=(samples, 1)))
        y = torch.where(torch.arange(LENGTH) < real, tokens[:, 1:], PADDING)
        return replace(pool, x=tokens[:, :-1], y=y, classes=TOKENS)
    y = pool.x @ torch.from_numpy(rng.normal(size=(FEATURES, OUTPUTS)).astype(np.float32))
    return replace(pool, y=y if name == "regression" else (y > 0).float(), classes=OUTPUTS)


def case(name, sizes):
    """A federation, a model and the task."""
    federation = make_federation(sizes, (FEATURES,))
    federation = replace(federation, train=pool_of(federation.train, name), test=pool_of(federation.test, name, 1))
    torch.manual_seed(0)
    model = Reader((LENGTH,), TOKENS) if name == "next_token" else nn.Linear(FEATURES, OUTPUTS)
    return federation, model, TASKS[name]
