"""`fedgma paper`: what the commands print, write and refuse; a cut experiment from end to end on embedded images."""

import csv
import json
import re
import shlex
import signal
import subprocess
import sys

import pytest
from made_runs import write_experiment

from commands import call
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import grid_of, plan
from fedgma.experiments.play import play_fleet
from fedgma.paper import analyses, fleets
from fedgma.paper.catalogue import experiment
from fedgma.paper.entries import read_entries, write_export
from fedgma.paper.findings import ClaimVerdict, Finding, read_findings, write_findings
from fedgma.paper.fleets import kind, pack_alike
from fedgma.paper.plans import Cut
from fedgma.paper.rates import read_chosen

CUT = ("--quick", "--cells", "clients=10", "--seeds", "1", "--rounds", "2", "--device", "cpu", "--no-estimate")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """E10 cut to two runs of two rounds on the embedded images."""
    out = tmp_path_factory.mktemp("paper") / "runs"
    return out, call("paper", "run", "E10", *CUT, "--out", out)


def test_the_list_names_every_experiment_with_its_runs_and_its_data(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path))
    monkeypatch.delenv("FEDGMA_DATA", raising=False)
    code, printed, _ = call("paper", "list")
    rows = {words[0]: " ".join(words[1:]) for line in printed.splitlines() if (words := line.split())}
    assert code == 0
    assert re.match(r"In-distribution accuracy Table 2 960 [\d,]+ M absent: mnist", rows["E1"])
    assert rows["E18"].endswith("an analysis")
    assert [name for name in rows if name[0] == "E"] == [f"E{number}" for number in range(1, 19)]


def test_a_cut_experiment_is_played_and_said_beforehand(played):
    out, (code, printed, said) = played
    assert (code, said) == (0, "")
    lines = printed.splitlines()
    assert lines[0] == "E10: Number of clients (Table 8, Figure 3c)"
    assert lines[1] == "no chosen rates for fmnist-mini fedavg: the defaults are used"
    assert lines[2] == "2 runs in one fleet on cpu, fp32, 0.0 million samples"
    assert len(list(out.iterdir())) == 2
    heads = [json.loads((folder / "run.json").read_text()) for folder in out.iterdir()]
    assert {head["precision"] for head in heads} == {"fp32"}
    assert {head["command"] for head in heads} == {
        shlex.join(["fedgma", "paper", "run", "E10", *CUT, "--out", out.name])  # no folders, which are private
    }


def test_what_is_done_is_not_repeated(played):
    code, printed, _ = call("paper", "run", "E10", *CUT, "--out", played[0])
    assert code == 0
    assert "all 2 runs are already done" in printed
    assert f"compare with: fedgma paper compare E10 {played[0]} --quick\n" in printed


def test_a_fleet_that_is_stopped_has_no_speed(tmp_path, monkeypatch):
    def stopped_after_a_round(packed, materials, watch, stopping, **options):
        stopping()  # as a run asks before and after a round
        stopping()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fedgma.cli.play.play_fleets", stopped_after_a_round)
    code, printed, said = call("paper", "run", "E10", *CUT, "--out", tmp_path / "runs")
    assert code == 130
    assert "samples/s" not in printed
    assert "fedgma: stopped; the completed rounds are in" in said


def test_what_is_done_elsewhere_is_not_repeated(played, tmp_path):
    results, out = tmp_path / "results", tmp_path / "runs"
    entries = read_entries([played[0]])[0]
    write_export(entries[:1], results / "E10")
    code, printed, _ = call("paper", "run", "E10", *CUT, "--out", out, "--done", results)
    assert code == 0
    assert f"done in {results}: 1 run\n1 run in one fleet on cpu" in printed
    assert [folder.name for folder in out.iterdir()] == [entries[1].facts["fingerprint"]]


def test_the_runs_are_compared(played, tmp_path):
    words = ("paper", "compare", "e10", played[0], "--quick", "--cells", "clients=10", "--out", tmp_path / "page")
    code, printed, _ = call(*words)
    assert code == 0
    assert "1 of 1 cells were run in both arms, with 1 seed and 2 rounds" in printed
    assert "These runs are a trial on embedded images" in printed
    assert (tmp_path / "page" / "report.html").exists()
    assert (tmp_path / "page" / "tables" / "cells.tex").exists()


def test_a_quick_trial_is_found_by_a_comparison_without_it(played):
    code, _, said = call("paper", "compare", "E10", played[0])
    assert code == 3
    assert said.startswith("fedgma: no finished run of E10 in ")
    assert said.endswith("; add --quick to see the quick trial that is there\n")


