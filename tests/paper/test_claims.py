"""Kinds of claims beside the plain one, each on a few runs made by hand."""

import json
from pathlib import Path

import pytest
from made_runs import varied, write_experiment, write_run

from fedgma.errors import ConfigError
from fedgma.paper.catalogue import catalogue, experiment
from fedgma.paper.claims import ANALYSIS, correct_answers, look_at
from fedgma.paper.compare import compare
from fedgma.paper.entries import read_entries, read_export
from fedgma.paper.figures import draw
from fedgma.paper.findings import ClaimVerdict, Finding
from fedgma.paper.kinds import mask_step
from fedgma.paper.plans import Cut, plan_runs
from fedgma.paper.rates import Chosen, read_chosen
from fedgma.paper.results import findings_of
from fedgma.paper.search import doubts
from fedgma.paper.sensitivity import sensitivity_table
from fedgma.paper.tables import cells_table

RESULTS = Path(__file__).parents[2] / "results"


def findings(out, name, level, *, cells="", rounds=40, seeds=4):
    cut = Cut(seeds=seeds, cells=cells)
    write_experiment(out, experiment(name), varied(level), cut=cut, rounds=rounds)
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
        write_experiment(tmp_path, experiment("E1"), level, cut=cut, rounds=40)
    found = look_at(compare(experiment("E1"), read_entries([tmp_path])[0], Chosen()))[0]
    assert found.verdict == "contradicted (mnist, fmnist), preliminary (cifar10)"
    small, large = found.text.split("; cifar10: ")
    assert small.startswith("mnist, fmnist: ahead in 0 of 2 cells (0 significant), behind in 2 (2 significant)")
    assert "4 seeds" in small
    assert large.startswith("ahead in 1 of 1 cells (0 significant)")
    assert "2 seeds (a verdict needs at least 4 seeds)" in large


def test_a_cell_of_one_seed_takes_no_interval_from_the_others(tmp_path):
    def level(run):
        return 80 + 3 * (run.aggregator == "gma") + 0.01 * run.seed * (run.aggregator == "mean")

    cells = "dataset=cifar10,partition.name=label_skew,algorithm=fedavg"
    for clients, seeds in ((10, 1), (100, 4)):
        cut = Cut(seeds=seeds, cells=f"{cells},partition.clients={clients}")
        write_experiment(tmp_path, experiment("E1"), level, cut=cut, rounds=40)
    ahead, _, trend = look_at(compare(experiment("E1"), read_entries([tmp_path])[0], Chosen()))
    assert ahead.verdict == "holds (cifar10), preliminary (cifar10 with one seed)"
    assert trend.verdict == "preliminary"
    assert "no two values of clients have the same number of rounds" in trend.text


def test_arms_are_compared_where_both_were_run(tmp_path):
    def level(run):
        lifts = {"mean": 0.0, "gma": 1.0, "damped_mean": 2.0, "shuffled_mask": 0.5}
        return 80 + lifts[run.aggregator] + 0.01 * run.seed * (run.aggregator == "mean")

    cells = "partition.clients=100,algorithm=fedavg"
    for datasets, arms, seeds in (("mnist", "mean|gma|damped_mean", 4), ("cifar10", "mean|gma", 2)):
        cut = Cut(seeds=seeds, cells=f"{cells},dataset={datasets},aggregator={arms}")
        write_experiment(tmp_path, experiment("C1"), varied(level), cut=cut, rounds=40)
    found = look_at(compare(experiment("C1"), read_entries([tmp_path])[0], Chosen()))
    versus = {one.claim.second: one for one in reversed(found) if one.claim.kind == "versus"}  # the first of each
    assert versus["damped_mean"].verdict == "contradicted"
    assert versus["damped_mean"].text.startswith("gma ahead of damped_mean in 0 of 1 cells; -1.00 points")
    assert "gma and shuffled_mask share no seed" in versus["shuffled_mask"].text
    assert versus["shuffled_mask"].verdict == "preliminary"


def test_a_claim_without_runs_says_so(tmp_path):
    made = findings(tmp_path, "E8", lambda run: 90.0, cells="dataset=mnist,momentum=0.9")
    assert verdicts(made) == ["inconclusive", "not run"]


