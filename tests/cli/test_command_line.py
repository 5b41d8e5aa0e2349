"""The command line as people know it: JSON, progress, estimates, names, questions and exit codes."""

import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command

from commands import BUILT, call
from fedgma import cli
from fedgma.cli import bars, paper, play
from fedgma.cli import estimate as estimates
from fedgma.cli.tables import say_table
from fedgma.experiments import doctor, estimate
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.outcome import Outcome
from fedgma.experiments.plan import pack, plan
from fedgma.experiments.play import Played
from fedgma.experiments.progress import arm_names
from fedgma.paper.catalogue import experiment
from fedgma.records.label import read_label
from fedgma.records.reader import read_runs
from fedgma.reports.tables import Table
from fedgma.statistics.arms import rows
from fedgma.statistics.baseline import against_baseline
from run_folders import write_duel, write_run

SMALL = ("model=logistic", "rounds=2", "seed=0", "partition.clients=10", "client_test_size=0", "--device", "cpu")


def test_the_doctor_trains_only_on_request(monkeypatch, tmp_path):
    def never(seconds):
        raise AssertionError("no speed check was asked for")

    monkeypatch.setattr(doctor, "measure_speed", never)
    code, printed, _ = call("doctor", "--out", tmp_path, "--json")
    assert code == 0
    assert "speed" not in {finding["what"] for finding in json.loads(printed)}
    assert "numpy" in call("doctor", "--out", tmp_path)[1]