def test_results_can_be_compared_in_place_of_run_folders(tmp_path):
    write_experiment(tmp_path / "runs", experiment("E12"), lambda run: 90.0 + run.seed, cut=Cut(seeds=2), rounds=11)
    code, printed, _ = call("paper", "results", tmp_path / "runs", "--out", tmp_path / "results")
    assert code == 0
    assert f"E12: 6 runs in {tmp_path / 'results' / 'E12'}" in printed
    results = tmp_path / "results" / "E12"
    assert {path.name for path in results.iterdir()} == {"runs.json", "runs.jsonl", "report.md", "tables", "pictures"}
    code, printed, _ = call("paper", "compare", "E12", results, "--out", tmp_path / "page")
    assert code == 0
    assert "2 of 2 cells were run in both arms, with 2 seeds and 11 rounds" in printed


def test_rates_are_searched_on_held_out_samples(tmp_path):
    cells = (
        "batch_size=32,shift.name=none,partition.name=label_skew,algorithm=fedavg,server_learning_rate=1,clients=100"
    )
    words = ("--quick", "--seeds", "1", "--rounds", "2", "--device", "cpu", "--no-estimate", "--cells", cells)
    code, printed, said = call("paper", "search", *words, "--out", tmp_path / "runs", "--to", tmp_path / "rates")
    assert code == 0, said
    rows = (tmp_path / "rates" / "rates.csv").read_text().splitlines()
    assert (
        rows[0] == "dataset,partition,clients,algorithm,aggregator,client_learning_rate,server_learning_rate,seed,"
        "validation_last10"
    )
    found = {(arm, float(client)): float(score) for *_, arm, client, _, _, score in csv.reader(rows[1:])}
    assert len(found) == 8
    pairs = [client for arm, client in found if arm == "mean"]
    best = max(pairs, key=lambda client: found["mean", client] + found["gma", client])
    assert f"fmnist-mini fedavg shared: client {best:g}, server 1" in printed
    chosen = read_chosen(tmp_path / "rates" / "chosen.toml")
    assert chosen.pair("fmnist-mini", "fedavg", "shared") == (best, 1.0)
    assert chosen.pair("fmnist-mini", "fedavg", "gma") == (max(pairs, key=lambda client: found["gma", client]), 1.0)


def test_an_analysis_is_done_written_and_shown(tmp_path, monkeypatch):
    def analyse(request):
        rows = [{"seeds": request.seeds, "quick": request.quick}]
        return analyses.AnalysisResult({"asked": rows}, [Finding("paired/5/all", "density matters")])

    monkeypatch.setitem(analyses.ANALYSES, "E7", analyse)
    code, printed, said = call("paper", "run", "E7", "--out", tmp_path, "--quick", "--seeds", "3")
    assert (code, said) == (0, "")
    assert "density matters" in printed
    folder = tmp_path / "analyses" / "E7"
    assert (folder / "asked.csv").read_text() == "seeds,quick\n3,True\n"
    assert (folder / "printed-table_nonparticipating_2of10.csv").exists()
    assert read_findings(folder) == [Finding("paired/5/all", "density matters")]
    (folder / "README.md").unlink()  # it is for people, and nothing reads it
    assert "- density matters\n" in call("paper", "compare", "E7", tmp_path)[1]
    code, printed, _ = call("paper", "results", tmp_path, "--out", tmp_path / "results", "--only", "E7")
    assert (code, printed) == (0, f"E7: 0 runs and the analysis in {tmp_path / 'results' / 'E7'}\n")
    assert {"asked.csv", "findings.json"} <= {path.name for path in (tmp_path / "results" / "E7").iterdir()}


