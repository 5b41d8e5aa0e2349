"""What the benchmarks of training share: workloads, federations of random images, fleets of runs, and timing."""

import argparse
import copy
import logging
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedgma.aggregation.optimizers import server_optimizer
from fedgma.aggregation.rules import masked_mean
from fedgma.data.pools import ImagePool
from fedgma.simulation.fleet import Fleet, assemble, lay_lane_batch, play_round, start
from fedgma.simulation.sampling import sample_clients
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import State
from fedgma.training.evaluation import evaluate, run_forward, scorer
from fedgma.training.lane_batch import Assignment
from fedgma.training.models import SmallCNN
from fedgma.training.stacked import unflatten

# distance of a lane's update, relative to its length, in the median of the lanes: a single lane can jump where the
# input of a ReLU is zero within rounding
BOUND = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 0.2}
RESNET_LAYERS = [(32, 64), (16, 128), (8, 256), (4, 512)]  # columns and channels
SERVERS = [("sgd", 1.0), ("adam", 0.01), ("momentum", 0.5), ("yogi", 0.01)]


def plain_cnn(shape, classes):
    """The small CNN without dropout, whose draws would differ from one trainer to another."""
    return SmallCNN(shape, classes, dropout=(0.0, 0.0))


RECIPE = {"local_epochs": 5, "weight_decay": 1e-3, "gradient_clip": 10.0, "augment": "half_crop_flip"}


@dataclass(frozen=True)
class Workload:
    """Clients x samples, how many a round, and how they train."""

    model: str | Callable[..., nn.Module]
    shape: tuple[int, int, int]
    clients: int
    samples: int
    clients_per_round: int
    batch: int
    lr: float = 0.05
    momentum: float = 0.9
    check: tuple[int, int] = (2, 3)  # rounds and local steps in which a way is compared with the loop
    settings: Mapping[str, object] = field(default_factory=dict)  # more of a run


WORKLOADS = {
    "W1": Workload("lenet", (1, 28, 28), 100, 600, 10, 32),
    "W2": Workload("lenet", (1, 28, 28), 500, 120, 10, 32),
    "W3": Workload("lenet", (1, 28, 28), 1000, 60, 100, 32),
    "pfl": Workload("cnn", (3, 32, 32), 1000, 50, 50, 10, lr=0.1, momentum=0.0),
    "cnn": Workload(plain_cnn, (3, 32, 32), 1000, 50, 50, 10, lr=0.1, momentum=0.0),
    "resnet": Workload("resnet18-gn", (3, 32, 32), 100, 500, 10, 64, lr=0.01, check=(1, 2)),
    "resnet-bn": Workload("resnet18-bn", (3, 32, 32), 100, 500, 10, 64, lr=0.01, check=(1, 2)),
    # the recipe of C17
    "resnet-imagenet": Workload(
        "resnet18-gn-imagenet", (3, 32, 32), 100, 500, 10, 50, lr=0.1, momentum=0.0, check=(1, 2), settings=RECIPE
    ),
    # the settings of C43
    "resnet-imagenet-momentum": Workload(
        "resnet18-gn-imagenet",
        (3, 32, 32),
        100,
        500,
        10,
        64,
        lr=0.01,
        check=(1, 2),
        settings={"local_epochs": 3, "augment": "crop_flip"},
    ),
    "logistic": Workload("logistic", (1, 28, 28), 100, 600, 10, 32),
}


@dataclass(frozen=True, eq=False)
class Images:
    train: ImagePool
    test: ImagePool
    clients: tuple[np.ndarray, ...]


