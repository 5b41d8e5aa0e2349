"""The workload that every engine runs: data, sizes, and one line of JSON about how it went. Needs numpy only.

FedAvg on LeNet, 28x28 grey images, 10 classes, batch 32, one local epoch, SGD 0.05 with momentum 0.9. FASHION_MNIST
names the folder with the four .gz files of Fashion-MNIST; without it images are made up.
"""

import gzip
import json
import os
import pathlib
import time

import numpy as np

# clients, samples a client, clients a round, rounds
WORKLOADS = {"W1": (100, 600, 10, 10), "W2": (500, 120, 10, 20), "W3": (1000, 60, 100, 10)}
BATCH, LR, MOMENTUM, MEAN, STD = 32, 0.05, 0.9, 0.286, 0.353


class Settings:
    """What the runner asks for, in the environment: Flower's workers inherit that, and not a command line."""

    def __init__(self) -> None:
        self.threads = int(os.environ.get("BENCH_THREADS", "2"))
        self.clients, self.samples, self.clients_per_round, self.rounds = WORKLOADS[
            os.environ.get("BENCH_WORKLOAD", "W1")
        ]


def age() -> float:
    """Seconds since this process began, imports included."""
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(pathlib.Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def draw(settings: Settings, round: int) -> tuple[np.ndarray, np.ndarray]:
    """A round's clients, and the order in which each goes through its samples."""
    rng = np.random.default_rng([7, round])
    chosen = np.sort(rng.choice(settings.clients, settings.clients_per_round, replace=False))
    return chosen, np.stack([rng.permutation(settings.samples) for _ in chosen])


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training and test images (uint8 [n, 1, 28, 28]) and labels; client k owns the k-th equal slice."""
    folder = os.environ.get("FASHION_MNIST")
    rng = np.random.default_rng(3)
    if folder is None:
        shapes = rng.integers(0, 256, (10, 1, 28, 28))
        labels = [rng.integers(0, 10, n) for n in (60_000, 10_000)]
        pictures = [(0.4 * shapes[y] + rng.integers(0, 150, (len(y), 1, 28, 28))).astype(np.uint8) for y in labels]
        return pictures[0], labels[0], pictures[1], labels[1]
    raw = [_read(pathlib.Path(folder) / name) for name in _FILES]
    x, xt = (values[16:].reshape(-1, 1, 28, 28) for values in raw[:2])
    y, yt = (values[8:].astype(np.int64) for values in raw[2:])
    mixed = rng.permutation(len(x))
    return x[mixed], y[mixed], xt.copy(), yt


_FILES = [f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1") for part in ("train", "t10k")]


def _read(path: pathlib.Path) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8)


def scaled(x: np.ndarray) -> np.ndarray:
    """Bytes as the network sees them."""
    return (x.astype(np.float32) / np.float32(255) - np.float32(MEAN)) / np.float32(STD)


class Clock:
    """Seconds of each round; `report` prints them for the runner to read."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.seconds, self.start = settings, [], 0.0
        self.ready = age()

    def begin(self) -> None:
        self.start = time.perf_counter()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self.start)

    def report(self, accuracy: float, **versions: str) -> None:
        line = {"ready_s": self.ready, "round_s": self.seconds, "accuracy": float(accuracy), "versions": versions}
        print("RESULT " + json.dumps(line), flush=True)
