"""The headline numbers once more, from the exported runs with numpy and scipy alone: the pages have to say them."""

import csv
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
MASKS = {"as printed": "gma", "voters only": "voters_only", "norm kept": "norm_kept"}
LABELS = {
    ("fedavg", "gma"): "GMA",
    ("fedavg", "wiener"): "Wiener",
    ("fedadam", "mean"): "FedAdam, mean",
    ("fedadam", "magnitude_agreement"): "FedAdam, magnitude agreement",
    ("fedavg", "average"): "mean, server average 0.9",
}
ORDER = ("fmnist", "fedcmnist", "femnist", "mnist", "cifar10")


def page(name):
    """A page of the documentation, each paragraph in one line."""
    return " ".join((ROOT / "docs" / name).read_text().split())


def read(name):
    """Settings, test scores (best, last10, final) and test curve of every exported run."""
    folder = ROOT / "results" / name
    shared = json.loads((folder / "runs.json").read_text())["settings"]
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    return [({**shared, **line["settings"]}, line["scores"]["test"], line["curves"]["test"]) for line in lines]


def interval(values, tests=1):
    """Student's interval of a mean, for the level of `tests` tests."""
    half = stats.t.ppf(1 - 0.025 / tests, len(values) - 1) * stats.sem(values)
    return np.mean(values), np.mean(values) - half, np.mean(values) + half


def p_of(values):
    return stats.ttest_1samp(values, 0).pvalue


def holm(p_values):
    """The definition: the k-th smallest is compared with 5 % / (tests - k), until one fails."""
    kept = [False] * len(p_values)
    for place, index in enumerate(np.argsort(p_values)):
        if p_values[index] >= 0.05 / (len(p_values) - place):
            break
        kept[index] = True
    return kept


def rise(curve):
    """Mean of the last quarter of the rounds minus that of the quarter before, along straight lines between points."""
    rounds, values = np.array(curve[0]), np.array(curve[1]) / 100
    quarters = [np.linspace(a, b, 401) * rounds[-1] for a, b in pairwise((0.5, 0.75, 1.0))]
    before, after = (np.interp(places, rounds, values).mean() for places in quarters)
    return after - before


@pytest.mark.parametrize(
    ("partition", "most", "cells"), [("label_skew", 1, 15), ("label_skew", 0.5, 11), ("iid", 1, 16)]
)
def test_table_2_at_convergence(partition, most, cells):
    runs = defaultdict(dict)
    for settings, scores, curve in read("C6"):
        if settings["partition.name"] == partition:
            cell = settings["dataset"], settings["partition.clients"], settings["algorithm"]
            runs[cell][settings["aggregator"], settings["seed"]] = scores[1], rise(curve)
    rows = []
    for cell in runs.values():
        seeds = range(4)
        if all(np.mean([cell[arm, seed][1] for seed in seeds]) <= most for arm in ("mean", "gma")):
            rows.append([cell["gma", seed][0] - cell["mean", seed][0] for seed in seeds])
    assert len(rows) == cells
    mean, low, high = interval(np.mean(rows, axis=0))
    assert f"{mean:+.2f} ({low:.2f} to {high:.2f})" in page("replication.md")


def test_the_confirmation():
    runs = defaultdict(lambda: defaultdict(dict))
    for settings, scores, _ in read("C23") + read("C31"):
        rule = "average" if settings.get("server_average") else settings["aggregator"]
        runs[settings["dataset"]][settings["algorithm"], rule][settings["seed"]] = scores[1]
    found = {}
    for dataset, arms in runs.items():
        half = np.median([score for scores in arms.values() for score in scores.values()]) / 2
        for arm in LABELS:
            base = arms["fedavg" if arm[1] in ("mean", "average") else arm[0], "mean"]
            pairs = [(arms[arm][seed], base[seed]) for seed in base]
            found[arm, dataset] = [a - b for a, b in pairs if min(a, b) >= half]
    sure = dict(zip(found, holm([p_of(values) for values in found.values()]), strict=True))
    masks = (ROOT / "docs" / "masks.md").read_text()
    assert len(found) == 25
    for arm, name in LABELS.items():
        (row,) = [line for line in masks.splitlines() if line.startswith(f"| {name} |")]
        for cell, dataset in zip(row.split(" | ")[1:], ORDER, strict=True):
            mean, low, high = interval(found[arm, dataset])
            said = f"**{mean:+.2f}**" if sure[arm, dataset] else f"{mean:+.2f}"
            assert cell.startswith(f"{said} [{low:+.2f}, {high:+.2f}]"), (name, dataset)
        starts = sorted(interval(found[arm, dataset], 25)[1] for dataset in ORDER)
        met = "met" if starts[0] >= -0.3 and starts[-2] >= 0.5 else "missed"
        (row,) = [line for line in masks.splitlines() if line.startswith(f"| **{name}** |")]
        assert row.split(" | ")[1] == met
        assert f"| {starts[0]:+.2f} | {starts[-2]:+.2f} |" in row