def test_results_are_exported_again_in_place_with_what_the_analysis_says(tmp_path):
    results = tmp_path / "results"
    write_experiment(tmp_path / "runs", experiment("E11"), lambda run: 90.0, cut=Cut(seeds=2), rounds=11)
    (tmp_path / "runs" / "analyses" / "E11").mkdir(parents=True)
    write_findings([Finding("agreement/fall", "It falls.", ClaimVerdict.HOLDS)], tmp_path / "runs" / "analyses" / "E11")
    assert call("paper", "results", tmp_path / "runs", "--out", results, "--only", "E11")[0] == 0
    report = (results / "E11" / "report.md").read_text()
    assert "falls as clients become more similar: holds." in report
    (results / "E11" / "report.md").write_text("an old report")
    assert call("paper", "results", results, "--out", results, "--only", "E11")[0] == 0
    assert (results / "E11" / "report.md").read_text() == report


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("{", "expected the findings of an analysis"),
        ('{"findings": []}', "expected the findings of an analysis"),
        ('{"format": 2, "findings": []}', "has format 2; this version reads 1"),
        ('{"format": 1, "findings": [{"id": "", "text": ""}]}', "expected the findings of an analysis"),
        ('{"format": 1, "findings": [{"id": "a", "text": "", "verdict": "maybe"}]}', "'maybe' is not a valid"),
        (
            '{"format": 1, "findings": [{"id": "a", "text": "", "interval": [1]}]}',
            "expected the findings of an analysis",
        ),
    ],
)
def test_findings_that_are_none_are_refused_by_the_name_of_their_file(tmp_path, written, reason):
    (tmp_path / "E7").mkdir()
    (tmp_path / "E7" / "findings.json").write_text(written)
    code, _, said = call("paper", "compare", "E7", tmp_path)
    assert code == 3
    assert reason in said
    assert "findings.json" in said


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["run", "E99"], 2, "unknown experiment 'E99'"),
        (
            ["run", "E13", "--cells", "local_epochs=2"],
            2,
            "fits --cells 'local_epochs=2'; it has local_epochs 1, ",
        ),
        (["run", "E10", "--quick", "--cells", "dataset=mnist"], 2, "dataset fmnist-mini; --quick puts embedded images"),
        (
            ["compare", "E13", ".", "--cells", "dataset=minst"],
            2,
            "fits --cells 'dataset=minst'; it has ",
        ),
        (["run", "E13", "--rates", "none.toml"], 2, "cannot read the chosen rates"),
        (["run", "E13", "--precision", "fp8"], 2, "unknown precision 'fp8'"),
        (["run", "C12"], 2, "C12 needs learning rates for cifar10 fedavg, cifar10 fedprox, cifar10 fedadam"),
        (["search", "--plan", "C6"], 2, "--plan expects a search of learning rates, such as E15 or C5, got C6"),
        (["queue", "--runs", "no-such-folder"], 3, "no such folder: no-such-folder"),
        (["compare", "E18", "."], 3, "no analysis of E18"),
        (["compare", "E13", ".", "--statistic", "median"], 2, "unknown statistic 'median'"),
        (["compare", "E13", "no-such-folder"], 3, "holds no run"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(words, code, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, _, said = call("paper", *words)
    assert found == code
    assert reason in said
    assert "Traceback" not in said


def test_runs_are_played_without_pictures_and_statistics(tmp_path):
    """A machine that only plays has torch and numpy, and little else."""
    words = ["fedgma", "paper", "run", "E10", *CUT, "--out", str(tmp_path)]
    code = f"import sys; sys.modules.update(matplotlib=None, scipy=None); sys.argv = {words!r}"
    command = [sys.executable, "-c", f"{code}; from fedgma.cli import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fleet 1 of 1: 2 runs of fmnist-mini, 2 rounds" in done.stdout


def test_fleets_may_be_small_and_hold_pairs():
    materials = Materials("cpu")
    runs = plan(grid_of({"rounds": 2, "seed": [0, 1, 2], "algorithm": ["fedavg", "fedadam"]}), materials, None)
    fleets_ = pack_alike(runs, materials, 2)
    assert len(fleets_) == 6
    for one, other in fleets_:
        assert (one.settings.seed, one.settings.algorithm) == (other.settings.seed, other.settings.algorithm)
        assert {one.settings.aggregator, other.settings.aggregator} == {"mean", "gma"}


def test_a_fleet_that_would_not_end_in_time_is_left(tmp_path):
    words = ["--quick", "--cells", "clients=10|50", "--seeds", "1", "--rounds", "2", "--device", "cpu", "--no-estimate"]
    code, printed, _ = call("paper", "run", "E10", *words, "--out", tmp_path, "--minutes", "0")
    assert code == 0
    assert "2 fleets were not started: they would end after 0 minutes" in printed
    assert not list(tmp_path.iterdir())


def test_fleets_hold_runs_with_as_many_steps():
    materials = Materials("cpu")
    settings = {"partition": {"clients": [10, 100]}, "rounds": [2, 3], "clients_per_round": 10, "seed": 0}
    fleets = pack_alike(plan(grid_of(settings), materials, None), materials)
    assert [len(fleet) for fleet in fleets] == [2] * 4
    assert all(len({kind(run.settings) for run in fleet}) == 1 for fleet in fleets)


def test_a_precision_below_fp32_names_another_run_and_needs_a_gpu():
    grid = grid_of({"rounds": 1, "seed": 0})
    names = {
        precision: plan(grid, Materials("cpu", precision=precision), None)[0].fingerprint
        for precision in ("fp32", "tf32", "bf16")
    }
    assert len(set(names.values())) == 3
    assert names["fp32"] == plan(grid, Materials("cpu"), None)[0].fingerprint
    materials = Materials("cpu", precision="bf16")
    with pytest.raises(ValueError, match="precision 'bf16' is for a GPU"):
        next(play_fleet(plan(grid, materials, None), materials))


def test_the_time_is_measured_in_a_few_rounds_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fleets, "WORTH", 0)
    materials = Materials("cpu")
    settings = {"model": "logistic", "partition": {"clients": 20}, "clients_per_round": 4, "rounds": 50, "seed": 0}
    packed = pack_alike(plan(grid_of(settings), materials, tmp_path / "runs"), materials)
    assert fleets.estimate(packed, materials) > 0
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(fleets, "WORTH", 10**9)
    assert fleets.estimate(packed, materials) is None
