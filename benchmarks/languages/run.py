"""The finalists among the rules on text: a small GPT, 50 languages as clients, each arm at its own best rates.

    python benchmarks/languages/run.py --out runs/languages --precision bf16
    python benchmarks/languages/run.py --out runs/languages --precision bf16 --rates 0.003 1.0   # FedAvg's arms alike
    python benchmarks/languages/run.py --out /tmp/tiny --rounds 2 --seeds 1 --languages 12     # a trial on the CPU

Written before the runs: nine arms, each with nine pairs of rates on one grid of client rates, and of server rates for
each kind of server. The pair that predicts most bytes of held-out text right with seed 60 is compared on the test text
with seeds 61 to 66. Ten languages train in a round. The last 20 % of each language's text is for testing. scores.csv
holds what the runs of the page on masks came to. The same command goes on where it was stopped. Added after these runs:
`--rates` compares the arms of FedAvg at one pair, that of the mean, because the search gave others a larger client
rate; same_rates.csv holds what they came to.
"""

import argparse
import csv
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgma.experiments.grid import Grid, expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import Planned, missing, pack, plan
from fedgma.experiments.play import play_fleet
from fedgma.experiments.settings import Settings
from fedgma.records.reader import read_run
from fedgma.statistics.arms import score
from fedgma.statistics.metrics import ACCURACY

HERE = Path(__file__).resolve().parent
MODEL = f"{HERE.parents[1] / 'examples' / 'tokens.py'}:GPT"
SEARCH_SEED, SEARCH_ROUNDS, ROUNDS, SEEDS = 60, 60, 100, 6
CLIENT_RATES = [0.001, 0.003, 0.01]
SERVER_RATES = {"fedavg": [0.25, 0.5, 1.0], "fedavgm": [0.03, 0.1, 0.3], "fedadam": [0.003, 0.01, 0.03]}
ARMS: dict[str, dict[str, Any]] = {
    "mean": {"algorithm": "fedavg", "aggregator": "mean"},
    "gma": {"algorithm": "fedavg", "aggregator": "gma"},
    "wiener": {"algorithm": "fedavg", "aggregator": "wiener"},
    "fedexp": {"algorithm": "fedavg", "aggregator": "fedexp"},
    "mean, server average 0.9": {"algorithm": "fedavg", "aggregator": "mean", "server_average": 0.9},
    "fedavgm, mean": {"algorithm": "fedavgm", "aggregator": "mean"},
    "fedadam, mean": {"algorithm": "fedadam", "aggregator": "mean"},
    "fedadam, gma": {"algorithm": "fedadam", "aggregator": "gma"},
    "fedadam, magnitude_agreement": {"algorithm": "fedadam", "aggregator": "magnitude_agreement"},
}
COMMON: dict[str, Any] = {
    "task": "next_token",
    "model": MODEL,
    "sequence_length": 64,
    "partition": {"name": "natural"},
    "clients_per_round": 10,
    "local_steps": 8,
    "batch_size": 16,
    "client_optimizer": "adamw",
    "gradient_clip": 1.0,
    "evaluate_every": 20,
    "mask_every": 0,
    "client_test_size": 0,
}
HEADER = ("arm", "client_learning_rate", "server_learning_rate", "seed", "accuracy")


def unpack(folder: Path, languages: int) -> Path:
    """The first languages of the archive as a folder of text files."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(HERE / "text.tar.xz") as archive:
        for entry in sorted(archive.getnames())[:languages]:
            file = archive.extractfile(entry)
            assert file is not None
            (folder / Path(entry).name).write_bytes(file.read())
    return folder


def play(settings: Sequence[Settings], materials: Materials, out: Path) -> list[Planned]:
    """Train the runs that are missing; returns all of them in the given order."""
    planned = plan(Grid(tuple(settings), ()), materials, out)
    for members in pack(missing(planned), materials):
        for _ in play_fleet(members, materials, checkpoint_seconds=300.0, keep_state=False):
            pass
    return planned


def search(base: dict[str, Any], materials: Materials, out: Path) -> dict[str, tuple[float, float]]:
    """The pair of rates of every arm that is best on validation text."""
    keys, settings = [], []
    for arm, own in ARMS.items():
        for client in CLIENT_RATES:
            for server in SERVER_RATES[own["algorithm"]]:
                rates = {"client_learning_rate": client, "server_learning_rate": server}
                given = {**base, **own, **rates, "validation": 0.1, "seed": SEARCH_SEED}
                keys.append((arm, (client, server)))
                settings += expand(given).runs
    planned = play(settings, materials, out)
    found = {key: _accuracy(run, "validation") for key, run in zip(keys, planned, strict=True)}
    return {arm: max((pair for name, pair in keys if name == arm), key=lambda pair: found[arm, pair]) for arm in ARMS}


def test(
    base: dict[str, Any], chosen: dict[str, tuple[float, float]], seeds: int, materials: Materials, out: Path
) -> list[tuple[Any, ...]]:
    """Every arm at its rates with every seed: rows of the table."""
    keys = [(arm, SEARCH_SEED + 1 + number) for number in range(seeds) for arm in chosen]
    settings: list[Settings] = []
    for arm, seed in keys:
        rates = dict(zip(("client_learning_rate", "server_learning_rate"), chosen[arm], strict=True))
        settings += expand({**base, **ARMS[arm], **rates, "seed": seed}).runs
    planned = play(settings, materials, out)
    return [
        (arm, *chosen[arm], seed, round(_accuracy(run, "test"), 4))
        for (arm, seed), run in zip(keys, planned, strict=True)
    ]


def _accuracy(run: Planned, split: str) -> float:
    """The share of bytes that were predicted right, in percent: the mean of the last ten rounds."""
    assert run.folder is not None
    return score(read_run(run.folder), split=split, of=ACCURACY)


def main() -> None:
    """Search, compare, and write the scores into the folder of the runs."""
    parser = argparse.ArgumentParser(description="Rules on text by language.")
    parser.add_argument("--out", type=Path, default=Path("runs/languages"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--languages", type=int, default=50)
    parser.add_argument("--rates", type=float, nargs=2, metavar=("CLIENT", "SERVER"), help="of all arms of FedAvg")
    given = parser.parse_args()
    materials = Materials(given.device, precision=given.precision)
    base = {**COMMON, "dataset": str(unpack(given.out / "text", given.languages))}
    if given.rates:
        chosen = {arm: tuple(given.rates) for arm, own in ARMS.items() if own["algorithm"] == "fedavg"}
    else:
        chosen = search({**base, "rounds": min(SEARCH_ROUNDS, given.rounds)}, materials, given.out / "search")
    for arm, pair in chosen.items():
        print(f"{arm}: client {pair[0]:g}, server {pair[1]:g}", flush=True)
    rows = test({**base, "rounds": given.rounds}, chosen, given.seeds, materials, given.out / "test")
    with (given.out / ("same_rates.csv" if given.rates else "scores.csv")).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])
    for row in rows:
        print(*row, sep=", ")


if __name__ == "__main__":
    main()
