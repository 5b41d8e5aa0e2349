"""Folders of format 1: read as they are, converted in place, nothing lost."""

import hashlib
import json
import shutil

import pytest

from commands import call
from fedgma.errors import DataError
from fedgma.experiments import play as experiments
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import missing, plan
from fedgma.records import convert as conversion
from fedgma.records.convert import convert
from fedgma.records.format import fingerprint
from fedgma.records.reader import read_head, read_run, read_runs
from fedgma.records.writer import RunFolder
from run_folders import write_duel, write_run

TINY = {
    "model": "logistic",
    "partition": {"clients": 10},
    "rounds": 2,
    "seed": 0,
    "aggregator": ["mean", "gma"],
    "client_test_size": 0,
    "mask_every": 0,
}


def in_format_1(out):
    """Run folders as the last version wrote them: no identity, and other names of a setting and of the folders."""
    for folder in list(out.iterdir()):
        head = json.loads((folder / "run.json").read_text())
        del head["identity"], head["checksum"]
        head["settings"]["cohort"] = head["settings"].pop("clients_per_round")
        name = hashlib.sha256(json.dumps(head["settings"], sort_keys=True).encode()).hexdigest()[:16]
        head |= {"format": 1, "fingerprint": name, "lineage": f"of {name}"}
        (folder / "run.json").write_text(json.dumps(head))
        (folder / "SHA256SUMS").unlink()
        for manifest in folder.rglob("manifest.json"):
            entries = json.loads(manifest.read_text())
            manifest.write_text(json.dumps({"format": 1, "round": entries["round"], "files": entries["files"]}))
        folder.rename(out / name)


def contents(out):
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name not in ("run.json", "SHA256SUMS", "manifest.json", "lock")
    }


def play(settings, out):
    materials = Materials("cpu")
    left = missing(plan(expand(settings), materials, out))
    return [played.line["round"] for played in experiments.play_fleet(left, materials)] if left else []


def test_a_converted_run_has_the_name_that_a_new_one_would_have_and_everything_it_had(tmp_path):
    play(TINY, tmp_path)
    wanted = contents(tmp_path)
    in_format_1(tmp_path)
    assert not set(wanted) & set(contents(tmp_path))
    assert len(missing(plan(expand(TINY), Materials("cpu"), tmp_path))) == 2
    converted = convert(tmp_path)
    assert [(one.rewritten, one.renamed, one.known, one.problem) for one in converted] == [(True, True, True, "")] * 2
    assert contents(tmp_path) == wanted
    assert play(TINY, tmp_path) == []  # done before
    assert play({**TINY, "rounds": 3}, tmp_path) == [3, 3]  # and extended, not begun anew


def test_a_run_of_format_1_can_be_extended_as_it_is(tmp_path):
    play(TINY, tmp_path)
    in_format_1(tmp_path)
    assert play({**TINY, "rounds": 3}, tmp_path) == [3, 3]


def test_converting_twice_changes_nothing(tmp_path):
    write_duel(tmp_path, seeds=2, rounds=3)
    convert(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not any(one.rewritten or one.renamed for one in convert(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_death_left_half_done_is_finished_by_the_next_conversion(tmp_path, monkeypatch):
    folder = write_run(tmp_path, rounds=3)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_renamed", lambda folder, before, names: folder)
        convert(tmp_path)
    assert read_head(folder)["fingerprint"] != folder.name
    (one,) = convert(tmp_path)
    assert one.renamed
    assert one.folder.name == read_head(one.folder)["fingerprint"]


def test_every_part_of_an_old_record_is_still_there(tmp_path):
    folder = write_run(tmp_path, rounds=3)
    old = json.loads((folder / "run.json").read_text())
    (one,) = convert(tmp_path)
    new = json.loads((one.folder / "run.json").read_text())
    assert new["format"] == 3
    assert new["formerly"] == old["fingerprint"]
    changed = ("format", "fingerprint")
    assert {name: new[name] for name in old if name not in changed} == {
        k: v for k, v in old.items() if k not in changed
    }
    assert new["identity"] == {"data": "ab" * 32, "model": "lenet, 61706 parameters", "precision": "fp32"}


def test_a_longer_run_still_names_the_one_that_it_extends(tmp_path):
    short = write_run(tmp_path, rounds=3)
    long = write_run(tmp_path, rounds=5)
    head = json.loads((long / "run.json").read_text())
    (long / "run.json").write_text(json.dumps({**head, "extends": short.name}))
    heads = [read_head(one.folder) for one in convert(tmp_path)]
    by_rounds = {head["settings"]["rounds"]: head for head in heads}
    assert by_rounds[5]["extends"] == by_rounds[3]["fingerprint"]
    assert by_rounds[5]["lineage"] == by_rounds[3]["lineage"]


def test_a_run_of_unknown_code_is_rewritten_under_the_name_it_has(tmp_path):
    folder = write_run(tmp_path, rounds=3, model="m.py:Net")
    (one,) = convert(tmp_path)
    assert (one.rewritten, one.renamed, one.known) == (True, False, False)
    assert one.folder == folder
    assert "model" not in read_head(folder)["identity"]


def test_settings_are_read_under_the_names_they_have_now(tmp_path):
    folder = write_run(tmp_path, rounds=3)
    head = json.loads((folder / "run.json").read_text())
    head["settings"]["cohort"] = head["settings"].pop("clients_per_round")
    (folder / "run.json").write_text(json.dumps(head))
    assert read_run(folder).settings["clients_per_round"] == 10
    (one,) = convert(tmp_path)
    settings = json.loads((one.folder / "run.json").read_text())["settings"]
    assert settings["clients_per_round"] == 10
    assert "cohort" not in settings


def test_a_format_1_run_is_read_as_one_of_the_current_format(tmp_path):
    run = read_run(write_run(tmp_path, rounds=3))
    assert run.head["format"] == 3
    assert run.identity == {"data": "ab" * 32, "model": "lenet, 61706 parameters", "precision": "fp32"}
    assert run.head["lineage"] == fingerprint({**run.head["settings"], "rounds": None}, run.identity)


def test_the_command_says_what_it_did_and_what_it_left(tmp_path):
    write_duel(tmp_path / "runs", seeds=2, rounds=3)
    broken = write_run(tmp_path / "runs", rounds=3, seed=9)
    (broken / "run.json").write_text("{")
    code, said, error = call("convert", tmp_path / "runs")
    assert code == 3
    assert "4 of 5 run folders were rewritten to format 3; 0 were already." in said
    assert "4 folders were renamed" in said
    assert f"left as it was: {broken.name}" in said
    assert "1 run folders could not be converted" in error
    shutil.rmtree(broken)
    assert call("convert", tmp_path / "runs")[:2] == (
        0,
        "0 of 4 run folders were rewritten to format 3; 4 were already.\n",
    )
    assert len(read_runs(tmp_path / "runs")) == 4


def test_a_folder_that_is_being_written_is_left_for_later(tmp_path):
    with RunFolder(tmp_path / "run", {"settings": {}, "parameters": 1}):
        (one,) = convert(tmp_path)
    assert "a process is writing this folder" in one.problem


def test_a_writer_that_goes_on_with_an_old_folder_makes_it_a_new_one(tmp_path):
    head = {"settings": {"engine": "flower", "rounds": 3}, "parameters": {"w": [2, "float32"]}}
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, **head, "device": "kept"}))
    with RunFolder(tmp_path, head):
        pass
    assert json.loads((tmp_path / "run.json").read_text())["format"] == 3
    assert read_head(tmp_path)["device"] == "kept"


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no run"):
        convert(tmp_path)