def test_what_an_analysis_shows_is_not_told_from_runs():
    made = compare(experiment("E7"), [], Chosen())
    assert {found.verdict for found in look_at(made)} == {"not run"}
    few, fewer = look_at(made, [Finding("paired/5/all", "2 points."), Finding("separate/2/all", "9 points.")])
    assert (few.verdict, few.text) == ("preliminary", "2 points.")
    assert (fewer.verdict, fewer.text) == ("not run", "no analysis with a finding 'paired/2'")


def test_a_claim_has_the_verdicts_of_the_findings_below_its_id():
    findings = [
        Finding("paired/2/participating", "Down by 18.", ClaimVerdict.HOLDS, -18.0, (-23.0, -12.0), 4),
        Finding("paired/2/non_participating", "Up by 3.", ClaimVerdict.INCONCLUSIVE, 3.0, (-1.0, 7.0), 4),
        Finding("paired/25/participating", "Another one.", ClaimVerdict.CONTRADICTED),
    ]
    _, fewer = look_at(compare(experiment("E7"), [], Chosen()), findings)
    assert fewer.verdict == "holds (participating), inconclusive (non-participating)"
    assert fewer.text.startswith(
        "Down by 18. (p = 0.0019, 0.0038 corrected for 2 tests) Up by 3. (p = 0.097, 0.097 corr"
    )


def test_every_claim_about_an_analysis_names_a_finding_of_the_results():
    results = Path(__file__).parents[2] / "results"
    run = [one for one in catalogue().values() if one.analysis and (results / one.id).is_dir()]
    assert {"E7", "E11", "E16", "E17", "E18"} <= {one.id for one in run}
    for one in run:
        answers = look_at(compare(one, [], Chosen()), findings_of(one, [results]))
        about = [answer for answer in answers if answer.claim.kind == ANALYSIS]
        assert all(ClaimVerdict.NOT_RUN not in answer.verdicts.values() for answer in about), one.id


@pytest.mark.parametrize(("cohort", "steps"), [(10, [0, 2, 4, 10]), (5, [0, 1, 3, 5]), (30, [0, 6, 12, 30])])
def test_thresholds_fall_into_as_many_masks_as_votes_allow(cohort, steps):
    assert [mask_step({"tau": tau, "clients_per_round": cohort}) for tau in (0.0, 0.2, 0.4, 1.0)] == steps


# -- defects that an audit of the replication found --------------------------------------------------------------------


def by_arm(lift, base=80.0, wobble=0.05):
    """The level of a run: `base`, and `lift(run)` for GMA, which varies a little with the seed."""
    return lambda run: base + (lift(run) + wobble * run.seed) * (run.aggregator == "gma")


def cells_of_e1(out, cells, lift, *, seeds=4, rounds=40):
    write_experiment(out, experiment("E1"), varied(by_arm(lift)), cut=Cut(seeds=seeds, cells=cells), rounds=rounds)


