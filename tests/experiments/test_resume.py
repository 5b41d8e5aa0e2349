"""Stopped at any moment and run again: the same weights, the same records, nothing done twice."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_runs import SMALL

from fedgma.errors import ConfigError, DataError, IntegrityError
from fedgma.experiments import play as experiments
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import missing, pack
from fedgma.records import checkpoints
from fedgma.records.checkpoints import read_checkpoint, write_checkpoint
from fedgma.records.reader import read_lines
from fedgma.records.state import is_running
from fedgma.records.writer import RunFolder

STATEFUL = {**SMALL, "algorithm": ["fedyogi", "scaffold"], "aggregator": "gma", "seed": 0}
COMMAND = [sys.executable, "-c", "from fedgma.cli import main; main()", "run", "--quiet", "--checkpoint-seconds", "0"]


def words(settings):
    nested = {f"partition.{key}": value for key, value in settings["partition"].items()}
    plain = {key: value for key, value in settings.items() if key != "partition"}
    return [f"{key}={json.dumps(value)}" for key, value in {**plain, **nested}.items()]


def play(settings, out, rounds=None, every=0.0, **options):
    """Play in this process, stopping after so many rounds of the fleet."""
    grid = expand(settings)
    materials = Materials("cpu")
    planned = experiments.plan(grid, materials, out)
    seen = []
    for members in pack(missing(planned), materials):
        last = None if rounds is None else rounds * len(members)
        stop = functools.partial(lambda last: len(seen) == last, last)
        for played in experiments.play_fleet(members, materials, checkpoint_seconds=every, stop=stop, **options):
            seen.append(played)
    return seen


def outcome(out):
    """Everything that must not depend on how often a run was stopped."""
    found = {}
    for folder in sorted(path for path in Path(out).iterdir() if path.is_dir()):
        lines = [{**line, "seconds": None} for line in read_lines(folder)]
        assert [line["round"] for line in lines] == list(range(1, len(lines) + 1))
        assert (folder / "done").exists(), folder
        assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"{len(lines):08d}"]  # the last one
        found[folder.name] = (json.loads((folder / "done").read_text()), lines)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    play(STATEFUL, out)
    return outcome(out)


@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_a_stopped_run_goes_on_to_the_same_weights_and_records(tmp_path, whole, rounds):
    first = play(STATEFUL, tmp_path, rounds=rounds, every=1e9)
    second = play(STATEFUL, tmp_path)
    assert len(first) == 2 * rounds
    assert len(first) + len(second) == 2 * STATEFUL["rounds"]
    assert outcome(tmp_path) == whole


@pytest.mark.parametrize("every", [0.0, 1e9])
def test_rounds_begun_ahead_leave_the_same_weights_and_records(tmp_path, whole, every):
    played = play(STATEFUL, tmp_path, every=every, ahead=True)
    rounds = [one.line["round"] for one in played]
    assert rounds == sorted(rounds)
    assert outcome(tmp_path) == whole


def test_a_run_stopped_with_a_round_ahead_keeps_that_round(tmp_path, whole):
    first = play(STATEFUL, tmp_path, rounds=2, every=1e9, ahead=True)
    assert len(first) == 2 * 3
    for folder in tmp_path.iterdir():
        assert read_checkpoint(folder / "checkpoints").round == len(read_lines(folder)) == 3
    assert len(play(STATEFUL, tmp_path, ahead=True)) == 2 * 3
    assert outcome(tmp_path) == whole


def test_a_round_ahead_begins_before_the_last_is_written_but_not_before_it_is_saved(tmp_path, monkeypatch):
    seen = []

    def watched(owner, name, note):
        real = getattr(owner, name)

        def call(*arguments):
            seen.append(note(*arguments))
            return real(*arguments)

        monkeypatch.setattr(owner, name, call)

    watched(experiments.fleets, "play_round", lambda _, state: f"begin {state.rounds[0] + 1}")
    watched(RunFolder, "append", lambda _, line: f"line {line['round']}")
    watched(experiments, "_save", lambda _folders, _fleet, state: f"save {state.rounds[0]}")
    one = {**SMALL, "aggregator": "gma", "seed": 0, "rounds": 3}
    play(one, tmp_path / "ahead", every=1e9, ahead=True)
    assert seen == ["begin 1", "begin 2", "line 1", "begin 3", "line 2", "line 3", "save 3"]
    seen.clear()
    play(one, tmp_path / "saved", every=0, ahead=True)
    assert seen[:6] == ["begin 1", "line 1", "save 1", "begin 2", "line 2", "save 2"]


def test_arrays_of_clients_and_server_survive_a_stop(tmp_path):
    chosen = {**SMALL, "algorithm": "fedsmoo", "rho": 0.05, "aggregator": "gma", "seed": 0, "rounds": 3}
    play(chosen, tmp_path / "whole")
    play(chosen, tmp_path / "stopped", rounds=2)
    play(chosen, tmp_path / "stopped")
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "stopped")


def test_a_finished_run_is_not_touched_again(tmp_path, whole):
    play(STATEFUL, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert play(STATEFUL, tmp_path) == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_longer_list_runs_only_what_is_missing(tmp_path, whole):
    play({**STATEFUL, "algorithm": "scaffold"}, tmp_path)
    later = play(STATEFUL, tmp_path)
    assert {played.run.settings.algorithm for played in later} == {"fedyogi"}
    assert outcome(tmp_path) == whole


@pytest.mark.parametrize("rounds", [12, 25])
def test_more_rounds_go_on_from_fewer_and_leave_what_a_longer_run_would_have(tmp_path, rounds):
    chosen = {**STATEFUL, "evaluate_every": 4, "mask_every": 4, "rounds": rounds}  # 11 and 6 are no turns of theirs
    play(chosen, tmp_path / "whole")
    for shorter in (6, 11):
        play({**chosen, "rounds": shorter}, tmp_path / "grown")
    played = play(chosen, tmp_path / "grown")
    assert len(played) == 2 * (rounds - 11)
    wanted, grown = outcome(tmp_path / "whole"), outcome(tmp_path / "grown")
    assert {name: grown[name] for name in wanted} == wanted
    heads = [json.loads((tmp_path / "grown" / name / "run.json").read_text()) for name in wanted]
    assert {json.loads((tmp_path / "grown" / head["extends"] / "done").read_text())["rounds"] for head in heads} == {11}


def test_death_while_a_run_is_being_extended_costs_nothing(tmp_path, whole):
    play({**STATEFUL, "rounds": 4}, tmp_path / "short")
    with pytest.MonkeyPatch.context() as patch:
        shutil.copytree(tmp_path / "short", tmp_path / "count")
        steps = dying(patch, at=0)
        play(STATEFUL, tmp_path / "count")
    for at in random.Random(3).sample(range(1, steps[0] + 1), 6):
        out = tmp_path / str(at)
        shutil.copytree(tmp_path / "short", out)
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, at)
            with pytest.raises(Death):
                play(STATEFUL, out)
        play(STATEFUL, out)
        found = outcome(out)
        assert {name: found[name] for name in whole} == whole, at


def test_only_a_finished_run_whose_state_was_kept_whole_is_extended(tmp_path, whole, caplog):
    play({**STATEFUL, "rounds": 5}, tmp_path, keep_state=False)
    assert list(tmp_path.rglob("checkpoints")) == []
    assert len(play(STATEFUL, tmp_path)) == 2 * 6
    longer = {**STATEFUL, "rounds": 8}
    for state in tmp_path.rglob("state.safetensors"):
        damage(state, "flip")
    assert len(play(longer, tmp_path)) == 2 * 8
    assert "is not extended" in caplog.text


def test_another_seed_or_other_data_are_no_beginning_of_a_run(tmp_path):
    play({**STATEFUL, "rounds": 3}, tmp_path)
    assert len(play({**STATEFUL, "seed": 1}, tmp_path)) == 2 * 6


class Death(BaseException):
    """Stands for kill -9: nothing catches it."""


def dying(monkeypatch, at):
    """Let the process die at the `at`-th thing it does to the disk; returns the count of those done."""
    done = [0]

    def wrapped(function):
        def call(*arguments, **options):
            done[0] += 1
            if done[0] == at:
                raise Death
            return function(*arguments, **options)

        return call

    for owner, name in (
        (checkpoints.os, "fsync"),
        (checkpoints.Path, "rename"),
        (checkpoints.Path, "replace"),
        (checkpoints.Path, "mkdir"),
        (checkpoints.shutil, "rmtree"),
        (RunFolder, "append"),
    ):
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    return done


@pytest.mark.slow  # tests/faults/test_crash_resume.py has a shorter one
@pytest.mark.parametrize(("ahead", "every", "deaths"), [(False, 0.0, 15), (True, 1e9, 5)])
def test_death_at_any_step_of_writing_costs_nothing(tmp_path, whole, ahead, every, deaths):
    with pytest.MonkeyPatch.context() as patch:
        steps = dying(patch, at=0)
        play(STATEFUL, tmp_path / "count", ahead=ahead, every=every)
    assert steps[0] > 30
    for at in random.Random(1).sample(range(1, steps[0] + 1), deaths):
        out = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, at)
            with pytest.raises(Death):
                play(STATEFUL, out, ahead=ahead, every=every)
        play(STATEFUL, out)
        assert outcome(out) == whole, at


# the command, but before it syncs a file for the so-manyth time it says so and stands still
HALTING = """
import os, sys, time
from fedgma.cli import main
left, sync = int(sys.argv.pop(1)), os.fsync
def halt(handle):
    global left
    left -= 1
    if left == 0:
        print("halted", flush=True)
        time.sleep(10**6)
    sync(handle)
