"""The order in which a client trains on its samples, drawn on the host from (seed, "batches", round, client).

So the loop, the lanes and a fleet all train on the same batches, and so does a resumed run.
"""

from collections.abc import Sequence

import numpy as np

from fedgma.seeds import generator


def batch_order(
    samples: np.ndarray,
    *,
    seed: int,
    round: int,
    client: int,
    epochs: int,
    batch: int,
    steps: int | None = None,
    least: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """A client's batches of a round: indices [step, batch], padded, and how many of each are real.

    Every epoch is a new permutation and ends with a partial batch where the batch size does not divide the samples; if
    that has fewer than `least` samples, it is left out.

    >>> index, counts = batch_order(np.arange(5), seed=0, round=1, client=7, epochs=1, batch=2)
    >>> counts.tolist(), sorted(index[:2].ravel().tolist() + index[2, :1].tolist())
    ([2, 2, 1], [0, 1, 2, 3, 4])
    """
    size, per_epoch = len(samples), -(-len(samples) // batch)
    rng = generator(seed, "batches", round, client)
    index = np.zeros((epochs, per_epoch * batch), np.int64)
    for epoch in range(epochs):
        index[epoch, :size] = rng.permutation(samples)
    counts = np.full((epochs, per_epoch), batch, np.int64)
    if size % batch:
        counts[:, -1] = size % batch
    kept = per_epoch - (0 < size % batch < least)
    index = index.reshape(epochs, per_epoch, batch)[:, :kept]
    return index.reshape(-1, batch)[:steps], counts[:, :kept].reshape(-1)[:steps]


def stack_orders(orders: Sequence[tuple[np.ndarray, np.ndarray]], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders as one int32 array [order, step, batch], and counts [order, step]; short ones end in empty steps."""
    longest = max((len(counts) for _, counts in orders), default=0)
    index = np.zeros((len(orders), longest, batch), np.int32)
    counts = np.zeros((len(orders), longest), np.int64)
    for row, (order, count) in enumerate(orders):
        index[row, : len(count)] = order
        counts[row, : len(count)] = count
    return index, counts


def effective_steps(steps: np.ndarray, momentum: np.ndarray, nesterov: np.ndarray | None = None) -> np.ndarray:
    """How many plain gradients a lane's displacement amounts to, in units of its learning rate.

    A gradient computed j steps before the end acts (1 - rho^j) / (1 - rho) times under momentum rho, and with
    Nesterov's step (1 - rho^(j + 1)) / (1 - rho) times. Without momentum this is the number of steps, SCAFFOLD's K.

    >>> effective_steps(np.array([3, 2]), np.array([0.0, 0.5])).tolist()
    [3.0, 2.5]
    """
    rho = momentum.astype(np.float64)
    first = rho if nesterov is None else np.where(nesterov > 0, rho * rho, rho)
    return np.asarray((steps - first * (1 - rho**steps) / (1 - rho)) / (1 - rho))


def effective_rates(lr: np.ndarray, steps: np.ndarray, momentum: np.ndarray, nesterov: np.ndarray) -> np.ndarray:
    """How far a constant gradient of 1 moves a lane: SCAFFOLD's K times the rate, for any rates [lane, step].

    >>> effective_rates(np.array([[0.5, 0.25, 9.0]]), np.array([2]), np.array([0.5]), np.array([0.0])).tolist()
    [0.875]
    """
    if (lr == lr[:, :1]).all():
        return np.asarray(lr[:, 0] * effective_steps(steps, momentum, nesterov))
    step, rho = np.arange(lr.shape[1]), momentum.astype(np.float64)[:, None]
    gathered = (1 - rho ** (step + 1 + (nesterov[:, None] > 0))) / (1 - rho)  # gradients in the step, by their weights
    return np.asarray((lr * gathered * (step < steps[:, None])).sum(1))
