"""The workloads that the benchmarks share: shapes, federations of random images, and how a row of the table is made."""

import argparse
import platform
import resource
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from fedgma.evaluation import evaluate
from fedgma.fleet import Fleet, assemble, play_round, start
from fedgma.pools import Pool
from fedgma.specs import RunSpec
from fedgma.states import State
from fedgma.trainers.cohorts import unflatten


@dataclass(frozen=True)
class Workload:
    """Clients x samples, how many a round, and how they train."""

    model: str
    shape: tuple[int, int, int]
    clients: int
    samples: int
    cohort: int
    batch: int
    lr: float = 0.05
    momentum: float = 0.9


WORKLOADS = {
    "W1": Workload("lenet", (1, 28, 28), 100, 600, 10, 32),
    "W2": Workload("lenet", (1, 28, 28), 500, 120, 10, 32),
    "W3": Workload("lenet", (1, 28, 28), 1000, 60, 100, 32),
    "pfl": Workload("cnn", (3, 32, 32), 1000, 50, 50, 10, lr=0.1, momentum=0.0),
    "resnet": Workload("resnet18-gn", (3, 32, 32), 100, 500, 10, 64, lr=0.01),
    "logistic": Workload("logistic", (1, 28, 28), 100, 600, 10, 32),
}


@dataclass(frozen=True, eq=False)
class Images:
    train: Pool
    test: Pool
    clients: tuple[np.ndarray, ...]


def make_images(work: Workload, device: str, clients: int | None = None, seed: int = 0) -> Images:
    """Noisy images around ten centres, dealt to clients; the same for the same seed on every device."""
    clients = clients or work.clients
    rng = np.random.default_rng(7)
    centres = rng.integers(0, 256, (10, *work.shape)).astype(np.int16)

    def pool(size: int) -> Pool:
        y = rng.integers(10, size=size)
        x = np.empty((size, *work.shape), np.uint8)
        for begin in range(0, size, 10000):
            part = slice(begin, begin + 10000)
            noise = rng.integers(-128, 128, (len(y[part]), *work.shape), dtype=np.int16)
            x[part] = np.clip(centres[y[part]] // 4 + 96 + noise // 2, 0, 255)
        centre = torch.full((work.shape[0], 1, 1), 0.5)
        home = torch.zeros(size, dtype=torch.int64)
        return Pool(torch.from_numpy(x), torch.from_numpy(y), 10, home, centre, centre / 2).to(device)

    size = min(clients * work.samples, 60000)
    order = np.random.default_rng(seed).permutation(size)
    # federations larger than the images share them: the time of a round does not depend on which sample it is
    parts = [np.take(order, range(c * work.samples, (c + 1) * work.samples), mode="wrap") for c in range(clients)]
    return Images(pool(size), pool(10000), tuple(parts))


def spec_of(work: Workload, images: Images, **settings: object) -> RunSpec:
    base = {"model": work.model, "cohort": work.cohort, "batch_size": work.batch, "lr": work.lr, "rounds": 10**6}
    return RunSpec(images, **{**base, "momentum": work.momentum, "evaluate_every": 0, **settings})


@dataclass(frozen=True)
class Timing:
    start_up: float  # seconds until the first round is done
    round_ms: float
    host_ms: float  # of that, until everything is handed to the device
    samples: float  # a second
    memory: float  # MiB
    loss: float
    accuracy: float  # on the test images, after all rounds


def measure(specs: list[RunSpec], *, rounds: int, warm: int = 2, **options: object) -> Timing:
    """Whole rounds, draws to server step, timed together so that nothing waits for the clock."""
    cuda = specs[0].federation.train.y.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    fleet = assemble(specs, **options)
    state, played = play_round(fleet, start(fleet))
    loss = statistics.mean(record.train_loss for record in played.records)  # waits
    start_up = time.perf_counter() - begun
    for _ in range(warm):
        state, played = play_round(fleet, state)
    _wait(cuda)
    begun = time.perf_counter()
    for _ in range(rounds):
        state, played = play_round(fleet, state)
    host = time.perf_counter() - begun
    _wait(cuda)
    spent = (time.perf_counter() - begun) / rounds
    loss = statistics.mean(record.train_loss for record in played.records)
    samples = sum(float(record.weight) * spec.local_epochs for record, spec in zip(played.records, specs, strict=True))
    accuracy = test_accuracy(fleet, state)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Timing(start_up, spent * 1e3, host / rounds * 1e3, samples / spent, peak / 2**20, loss, accuracy)


def test_accuracy(fleet: Fleet, state: State) -> float:
    params = unflatten(state.params, fleet.shapes)
    pool = fleet.specs[0].federation.test
    return evaluate(fleet.score, params, state.buffers, pool, batch=fleet.eval_batch).accuracy.mean().item()


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def header(device: str) -> str:
    """Machine and versions, for the head of a table."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()}"
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    return (
        f"{name}{threads}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


def parser(text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--rounds", type=int, default=20)
    return made