def test_the_counts_of_the_multiverse():
    scores = defaultdict(dict)
    for settings, values, _ in read("C24"):
        arm, adaptive = settings["aggregator"], settings["algorithm"] == "fedadam"
        own = () if arm == "mean" else (settings["tau"], settings["mask_position"] if adaptive else None)
        scores[key(settings), arm, *own][settings["seed"]] = values[1]
    apart = []
    for row in csv.DictReader((ROOT / "src" / "fedgma" / "paper" / "universes.csv").read_text().splitlines()):
        settings = settings_of(row)
        position = row["position"] if row["server"] == "FedAdam" else None
        masked = scores[key(settings), MASKS[row["mask"]], float(row["tau"]), position]
        plain = scores[key(settings), "mean"]
        apart.append([masked[seed] - plain[seed] for seed in range(6)])
    means, kept = np.mean(apart, axis=1), holm([p_of(values) for values in apart])
    bounds = np.array([interval(values) for values in apart])
    ahead, behind = int((means > 0).sum()), int((means < 0).sum())
    share, low, high = interval(100 * (np.array(apart) > 0).mean(axis=0))
    said = (
        f"ahead in {ahead} and behind in {behind} (by seed: ahead in {share:.0f} %, 95 % CI {low:.0f} to {high:.0f}); "
        f"the 95 % CI excludes zero in {(bounds[:, 1] > 0).sum()} and {(bounds[:, 2] < 0).sum()}; after Holm's "
        f"correction for 128 tests {sum(kept & (means > 0))} are ahead and {sum(kept & (means < 0))} behind"
    )
    assert said in page("masks.md")


def settings_of(universe):
    """What the choices of a universe set, as a record names it."""
    partition, _, alpha = universe["partition"].partition(" ")
    skew = {"2": "exact", "shards": "shards"}.get(partition)
    work = universe["local work"]
    return {
        "dataset": universe["data"].lower(),
        "partition.name": "label_skew" if skew else partition.lower(),
        "partition.mode": skew,
        "partition.alpha": float(alpha) if partition == "Dirichlet" else None,
        "partition.clients": int(universe["clients"]),
        "clients_per_round": int(universe["a round"]),
        "local_steps": 5 if work == "5 steps" else None,
        "local_epochs": int(work[0]),
        "batch_size": int(universe["batch"]),
        "momentum": float(universe["momentum"]),
        "algorithm": universe["server"].lower(),
        "weighting": universe["weights"],
    }


def key(settings):
    names = ("dataset", "partition.name", "partition.mode", "partition.alpha", "partition.clients", "clients_per_round")
    names += ("local_steps", "local_epochs", "batch_size", "momentum", "algorithm")
    return (*(settings.get(name) for name in names), settings.get("weighting") or "samples")


def test_the_printed_grid_of_the_masked_mean_is_nearest_to_our_plain_mean():
    printed, ours = {}, defaultdict(list)
    with (ROOT / "src/fedgma/paper/printed/table_lr_grid.csv").open() as file:
        for row in csv.DictReader(file):
            if row["aggregation"] == "GMA" and float(row["mean"]) > 0.1:  # 0.1 is no accuracy, it stands for divergence
                printed[float(row["eta_l"]), float(row["eta_g"])] = float(row["mean"])
    for settings, scores, _ in read("C8"):
        if settings["local_steps"] == 6:
            rates = settings["client_learning_rate"], settings["server_learning_rate"]
            ours[settings["aggregator"], rates].append(scores[1])  # of best, last10, final
    near = {
        arm: sum(abs(np.mean(ours[arm, rates]) - value) <= 2 for rates, value in printed.items())
        for arm in ("mean", "masked_extra", "norm_kept", "gma")
    }
    assert f"the mean in {near['mean']} of {len(printed)} cells" in page("replication.md")
    assert f"a masked step added in {near['masked_extra']}, GMA with its norm kept in {near['norm_kept']}" in page(
        "replication.md"
    )
    assert near["gma"] == 0
