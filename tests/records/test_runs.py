import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgma.errors import DataError, FedgmaError
from fedgma.records.format import FORMAT
from fedgma.records.reader import read_head, read_run, read_runs
from fedgma.records.writer import write_head
from fedgma.reports.report import make_report
from fedgma.statistics.arms import rows, score, telling
from run_folders import write_duel, write_run


def test_a_folder_is_read_with_all_runs_below_it_each_once(tmp_path):
    folders = write_duel(tmp_path / "a" / "b", seeds=2)
    runs = read_runs([tmp_path, folders[0], tmp_path / "a"])
    assert sorted(run.folder for run in runs) == sorted(folders)


@pytest.mark.parametrize("text", ["fedgma run 'seed=[0,1]'", "[ 0,\n1 ]", "[]", "[1 2]"])
def test_a_text_that_looks_like_a_list_is_recorded_as_it_is(tmp_path, text):
    write_head(tmp_path, {"format": FORMAT, "settings": {"seed": [0, 1]}, "command": text})
    assert '"seed": [0, 1]' in (tmp_path / "run.json").read_text()  # a list of numbers is one line
    head = read_head(tmp_path)
    assert (head["command"], head["settings"]) == (text, {"seed": [0, 1]})


def test_a_finished_run_holds_its_settings_flat_and_its_rounds(tmp_path):
    run = read_run(write_run(tmp_path, rounds=12))
    assert run.finished
    assert run.settings["partition.classes_per_client"] == 2
    assert [record["round"] for record in run.rounds] == list(range(1, 13))


def test_last10_is_the_mean_of_the_evaluations_in_the_last_ten_rounds(tmp_path):
    folder = write_run(tmp_path, rounds=15)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        if line["round"] % 5:
            del line["test"]  # evaluated in rounds 5, 10 and 15
        else:
            line["test"]["accuracy"] = line["round"] / 100
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert (score(run, "best"), score(run, "last10"), score(run, "final")) == (15.0, 12.5, 15.0)


def test_runs_that_differ_in_their_seed_alone_are_one_row(tmp_path):
    write_duel(tmp_path, seeds=3)
    made = rows(read_runs([tmp_path]))
    assert [(row.label, len(row.runs)) for row in made] == [({"aggregator": "mean"}, 3), ({"aggregator": "gma"}, 3)]


def test_a_setting_that_follows_from_another_is_not_named(tmp_path):
    write_run(tmp_path, algorithm="fedprox", mu=0.1)
    write_run(tmp_path, algorithm="fedavg", mu=None)
    assert telling(read_runs([tmp_path])) == ["algorithm"]


def test_a_run_without_done_is_unfinished_and_what_a_crash_left_is_passed_over(tmp_path):
    folder = write_run(tmp_path, stop=4)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "test": {"accu')
    run = read_run(folder)
    assert not run.finished
    assert len(run.rounds) == 4


BREAKS = {
    "no such folder": lambda folder: os.rename(folder, folder.with_name("elsewhere")),
    "no run.json in it": lambda folder: (folder / "run.json").unlink(),
    "is not JSON": lambda folder: (folder / "run.json").write_text("{"),
    "has format 99": lambda folder: _change(folder, format=99),
    "'settings' as a dict": lambda folder: _change(folder, settings=[1]),
    "setting 'rounds' should be int": lambda folder: _change(folder, settings={"seed": 0}),
    "line 3,.* is not JSON": lambda folder: _line(folder, 2, "{{{"),
    "should be round 3, got 7": lambda folder: _line(folder, 2, '{"round": 7}'),
    "should be a JSON object": lambda folder: _line(folder, 2, "3"),
    "test accuracy should be from 0 to 1, got 74.2": lambda folder: _line(
        folder, 2, '{"round": 3, "test": {"accuracy": 74.2}}'
    ),
    "marked done after 30 rounds but holds 29": lambda folder: _line(folder, 29, ""),
    "ends in an incomplete line": lambda folder: _line(folder, 30, '{"round": 31'),
    "not UTF-8": lambda folder: (folder / "run.json").write_bytes(b"\xff\xfe{}"),
    "done should be a JSON object": lambda folder: (folder / "done").write_text("[]"),
    "nested|recursion": lambda folder: (folder / "run.json").write_text("[" * 100_000),
}


def _change(folder, **values):
    head = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**head, **values}))


def _line(folder, place, text):
    lines = (folder / "rounds.jsonl").read_text().split("\n")
    lines[place : place + 1] = [text] if text else []
    (folder / "rounds.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("sentence", BREAKS)
def test_a_broken_folder_is_refused_with_a_sentence_that_names_it(tmp_path, sentence):
    folder = write_run(tmp_path)
    BREAKS[sentence](folder)
    with pytest.raises(DataError, match=sentence) as caught:
        read_runs([folder])
    assert folder.name in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=150)
@given(
    name=st.sampled_from(["run.json", "rounds.jsonl", "done"]),
    place=st.floats(0, 0.999),
    put=st.binary(max_size=3) | st.sampled_from([b"null", b"[]", b"{}", b"-1", b"1e999", b"NaN", b'"x"']),
    cut=st.integers(0, 6),
)
def test_no_damage_to_a_file_gives_anything_but_a_report_or_one_sentence(tmp_path_factory, name, place, put, cut):
    folder = write_run(tmp_path_factory.mktemp("runs"), rounds=3)
    raw = (folder / name).read_bytes()
    at = int(place * len(raw))
    (folder / name).write_bytes(raw[:at] + put + raw[at + cut :])
    try:
        make_report([folder])
    except FedgmaError as error:
        assert "\n" not in str(error)  # noqa: PT017 (a damaged file may still be a good one)
