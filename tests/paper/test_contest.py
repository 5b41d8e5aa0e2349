"""Which rule earns its place: rates of every arm, finalists by the rule written beforehand, and the criterion."""

import math
import re
from pathlib import Path

import pytest
from made_runs import write_run

from fedgma.paper.catalogue import experiment
from fedgma.paper.compare import compare
from fedgma.paper.contest import earns, gains_of, pooled, ranked, rising, scores_of
from fedgma.paper.entries import read_entries, read_export
from fedgma.paper.plans import Cut, plan_runs
from fedgma.paper.rates import Chosen, read_chosen, rule_of
from fedgma.paper.search import choose, write_search
from scripts import load_script

RESULTS = Path(__file__).parents[2] / "results"
CELLS = "dataset=fmnist,aggregator=mean|gma|wiener,client_learning_rate=0.015|0.03"


def noisy(level, seed):
    return level + (0.05, -0.05, 0.02, -0.02)[seed % 4]


def test_every_arm_is_searched_alone_and_the_next_plan_uses_its_pair(tmp_path):
    """FedAdam's Wiener filter, GMA without a mask for the output layer and the average of models have pairs too."""
    cut = Cut(cells=CELLS)
    for run in plan_runs(experiment("C20"), Chosen(), cut).grid.runs:
        likes_small = run.aggregator == "wiener" or run.server_average > 0 or run.unmasked
        high = (run.client_learning_rate == 0.015) == bool(likes_small)
        level = 80.0 + 5 * high + (run.server_learning_rate in (0.5, 0.1, 0.01))
        write_run(tmp_path / "runs", run, level, splits=("validation",), rounds=40)
    found = compare(experiment("C20"), read_entries([tmp_path / "runs"])[0], Chosen(), cut)
    where = "fmnist, label_skew, 100, 20 steps"
    pairs = {(algorithm, rule): pair for (_, algorithm, rule), pair in choose(found, by_setting=True).items()}
    assert pairs["fedavg", "wiener"] == pairs["fedavg", "gma, unmasked fc3.*"] == (0.015, 0.5)
    assert pairs["fedavg", "mean, server average 0.9"] == (0.015, 0.5)
    assert pairs["fedavg", "mean"] == pairs["fedavg", "gma"] == (0.03, 0.5)
    assert (pairs["fedadam", "wiener"], pairs["fedavgm", "mean"]) == ((0.015, 0.01), (0.03, 0.1))
    write_search(found, Chosen(), tmp_path, by_setting=True)
    chosen = read_chosen(tmp_path / "chosen.toml")
    assert chosen.rates[where, "fedavg", "gma, unmasked fc3.*"] == (0.015, 0.5)
    runs = [run for _, run in plan_runs(experiment("C21"), chosen, Cut(seeds=1, cells="dataset=fmnist")).runs]
    rates = {(run.algorithm, rule_of(run.model_dump())): run.client_learning_rate for run in runs}
    assert rates["fedadam", "wiener"] == rates["fedavg", "mean, server average 0.9"] == 0.015
    assert rates["fedavg", "ties"] == rates["fedavg", "gma"] == 0.03  # a rule that was not searched has GMA's rates


@pytest.fixture(scope="module")
def gains(tmp_path_factory):
    """Wiener gains a point everywhere, James-Stein 2 and -0.8, GMA with FedAdam half a point over FedAdam's mean."""
    folder = tmp_path_factory.mktemp("contest")
    extra = {
        ("fedavg", "wiener"): (1, 1),
        ("fedavg", "james_stein"): (2, -0.8),
        ("fedavg", "shuffled_mask"): (9, 9),
        ("fedadam", "mean"): (5, 5),
        ("fedadam", "gma"): (5.5, 5.5),
    }
    cut = Cut(cells="aggregator=mean|gma|wiener|james_stein|shuffled_mask")
    for run in plan_runs(experiment("C21"), Chosen(), cut).grid.runs:
        if run.unmasked is None and not run.server_average and run.algorithm != "fedavgm":
            more = extra.get((run.algorithm, run.aggregator), (0, 0))[run.dataset == "mnist"]
            write_run(folder, run, noisy(80 + more, run.seed + len(run.aggregator)), rounds=40)
    return gains_of(scores_of(read_entries([folder])[0]))


