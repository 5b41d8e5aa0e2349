"""Runs beside printed numbers: which runs a cell takes, what the verdict is, what is written down."""

import json
from pathlib import Path

import pytest
from made_runs import varied, write_experiment, write_run

from fedgma.errors import DataError
from fedgma.paper.catalogue import experiment
from fedgma.paper.claims import look_at
from fedgma.paper.compare import Agreement, compare, judge
from fedgma.paper.entries import Entry, read_entries, thinned, write_export
from fedgma.paper.plans import Cut, plan_runs
from fedgma.paper.rates import Chosen
from fedgma.paper.results import export, make_report, write_comparison
from fedgma.paper.tables import cells_table, taus_note
from fedgma.reports.report import in_markdown
from fedgma.reports.tables import markdown
from fedgma.statistics.verdicts import paired

HERE = Path(__file__).parent
PRINTED = {1: 88.1, 3: 89.91, 5: 85.71, 10: 84.13, 20: 80.27}  # plain averaging by local epochs, Tables 8 and 9
LIFTS = {1: 0.3, 3: 0.1, 5: -1.0, 10: 2.0, 20: 6.4}  # of the mask, in our made runs
WOBBLE = (-0.15, -0.05, 0.05, 0.15)  # of the difference, by seed


def by_epochs(settings):
    """The printed levels, with differences that agree, vanish and contradict."""
    level = PRINTED[settings.local_epochs] + 0.5 * settings.seed
    masked = settings.aggregator == "gma"
    return level + masked * (LIFTS[settings.local_epochs] + WOBBLE[settings.seed])


@pytest.fixture(scope="module")
def epochs(tmp_path_factory):
    """All runs of E13, made by hand, and their comparison."""
    out = tmp_path_factory.mktemp("e13")
    write_experiment(out, experiment("E13"), varied(by_epochs, 0.01), rounds=40)
    entries, unfinished = read_entries([out])
    return out, compare(experiment("E13"), entries, Chosen(), unfinished=unfinished)


def test_verdicts_go_by_the_interval():
    ours = paired([1.0, 1.2, 1.6, 1.0])  # 95 % CI 0.75 to 1.65
    assert judge(ours, 1.0) == Agreement.INSIDE
    assert judge(ours, 3.0) == Agreement.SIGN
    assert judge(ours, -1.0) == Agreement.CONTRADICTS
    assert judge(ours, 0.0) == Agreement.PRINTED_EQUAL
    assert judge(ours, None) == Agreement.MASKED_AHEAD
    assert judge(paired([-1.0, -1.1, -1.2, -1.1]), None) == Agreement.PLAIN_AHEAD
    assert judge(paired([-1.0, 2.0, 1.0, 0.5]), 1.0) == Agreement.INCONCLUSIVE
    assert judge(paired([0.0] * 4), 1.0) == Agreement.EQUAL
    assert judge(paired([1.0, 1.1, 1.2]), 3.0) == judge(paired([1.0]), 3.0) == Agreement.PRELIMINARY
    assert judge(ours._replace(corrected=0.06), 1.0) == Agreement.INCONCLUSIVE


def test_each_cell_has_its_verdict(epochs):
    says = {one.cell.settings["local_epochs"]: one.agreement for one in epochs[1].on()}
    assert says == {
        1: "agrees in sign and interval",  # 0.3, printed 0.28
        3: "inconclusive",
        5: "contradicts",  # -1, printed 1.58
        10: "agrees in sign",  # 2, printed 2.98
        20: "agrees in sign and interval",
    }


def test_claims_are_looked_at_over_all_cells(epochs):
    ahead, grows = look_at(epochs[1])
    assert ahead.verdict == "holds"
    assert ahead.text.startswith(
        "ahead in 4 of 5 cells (3 significant), behind in 1 (1 significant); over these cells +1.56"
    )
    assert grows.verdict == "holds"
    assert "1: +0.30, 3: +0.10, 5: -1.00, 10: +2.00, 20: +6.40" in grows.text


def test_the_whole_report_is_the_one_kept_beside_this_test(epochs):
    text = in_markdown(make_report(epochs[1]))
    golden = HERE / "golden.md"
    assert text == golden.read_text(), f"if this is meant, write the new text into {golden.name}"


