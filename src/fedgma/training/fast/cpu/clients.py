"""Local training on the CPU: all sampled clients of a round in one call, each thread training whole clients.

A client's result does not depend on the number of threads or on the other clients. numba compiles the kernels the first
time they are used on a machine (some 15 seconds) and keeps them on disk; without numba use the torch trainer.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from fedgma.errors import ConfigError, DataError
from fedgma.machine import available_cores

Array = np.ndarray[Any, Any]

# modules with Shape, size, space, train and logits
NETWORKS = {"lenet": "fedgma.training.fast.cpu.lenet", "logistic": "fedgma.training.fast.cpu.logistic"}
_CHUNK = 1024  # images that a thread evaluates at a time
_BATCH = 32


class Images(NamedTuple):
    """A data set as the kernels read it; make one with `images` or `tinted`."""

    bytes: Array  # uint8 [sample, pixel], empty where the images are floats
    floats: Array  # float32 [sample, pixel], empty where they are bytes
    table: Array  # float32 [channel, 256]: what a byte means
    tint: Array  # float32 [sample, 2, channel]: what black is and what white adds, empty where images are not tinted
    y: Array  # int64 [sample]
    sizes: tuple[int, int, int]  # channels, height, width


class ClientResults(NamedTuple):
    """The results of local training, clients in the order in which they were passed."""

    updates: Array  # float32 [client, parameter], trained minus start
    losses: Array  # float64 [client], mean training loss over the samples seen
    accuracies: Array  # float64 [client], share of correct predictions at the time of training
    samples: Array  # int64 [client], samples seen, epochs counted


def why_not(network: str, sizes: tuple[int, int, int]) -> str:
    """Why the kernels cannot train this network on images of (channels, height, width); empty where they can.

    >>> why_not("resnet18", (3, 32, 32))
    "no CPU kernel for 'resnet18'; known: lenet, logistic"
    """
    if network not in NETWORKS:
        return f"no CPU kernel for {network!r}; known: {', '.join(sorted(NETWORKS))}"
    if network == "lenet" and (sizes[1] % 4 or sizes[2] % 4 or min(sizes[1:]) < 12):
        return f"the LeNet kernel wants height and width to be multiples of 4 from 12 up, got {sizes[1]}x{sizes[2]}"
    try:
        importlib.import_module("numba")
    except ImportError:
        return "the CPU kernels need numba, which is not installed; pip install 'fedgma[fast]'"
    return ""


def images(x: Array, y: Array, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Images:
    """A data set for the kernels: bytes become (byte / 255 - mean) / std per channel, floats stay as they are.

    >>> data = images(np.zeros((5, 1, 28, 28), np.uint8), np.zeros(5, int), mean=[0.5], std=[0.25])
    >>> data.sizes, float(data.table[0, 255])
    ((1, 28, 28), 2.0)
    """
    if x.ndim != 4 or x.dtype not in (np.uint8, np.float32):
        raise DataError(f"images must be uint8 or float32 [sample, channel, row, column], got {x.dtype} {x.shape}")
    if y.shape != x.shape[:1]:
        raise DataError(f"{len(x)} images need as many labels, got labels of shape {y.shape}")
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    centre, scale = (np.broadcast_to(np.asarray(v, np.float32), x.shape[1:2])[:, None] for v in (mean, std))
    flat = np.ascontiguousarray(x).reshape(len(x), -1)
    channels, height, width = x.shape[1:]
    bytes_, floats = (flat if x.dtype == kind else np.zeros((0, 0), kind) for kind in (np.uint8, np.float32))
    none = np.zeros((0, 2, channels), np.float32)
    parts = (bytes_, floats, (levels - centre) / scale, none, np.ascontiguousarray(y, np.int64))
    bytes_, floats, table, tint, labels = map(_read_only, parts)
    return Images(bytes_, floats, table, tint, labels, (channels, height, width))


def tinted(x: Array, y: Array, black: Array, white: Array, mean: Array, std: Array) -> Images:
    """Grey images of bytes for the kernels, each in its own two colours [sample, channel], which are then normalised.

    >>> pixels, colour = np.zeros((1, 1, 4, 4), np.uint8), np.array([[1.0, 0.5, 0.0]])
    >>> tinted(pixels, np.zeros(1, int), 0 * colour, colour, np.zeros(3), np.full(3, 0.5)).tint.tolist()
    [[[0.0, 0.0, 0.0], [2.0, 1.0, 0.0]]]
    """
    grey = images(x, y)
    tint = np.stack([(black - mean) / std, (white - black) / std], axis=1).astype(np.float32)
    return grey._replace(tint=_read_only(tint), sizes=(tint.shape[2], *grey.sizes[1:]))


def train_clients(
    network: str,
    params: Array,
    data: Images,
    batches: Sequence[Array],
    *,
    classes: int,
    lr: float | Array,
    momentum: float | Array = 0.0,
    mu: float | Array = 0.0,
    weight_decay: float | Array = 0.0,
    nesterov: float | Array = 0.0,
    corrections: Array | None = None,
    clip: float | Array = np.inf,
    threads: int | None = None,
) -> ClientResults:
    """Train each client by SGD from `params`.

    `params` is flat float32 in the order of torch's `state_dict`, one vector for all clients or one for each.
    `batches[k]` holds client k's samples, int [step, batch], padded with -1; a step of -1 alone is skipped. Rates are
    numbers, or arrays with one number per client; `lr` may also be [client, step]. A step is: gradient of the mean
    loss, plus mu times the distance from `params`, scaled down to a norm of `clip`, plus `corrections[k]` (SCAFFOLD's
    c - c_k), then weight decay, momentum and Nesterov's step (1 or 0) as in `torch.optim.SGD`.
    """
    kernel, shape, pixels = _kernel(network, data, classes)
    clients, size = len(batches), kernel.size(shape)
    starts = _rows("params", params, clients, size)
    fixes = (
        _read_only(np.zeros((clients, 0), np.float32))
        if corrections is None
        else _rows("corrections", corrections, clients, size)
    )
    terms = {"momentum": momentum, "mu": mu, "weight_decay": weight_decay, "nesterov": nesterov}
    rates = np.stack([_each(name, value, clients) for name, value in terms.items()], axis=1)
    bounds = _each("clip", clip, clients)
    plans = [_plan(k, steps, len(data.y)) for k, steps in enumerate(batches)]
    lrs = _step_rates(lr, clients, max([1, *(len(plan) for plan in plans)]))
    _check_labels(data.y, classes)
    updates, sums = np.empty((clients, size), np.float32), np.zeros((clients, 3))

    def train_client(k: int, space: Any) -> None:
        sums[k] = kernel.train(
            shape, starts[k], pixels, data.y, plans[k], lrs[k], rates[k], bounds[k], fixes[k], space, updates[k]
        )

    longest = max([1, *(plan.shape[1] for plan in plans)])
    order = sorted(range(clients), key=lambda k: -plans[k].shape[0])  # the longest first, so that threads end together
    _share(train_client, order, lambda: kernel.space(shape, longest), threads)
    seen = np.maximum(sums[:, 2], 1)
    return ClientResults(updates, sums[:, 0] / seen, sums[:, 1] / seen, sums[:, 2].astype(np.int64))


def logits(
    network: str, params: Array, data: Images, *, classes: int, index: Array | None = None, threads: int | None = None
) -> Array:
    """Logits [sample, class] over a data set, or over the samples in `index`."""
    kernel, shape, pixels = _kernel(network, data, classes)
    flat = _rows("params", params, 1, kernel.size(shape))[0]
    chosen = np.arange(len(data.y)) if index is None else np.ascontiguousarray(index, np.int64)
    if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= len(data.y):
        raise DataError(f"samples to evaluate must be numbers below {len(data.y)} and at least one, got {chosen.size}")
    _check_labels(data.y, classes)
    result = np.empty((chosen.size, classes), np.float32)

    def evaluate_chunk(first: int, space: Any) -> None:
        part = slice(first, first + _CHUNK)
        kernel.logits(shape, flat, pixels, data.y, _read_only(chosen[part]), space, result[part])

    _share(evaluate_chunk, range(0, chosen.size, _CHUNK), lambda: kernel.space(shape, _BATCH), threads)
    return result


def evaluate(
    network: str, params: Array, data: Images, *, classes: int, index: Array | None = None, threads: int | None = None
) -> tuple[float, int]:
    """Mean loss and number of correct predictions over a data set, or over the samples in `index`."""
    scores = logits(network, params, data, classes=classes, index=index, threads=threads).astype(np.float64)
    wanted = data.y if index is None else data.y[np.asarray(index)]
    top = scores.max(1)
    losses = np.log(np.exp(scores - top[:, None]).sum(1)) + top - scores[np.arange(len(scores)), wanted]
    return float(losses.mean()), int((scores.argmax(1) == wanted).sum())


def _kernel(network: str, data: Images, classes: int) -> tuple[Any, Any, Any]:
    reason = why_not(network, data.sizes)
    if reason:
        raise ConfigError(reason)
    module = importlib.import_module(NETWORKS[network])
    pixels = module.pixels.Pixels(data.bytes, data.floats, data.table, data.tint)
    return module, module.Shape(*data.sizes, classes), pixels


def _read_only(array: Array) -> Array:
    # numba compiles separately for writeable arrays: all inputs are read-only, so that it compiles once
    view = array.view()
    view.flags.writeable = False
    return view


def _rows(name: str, values: Array, clients: int, size: int) -> Array:
    given = np.ascontiguousarray(values, np.float32)
    if given.shape not in ((size,), (clients, size)):
        raise DataError(f"{name} must have shape ({size},) or ({clients}, {size}), got {given.shape}")
    return _read_only(np.broadcast_to(given, (clients, size)))


def _each(name: str, value: float | Array, clients: int) -> Array:
    given = np.asarray(value, np.float32)
    if given.shape not in ((), (clients,)):
        raise ConfigError(f"{name} must be a number or one for each of {clients} clients, got shape {given.shape}")
    return np.ascontiguousarray(np.broadcast_to(given, (clients,)))


def _step_rates(lr: float | Array, clients: int, steps: int) -> Array:
    """Learning rates [client, step]."""
    given = np.asarray(lr, np.float32)
    if given.ndim < 2:
        given = _each("lr", given, clients)[:, None]
    elif len(given) != clients or given.shape[1] < steps or given.ndim > 2:
        raise ConfigError(f"lr must be [client, step] for {clients} clients and {steps} steps, got shape {given.shape}")
    return _read_only(np.ascontiguousarray(np.broadcast_to(given, (clients, max(steps, given.shape[1])))))


def _plan(client: int, steps: Array, samples: int) -> Array:
    plan = np.ascontiguousarray(steps, np.int64)
    if plan.ndim != 2 or (plan.size and not -1 <= plan.min() <= plan.max() < samples):
        raise DataError(
            f"batches[{client}] must be [step, batch] of sample numbers below {samples} or -1, got shape {plan.shape}"
        )
    return _read_only(plan)


def _check_labels(y: Array, classes: int) -> None:
    if y.size and not 0 <= y.min() <= y.max() < classes:
        raise DataError(f"labels must be 0 to {classes - 1}, got {y.min()} to {y.max()}")


def _share(do: Callable[[int, Any], None], jobs: Iterable[int], space: Callable[[], Any], threads: int | None) -> None:
    """Do the jobs in threads that take them from one queue, each with its own scratch memory."""
    waiting = list(jobs)
    workers = min(threads or available_cores(), len(waiting))
    queue = iter(waiting)  # next() on it is atomic

    def work() -> None:
        scratch = space()
        for job in queue:
            do(job, scratch)

    if workers <= 1:
        return work()
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(work) for _ in range(workers)]:
            done.result()
