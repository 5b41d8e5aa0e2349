"""Clocks in settings, records and reports: off unless asked for, recorded, resumed, and part of a run's identity."""

import json

import numpy as np
import pytest
from small_runs import SMALL

from fedgma.data.files.own.delays import read_delays
from fedgma.errors import ConfigError, DataError
from fedgma.experiments import play as experiments
from fedgma.experiments.grid import check, expand, read_grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import missing, pack, plan
from fedgma.experiments.settings import Settings, complete, record
from fedgma.records.reader import read_lines
from fedgma.reports.pictures import make_pictures
from fedgma.reports.report import make_report

SLOW = {"compute": "lognormal", "compute_seconds": 0.1, "network": "exponential", "network_seconds": 2.0}
SETTINGS = {**SMALL, "client_test_size": 0, "seed": 0}
CLOCK = {**SLOW, "name": "asynchronous", "concurrency": 7, "dropout": 0.2, "deadline": 60.0}


def train(settings, out, rounds=None):
    """The runs of settings, stopped after so many rounds."""
    materials = Materials("cpu")
    (members,) = pack(missing(plan(expand(settings), materials, out)), materials)
    seen = []
    last = None if rounds is None else rounds * len(members)
    for played in experiments.play_fleet(members, materials, stop=lambda: len(seen) == last):
        seen.append(played)


def told(out):
    """What the folders say, without how long it took."""
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    return {
        folder.name: (
            json.loads((folder / "done").read_text()),
            [{**line, "seconds": None} for line in read_lines(folder)],
        )
        for folder in folders
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    train({**SETTINGS, "clock": CLOCK}, out)
    return out


def test_a_stopped_run_continues_with_the_same_events_and_bits(undisturbed, tmp_path):
    settings = {**SETTINGS, "clock": CLOCK}
    train({**settings, "rounds": 4}, tmp_path, rounds=2)
    train({**settings, "rounds": 4}, tmp_path)
    train(settings, tmp_path)  # the same with more rounds continues it
    assert {name: ends for name, ends in told(tmp_path).items() if name in told(undisturbed)} == told(undisturbed)


def test_rounds_are_recorded_with_their_time_and_both_arms_have_the_same(undisturbed):
    lines = [[line["clock"] for line in lines] for _, lines in told(undisturbed).values()]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    for line in lines:
        times = [entry["time"] for entry in line]
        assert times == sorted(times)
        assert all(entry["asked"] >= entry["lost"] >= 0 for entry in line)
        np.testing.assert_allclose(np.diff([0, *times]), [entry["seconds"] for entry in line])


def test_a_report_tells_the_time_to_a_target_beside_the_rounds(undisturbed):
    made = make_report(undisturbed)
    (table,) = (table for table in made.tables if table.name == "targets")
    assert {"target, %", "reached", "rounds", "seconds", "lost, %", "staleness"} <= set(table.header)
    assert all(row[table.header.index("seconds")] > 0 for row in table.rows)
    assert "Accuracy by simulated time" in {picture.kind for picture in make_pictures(made.rows)}
    (twice,) = (table for table in make_report(undisturbed, targets=[1.0, 99.9]).tables if table.name == "targets")
    reached = [row[twice.header.index("reached")] for row in twice.rows]
    assert reached == ["1 of 1", "1 of 1", "0 of 1", "0 of 1"]


def test_a_round_that_all_miss_is_recorded_and_no_failure(tmp_path, caplog):
    clock = {"name": "synchronous", "network_seconds": 2.0, "deadline": 1.0}
    outcome = experiments.run({**SETTINGS, "rounds": 2, "clock": clock, "aggregator": "mean"}, out=tmp_path)
    lines = outcome.runs[0].rounds
    assert [line["counted"] for line in lines] == [0, 0]
    assert lines[1]["clock"] == {"time": 2.0, "seconds": 1.0, "asked": 4, "lost": 4}
    assert lines[1]["train"] == {"loss": None, "accuracy": None}
    assert "no client answered in time in any of 2 rounds, so no model was trained; raise clock.deadl" in caplog.text


def test_rounds_that_some_clients_reach_say_nothing(caplog):
    clock = {"name": "synchronous", "network_seconds": 2.0, "deadline": 3.0}
    experiments.run({**SETTINGS, "rounds": 1, "clock": clock, "aggregator": "mean"})
    assert "no client answered" not in caplog.text


def test_without_a_clock_a_record_says_nothing_of_it():
    assert "clock" not in record(complete(Settings()))
    assert record(complete(check({"clock": "synchronous"})))["clock"]["name"] == "synchronous"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clock.deadline=5"], "clock.deadline is given but no run uses it"),
        (["clock=synchronous", "clock.concurrency=5"], "clock.concurrency is given but no run uses it"),
        (["clock=synchronous", "clock.compute=normal"], "unknown distribution 'normal'"),
        (["clock=sync"], "did you mean 'asynchronous'|expected|should be"),
    ],
)
def test_settings_that_no_clock_reads_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        read_grid(None, words)


def test_measured_delays_belong_to_the_identity(tmp_path):
    file = tmp_path / "phones.csv"
    file.write_text("client,seconds\na,1\nb,2\na,3\n")
    settings = check({**SMALL, "clock": {"name": "synchronous", "network": str(file)}})
    first = Materials("cpu").identity(complete(settings))["clock"]
    assert record(complete(settings))["clock"]["network"] == "phones.csv"
    assert [seconds.tolist() for seconds in read_delays(file)] == [[1.0, 3.0], [2.0]]
    file.write_text("client,seconds\na,1\nb,2\na,4\n")
    assert Materials("cpu").identity(complete(settings))["clock"] != first
    file.unlink()
    with pytest.raises(ConfigError, match=r"clock\.network: no file"):
        Materials("cpu").identity(complete(settings))


def test_delays_are_read_from_arrays_and_bad_ones_refused(tmp_path):
    table = tmp_path / "phones.csv"
    table.write_text("client,seconds\na,1\na,x\n")
    with pytest.raises(DataError, match=r"must be numbers, .*got 'x' in row 2"):
        read_delays(table)
    file = tmp_path / "delays.npz"
    np.savez(file, seconds=np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert [seconds.tolist() for seconds in read_delays(file)] == [[1.0, 2.0], [3.0, 4.0]]
    for arrays, said in (
        ({"time": np.ones(3)}, "must hold `seconds`"),
        ({"seconds": np.array([1.0, np.nan])}, "must be from 0 to 1e\\+12"),
        ({"seconds": np.ones((2, 2, 2))}, "must be numbers"),
        ({"seconds": np.ones(3), "client": np.arange(2)}, "a device for each of 3"),
    ):
        np.savez(file, **arrays)
        with pytest.raises(DataError, match=said):
            read_delays(file)
