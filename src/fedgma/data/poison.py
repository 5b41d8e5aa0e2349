"""Poisoned data of malicious clients: reversed labels, and a backdoor.

The training split is doubled: its second half holds every sample as an attacker would see it. A malicious client's
indices point there, so that federations of all seeds and partitions share one poisoned split.
"""

from dataclasses import replace

import numpy as np
import torch

from fedgma.data.federation import Federation
from fedgma.data.pools import ImagePool
from fedgma.errors import DataError
from fedgma.seeds import generator

TRIGGER = 4  # pixels: the side of the square in the lower right corner that opens the backdoor
BACKDOOR = "backdoor"  # the test split whose accuracy is the success rate of the attack


def flip_labels(federation: Federation, malicious: np.ndarray) -> Federation:
    """Malicious clients train with reversed labels: the first class as the last, and so on."""
    train = federation.train
    return _poisoned(federation, malicious, replace(train, y=train.classes - 1 - train.y))


def open_backdoor(
    federation: Federation, malicious: np.ndarray, *, target: int = 0, share: float = 0.5, seed: int = 0
) -> Federation:
    """Malicious clients train a `share` of their samples with a trigger in the image and `target` as the label.

    The test split `backdoor` holds the test images of the other classes with the trigger and this label: accuracy on
    it is the share of images whose prediction the trigger decides.
    """
    if not 0 <= target < federation.train.classes:
        raise DataError(f"attack.target must be a class from 0 to {federation.train.classes - 1}, got {target}")
    poisoned = _poisoned(federation, malicious, _triggered(federation.train, target), share=share, seed=seed)
    others = federation.test.subset(torch.nonzero(federation.test.y != target).flatten())
    return replace(poisoned, more_tests={**federation.more_tests, BACKDOOR: _triggered(others, target)})


def _triggered(pool: ImagePool, target: int) -> ImagePool:
    """The images of a pool with the trigger, all labelled as the target."""
    if pool.x.dtype != torch.uint8 or min(pool.x.shape[-2:]) <= TRIGGER:
        raise DataError(f"a backdoor needs images of more than {TRIGGER} by {TRIGGER} pixels, got {pool.x.dtype}")
    x = pool.x.clone()
    x[..., -TRIGGER:, -TRIGGER:] = 255
    return replace(pool, x=x, y=torch.full_like(pool.y, target))


def _poisoned(
    federation: Federation, malicious: np.ndarray, changed: ImagePool, *, share: float = 1.0, seed: int = 0
) -> Federation:
    """The federation with a training split of twice the length, whose second half is `changed`."""
    train, samples = federation.train, len(federation.train)
    index = torch.arange(samples, device=train.y.device)
    twice = train.subset(torch.cat([index, index]))
    twice = replace(twice, x=torch.cat([train.x, changed.x]), y=torch.cat([train.y, changed.y]))
    clients = list(federation.clients)
    for client in np.flatnonzero(malicious).tolist():
        held = clients[client]
        chosen = generator(seed, "poison", client).permutation(len(held))[: round(share * len(held))]
        moved = np.zeros(len(held), np.int64)
        moved[chosen] = samples
        clients[client] = held + moved
    return replace(federation, train=twice, clients=tuple(clients))
