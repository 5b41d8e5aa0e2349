"""The commands as a whole: never a traceback, always a documented code; the doctor; the docs."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import call
from fedgma.cli.bars import spark, top_of
from fedgma.experiments import doctor
from fedgma.experiments.grid import every_name
from fedgma.records.checkpoints import digest
from scripts import load_script

ROOT = Path(__file__).parents[2]


WORDS = st.one_of(
    st.sampled_from(["--show", "--quiet", "--json", "--out", "--device", "--status", "-q", "--help", "=", "x.toml"]),
    st.builds("{}={}".format, st.sampled_from([*every_name(), "tua"]), st.text(max_size=6)),
    st.text(max_size=8),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["run", "sweep"]), st.lists(WORDS, max_size=4))
def test_no_list_of_words_ends_in_a_traceback(command, words):
    last = ["--show"] if command == "run" else ["--status", "--no-such-option"]  # nothing is played
    code, _, said = call(command, *words, *last)
    assert code in (0, 2, 3)
    assert "Traceback" not in said


def test_the_doctor_says_what_is_missing_and_what_to_do(monkeypatch, tmp_path):
    real = doctor.metadata.version

    def version(name):
        if name in ("numba", "torch"):
            raise doctor.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    found = {one.what: one for one in doctor.examine(tmp_path)}
    assert "fedgma[fast]" in found["numba"].advice
    assert not found["numba"].must
    assert found["torch"].must
    assert found["data: fmnist-mini"] == ("data: fmnist-mini", "in the package", "", False)


def test_a_wrong_data_folder_is_a_finding(monkeypatch):
    monkeypatch.setenv("FEDGMA_DATA", "/no/such/folder")
    assert [one.what for one in doctor.examine() if one.must and one.advice] == ["data"]


def test_the_doctors_exit_code(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda out: [doctor.Finding("torch", "missing", "pip install", True)])
    assert call("doctor", "--json")[0] == 2


def test_the_doctor_measures_speed():
    found = doctor.measure_speed(0.2, "cpu")
    assert "rounds/s" in found.found


def test_the_settings_reference_is_that_of_the_models():
    tool = load_script("tools/write_settings.py")
    page = (ROOT / "docs" / "settings.md").read_text()
    assert tool.page_with(tool.reference(), page) == page, "run: python tools/write_settings.py"


def test_the_example_gives_a_verdict(capsys):
    example = load_script("examples/own_data.py")
    outcome = example.main(rounds=6)
    assert outcome.comparisons[0].cells[0].verdict.of == 4
    assert "seeds" in capsys.readouterr().out


def test_an_arm_is_called_by_what_tells_it_apart_whatever_its_seed():
    from fedgma.experiments.grid import expand
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.plan import plan
    from fedgma.experiments.progress import arm_names

    chosen = {"partition": ["iid", {"name": "dirichlet", "alpha": 0.1}], "tau": [0.2, 0.4], "seed": [0, 1]}
    names = arm_names(plan(expand(chosen), Materials("cpu"), None))
    both = ["mean", "GMA, tau 0.2", "GMA, tau 0.4"]
    assert list(dict.fromkeys(names.values())) == [f"{part}, {arm}" for part in ("dirichlet", "iid") for arm in both]
    assert len(names) == 12


def test_sparks_follow_the_curve():
    assert spark([0, 100]) == "▁█"
    assert len(spark(list(range(100)))) <= 12


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_a_diverged_run_leaves_a_gap_in_its_curve(score):
    assert spark([1.0, score, 2.0], top=2.0) == "▅ █"
    assert top_of([score, -3.0]) == 3.0
    assert top_of([score]) == 1.0


def test_a_digest_sees_names_types_and_shapes():
    base = {"w": np.zeros(4, np.float32)}
    others = [{"v": base["w"]}, {"w": base["w"].astype(np.int32)}, {"w": base["w"].reshape(2, 2)}, {}]
    assert all(digest(base) != digest(other) for other in others)
    assert json.dumps(digest(base)).strip('"') == digest({"w": np.zeros(4, np.float32)})


def test_progress_is_shown_on_a_terminal_and_counts_what_was_resumed(monkeypatch):
    from rich.console import Console

    from fedgma.cli.bars import Display
    from fedgma.experiments import play as experiments
    from fedgma.experiments.grid import expand
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.progress import arm_names

    materials = Materials("cpu")
    chosen = {"model": "logistic", "rounds": 3, "seed": 0, "partition": {"clients": 10}}
    members = experiments.plan(expand(chosen), materials, None)
    screen = io.StringIO()
    watch = Display(Console(file=screen, force_terminal=True, width=160), quiet=False, names=arm_names(members))
    with watch.bars:
        watch.begin(members, "training")
        for played in experiments.play_fleet(members, materials):
            watch.see(played)
    (task,) = watch.bars.tasks
    assert (task.completed, task.total) == (6, 6)
    assert "GMA" in task.fields["arms"]
    assert "training" in screen.getvalue()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_pipe_gets_no_progress(quiet):
    from rich.console import Console

    from fedgma.cli.bars import Display

    assert Display(Console(file=io.StringIO()), quiet=quiet, names={}).bars.disable