def test_page_tables_and_figures_are_written(epochs, tmp_path):
    write_comparison(epochs[1], tmp_path)
    assert {"report.html", "report.md", "tables", "pictures"} == {path.name for path in tmp_path.iterdir()}
    assert {f"{name}.{end}" for name in ("claims", "sensitivity", "cells") for end in ("md", "tex", "csv")} <= {
        path.name for path in (tmp_path / "tables").iterdir()
    }
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 6  # along local epochs, and the curves of five cells
    assert "agrees in sign and interval" in page


def test_an_export_says_the_same_as_the_run_folders(epochs, tmp_path):
    folder, made = epochs
    entries, _ = read_entries([folder])
    assert export(experiment("E13"), entries, Chosen(), tmp_path) == 40
    again, unfinished = read_entries([tmp_path / "E13"])
    back = compare(experiment("E13"), again, Chosen(), unfinished=unfinished)
    assert markdown(cells_table(back, "test")) == markdown(cells_table(made, "test"))
    assert [(found.verdict, found.text) for found in look_at(back)] == [
        (found.verdict, found.text) for found in look_at(made)
    ]
    assert (tmp_path / "E13" / "runs.jsonl").stat().st_size < 40 * 1200


def test_thinning_keeps_the_summaries_and_at_most_forty_points(tmp_path):
    points = {round: round / 1000 for round in range(1, 201)}
    assert len(thinned(points)) == 40
    assert list(thinned(points))[-1] == 200
    (settings,) = plan_runs(experiment("E12"), Chosen(), Cut(seeds=1, cells="aggregator=mean")).grid.runs
    write_run(tmp_path / "runs", settings, 90.0, noise=3.0)
    entries, _ = read_entries([tmp_path / "runs"])
    write_export(entries, tmp_path / "export")
    (before,), (after,) = entries, read_entries([tmp_path / "export"])[0]
    assert after.scores["test"] == pytest.approx(before.scores["test"], abs=1e-3)
    assert after.settings == before.settings
    assert isinstance(after, Entry)


def test_a_damaged_export_is_refused_by_name(tmp_path):
    (tmp_path / "runs.jsonl").write_text("{")
    with pytest.raises(DataError, match="expected exported runs in"):
        read_entries([tmp_path])


def e12(seeds=2):
    return plan_runs(experiment("E12"), Chosen(), Cut(seeds=seeds, cells="aggregator=mean|gma")).grid.runs


def levels(out, chosen=None, cut=None):
    entries, unfinished = read_entries([out])
    made = compare(experiment("E12"), entries, chosen or Chosen(), cut or Cut(), unfinished=unfinished)
    return made, next(one for one in made.on() if one.cell.arm == "gma")


def test_of_short_and_long_runs_the_long_ones_count(tmp_path):
    for settings in e12():
        write_run(tmp_path, settings, 50.0, rounds=11)
        write_run(tmp_path, settings, 60.0, rounds=20)
    made, cell = levels(tmp_path)
    assert set(cell.masked.values()) == {60.0}
    assert "4 runs of the same cells with other rounds, rates or precision are left out" in made.notes


def test_the_rounds_that_were_asked_for_count_before_longer_runs(tmp_path):
    for settings in e12():
        write_run(tmp_path, settings, 50.0, rounds=settings.rounds)
        write_run(tmp_path, settings, 60.0, rounds=settings.rounds + 100)
    assert set(levels(tmp_path)[1].masked.values()) == {50.0}


def test_a_cell_that_was_cut_is_not_held_against_whole_ones_of_its_part(tmp_path):
    for settings in plan_runs(experiment("E12"), Chosen(), Cut(seeds=2)).grid.runs:
        if settings.aggregator != "and_mask":
            write_run(tmp_path, settings, 50.0, rounds=settings.rounds)
        if settings.aggregator != "gma":
            write_run(tmp_path, settings, 40.0, rounds=11)
    arms = {one.cell.arm: one for one in levels(tmp_path)[0].on()}
    assert arms["gma"].masked
    assert not arms["and_mask"].masked


def test_of_several_rates_the_chosen_ones_count(tmp_path):
    for settings in e12():
        for rate, level in ((0.05, 50.0), (0.1, 40.0)):
            write_run(tmp_path, settings.model_copy(update={"client_learning_rate": rate}), level, rounds=11)
    chosen = Chosen({("mnist", "fedavg", "shared"): (0.1, 1.0)})
    assert set(levels(tmp_path, chosen)[1].masked.values()) == {40.0}
    assert set(levels(tmp_path)[1].masked.values()) == {50.0}