def test_finalists_are_the_candidates_that_gain_most_over_the_mean_of_their_server(gains):
    assert [arm for arm, _ in ranked(gains)][:3] == [
        ("fedavg", "wiener"),
        ("fedavg", "james_stein"),
        ("fedadam", "gma"),
    ]
    assert dict(ranked(gains))["fedavg", "james_stein"] == pytest.approx(0.6, abs=0.1)
    assert dict(ranked(gains))["fedadam", "gma"] == pytest.approx(0.5, abs=0.1)


def test_runs_that_diverged_are_counted_and_left_out():
    levels = {("fedavg", "mean"): 80.0, ("fedavg", "wiener"): 81.0, ("fedavg", "ties"): 79.0}
    scores = {"mnist": {arm: dict.fromkeys(range(4), level) for arm, level in levels.items()}}
    scores["mnist"]["fedavg", "ties"][2] = 10.0
    found = {gain.arm[1]: gain for gain in gains_of(scores)}
    assert (found["wiener"].lost, found["ties"].lost) == ((0, 0), (1, 0))
    assert (found["ties"].verdict.mean, found["ties"].verdict.of) == (-1, 3)
    charged = {gain.arm[1]: gain for gain in gains_of(scores, diverged=True)}
    assert (charged["ties"].verdict.mean, charged["ties"].verdict.of) == (-18.25, 4)
    assert (charged["ties"].lost, charged["wiener"].verdict.mean) == ((1, 0), 1)


def test_settings_in_which_an_arm_still_rises_are_named():
    entries = [entry for entry in read_export(RESULTS / "C31") if entry.settings["aggregator"] == "mean"]
    (setting,) = rising(entries)
    assert setting.startswith("cifar10")
    flat = {"test": dict.fromkeys(range(10, 510, 10), 0.5)}
    assert rising([entry._replace(curves=flat) for entry in entries]) == set()


def test_a_rule_earns_its_place_if_it_loses_nowhere_and_gains_on_two_data_sets(gains):
    assert earns(gains, ("fedavg", "wiener"))
    assert not earns(gains, ("fedavg", "james_stein"))
    assert not earns(gains, ("fedavg", "gma"))
    (one,) = [gain for gain in gains if gain.arm == ("fedavg", "wiener") and gain.setting.startswith("mnist")]
    assert one.interval[0] < one.verdict.low < one.verdict.mean < one.verdict.high < one.interval[1]


def test_three_seeds_are_no_test_of_the_table_and_earn_nothing():
    scores = {
        name: {
            ("fedavg", "mean"): dict.fromkeys(range(3), 80.0),
            ("fedavg", "wiener"): {seed: 90.0 + 0.1 * seed for seed in range(3)},
        }
        for name in ("mnist", "fmnist")
    }
    found = gains_of(scores)
    assert [gain.interval for gain in found] == [(-math.inf, math.inf)] * 2
    assert not earns(found, ("fedavg", "wiener"))


def test_arms_are_pooled_over_settings_by_seed_without_seeds_in_which_one_diverged():
    first, second = ("fedadam", "gma"), ("fedadam", "mean")
    scores = {
        "mnist": {first: {0: 91.0, 1: 92.0, 2: 93.0}, second: {0: 90.0, 1: 90.0, 2: 90.0}},
        "fmnist": {first: {0: 79.0, 1: 79.0, 2: 10.0}, second: {0: 80.0, 1: 80.0, 2: 80.0}},
    }
    found = pooled(scores, first, second)
    assert (found.verdict.mean, found.verdict.of) == (0.25, 2)  # of the seeds 0 and 1: 0 and 0.5
    assert (found.ahead, found.of, found.lost) == (1, 2, 1)
    assert pooled(scores, first, ("fedadam", "wiener")) is None


def test_the_pages_say_what_the_exported_runs_say_and_that_of_masks_in_1200_words():
    made = load_script("tools/write_masks.py")
    for path, measured in made.parts().items():
        assert made.page_with(measured, path.read_text()) == path.read_text(), "run: python tools/write_masks.py"
    page = made.PAGE.read_text()
    words = [word for word in re.sub(r"<!--.*?-->", "", page).split() if re.search(r"\w", word)]
    assert len(words) <= 1200
