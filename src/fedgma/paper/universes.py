"""The multiverse: universes drawn at random over the paper's open choices and their neighbourhood.

A universe fixes every choice. In it the plain mean and masked averaging, as the universe reads it, are compared, each
at its own learning rates. `universes.csv` in this folder holds the draw; `python tools/draw_universes.py` made it.
C19 searches the learning rates of every universe, C24 compares the arms.
"""

import csv
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from fedgma.seeds import generator

FILE = "universes.csv"
SEED, NUMBER = 18, 128
Universe = Mapping[str, str]  # the number, and the level of every choice

# levels of each choice, drawn with equal probability among those that `_allowed` allows; some stand more than once
CHOICES: dict[str, tuple[str, ...]] = {
    "data": ("MNIST", "FMNIST", "FedCMNIST"),
    "partition": ("2 classes", "shards", "Dirichlet 0.1", "Dirichlet 0.3", "Dirichlet 1", "iid"),
    "clients": ("100", "100", "100", "100", "10"),
    "a round": ("5", "10", "20"),
    "local work": ("5 steps", "1 epoch", "2 epochs", "3 epochs"),
    "batch": ("10", "32", "64", "600"),
    "momentum": ("0", "0.9"),
    "server": ("FedAvg", "FedAdam"),
    "tau": ("0.2", "0.4", "0.8"),
    "mask": ("as printed", "as printed", "voters only", "norm kept"),
    "weights": ("samples", "uniform"),
    "position": ("after", "before"),
}
# what a level sets, besides the partition
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {name: {"dataset": name.lower()} for name in CHOICES["data"]},
    "local work": {
        "5 steps": {"local_epochs": 5, "local_steps": 5},  # epochs enough for five steps of the smallest clients
        **{f"{count} epoch{'s' * (count > 1)}": {"local_epochs": count} for count in (1, 2, 3)},
    },
    "batch": {size: {"batch_size": int(size)} for size in CHOICES["batch"]},
    "momentum": {value: {"momentum": float(value)} for value in CHOICES["momentum"]},
    "server": {name: {"algorithm": name.lower()} for name in CHOICES["server"]},
    "a round": {count: {"clients_per_round": int(count)} for count in CHOICES["a round"]},
    "weights": {name: {"weighting": name} for name in CHOICES["weights"]},
    "tau": {value: {"tau": float(value)} for value in CHOICES["tau"]},
    "mask": {
        "as printed": {"aggregator": ["mean", "gma"]},
        "voters only": {"aggregator": ["mean", "voters_only"]},
        "norm kept": {"aggregator": ["mean", "norm_kept"]},
    },
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "2 classes": {"name": "label_skew", "mode": "exact"},
    "shards": {"name": "label_skew", "mode": "shards"},
    **{f"Dirichlet {alpha:g}": {"name": "dirichlet", "alpha": alpha} for alpha in (0.1, 0.3, 1.0)},
    "iid": {"name": "iid"},
}
# the grid of the search: client rates by momentum, server rates by algorithm; the same for both arms
CLIENT_RATES = {"0": [0.02, 0.06, 0.2, 0.6], "0.9": [0.002, 0.006, 0.02, 0.06]}
SERVER_RATES = {"FedAvg": [1.0, 2.0], "FedAdam": [0.01, 0.03]}
IMAGES = 60_000
SAMPLES = 360_000  # that a run trains on, if its rounds stay within the next two
FEWEST, MOST = 20, 200  # rounds
SEARCH = 0.5  # the share of the rounds in the search


def draw(number: int = NUMBER, seed: int = SEED) -> list[dict[str, str]]:
    """Different universes in random order: the first n of them are a random sample too.

    >>> first, second = draw(2)
    >>> first["number"], second["number"], first["clients"] in CHOICES["clients"]
    ('1', '2', True)
    """
    rng = generator(seed, "universes")
    universes: dict[tuple[str, ...], dict[str, str]] = {}
    while len(universes) < number:
        universe: dict[str, str] = {}
        for choice, levels in CHOICES.items():
            allowed = [level for level in levels if _allowed(choice, level, universe)]
            universe[choice] = allowed[int(rng.integers(len(allowed)))]
        universes.setdefault(tuple(universe.values()), universe)
    return [{"number": str(position), **universe} for position, universe in enumerate(universes.values(), 1)]


def _allowed(choice: str, level: str, before: Universe) -> bool:
    """Whether a level goes with those drawn before it.

    An epoch of ten clients is as much work as ten epochs of a hundred, so these do not take several.
    """
    if choice == "a round":
        return int(level) <= int(before["clients"])
    if choice == "local work" and before["clients"] == "10":
        return level in ("5 steps", "1 epoch")
    return choice != "position" or level == "after" or before["server"] == "FedAdam"


@cache
def read() -> tuple[Universe, ...]:
    """The universes of the package, in their order."""
    text = (resources.files("fedgma.paper") / FILE).read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def written(universes: Iterable[Universe]) -> str:
    """Universes as CSV."""
    rows = [",".join(universe.values()) for universe in universes]
    return "\n".join([",".join(["number", *CHOICES]), *rows, ""])


def part_of(universe: Universe, *, search: bool) -> dict[str, Any]:
    """A universe as a part of an experiment; that of a search has the grid of rates and fewer rounds."""
    settings = settings_of(universe)
    if search:
        rates = CLIENT_RATES[universe["momentum"]], SERVER_RATES[universe["server"]]
        settings |= {"client_learning_rate": rates[0], "server_learning_rate": rates[1]}
        settings["rounds"] = round(SEARCH * settings["rounds"])
    settings["evaluate_every"] = max(1, settings["rounds"] // 4)
    return {"name": name_of(universe), "rates": "part", "settings": settings}


def name_of(universe: Universe) -> str:
    """The name of a universe's part.

    >>> name_of({"number": "7"})
    'universe 007'
    """
    return f"universe {int(universe['number']):03d}"


def is_universe(where: str) -> bool:
    """Whether rates were chosen for a universe.

    >>> is_universe("mnist, universe 007"), is_universe("mnist, iid, 100")
    (True, False)
    """
    return ", universe " in where


def settings_of(universe: Universe) -> dict[str, Any]:
    """The settings of a universe, without rates and seeds."""
    settings: dict[str, Any] = {}
    for choice, levels in SETS.items():
        settings |= levels[universe[choice]]
    settings["partition"] = {**PARTITIONS[universe["partition"]], "clients": int(universe["clients"])}
    if universe["server"] == "FedAdam":
        settings["mask_position"] = universe["position"]
    return {**settings, "rounds": rounds_of(universe)}


def rounds_of(universe: Universe) -> int:
    """The rounds of a run: as many as its samples allow, to the next ten.

    >>> usual = {"clients": "100", "a round": "10", "local work": "1 epoch", "batch": "32"}
    >>> rounds_of(usual), rounds_of({**usual, "clients": "10"}), rounds_of({**usual, "local work": "5 steps"})
    (60, 20, 200)
    """
    work = SETS["local work"][universe["local work"]]
    held = IMAGES / int(universe["clients"])
    steps = work.get("local_steps")
    trained = work["local_epochs"] * held if steps is None else steps * int(universe["batch"])
    rounds = 10 * round(SAMPLES / (int(universe["a round"]) * trained) / 10)
    return int(max(FEWEST, min(MOST, rounds)))