def make_images(work: Workload, device: str, clients: int | None = None, seed: int = 0) -> Images:
    """Noisy images around ten centres, dealt to clients; made on the device, the same each time on that kind of it."""
    clients = clients or work.clients
    draw = torch.Generator(device).manual_seed(7)

    def integers(low: int, high: int, *shape: int, kind: torch.dtype = torch.int16) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw, device=device, dtype=kind)

    centres = integers(0, 256, 10, *work.shape)

    def pool(size: int) -> ImagePool:
        y = integers(0, 10, size, kind=torch.int64)
        x = torch.empty((size, *work.shape), dtype=torch.uint8, device=device)
        for part, labels in zip(x.split(10000), y.split(10000), strict=True):
            noise = integers(-128, 128, *part.shape)
            part.copy_((centres[labels] // 4 + 96 + noise // 2).clamp(0, 255))
        centre = torch.full((work.shape[0], 1, 1), 0.5, device=device)
        return ImagePool(x, y, 10, torch.zeros_like(y), centre, centre / 2)

    size = min(clients * work.samples, 60000)
    order = np.random.default_rng(seed).permutation(size)
    # federations larger than the images share them: the time of a round does not depend on which sample it is
    parts = [np.take(order, range(c * work.samples, (c + 1) * work.samples), mode="wrap") for c in range(clients)]
    return Images(pool(size), pool(10000), tuple(parts))


def spec_of(work: Workload, images: Images, **settings: object) -> RunSpec:
    base = {
        "model": work.model,
        "clients_per_round": work.clients_per_round,
        "batch_size": work.batch,
        "client_learning_rate": work.lr,
        "rounds": 10**6,
    }
    return RunSpec(images, **{**base, "momentum": work.momentum, "evaluate_every": 0, **work.settings, **settings})


def fleet_specs(work: Workload, images: Images, runs: int, seeds: int | None = None) -> list[RunSpec]:
    """Runs that differ in seed, threshold and server; with `seeds`, only so many different seeds."""
    specs = []
    for run in range(runs):
        rule, server = masked_mean(0.1 * (run % 10)), server_optimizer(*SERVERS[run % 4], "after")
        specs.append(spec_of(work, images, seed=run % (seeds or runs), rule=rule, optimizer=server))
    return specs


def lane_updates(fleet: Fleet, state: State, steps: int | None = None) -> torch.Tensor:
    """The updates [lane, entry] of the next round's lanes, after all of their steps or after the first few."""
    lanes = [
        (run, int(client))
        for run, spec in enumerate(fleet.specs)
        for client in sample_clients(spec, int(state.rounds[run]) + 1)
    ]
    batch, _ = lay_lane_batch(fleet, state, lanes)
    if steps is not None:
        batch = replace(batch, counts=np.where(np.arange(batch.counts.shape[1]) < steps, batch.counts, 0))
        batch = batch.take(slice(None))
    params = unflatten(state.params, fleet.shapes)
    return fleet.train(Assignment(fleet.model, batch, fleet.pools, params, state.buffers)).flat


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
    wait(cuda)
    begun = time.perf_counter()
    for _ in range(rounds):
        state, played = play_round(fleet, state)
    host = time.perf_counter() - begun
    wait(cuda)
    spent = (time.perf_counter() - begun) / rounds
    loss = statistics.mean(record.train_loss for record in played.records)
    samples = sum(float(record.weight) * spec.local_epochs for record, spec in zip(played.records, specs, strict=True))
    accuracy = test_accuracy(fleet, state)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Timing(start_up, spent * 1e3, host / rounds * 1e3, samples / spent, peak / 2**20, loss, accuracy)


def test_accuracy(fleet: Fleet, state: State) -> float:
    """By the module as it is: a compiled forward pass would take longer to make than to use."""
    params, pool = unflatten(state.params, fleet.shapes), fleet.specs[0].federation.test
    score = scorer(run_forward(copy.deepcopy(fleet.model).eval()))
    return evaluate(score, params, state.buffers, pool, batch=min(fleet.eval_batch, 1000)).accuracy.mean().item()


def wait(cuda: bool) -> None:
    """Until the device has done everything."""
    if cuda:
        torch.cuda.synchronize()


def graph_seconds(work: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Seconds of one call; on a GPU of a captured graph, so that launches do not count."""
    work()
    if device == "cpu":
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats / 1e3


def header(device: str) -> str:
    """Machine and versions, for the head of a table."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()}"
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    return (
        f"{name}{threads}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


def progress() -> logging.Logger:
    """What is going on, with the seconds since the start, on stderr; the engine tells there what it compiles."""
    lines = logging.StreamHandler(sys.stderr)
    begun = time.time()
    lines.setFormatter(logging.Formatter("%(seconds)6.1f s  %(message)s"))
    lines.addFilter(lambda record: setattr(record, "seconds", record.created - begun) or True)
    log = logging.getLogger("fedgma")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    return log


def parser(text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--rounds", type=int, default=20)
    return made
