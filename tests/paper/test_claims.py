"""Kinds of claims beside the plain one, each on a few runs made by hand."""

from pathlib import Path

import pytest
from made_runs import write_experiment

from fedgma.paper.catalogue import catalogue, experiment
from fedgma.paper.claims import ANALYSIS, look_at, mask_step
from fedgma.paper.compare import compare
from fedgma.paper.entries import read_entries
from fedgma.paper.figures import draw
from fedgma.paper.findings import ClaimVerdict, Finding
from fedgma.paper.plans import Cut
from fedgma.paper.rates import Chosen
from fedgma.paper.results import findings_of


def findings(out, name, level, *, cells="", rounds=11, seeds=2):
    cut = Cut(seeds=seeds, cells=cells)
    write_experiment(out, experiment(name), level, cut=cut, rounds=rounds)
    return compare(experiment(name), read_entries([out])[0], Chosen(), cut)


def verdicts(made):
    return [found.verdict for found in look_at(made)]


@pytest.mark.parametrize(("lift", "verdict"), [(3.0, "holds"), (-3.0, "contradicted"), (0.0, "inconclusive")])
def test_group_above_batch_normalisation(tmp_path, lift, verdict):
    made = findings(tmp_path, "E9", lambda run: 80 + lift * (run.model == "resnet18-gn"), cells="algorithm=fedavg")
    assert verdicts(made)[1] == verdict


def test_the_binary_mask_near_the_soft_one_and_later(tmp_path):
    def level(run):
        return {"mean": 90.0, "gma": 93.0, "and_mask": 92.8}[run.aggregator] + 0.1 * run.seed

    made = findings(tmp_path, "E12", level, rounds=60)
    above, near, sooner = look_at(made)
    assert (above.verdict, near.verdict) == ("holds", "holds")
    assert near.text.startswith("and_mask minus gma: -0.20 points")
    assert "rounds that gma needs less than and_mask" in sooner.text
    assert len(draw(made)) == 1


def test_each_arm_at_its_own_best_pair(tmp_path):
    def level(run):
        fast = 0.1 if run.aggregator == "gma" else 0.05
        return 80 + 2 * (run.aggregator == "gma") - 10 * abs(run.client_learning_rate - fast)

    cells = "client_learning_rate=0.05|0.1,server_learning_rate=1"
    _, pair = look_at(findings(tmp_path, "E14", level, cells=cells))
    assert pair.verdict == "holds"
    assert pair.text.startswith("best of plain at 0.05 and 1, of masked at 0.1 and 1: +2.00 points")


def test_controls_are_put_beside_the_mask(tmp_path):
    def level(run):
        lifts = {"mean": 0.0, "gma": 1.0, "damped_mean": 1.5, "shuffled_mask": 0.5}
        return 80 + lifts[run.aggregator]

    made = findings(tmp_path, "C14", level, cells="client_learning_rate=0.05,server_learning_rate=1")
    assert verdicts(made) == ["holds", "holds", "contradicted", "holds"]


def test_data_sets_of_other_seeds_are_told_apart(tmp_path):
    def level(run):
        lift = {"mnist": -1.0, "fmnist": -3.0, "cifar10": 5.0}[run.dataset]
        return 80 + lift * (run.aggregator == "gma") + 0.01 * run.seed * (run.aggregator == "mean")

    cells = "partition.clients=100,partition.name=label_skew,algorithm=fedavg"
    for datasets, seeds in (("mnist|fmnist", 4), ("cifar10", 2)):
        cut = Cut(seeds=seeds, cells=f"{cells},dataset={datasets}")
        write_experiment(tmp_path, experiment("E1"), level, cut=cut, rounds=11)
    found = look_at(compare(experiment("E1"), read_entries([tmp_path])[0], Chosen()))[0]
    assert found.verdict == "contradicted (mnist, fmnist), holds (cifar10)"
    small, large = found.text.split("; cifar10: ")
    assert small.startswith("mnist, fmnist: ahead in 0 of 2 cells (0 significant), behind in 2 (2 significant)")
    assert "4 seeds" in small
    assert large.startswith("ahead in 1 of 1 cells (1 significant)")
    assert "2 seeds" in large