def unfinish(out, clients):
    """Let the runs with this number of clients rise to their end."""
    for folder in out.iterdir():
        head = json.loads((folder / "run.json").read_text())
        if head["settings"]["partition"]["clients"] == clients:
            lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
            for line in lines:
                if "test" in line:
                    line["test"]["accuracy"] *= 0.5 + 0.5 * line["round"] / len(lines)
            (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_cells_that_have_not_converged_do_not_decide_a_claim(tmp_path):
    cells = "dataset=mnist,partition.name=iid,algorithm=fedavg,partition.clients=100|500"
    cells_of_e1(tmp_path, cells, lambda run: 1.0 if run.partition.clients == 100 else -9.0)
    unfinish(tmp_path, 500)
    made = compare(experiment("E1"), read_entries([tmp_path])[0], Chosen())
    assert {one.cell.settings["partition.clients"]: one.converged for one in made.on() if one.differences} == {
        100: True,
        500: False,
    }
    answer = look_at(made)[1]
    assert answer.verdict == "holds"
    assert answer.text.startswith("ahead in 1 of 1 cells")
    assert "; apart: 1 cell not converged, -" in answer.text


def test_a_claim_whose_cells_have_not_converged_is_preliminary_however_clear(tmp_path):
    cells_of_e1(tmp_path, "dataset=mnist,partition.name=iid,algorithm=fedavg,partition.clients=500", lambda run: 9.0)
    unfinish(tmp_path, 500)
    answer = look_at(compare(experiment("E1"), read_entries([tmp_path])[0], Chosen()))[1]
    assert answer.verdict == "preliminary"
    assert answer.text.startswith("no cell has converged; ahead in 1 of 1 cells")


def test_cells_that_the_paper_does_not_print_stand_apart(tmp_path):
    def lift(run):
        return 2.0 if run.clients_per_round < 300 else -9.0  # 300 writers a round are ours

    cut = Cut(seeds=4, cells="dataset=femnist,algorithm=fedavg")
    write_experiment(tmp_path, experiment("E2"), by_arm(lift), cut=cut, rounds=40)
    answer = look_at(compare(experiment("E2"), read_entries([tmp_path])[0], Chosen()))[0]
    assert answer.verdict == "holds"
    assert answer.text.startswith("ahead in 2 of 2 cells")
    assert "; apart: 1 cell not printed, -8.9" in answer.text


def test_a_trend_compares_only_cells_with_the_same_number_of_rounds(tmp_path):
    def lift(run):
        return {10: 9.0, 100: 1.0, 500: 3.0}[run.partition.clients]

    cells = "dataset=mnist,partition.name=label_skew,algorithm=fedavg,partition.clients="
    cells_of_e1(tmp_path, f"{cells}10", lift, rounds=40)
    cells_of_e1(tmp_path, f"{cells}100|500", lift, rounds=60)
    trend = look_at(compare(experiment("E1"), read_entries([tmp_path])[0], Chosen()))[2]
    assert trend.verdict == "holds"
    assert trend.text.startswith("the difference changes by +2.00 points a step")
    assert "by clients 100: +1.08, 500: +3.08" in trend.text


def test_a_cell_that_does_not_learn_is_not_taken_for_converged(tmp_path):
    def level(run):
        learned = run.client_learning_rate == 0.01
        return (80.0 if learned else 10.0) + (run.aggregator == "gma") * (1.0 + 0.05 * run.seed) * (
            1 if learned else -1
        )

    cells = "client_learning_rate=0.01|0.1,server_learning_rate=1"
    ahead, _ = look_at(findings(tmp_path, "E14", level, cells=cells))
    assert ahead.verdict == "holds"
    assert "apart: 1 cell below half of the best level, -1.0" in ahead.text


def test_the_claims_of_a_page_are_corrected_together(tmp_path):
    def level(run):  # p = 0.03 for each of two claims
        return 80.0 + (run.aggregator == "gma") * (1.0, 1.1, 0.3, 0.5)[run.seed]

    made = findings(tmp_path, "E8", level, cells="dataset=mnist,partition.name=iid")
    alone, other = look_at(made)
    assert (alone.verdict, other.verdict) == ("inconclusive", "inconclusive")
    test = alone.looks["mnist"].test
    assert (test.tests, test.p < 0.05) == (2, True)
    assert test.corrected == pytest.approx(2 * test.p)
    assert f"p = {test.p:.2g}, {test.corrected:.2g} corrected for 2 tests" in alone.text
    (single,) = correct_answers([alone])
    assert single.verdict == "holds"
    assert single.looks["mnist"].test.corrected == pytest.approx(test.p)  # corrected from p itself, not once more


def test_cells_are_called_significant_after_correction_within_their_table(tmp_path):
    def level(run):
        return 80.0 + (run.aggregator == "gma") * (1.0, 1.1, 0.6, 0.5)[run.seed]  # p = 0.01 in each of 16 cells

    cells = "dataset=mnist|fmnist,partition.clients=100"
    write_experiment(tmp_path, experiment("E1"), level, cut=Cut(seeds=4, cells=cells), rounds=40)
    made = compare(experiment("E1"), read_entries([tmp_path])[0], Chosen())
    assert {one.verdict.tests for one in made.on() if one.verdict} == {16}
    assert look_at(made)[0].text.startswith("ahead in 8 of 8 cells (0 significant)")


def test_two_or_three_seeds_never_hold_or_contradict(tmp_path):
    for seeds in (1, 2, 3):
        made = findings(tmp_path / str(seeds), "E8", by_arm(lambda run: 5.0), cells="dataset=mnist", seeds=seeds)
        assert set(verdicts(made)) == {"preliminary"}
        assert {one.agreement for one in made.on() if one.differences} == {"preliminary"}


def test_diverged_runs_are_counted_and_the_difference_is_given_without_their_seeds(tmp_path):
    def level(run):
        return 10.0 if run.aggregator == "gma" and run.seed == 4 else 80.0 + (run.aggregator == "gma")

    made = findings(tmp_path, "E8", level, cells="dataset=mnist,momentum=0.9,partition.name=iid", seeds=5)
    (ahead, _) = look_at(made)
    assert "; 1 of 10 runs diverged, without their seeds +1.00 points, 95 % CI +1.00 to +1.00" in ahead.text
    (cell,) = [one for one in made.on() if one.differences]
    assert (cell.lost, cell.settled.of, cell.verdict.of) == ({4}, 4, 5)
    assert "1 of 10 paired runs diverged" in made.notes


def test_both_arms_best_pairs_are_those_of_the_search_over_numbers_of_clients(tmp_path):
    """GMA's single best cell is at 0.1 with 500 clients, but over both numbers its best pair is 0.01, as the mean's."""

    def level(run):
        if run.aggregator == "gma" and run.partition.clients == 500:
            return 85.0 if run.client_learning_rate == 0.1 else 82.0
        return 60.0 if run.client_learning_rate == 0.1 else 80.0

    cells = (
        "dataset=mnist,algorithm=fedavg,client_learning_rate=0.01|0.1,server_learning_rate=1,partition.clients=100|500"
    )
    cut = Cut(seeds=4, cells=cells)
    for run in plan_runs(experiment("E15"), Chosen(), cut).grid.runs:
        write_run(tmp_path, run, level(run), splits=("validation",), rounds=40)
    (same,) = look_at(compare(experiment("E15"), read_entries([tmp_path])[0], Chosen(), cut))
    assert same.text.startswith("the same pair is best for both arms in 1 of 1 data sets and algorithms")
    assert same.verdict == "holds"


def test_a_cell_with_one_arm_is_not_counted_as_run(tmp_path):
    made = findings(tmp_path, "E8", lambda run: 80.0, cells="dataset=mnist,partition.name=iid,aggregator=mean")
    whole = compare(experiment("E8"), list(made.entries), Chosen())
    assert any(note.startswith("0 of 20 cells were run in both arms, and 2 in one arm only") for note in whole.notes)


def test_the_verdict_is_about_the_last_ten_rounds_where_the_paper_prints_the_best(tmp_path):
    cells_of_e1(tmp_path, "dataset=mnist,partition.name=iid,algorithm=fedavg,partition.clients=100", lambda run: 1.0)
    for folder in tmp_path.iterdir():  # one lucky evaluation of the plain mean
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        if json.loads((folder / "run.json").read_text())["settings"]["aggregator"] == "mean":
            lines[24]["test"]["accuracy"] = 0.99
        (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = compare(experiment("E1"), read_entries([tmp_path])[0], Chosen())
    assert made.experiment.statistic == "best"
    (cell,) = [one for one in made.on() if one.differences]
    assert cell.verdict.mean == pytest.approx(1.075)
    assert cell.restated("best").verdict.mean == pytest.approx(81.075 - 99, abs=0.01)
    assert look_at(made)[1].verdict == "holds"
    row = cells_table(made, "test")
    named = dict(zip(row.header, row.rows[0], strict=True))
    assert (named["rounds"], named["converged"], named["best difference"]) == ("40", "yes", pytest.approx(-17.925))


def test_sensitivity_shows_both_statistics_both_sets_of_cells_and_every_number_of_clients(tmp_path):
    cells = "dataset=mnist,partition.name=iid,algorithm=fedavg,partition.clients=100|500"
    cells_of_e1(tmp_path, cells, lambda run: 1.0 if run.partition.clients == 100 else -9.0)
    unfinish(tmp_path, 500)
    table = sensitivity_table(compare(experiment("E1"), read_entries([tmp_path])[0], Chosen()))
    rows = {row[2:5]: row[5:8] for row in table.rows if row[0].startswith("On iid")}
    assert set(rows) == {
        (statistic, *rest)
        for statistic in ("last10", "best")
        for rest in (("flat", "all"), ("converged", "all"), ("all", "all"), ("all", "100"), ("all", "500"))
    }
    assert rows["last10", "converged", "all"] == (1, 4, pytest.approx(1.075))
    assert rows["last10", "all", "500"][2] < -8
    assert sensitivity_table(compare(experiment("E15"), [], Chosen())) is None


def test_cells_that_rise_by_more_than_half_a_point_are_not_flat(tmp_path):
    cells_of_e1(tmp_path, "dataset=mnist,partition.name=iid,algorithm=fedavg,partition.clients=100", lambda run: 1.0)
    made = compare(experiment("E1"), read_entries([tmp_path])[0], Chosen())
    (cell,) = [one for one in made.on() if one.differences]
    rising = [cell._replace(course=cell.course._replace(rises=(0.0, rise))) for rise in (0.5, 0.6, 1.1)]
    assert [(one.is_flat, one.converged) for one in rising] == [(True, True), (False, True), (False, False)]


def test_cells_that_the_paper_prints_behind_do_not_contradict_it(tmp_path):
    made = {
        name: findings(tmp_path / name, "E8", by_arm(lambda run: -2.0), cells=f"momentum=0,dataset=fmnist,{name}")
        for name in ("partition.name=iid", "partition.name=label_skew")
    }
    behind, ahead = (look_at(one)[1] for one in made.values())
    assert behind.looks["fmnist"].printed < 0 < ahead.looks["fmnist"].printed
    assert (behind.verdict, ahead.verdict) == ("inconclusive", "contradicted")
    assert "; behind in print too, so no contradiction" in behind.text


def test_a_search_that_cannot_tell_pairs_apart_says_so(tmp_path):
    def level(run):
        return (
            90.0
            if run.client_learning_rate == 0.01 and run.aggregator == "gma"
            else 12.0 + run.server_learning_rate / 9
        )

    rates = "client_learning_rate=0.001|0.01|0.1,server_learning_rate=0.1|1|2"
    cut = Cut(seeds=1, cells=f"dataset=mnist,algorithm=fedavg,partition.clients=100,{rates}")
    for run in plan_runs(experiment("E15"), Chosen(), cut).grid.runs:
        write_run(tmp_path, run, level(run), splits=("validation",), rounds=11)
    said = doubts(compare(experiment("E15"), read_entries([tmp_path])[0], Chosen(), cut))
    assert said == [
        "mnist, fedavg, mean: 13.2 % at (0.001, 2), 13.2 % at (0.01, 2)",
        "mnist, fedavg, mean: client rate 0.001 and server rate 2 at the edge of the grid",
        "mnist, fedavg, gma: 91.0 % at (0.01, 0.1), 91.0 % at (0.01, 1)",
        "mnist, fedavg, gma: server rate 0.1 at the edge of the grid",
    ]


def test_the_searched_rates_of_cifar_10_are_in_doubt():
    made = compare(experiment("E15"), read_export(RESULTS / "E15"), read_chosen())
    said = doubts(made)
    for arm in ("mean", "gma"):
        assert f"cifar10, fedadam, {arm}: client rate 0.01 and server rate 0.01 at the edge of the grid" in said


def test_iid_cells_with_rates_of_another_partition_are_counted(tmp_path):
    cells_of_e1(tmp_path, "dataset=mnist,algorithm=fedavg,partition.clients=100", lambda run: 1.0)
    made = compare(experiment("E1"), read_entries([tmp_path])[0], Chosen())
    assert "1 of them are iid and use learning rates that were searched with label skew" in made.notes
    own = compare(experiment("C6"), read_export(RESULTS / "C6"), read_chosen())
    assert not any("searched with label skew" in note for note in own.notes)


def test_runs_of_new_seeds_are_compared_apart_from_those_that_they_repeat(tmp_path):
    for name, lift in (("E5", 0.0), ("C34", 2.0)):
        write_experiment(tmp_path, experiment(name), varied(by_arm(lambda run, lift=lift: lift)), rounds=40)
    entries = read_entries([tmp_path])[0]
    for name, seeds in (("E5", range(4)), ("C34", range(60, 80))):
        made = compare(experiment(name), entries, Chosen())
        assert {seed for cell in made.compared for seed in cell.differences} == set(seeds)
        assert not [note for note in made.notes if "left out" in note or "not used" in note]
    with pytest.raises(ConfigError, match=r"E5 has at most 60 seeds, got 61: those from 60 on are of the experiment"):
        plan_runs(experiment("E5"), Chosen(), Cut(seeds=61))