def test_full_precision_counts_before_less(tmp_path):
    for settings in e12():
        write_run(tmp_path, settings, 50.0, rounds=11, precision="bf16")
        write_run(tmp_path, settings, 60.0, rounds=11)
    assert set(levels(tmp_path)[1].masked.values()) == {60.0}


def test_runs_of_a_search_are_in_no_cell(tmp_path):
    for settings in e12():
        write_run(tmp_path, settings.model_copy(update={"validation": 0.1}), 50.0, rounds=11)
    made, cell = levels(tmp_path)
    assert not made.entries
    assert cell.agreement == Agreement.NOT_RUN


def test_unfinished_runs_are_counted_and_left_out(tmp_path):
    folders = [write_run(tmp_path, settings, 50.0, rounds=11) for settings in e12()]
    (folders[0] / "done").unlink()
    made, cell = levels(tmp_path)
    assert len(cell.differences) == 1
    assert "1 unfinished runs are left out" in made.notes


def test_runs_stopped_late_count_as_they_are_where_they_are_asked_for(tmp_path):
    folders = [write_run(tmp_path, settings, 50.0, rounds=11) for settings in e12()]
    lines = (folders[0] / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folders[0] / "rounds.jsonl").write_text("".join(lines[:10]))
    (folders[0] / "done").unlink()
    assert len(read_entries([tmp_path], 0.95)[0]) == 3
    entries, left = read_entries([tmp_path], 0.9)
    assert (len(entries), left) == (4, 0)
    made = compare(experiment("E12"), entries, Chosen())
    assert any("1 runs were stopped after 10 of 11 rounds" in note for note in made.notes)
    assert {one.played for one in made.compared if one.differences} == {"10 of 11"}


def test_of_two_runs_of_one_seed_the_one_that_came_further_counts(tmp_path):
    for number, settings in enumerate(e12()):
        write_run(tmp_path, settings, 50.0, rounds=11)
        folder = write_run(tmp_path / "again", settings, 60.0, rounds=11)
        head = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**head, "fingerprint": f"{number:016x}"}))
        (folder / "rounds.jsonl").write_text("".join((folder / "rounds.jsonl").read_text().splitlines(True)[:10]))
        (folder / "done").unlink()
        folder.rename(tmp_path / f"again{number}")
    entries, _ = read_entries([tmp_path], 0.9)
    for order in (entries, entries[::-1]):
        made = compare(experiment("E12"), order, Chosen())
        assert {level for cell in made.compared for level in cell.masked.values()} == {50.0}


def test_records_without_a_newer_setting_are_still_found(tmp_path):
    for settings in e12():
        folder = write_run(tmp_path, settings, 50.0, rounds=11)
        head = json.loads((folder / "run.json").read_text())
        del head["settings"]["validation"]
        (folder / "run.json").write_text(json.dumps(head))
    assert len(levels(tmp_path)[1].differences) == 2


def test_thresholds_that_coincide_are_named_and_stand_on_one_step(tmp_path):
    cut = Cut(seeds=4, cells="dataset=fmnist")
    write_experiment(tmp_path, experiment("E4"), varied(lambda run: 80 - 10 * abs(run.tau - 0.4)), cut=cut, rounds=40)
    entries, _ = read_entries([tmp_path])
    made = compare(experiment("E4"), entries, Chosen(), cut)
    assert "0.1 = 0.2; 0.3 = 0.4; 0.5 = 0.6; 0.7 = 0.8; 0.9 = 1." in taus_note(made)
    (peak,) = look_at(made)
    assert peak.verdict == "holds"
    assert peak.text.startswith("best at 0.4 (80.00); 0.4 minus the best other (0.5): +1.00 points")


def test_every_split_that_was_measured_is_compared(tmp_path):
    write_experiment(tmp_path, experiment("E6"), varied(lambda run: 80 + (run.aggregator == "gma")), rounds=40)
    made = compare(experiment("E6"), read_entries([tmp_path])[0], Chosen())
    assert [one.split for one in made.compared] == ["test", "train", "seen"]
    ahead, not_ahead = look_at(made)
    assert (ahead.verdict, not_ahead.verdict) == ("holds", "contradicted")


def test_the_printed_training_accuracy_of_the_convex_run_stands_beside_ours(tmp_path):
    write_experiment(tmp_path, experiment("E5"), lambda run: 88.0, rounds=11)
    made = compare(experiment("E5"), read_entries([tmp_path])[0], Chosen())
    train = {one.cell.settings["partition.name"]: one.printed_difference for one in made.on("train")}
    assert train == {"iid": None, "label_skew": 0.2}
