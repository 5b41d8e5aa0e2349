"""What is left to run: planned runs that were not made on any machine, and how long they would take."""

import json
from pathlib import Path

import pytest
from made_runs import write_experiment

from commands import call
from fedgma.paper.catalogue import experiment
from fedgma.paper.entries import merged, read_entries, read_export, write_export
from fedgma.paper.plans import Cut, plan_runs, samples
from fedgma.paper.queue import Job, not_made, outlook, read_queue
from fedgma.paper.rates import Chosen, read_chosen

RESULTS = Path(__file__).parents[2] / "results"
ONE_SEED = Cut(seeds=1)
ONE = Job("E12", "a test")
PLANNED = len(plan_runs(experiment("E12"), Chosen()).grid.runs)


def made(folder, name="E12", cut=ONE_SEED, level=90.0, **options):
    write_experiment(
        folder, experiment(name), lambda run: level, cut=cut, rounds=options.pop("rounds", None), **options
    )
    return folder


def test_every_job_of_the_queue_plans_runs_with_four_seeds_or_is_a_search():
    searched: set[str] = set()
    for job in read_queue():
        plan = plan_runs(experiment(job.id), read_chosen(), Cut(cells=job.cells, seeds=1))
        assert plan.runs, job
        assert job.search == (experiment(job.id).splits == ("validation",))
        assert job.search or experiment(job.id).seeds >= 4, job
        needed = experiment(job.id).search
        assert not plan.unsearched or needed in searched, f"{job.id} needs the rates of {needed} first"
        searched |= {job.id} if job.search else set()


def test_runs_of_folders_and_exports_are_done_and_the_others_are_left(tmp_path):
    folders = made(tmp_path / "runs")
    entries = read_entries([folders])[0]
    assert len(entries) == 3
    write_export(entries[:2], tmp_path / "results" / "E12")
    (left,) = outlook([ONE], [], Chosen())
    assert (left.planned, left.done, left.runs, left.seconds) == (PLANNED, 0, PLANNED, None)
    for path, done in ((tmp_path / "results", 2), (folders, 3)):
        (left,) = outlook([ONE], read_entries([path])[0], Chosen())
        assert (left.done, left.runs) == (done, PLANNED - done)
    run = plan_runs(experiment("E12"), Chosen()).grid.runs[0]
    assert left.samples == (PLANNED - 3) * samples(run)
    assert left.rate == pytest.approx(samples(run) / (0.01 * run.rounds))  # of the records
    assert len(not_made([run], [])) == 1
    assert not_made([run], entries) == []


def test_a_run_with_other_rounds_is_not_the_planned_one(tmp_path):
    (left,) = outlook([ONE], read_entries([made(tmp_path, rounds=11)])[0], Chosen())
    assert (left.done, left.runs) == (0, PLANNED)


def test_a_run_that_was_evaluated_more_rarely_is_not_the_planned_one(tmp_path):
    run = plan_runs(experiment("E12"), Chosen()).grid.runs[0]
    (entry,) = [e for e in read_entries([made(tmp_path)])[0] if not not_made([run], [e])]
    for spacing, missing in ((1, 0), (run.evaluate_every, 0), (run.evaluate_every + 1, 1)):
        other = entry._replace(settings={**entry.settings, "evaluate_every": spacing})
        assert len(not_made([run], [other])) == missing


def test_a_run_with_a_setting_that_the_planned_one_leaves_at_its_default_is_another_run():
    cut = Cut(cells="dataset=mnist,algorithm=fedavg,aggregator=mean")
    planned = plan_runs(experiment("C22"), Chosen(), cut).grid.runs
    averaged = [entry for entry in read_export(RESULTS / "C22") if entry.settings.get("server_average")]
    left = not_made(planned, averaged)
    assert left == [run for run in planned if not run.server_average]
    assert len(left) == 9 == len(planned) - len(left)