def test_the_doctor_does_not_advise_what_is_installed(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1")
    assert "fedgma[fast]" not in doctor._faster()

    def missing(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert "fedgma[fast]" in doctor._faster()


def test_fewer_threads_than_cores_are_a_finding_only_if_a_variable_says_so(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: set(range(1000)), raising=False)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert not doctor._device().advice
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    assert "unset MKL_NUM_THREADS" in doctor._device().advice


def test_an_experiment_without_its_data_ends_with_the_code_of_missing_data(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDGMA_DATA", raising=False)
    words = ("--cells", "dataset=cifar10", "--seeds", "1", "--rounds", "1", "--out", tmp_path / "runs")
    code, printed, said = call("paper", "run", "E1", *words)
    assert code == 3
    assert "these data sets are missing: cifar10" in said
    assert "data set cifar10 is missing" in printed
    assert call("paper", "run", "E1", *words, "--quiet")[1] == ""


def test_an_output_that_cannot_be_written_is_one_sentence(monkeypatch):
    def full(*words, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedgma.cli.tables.objects", full)
    code, _, said = call("data", "list", "--json")
    assert (code, said) == (3, "fedgma: No space left on device: the output\n")


def test_everything_that_prints_a_table_prints_json(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgma.reports.pages.write_report", lambda made, out: out / "report.html")
    write_duel(tmp_path, seeds=2, rounds=3)
    report = json.loads(call("report", tmp_path, "--out", tmp_path / "page", "--json")[1])
    assert [row["aggregator"] for row in report["tables"]["results"]] == ["mean", "gma"]
    assert report["tables"]["results"][0]["last10"].keys() == {"mean", "deviation", "of"}
    assert report["page"] == str(tmp_path / "page" / "report.html")
    assert call("report", tmp_path, "--quiet")[1] == ""
    power = json.loads(call("power", "--sd", "1", "--difference", "2", "--json")[1])
    assert power["seeds"] == [{"difference": 2.0, "80%": 5, "90%": 5}]
    assert json.loads(call("data", "list", "--json")[1])[0].keys() == {"name", "what", "here"}
    one = experiment("E18")
    monkeypatch.setattr("fedgma.paper.catalogue.catalogue", lambda: {one.id: one})
    assert json.loads(call("paper", "list", "--json")[1])[0]["id"] == "E18"


def members(**changes):
    materials = Materials("cpu")
    chosen = {"model": "logistic", "rounds": 30, "seed": [0, 1], "partition": {"clients": 10}, **changes}
    return plan(expand(chosen), materials, None), materials


def line(round):
    return {"round": round, "seconds": 0.1, "test": {"accuracy": 0.5, "loss": 1.0}}


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_progress_is_one_line_on_a_terminal_of_any_width(width):
    runs, _ = members()
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    watch = bars.Display(console, quiet=False, names=arm_names(runs))
    watch.begin(runs, "training")
    for run in runs:
        watch.see(Played(run, line(7)))
    (shown,) = console.render_lines(watch.bars.get_renderable())
    text = "".join(segment.text for segment in shown)
    assert len(text.rstrip()) <= width
    assert "28/120" in text or width < 30
    assert "GMA 50.0" in text or width < 40


@pytest.mark.parametrize("width", [50, 80, 100, 140])
def test_progress_of_three_arms_shows_the_time_and_every_score(width):
    runs, _ = members(aggregator=["mean", "gma", "trimmed_mean"])
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    watch = bars.Display(console, quiet=False, names=arm_names(runs))
    watch.begin(runs, "training")
    for run in runs:
        for number in range(1, 8):
            watch.see(Played(run, line(number)))
    (shown,) = console.render_lines(watch.bars.get_renderable())
    text = "".join(segment.text for segment in shown)
    assert "42/180" in text
    assert re.search(r"\d\d:\d\d|--:--", text)
    assert "mean 50.0" in text
    assert "GMA 50.0" in text
    assert "trimmed mean 50.0" in text or width < 80
    assert "training" in text or width < 60


@pytest.mark.parametrize("width", [70, 80, 90, 120])
def test_numbers_and_ids_of_a_table_are_never_cut(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    header = ("run", "name", "arm", "seed", "rounds", "state", "last10", "started")
    row = ("f5271b11e1dd5d75", "", "trimmed mean", 0, "21", "done", 21.14, "2026-11-18 19:21Z")
    say_table(Table("runs", "", header, (row, row)))
    printed = capsys.readouterr().out
    assert printed.count("f5271b11e1dd5d75") == 2
    assert width < 80 or len(re.findall("2026-11-18 19:21Z", printed)) == 2


@pytest.mark.parametrize("width", [30, 200])
def test_a_table_on_a_narrow_terminal_is_whole(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    say_table(Table("runs", "", ("run", "state"), (("0123456789abcdef", "interrupted-for-long"),)))
    printed = capsys.readouterr().out
    assert "0123456789abcdef" in printed
    assert "interrupted-for-long" in printed


def test_every_argument_and_option_has_its_help():
    left = [
        (name, given.name)
        for name, command in commands_below(BUILT)
        for given in command.params
        if not getattr(given, "help", None)
    ]
    assert left == []


def commands_below(group, before=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_below(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_an_error_of_several_lines_is_one_line(tmp_path):
    (tmp_path / "two  spaces.py").write_text("def Net(shape, classes):\n    raise RuntimeError('no\\n  way')\n")
    code, _, said = call("run", f"model={tmp_path}/two  spaces.py:Net", *SMALL[1:])
    assert (code, said.count("\n")) == (2, 1)
    assert "two  spaces.py:Net" in said
    assert "(RuntimeError: no way)" in said


def test_an_unknown_command_is_answered_with_one_suggestion():
    code, _, said = call("rn")
    assert code == 2
    assert said.count("run") == 1


def test_a_setting_that_was_written_as_an_option_is_told_apart_from_a_wrong_option():
    for command in ("run", "sweep"):
        assert (
            call(command, "--dataset", "mine.npz")[2]
            == "fedgma: dataset is a setting, not an option; write dataset=VALUE\n"
        )
        assert call(command, "--batch-size=8")[2].endswith("write batch_size=VALUE\n")
        code, _, said = call(command, "--devise", "cpu")
        assert code == 2
        assert "--devise" in said
        assert "--device" in said


def test_spaces_around_the_sign_of_a_setting_are_named():
    assert call("run", "rounds", "=", "5")[2] == (
        "fedgma: expected key=value without spaces around '=', such as rounds=100\n"
    )


def test_signs_that_the_terminal_does_not_have_are_replaced(monkeypatch):
    screen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(screen, "ascii", write_through=True))
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(cli, "_run", lambda: sys.stdout.write("76.47 \u00b1 1.47"))
    cli.main()
    assert screen.getvalue() == b"76.47 ? 1.47"


def test_a_log_file_gets_a_line_now_and_then_and_a_quiet_one_none(monkeypatch):
    runs, _ = members()
    for seconds, quiet, lines in ((0.0, False, 2), (0.0, True, 0), (3600.0, False, 0)):
        monkeypatch.setattr(bars, "LINE_SECONDS", seconds)
        file = io.StringIO()
        watch = bars.Display(Console(file=file, width=40), quiet=quiet, names=arm_names(runs))
        with watch.bars:
            watch.begin(runs, "training")
            for round in (1, 2):
                watch.see(Played(runs[0], line(round)))
        written = file.getvalue().splitlines()
        assert len(written) == lines
    monkeypatch.setattr(bars, "LINE_SECONDS", 0.0)
    assert watch._progress.text == "training: 2 of 120 rounds, about 12 s left, mean 50.0 %"


def test_a_log_file_hears_of_a_loop_now_and_then(monkeypatch):
    for seconds, lines in ((0.0, 2), (3600.0, 0)):
        monkeypatch.setattr(bars, "LINE_SECONDS", seconds)
        file = io.StringIO()
        assert list(bars.follow(Console(file=file), iter("abc"), 3, "rounds of 4 runs")) == ["a", "b", "c"]
        written = file.getvalue().splitlines()
        assert len(written) == lines
        assert [line.split(",")[0] for line in written] == [f"rounds of 4 runs: {k} of 3" for k in (1, 2)][:lines]


def test_an_analysis_shows_how_far_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(bars, "LINE_SECONDS", 0.0)
    code, printed, _ = call("paper", "run", "E7", "--quick", "--seeds", "1", "--device", "cpu", "--out", tmp_path)
    assert code == 0
    assert re.search(r"rounds of \d+ runs with one trunk: 1 of 2, about \d+ s left", printed)
    assert re.search(r"rounds of \d+ separate runs: 1 of 3, about \d+ s left", printed)


def test_a_dry_run_says_what_it_would_take_and_trains_nothing(tmp_path):
    words = ("run", *SMALL, "--out", tmp_path / "runs", "--dry-run")
    code, printed, _ = call(*words, "--json")
    guess = json.loads(printed)
    assert code == 0
    assert (guess["runs"], guess["missing"], guess["fleets"]) == (2, 2, 1)
    assert guess["samples"] == 2 * 2 * 10 * 1000  # runs, rounds, clients, samples of each
    assert guess["seconds"] > 0
    assert guess["memory"] > 10_000 * 28 * 28  # the images alone
    assert call("sweep", *words[1:])[0] == 0
    assert not (tmp_path / "runs").exists()


def test_steps_limit_the_samples_of_a_round():
    (run, *_), materials = members(local_steps=3, batch_size=16, clients_per_round=4)
    assert estimate.samples_of(run.settings, materials) == 4 * 3 * 16


def test_a_very_long_job_is_begun_only_if_somebody_agrees(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(estimate, "is_long", lambda packed, materials: True)
    monkeypatch.setattr(estimate, "estimate", lambda packed, materials: estimate.Estimate(10**9, 7200.0, 2**30))
    monkeypatch.setattr(estimates.typer, "confirm", lambda question, default: asked.append(question))
    monkeypatch.setattr(estimates, "at_terminal", lambda: True)
    out = tmp_path / "runs"
    code, printed, _ = call("run", *SMALL, "--out", out)
    assert (code, len(asked), out.exists()) == (0, 1, False)
    assert "1,000.0 million samples, about 2.0 h, about 1.0 GiB" in printed
    assert call("run", *SMALL, "--out", out, "--yes")[0] == 0
    monkeypatch.setattr(estimates, "at_terminal", lambda: False)
    assert call("run", *SMALL, "--out", out)[0] == 0
    assert len(asked) == 1


def test_what_is_long_depends_on_samples_and_parameters(monkeypatch):
    runs, materials = members()
    packed = pack(runs, materials)
    assert not estimate.is_long(packed, materials)
    monkeypatch.setattr(estimate, "LONG", 4 * 30 * 10 * 1000 * 7850 - 1)
    assert estimate.is_long(packed, materials)


def test_names_and_notes_are_recorded_and_do_not_change_the_runs(tmp_path):
    out = tmp_path / "runs"
    assert call("run", *SMALL, "--out", out, "--name", "first", "--note", "try it")[0] == 0
    folders = sorted(out.iterdir())
    assert [read_label(folder) for folder in folders] == [("first", "try it")] * 2
    code, printed, _ = call("run", *SMALL, "--out", out, "--name", "second")
    assert (code, sorted(out.iterdir())) == (0, folders)
    assert "all 2 runs are already done" in printed
    assert [read_label(folder) for folder in folders] == [("second", "try it")] * 2
    assert call("run", *SMALL, "--out", out, "--name", "a\nb")[0] == 2


def test_the_command_that_is_printed_can_be_pasted_and_the_record_read(tmp_path):
    out = tmp_path / "two words" / b"Z\xfcrich".decode("utf-8", "surrogateescape")
    code, printed, _ = call("run", *SMALL, "--out", out)
    assert code == 0
    assert f"fedgma report {shlex.quote(str(out))}" in printed
    assert [run.head["command"].split()[0] for run in read_runs([out])] == ["fedgma"] * 2


def test_a_shell_can_complete_commands(monkeypatch):
    monkeypatch.setenv("_FEDGMA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "fedgma ex")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert call()[1].split() == ["export"]


def test_ids_are_completed(tmp_path, monkeypatch):
    from fedgma.cli.runs import complete_run

    write_duel(tmp_path / "runs", seeds=1, rounds=2)
    monkeypatch.chdir(tmp_path)
    ids = sorted(os.listdir("runs"))
    assert complete_run("") == ids
    assert complete_run(ids[0][:5]) == ids[:1]


def test_settings_and_their_files_are_completed(tmp_path, monkeypatch):
    from fedgma.cli.play import complete_word

    monkeypatch.chdir(tmp_path)
    (tmp_path / "partitions.toml").touch()
    assert complete_word("partition")[:2] == ["partitions.toml", "partition.name="]
    assert complete_word("tau") == ["tau="]


def test_the_page_on_the_command_line_names_every_command():
    from fedgma.cli.app import app

    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    groups = [group.name for group in app.registered_groups]
    assert [name for name in [*commands, *groups] if f"`fedgma {name}" not in page and f"`{name}`" not in page] == []


def test_run_alone_compares_the_mean_gma_and_an_average_of_models_and_words_compare_the_first_two(monkeypatch):
    grids = []
    monkeypatch.setattr(play, "play_grid", lambda grid, options: grids.append(grid))
    assert call("run")[0] == call("run", "rounds=3")[0] == 0
    alone, given = ([(run.aggregator, run.server_average) for run in grid.runs] for grid in grids)
    assert alone == [("mean", 0.0)] * 5 + [("gma", 0.0)] * 5 + [("mean", 0.9)] * 5
    assert given == [("mean", 0.0)] * 5 + [("gma", 0.0)] * 5
    assert [run.seed for run in grids[0].runs] == 3 * list(range(5))


def test_verdicts_of_several_arms_say_which_arms_they_are_of(tmp_path):
    for seed in range(4):
        for settings in ({"aggregator": "mean"}, {"aggregator": "gma"}, {"aggregator": "mean", "server_average": 0.9}):
            write_run(tmp_path, seed=seed, lift=len(settings), **settings)
    runs = read_runs([tmp_path])
    console = Console(file=io.StringIO(), width=200)
    play.print_outcome(
        console, Outcome(tuple(runs), tuple(rows(runs)), tuple(against_baseline(runs)), (), {}), tmp_path
    )
    printed = console.file.getvalue()
    assert "last 10 rounds, GMA against the mean: " in printed
    assert "last 10 rounds, the average of models against the mean: " in printed


def test_commands_that_train_take_the_options_that_are_declared_for_them():
    from fedgma.cli.app import app

    commands = get_command(app).commands
    paper_commands = commands["paper"].commands
    for options, names, group in (
        (play.Options, ("run", "sweep"), commands),
        (paper.Options, ("run", "all", "search"), paper_commands),
    ):
        for name in names:
            defaults = {option.name: option.default for option in group[name].params}
            assert {field: defaults[field] for field in options._fields} == options._field_defaults
