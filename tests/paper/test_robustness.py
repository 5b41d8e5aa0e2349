"""Rules under attack: what C7 plans, which runs it finds again, and what the page says of them."""

from pathlib import Path

import pytest
from made_runs import varied, write_experiment

from fedgma.paper.catalogue import experiment
from fedgma.paper.compare import compare
from fedgma.paper.entries import read_entries, read_export
from fedgma.paper.plans import Cut, plan_runs
from fedgma.paper.rates import Chosen
from fedgma.paper.results import export
from fedgma.paper.robustness import NO_ATTACK, matrices
from scripts import load_script

ROOT = Path(__file__).parents[2]
CUT = Cut(rounds=11, seeds=4, cells="partition.name=iid")


def tool():
    return load_script("tools/write_robustness.py")


def level(settings):
    """Made up: 90 % without an attack; attacks cost the mean 40, GMA about 50, robust rules 5 points."""
    if settings.attack.name == "none":
        return 90.0
    return varied(under_attack, 1e-3)(settings)


def under_attack(settings):
    return {"mean": 50.0, "gma": 40.0}.get(settings.aggregator, 85.0) + settings.attack.share


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacks")
    write_experiment(folder, experiment("C7"), level, cut=CUT, rounds=11)
    return read_entries([folder])[0]


def test_every_attack_meets_every_rule():
    runs = plan_runs(experiment("C7"), Chosen(), Cut(seeds=1)).grid.runs
    attacks = {(run.attack.name, run.attack.share, run.attack.scale) for run in runs}
    rules = {(run.aggregator, run.update_clip, run.norm_factor) for run in runs}
    assert len(attacks) == 19
    assert len(rules) == 10
    assert len(runs) == len(attacks) * len(rules) * 2  # iid and Dirichlet


def test_a_cell_takes_runs_of_its_own_attack_only(entries):
    made = compare(experiment("C7"), entries, Chosen(), CUT)
    assert len(made.entries) == len(entries)
    for cell in made.compared:
        for side in cell.entries:
            for entry in side.values():
                assert entry.settings["attack.name"] == cell.cell.settings["attack.name"]
                assert entry.settings["norm_factor"] == cell.cell.settings["norm_factor"]


def test_runs_recorded_before_there_were_attacks_are_never_taken_for_attacked_ones(entries):
    newer = ("attack.", "norm_factor")
    old = [
        entry._replace(settings={k: v for k, v in entry.settings.items() if not k.startswith(newer)})
        for entry in entries
        if entry.settings["attack.name"] is None and entry.settings["norm_factor"] is None
    ]
    made = compare(experiment("C7"), old, Chosen(), CUT)
    assert len(made.entries) == len(old)
    found = [cell for cell in made.compared if cell.plain or cell.masked]
    assert found
    assert all(cell.cell.settings["attack.name"] is None for cell in found)


def test_accuracy_is_laid_out_by_attack_and_rule(entries):
    (matrix,) = matrices(entries)
    assert matrix.title == "iid"
    assert matrix.attacks[:3] == (NO_ATTACK, "sign flip, 10 %", "sign flip, 20 %")
    assert matrix.rules[:2] == ("mean", "GMA")
    assert matrix.rules[-4:] == ("clipped mean", "clipped GMA", "bounded mean", "bounded GMA")
    assert matrix.mean("sign flip x10, 30 %", "GMA") == pytest.approx(40.3, abs=0.01)
    assert matrix.versus("zero, 30 %", "GMA", "mean").mean == pytest.approx(-10, abs=0.01)
    assert matrix.best("zero, 30 %") not in ("mean", "GMA")


def test_the_findings_are_those_of_the_runs(entries):
    said = tool().measured(entries)
    assert "760 of 1520 planned runs, 4 seeds." in said
    assert "with 85.3 %, which is 95 % of the accuracy of the mean without an attack (90.0 %)" in said
    assert (
        "corrected for 18 tests, GMA is significantly ahead in 0 and behind in 18, behind by at most 10.0 points"
        in said
    )
    assert "median under 18" in said
    assert "Cost of the norm bound without an attack, mean: none, the same accuracy in all 4 seeds." in said
    assert "| zero, 30 % | 50.3 | 40.3 |" in said


def test_attacked_runs_are_exported_and_read_back(entries, tmp_path):
    plan = experiment("C7")._replace(figures=("attacks",))
    full = [entry._replace(settings={**entry.settings, "rounds": 100}) for entry in entries]
    assert export(plan, full, Chosen(), tmp_path) == len(full)
    again = read_export(tmp_path / "C7")
    assert {frozenset(e.settings.items()) for e in again} == {frozenset(e.settings.items()) for e in full}
    assert (tmp_path / "C7" / "pictures" / "attacks-test.png").stat().st_size > 10_000


def test_the_page_says_what_the_exported_runs_say():
    made = tool()
    page = made.PAGE.read_text()
    assert made.page_with(made.measured(made.exported()), page) == page, "run: python tools/write_robustness.py"