def test_a_run_that_was_stopped_early_is_left(tmp_path):
    entries = read_entries([made(tmp_path)])[0]
    planned = int(entries[0].settings["rounds"])
    for played, done in ((planned - 1, 3), (planned // 2, 2)):
        stopped = [entries[0]._replace(done={"rounds": played}), *entries[1:]]
        assert outlook([ONE], stopped, Chosen())[0].done == done
        runs = plan_runs(experiment("E12"), Chosen()).grid.runs
        assert len(not_made(runs, stopped)) == PLANNED - done


def test_a_run_of_two_jobs_is_left_in_the_first():
    first, second = outlook([ONE, ONE], [], Chosen())
    assert (first.runs, first.earlier) == (PLANNED, 0)
    assert (second.runs, second.earlier, second.samples) == (0, PLANNED, 0)


def test_outdated_runs_are_left_with_the_reason(tmp_path):
    cut = Cut(seeds=1, cells="aggregator=gma|shuffled_mask|damped_mean")
    entries = read_entries([made(tmp_path, "C4", cut)])[0]
    (left,) = outlook([Job("C4", "")], entries, Chosen())
    assert left.done == 2  # damped_mean has always had the right length with FedAvg
    assert left.outdated == {"shuffled_mask before 2026-11-16 took steps about 20 % shorter than the masked ones": 1}
    new = [entry._replace(facts={**entry.facts, "started": "2026-11-17T00:00:00Z"}) for entry in entries]
    assert outlook([Job("C4", "")], merged([*entries, *new]), Chosen())[0].done == 3


def test_runs_that_are_made_again_have_the_precision_of_the_arms_beside_them():
    jobs = [job for job in read_queue() if job.id in ("C3", "C4", "C14") or (job.id == "C1" and "mnist" in job.cells)]
    entries = [entry for name in {job.id for job in jobs} for entry in read_export(RESULTS / name)]
    for left in outlook(jobs, entries, read_chosen()):
        assert left.precisions <= {left.job.precision}, left.job


def test_the_command_says_what_is_left_as_a_table_and_as_json(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write_export(read_entries([made(tmp_path / "runs", chosen=read_chosen())])[0], tmp_path / "results" / "E12")
    words = ("paper", "queue", "E12", "C18", "--runs", tmp_path / "results")
    code, printed, said = call(*words)
    assert (code, said) == (0, "")
    rows = [line.split() for line in printed.splitlines()]
    assert rows[1][:6] == ["C18", "1", "16", "0", "16", "48"]
    assert rows[2][:5] == ["total", "16", "0", "16", "48"]
    assert rows[3][:3] == ["step", "1,", "C18:"]  # why, below a table that fits into 80 columns
    assert f"not queued: E12 3 of {PLANNED} runs done" in printed
    assert f"next: fedgma paper run C18 --done {tmp_path / 'results'} --precision tf32" in printed
    document = json.loads(call(*words, "--json")[1])
    (job,), (other,) = document["queue"], document["not_queued"]
    assert (job["id"], job["runs_left"], job["samples_left"]) == ("C18", 16, 48_000_000)
    assert (other["id"], other["done"]) == ("E12", 3)
    assert document["total"]["gpu_minutes"] == job["gpu_minutes"] > 0


# -- merging what comes back ------------------------------------------------------------------------------------------


def test_runs_of_several_machines_are_merged_with_an_earlier_export(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgma.paper.results.draw", lambda comparison: [])  # pictures take seconds
    results, out = tmp_path / "results", tmp_path / "results"
    made(tmp_path / "a", cut=Cut(cells="seed=0"), rounds=12)
    made(tmp_path / "b", cut=Cut(cells="seed=1"), rounds=12)
    made(tmp_path / "c", cut=Cut(cells="seed=2"), rounds=12)
    made(tmp_path / "old", rounds=11)  # fits the same cells, and no comparison uses it beside the longer runs
    assert call("paper", "results", tmp_path / "old", "--out", out, "--only", "E12")[0] == 0
    assert call("paper", "results", tmp_path / "a", "--out", out, "--only", "E12")[0] == 0
    words = (tmp_path / "b", tmp_path / "c", results)
    code, printed, _ = call("paper", "results", *words, "--out", out, "--only", "E12")
    assert (code, printed) == (0, f"E12: 12 runs in {out / 'E12'}\n")
    runs = read_export(results / "E12")
    assert sorted((entry.settings["rounds"], entry.seed) for entry in runs) == sorted(
        [(11, 0)] * 3 + [(12, seed) for seed in range(3)] * 3
    )
    before = (results / "E12" / "runs.jsonl").read_bytes()
    assert call("paper", "results", results, "--out", out, "--only", "E12")[0] == 0
    assert (results / "E12" / "runs.jsonl").read_bytes() == before


def test_copies_of_a_run_are_one_run_with_the_curves_of_all(tmp_path):
    (entry, *_) = read_entries([made(tmp_path, "E6", level=80.0)])[0]
    assert set(entry.curves) >= {"train", "test", "seen"}
    one = entry._replace(curves={"test": entry.curves["test"]})
    other = entry._replace(curves={"train": entry.curves["train"]})
    (both,) = merged([one, other])
    assert set(both.curves) == {"test", "train"}
    shorter = entry._replace(done={"rounds": 3})
    assert merged([shorter, entry]) == merged([entry, shorter]) == [entry]


def test_an_export_keeps_apart_settings_that_older_runs_do_not_have(tmp_path):
    """A setting that did not exist is not the same as a setting that a run does not use."""
    new, old, *_ = read_entries([made(tmp_path / "runs")])[0]
    old = old._replace(settings={name: value for name, value in old.settings.items() if name != "batch_size"})
    write_export([new, old], tmp_path / "E12")
    read = read_export(tmp_path / "E12")
    assert [dict(entry.settings) for entry in read] == [dict(new.settings), dict(old.settings)]
