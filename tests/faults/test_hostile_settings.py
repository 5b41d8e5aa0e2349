"""D1 to D3 and D20: settings with wrong names, wrong values and contradictions; any command line."""

import math
import random

import pytest

from commands import call
from fedgma.cli import app
from fedgma.data.files import locate
from fedgma.errors import ConfigError
from fedgma.experiments.grid import check, every_name, expand, read_grid
from fedgma.experiments.settings.section import LARGE, MOST
from rows import row
from scripts import load_script


@pytest.fixture(scope="module")
def harness():
    """The program of the long campaign."""
    return load_script("benchmarks/faults/settings.py")


@pytest.fixture
def prepared(harness, monkeypatch):
    """The harness, with the commands built once; undone after the test."""
    monkeypatch.setattr(app, "app", app.app)
    monkeypatch.setattr(locate, "load_mini", locate.load_mini)
    harness.prepare(limit=False)
    return harness


def nested(dotted, value):
    section, _, name = dotted.rpartition(".")
    return {section: {name: value}} if section else {name: value}


@row(
    "D1",
    "a setting that does not exist, or a typo",
    happens="refused before anything starts",
    seen="the wrong name, and the nearest setting: `unknown setting 'tua'; did you mean 'tau'?`; exit code 2",
)
def test_d1_every_setting_with_one_wrong_character_is_refused_and_most_get_the_right_hint(harness):
    rng, right, tried = random.Random(0), 0, 0
    for name in every_name():
        for wrong in {harness.one_edit(rng, name) for _ in range(12)} - {*every_name(), *harness.SECTIONS}:
            with pytest.raises(ConfigError) as refused:
                expand({wrong: 1} if "." not in wrong else nested(wrong, 1))
            tried += 1
            section = name.split(".")[0]  # of `partitoin.alpha` only the section is wrong
            meant = section if "." in wrong and wrong.split(".")[0] != section else name
            right += f"did you mean '{meant}'?" in str(refused.value)
    assert tried > 400
    assert right >= 0.9 * tried


@row(
    "D2",
    "a value of the wrong type, not a number, negative or out of range",
    happens="refused before anything starts",
    seen="the setting, its bound and the value; exit code 2",
)
@pytest.mark.parametrize("dotted", every_name())
def test_d2_no_setting_takes_a_value_that_training_cannot_hold(dotted):
    for value in (math.nan, math.inf, -math.inf, 10 * LARGE, -10 * LARGE, {"a": 1}, [[1]], object(), b"x", "\0"):
        with pytest.raises(ConfigError) as refused:
            check(nested(dotted, value))
        assert dotted.split(".")[0] in str(refused.value)
        assert "\n" not in str(refused.value)


@row("D2")
@pytest.mark.parametrize("dotted", ["rounds", "batch_size", "local_epochs", "partition.clients", "evaluate_every"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", MOST + 1, 10**400])
def test_d2_counts_are_whole_numbers_from_one_to_a_bound(dotted, value):
    with pytest.raises(ConfigError, match=dotted):
        check(nested(dotted, value))


@row(
    "D3",
    "settings that contradict each other",
    happens="refused before anything starts",
    seen="the two settings, or the one that no run would use; exit code 2",
)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"aggregator": "mean", "tau": 0.3}, "tau is given but no run uses it"),
        ({"algorithm": "fedavg", "mu": 0.1}, "mu is given but no run uses it"),
        ({"clients_per_round": 11, "partition": {"clients": 10}}, "at most partition.clients = 10, got 11"),
        ({"partition": {"name": "iid", "alpha": 0.1}}, "partition.alpha is given but no run uses it"),
        ({"shift": {"name": "rotation", "low": 3.0, "high": 2.0}}, "low end of a range must not be above its high"),
        ({"dataset": "fedcmnist", "shift": "none"}, "fedcmnist needs its shift"),
        ({"seed": [1, 1]}, "1 is in the list twice"),
    ],
)
def test_d3_contradictions_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        expand(given)


@row(
    "D20",
    "any command line or settings file",
    happens="the command runs, or is refused",
    seen="one sentence and an exit code of the table above; never a traceback",
)
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (500, 1000, 1500))])
def test_d20_random_command_lines_and_files_end_in_a_documented_code(prepared, first):
    seen = prepared.some((20, range(first, first + 500)))
    faults, right = prepared.judge(seen)
    assert not faults, faults[0]
    assert right >= prepared.RIGHT
    assert {one.kind for one in seen} == {"words", "file", "options", "plan", "typo"}


@row("D20")
def test_d20_the_harness_sees_a_traceback_a_wrong_code_and_an_accepted_typo(prepared, monkeypatch, tmp_path):
    def failing(code):
        def run_app():
            if code is None:
                raise ZeroDivisionError
            raise SystemExit(code)

        return run_app

    for code in (None, 1, 0):
        monkeypatch.setattr(app, "run_app", failing(code))
        seen = [prepared.case(0, number, tmp_path) for number in range(60)]
        found = {one.kind for one in seen if one.fault}
        assert found >= ({"typo"} if code == 0 else {"words", "file", "options", "typo"})


@row("D20")
def test_d20_too_little_memory_is_one_sentence(monkeypatch):
    def starved(prog_name):
        raise MemoryError("Unable to allocate 954. GiB")

    monkeypatch.setattr(app, "app", starved)
    code, _, said = call("run")
    assert code == 3
    assert said == (
        "fedgma: not enough memory (Unable to allocate 954. GiB); use less data, smaller batches or fewer epochs\n"
    )


@row("D20")
def test_d20_a_value_with_a_line_break_sets_nothing_else():
    with pytest.raises(ConfigError, match="tau: expected a number, got '0\\.4"):
        read_grid(None, ["tau=0.4\nseed = 3"])


@row("D20")
@pytest.mark.parametrize("word", ["seed=" + "[" * 5000, "seed=" + "9" * 5000, "seed=" + "[" * 3000 + "]" * 3000])
def test_d20_a_word_that_is_nested_or_long_without_end_is_refused(word):
    with pytest.raises(ConfigError, match="seed"):
        read_grid(None, [word])