os.fsync = halt
main()
"""


@pytest.mark.slow  # tests/faults/test_crash_resume.py has a shorter one
def test_killed_for_real_again_and_again(tmp_path, whole):
    asked = [*COMMAND[3:], *words(STATEFUL), "--out", str(tmp_path)]
    for syncs in (21, 12):  # in the middle of a checkpoint of the second round, and of the one after that
        command = [sys.executable, "-c", HALTING, str(syncs), *asked]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "halted\n"
            process.kill()
        assert process.returncode == -signal.SIGKILL
    assert 0 < max(len(read_lines(folder)) for folder in tmp_path.iterdir()) < STATEFUL["rounds"]
    play(STATEFUL, tmp_path)
    assert outcome(tmp_path) == whole


def wait_for_rounds(out, process):
    """Wait until the process has written a round, or has ended."""
    while process.poll() is None and not any(path.stat().st_size for path in Path(out).glob("*/rounds.jsonl")):
        time.sleep(0.01)


@pytest.mark.slow  # tests/faults/test_crash_resume.py has a shorter one
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_folder_that_goes_on(tmp_path, number, code):
    endless = {**SMALL, "rounds": 100_000, "aggregator": "gma", "seed": 0}
    process = subprocess.Popen([*COMMAND, *words(endless), "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    wait_for_rounds(tmp_path, process)
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == code
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
    (folder,) = tmp_path.iterdir()
    lines = len(read_lines(folder))
    assert read_checkpoint(folder / "checkpoints").round == lines > 0


def damage(path, how):
    raw = bytearray(path.read_bytes())
    if how == "flip":
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    elif how == "truncate":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        path.unlink()


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "truncate", "unlink"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, whole, file, how):
    play(STATEFUL, tmp_path, rounds=4)
    for folder in tmp_path.iterdir():
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        damage(newest / file, how)
    assert len(play(STATEFUL, tmp_path)) == 2 * 3  # rounds 4, 5 and 6 again
    assert outcome(tmp_path) == whole


def test_where_every_checkpoint_is_damaged_that_is_said(tmp_path):
    play(STATEFUL, tmp_path, rounds=4)
    for state in tmp_path.rglob("state.safetensors"):
        damage(state, "flip")
    with pytest.raises(IntegrityError, match="no checkpoint can be used"):
        play(STATEFUL, tmp_path)


def test_no_flipped_bit_of_a_checkpoint_passes(tmp_path):
    write_checkpoint(tmp_path, 1, {"w": np.arange(6, dtype=np.float32), "round": np.array(1)})
    file = tmp_path / "00000001" / "state.safetensors"
    good = file.read_bytes()
    for bit in range(8 * len(good)):
        raw = bytearray(good)
        raw[bit // 8] ^= 1 << bit % 8
        file.write_bytes(raw)
        with pytest.raises(IntegrityError):
            read_checkpoint(tmp_path)


def test_a_checkpoint_keeps_the_order_of_its_entries(tmp_path):
    state = {name: np.zeros(3, kind) for name, kind in (("9", "f4"), ("1", "f8"), ("10", "i8"), ("0", "f2"))}
    write_checkpoint(tmp_path, 1, state)
    assert list(read_checkpoint(tmp_path).state) == list(state)


def test_a_lost_record_is_refused_and_not_begun_again(tmp_path):
    play(STATEFUL, tmp_path, rounds=4)
    for lines in tmp_path.rglob("rounds.jsonl"):
        lines.unlink()
    with pytest.raises(IntegrityError, match="has 0 complete lines"):
        play(STATEFUL, tmp_path, rounds=4)


def test_checkpoints_without_settings_are_refused(tmp_path):
    play(STATEFUL, tmp_path, rounds=2)
    for head in tmp_path.rglob("run.json"):
        head.unlink()
    with pytest.raises(IntegrityError, match="is missing; restore it"):
        play(STATEFUL, tmp_path)


def test_two_checkpoints_are_kept(tmp_path):
    play(STATEFUL, tmp_path, rounds=5)
    for folder in tmp_path.iterdir():
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00000004", "00000005"]


def test_half_a_line_is_cut_off(tmp_path, whole):
    play(STATEFUL, tmp_path, rounds=3)
    for lines in tmp_path.rglob("rounds.jsonl"):
        with lines.open("a") as stream:
            stream.write('{"round": 4, "train": {"lo')
    play(STATEFUL, tmp_path)
    assert outcome(tmp_path) == whole


def test_lost_lines_send_the_run_back_to_where_they_end(tmp_path, whole):
    play(STATEFUL, tmp_path, rounds=4)
    for lines in tmp_path.rglob("rounds.jsonl"):
        lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:3]))
    play(STATEFUL, tmp_path)
    assert outcome(tmp_path) == whole


def test_two_writers_of_one_folder_are_one_too_many(tmp_path):
    head = {"settings": {}, "parameters": 1}
    with RunFolder(tmp_path / "run", head):
        assert is_running(tmp_path / "run")
        with pytest.raises(ConfigError, match="another process is writing"), RunFolder(tmp_path / "run", head):
            pass
    assert not is_running(tmp_path / "run")
    with RunFolder(tmp_path / "run", head):  # the lock of one that is gone is no hindrance
        pass


def test_a_folder_of_other_settings_is_refused_with_what_differs(tmp_path):
    with RunFolder(tmp_path, {"settings": {"tau": 0.4, "seed": 0}, "parameters": 1}):
        pass
    with (
        pytest.raises(ConfigError, match="differing: tau"),
        RunFolder(tmp_path, {"settings": {"tau": 0.5, "seed": 0}, "parameters": 1}),
    ):
        pass


def test_going_on_with_other_versions_is_said(tmp_path, caplog):
    head = {"settings": {}, "parameters": 1, "device": "cpu", "versions": {"torch": "1"}}
    with RunFolder(tmp_path, head) as folder:
        folder.resume()
        folder.append({"round": 1})
        folder.checkpoint(1, {"w": np.zeros(1)})
    with RunFolder(tmp_path, {**head, "versions": {"torch": "2"}}) as folder:
        assert folder.resume().round == 1
    assert "continues with different versions" in caplog.text


def test_a_newer_format_is_refused_by_its_number(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="format 99"), RunFolder(tmp_path, {"settings": {}, "parameters": 1}):
        pass


def test_a_full_disk_stops_with_a_sentence_and_the_run_goes_on_later(tmp_path, whole, monkeypatch):
    real, left = os.fsync, [9]

    def full(handle):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "fsync", full)
        with pytest.raises(DataError, match="No space left on device"):
            play(STATEFUL, tmp_path)
    play(STATEFUL, tmp_path)
    assert outcome(tmp_path) == whole