def test_a_cell_of_one_seed_takes_no_interval_from_the_others(tmp_path):
    def level(run):
        return 80 + 3 * (run.aggregator == "gma") + 0.01 * run.seed * (run.aggregator == "mean")

    cells = "dataset=cifar10,partition.name=label_skew,algorithm=fedavg"
    for clients, seeds in ((10, 1), (100, 2)):
        cut = Cut(seeds=seeds, cells=f"{cells},partition.clients={clients}")
        write_experiment(tmp_path, experiment("E1"), level, cut=cut, rounds=11)
    ahead, _, trend = look_at(compare(experiment("E1"), read_entries([tmp_path])[0], Chosen()))
    assert ahead.verdict == "holds (cifar10), inconclusive (cifar10 with one seed)"
    assert (trend.verdict, trend.text[:26]) == ("inconclusive", "no two values of clients w")


def test_arms_are_compared_where_both_were_run(tmp_path):
    def level(run):
        lifts = {"mean": 0.0, "gma": 1.0, "damped_mean": 2.0, "shuffled_mask": 0.5}
        return 80 + lifts[run.aggregator] + 0.01 * run.seed * (run.aggregator == "mean")

    cells = "partition.clients=100,algorithm=fedavg"
    for datasets, arms, seeds in (("mnist", "mean|gma|damped_mean", 4), ("cifar10", "mean|gma", 2)):
        cut = Cut(seeds=seeds, cells=f"{cells},dataset={datasets},aggregator={arms}")
        write_experiment(tmp_path, experiment("C1"), level, cut=cut, rounds=11)
    found = look_at(compare(experiment("C1"), read_entries([tmp_path])[0], Chosen()))
    versus = {one.claim.second: one for one in found if one.claim.kind == "versus"}
    assert versus["damped_mean"].verdict == "contradicted"
    assert versus["damped_mean"].text.startswith("gma ahead of damped_mean in 0 of 1 cells; -1.00 points")
    assert versus["shuffled_mask"].text.startswith("gma and shuffled_mask share no seed")


def test_a_claim_without_runs_says_so(tmp_path):
    made = findings(tmp_path, "E8", lambda run: 90.0, cells="dataset=mnist,momentum=0.9")
    assert verdicts(made) == ["inconclusive", "not run"]


def test_what_an_analysis_shows_is_not_told_from_runs():
    made = compare(experiment("E7"), [], Chosen())
    assert {found.verdict for found in look_at(made)} == {"not run"}
    few, fewer = look_at(made, [Finding("paired/5/all", "2 points."), Finding("separate/2/all", "9 points.")])
    assert (few.verdict, few.text) == ("inconclusive", "2 points.")
    assert (fewer.verdict, fewer.text) == ("not run", "no analysis with a finding 'paired/2'")


def test_a_claim_has_the_verdicts_of_the_findings_below_its_id():
    findings = [
        Finding("paired/2/participating", "Down by 18.", ClaimVerdict.HOLDS, -18.0, (-23.0, -12.0), 4),
        Finding("paired/2/non_participating", "Up by 3.", ClaimVerdict.INCONCLUSIVE, 3.0, (-1.0, 7.0), 4),
        Finding("paired/25/participating", "Another one.", ClaimVerdict.CONTRADICTED),
    ]
    _, fewer = look_at(compare(experiment("E7"), [], Chosen()), findings)
    assert fewer.verdict == "holds (participating), inconclusive (non-participating)"
    assert fewer.text == "Down by 18. Up by 3."


def test_every_claim_about_an_analysis_names_a_finding_of_the_results():
    results = Path(__file__).parents[2] / "results"
    for one in catalogue().values():
        answers = look_at(compare(one, [], Chosen()), findings_of(one, [results]))
        about = [answer for answer in answers if answer.claim.kind == ANALYSIS]
        assert all(ClaimVerdict.NOT_RUN not in answer.verdicts.values() for answer in about), one.id


@pytest.mark.parametrize(("cohort", "steps"), [(10, [0, 2, 4, 10]), (5, [0, 1, 3, 5]), (30, [0, 6, 12, 30])])
def test_thresholds_fall_into_as_many_masks_as_votes_allow(cohort, steps):
    assert [mask_step({"tau": tau, "clients_per_round": cohort}) for tau in (0.0, 0.2, 0.4, 1.0)] == steps
