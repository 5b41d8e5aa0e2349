"""Summaries, arms and verdicts out of plain numbers."""

import pytest

from fedgma.experiments.outcomes import Summary, compare, gather, summarise


def lines(*accuracies, every=1):
    found = [{"round": r} for r in range(1, len(accuracies) + 1)]
    for line, accuracy in zip(found, accuracies, strict=True):
        if line["round"] % every == 0:
            line["test"] = {"accuracy": accuracy}
    return found


def test_the_last_ten_are_rounds_and_not_evaluations():
    twenty = lines(*(r / 100 for r in range(1, 21)), every=5)
    assert summarise(twenty) == pytest.approx((20.0, 17.5, 20.0))  # rounds 15 and 20


def test_a_run_that_was_never_evaluated_has_no_summary():
    assert summarise([{"round": 1}]) is None
    assert summarise([]) is None
    assert summarise([{"round": 1, "test": {"accuracy": None}}]) is None


def run(aggregator, seed, accuracy, **more):
    part = {"name": "iid", "clients": 10, "seed": seed}
    return {"aggregator": aggregator, "seed": seed, "partition": part, **more}, Summary(accuracy, accuracy, accuracy)


def test_arms_are_paired_by_seed_and_other_settings():
    runs = [run("mean", 0, 50.0, tau=None), run("mean", 1, 60.0, tau=None)]
    runs += [run("gma", seed, value, tau=tau) for tau in (0.2, 0.4) for seed, value in ((0, 51 + tau), (1, 61 + tau))]
    arms = gather(runs, ("aggregator", "tau", "seed"))
    assert [arm.label for arm in arms] == ["mean", "gma, tau 0.2", "gma, tau 0.4"]
    one, two = compare(arms)
    assert one.where == "tau 0.2"
    assert one.verdicts["last10"].mean == pytest.approx(1.2)
    assert two.verdicts["last10"].mean == pytest.approx(1.4)
    assert (two.verdicts["best"].ahead, two.verdicts["best"].of) == (2, 2)


def test_a_partition_that_is_dealt_anew_for_every_seed_is_one_arm():
    arms = gather([run("gma", seed, 50.0) for seed in range(3)], ("partition", "seed"))
    assert [arm.label for arm in arms] == ["iid clients 10"]
    assert sorted(arms[0].runs) == [0, 1, 2]


def test_other_algorithms_are_not_compared_with_each_other():
    runs = [run("mean", 0, 50.0, algorithm="fedavg"), run("gma", 0, 60.0, algorithm="fedyogi")]
    assert compare(gather(runs, ("algorithm", "aggregator", "seed"))) == []
