"""Crash and resume, rows C1 to C20: a stopped run goes on to the same bits, or says why not."""

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import time

import pytest

import crashes
import harnesses
from commands import call
from fedgma.errors import ConfigError, IntegrityError
from fedgma.experiments import play as experiments
from fedgma.records.reader import read_head, read_run
from rows import row

ARM = {"algorithm": "scaffold", "aggregator": "gma"}


@pytest.fixture(scope="module")
def harness():
    """The harnesses of benchmarks/faults, shortened."""
    with harnesses.prepared() as run:
        yield run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed run leaves."""
    out = tmp_path_factory.mktemp("whole")
    crashes.play(ARM, out)
    return crashes.outcome(out)


def stopped(out, rounds=4):
    """The folder of a run that was stopped after some rounds, with checkpoints of the last two."""
    crashes.play(ARM, out, stop=lambda played: played == rounds)
    (folder,) = out.iterdir()
    return folder


HARNESSES = {
    "C1": ("kill", ["--points", 20], "20 of 20 resumed to the same bits"),
    "C6": ("corrupt_checkpoints", ["--count", 300], "0 of 2"),
    "C12": ("two_processes", ["--count", 6], "6 of 6 folders with several processes have the same bits"),
    "C13": ("full_disk", ["--sizes", 16], "16 of 16 resumed to the same bits"),
    "C17, C18": ("signals", ["--signals", 3, "--seed", 1, "--limit", 600], "3 of 3 clean exits with nothing lost"),
}


@row(
    "C1",
    "kill -9 at any moment",
    happens="the same command goes on from the last checkpoint to the same model, records and mask statistics, bit for "
    "bit",
    seen="nothing special; the run ends as if it had not been killed",
)
@row("C6")
@row("C12")
@row("C13")
@row(
    "C17",
    "Ctrl-C, once or twice",
    happens="once: the round is finished and saved; twice, or before the first round has ended: the command ends at "
    "once",
    seen="exit code 130, within seconds; the same command goes on",
)
@row(
    "C18",
    "SIGTERM, for instance of a scheduler",
    happens="as Ctrl-C",
    seen="exit code 143; the same command goes on",
)
@pytest.mark.parametrize("number", HARNESSES)
def test_runs_that_are_disturbed_at_random_lose_nothing(harness, number):
    name, options, said = HARNESSES[number]
    assert harness(name, *options).startswith(said)


@row(
    "C4",
    "kill -9 again and again while a run resumes",
    happens="every start goes on from the last checkpoint; the results stay the same bits",
    seen="nothing special",
)
def test_c4_ten_deaths_in_a_row_cost_nothing(tmp_path, whole):
    rng, deaths = random.Random(4), 0
    while deaths < 10:
        with (
            contextlib.suppress(crashes.Death),
            crashes.on_each_call(crashes.dying_at(rng.randint(1, 90), rng.choice(["half", ""]))),
        ):
            if crashes.play(ARM, tmp_path) == []:
                break
            continue
        deaths += 1
    assert deaths >= 5  # it may have come to its end before
    crashes.play(ARM, tmp_path)
    assert crashes.outcome(tmp_path) == whole


@row("C6")
def test_c6_the_damage_stops_the_command_with_a_sentence_and_is_repaired_by_what_it_says(tmp_path, whole):
    folder = stopped(tmp_path)
    lines = folder / "rounds.jsonl"
    good = lines.read_bytes()
    lines.write_bytes(good.replace(b'"round": 1', b'"round": 3', 1))
    with pytest.raises(IntegrityError, match="restore what is damaged from a copy, or delete"):
        crashes.play(ARM, tmp_path)
    lines.write_bytes(good)
    assert crashes.play(ARM, tmp_path) == [5]
    assert crashes.outcome(tmp_path) == whole


@row("C6")
def test_c6_a_damaged_line_of_a_finished_run_is_no_outcome(tmp_path):
    crashes.play(ARM, tmp_path)
    (folder,) = tmp_path.iterdir()
    lines = (folder / "rounds.jsonl").read_bytes()
    (folder / "rounds.jsonl").write_bytes(lines.replace(b'"loss": 0.', b'"loss": 1.', 1))
    with pytest.raises(IntegrityError, match=r"rounds\.jsonl does not match its checksum"):
        experiments.run({**crashes.SETTINGS, **ARM}, data=crashes.arrays(), device="cpu", out=tmp_path)
    code, _, said = call("report", tmp_path, "--out", tmp_path / "report")
    assert code == 3
    assert "rounds.jsonl does not match its checksum" in said


@row("C6")
def test_c6_a_finished_run_is_checked_by_sha256sum_too(tmp_path):
    crashes.play(ARM, tmp_path)
    (folder,) = tmp_path.iterdir()
    if shutil.which("sha256sum"):
        ended = subprocess.run(
            ["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=True
        )
        assert ended.stdout == "run.json: OK\nrounds.jsonl: OK\ndone: OK\n"
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(IntegrityError, match="SHA256SUMS is missing"):
        read_run(folder)


def add_half_a_line(folder):
    with (folder / "rounds.jsonl").open("a") as stream:
        stream.write('{"round": 5, "train": {"lo')
    assert len(read_run(folder).rounds) == 4


ARRAYS, MANIFEST = (f"checkpoints/00000004/{name}" for name in ("state.safetensors", "manifest.json"))
GOES_ON = {  # what is done to the folder of a run that was stopped after round 4; the rounds that are played then
    "C7 no arrays": (
        lambda folder: (folder / ARRAYS).unlink(),
        [4, 5],
        "state.safetensors is missing",
    ),
    "C7 no manifest": (lambda folder: (folder / MANIFEST).unlink(), [4, 5], "manifest.json is missing"),
    "C7 no checkpoint": (
        lambda folder: shutil.rmtree(folder / "checkpoints"),
        [1, 2, 3, 4, 5],
        "has 4 rounds but no checkpoint; it starts again from round 1",
    ),
    "C19 half a line": (add_half_a_line, [5], ""),
}


@row(
    "C7",
    "a file of a checkpoint is missing",
    happens="the checkpoint counts as damaged, and the one before it is used",
    seen="a warning that names the file",
)
@row(
    "C19",
    "half a line in `rounds.jsonl` after a crash",
    happens="it is cut off; there is one line a round, with no hole and none twice",
    seen="nothing special; reports skip it",
)
@pytest.mark.parametrize("case", GOES_ON)
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, whole, caplog, case):
    harm, rounds, said = GOES_ON[case]
    harm(stopped(tmp_path))
    assert crashes.play(ARM, tmp_path) == rounds
    assert said in caplog.text
    assert crashes.outcome(tmp_path) == whole


@row("C8")
def test_c8_a_folder_under_the_name_of_another_run_is_refused(tmp_path):
    folder = stopped(tmp_path / "out")
    crashes.play({**ARM, "seed": 1}, tmp_path / "other", stop=lambda played: played == 1)
    (other,) = (tmp_path / "other").iterdir()
    folder.rename(tmp_path / "out" / other.name)
    with pytest.raises(ConfigError, match=r"different settings than this run \(differing: .*seed"):
        crashes.play({**ARM, "seed": 1}, tmp_path / "out")


@row("C9")
def test_c9_the_number_of_threads_is_recorded(tmp_path):
    assert "1 threads" in read_head(stopped(tmp_path))["device"]


@row(
    "C10",
    "a finished run is started again",
    happens="nothing is trained and no file changes",
    seen="`all runs are already done`, exit code 0",
)
def test_c10_a_finished_run_is_not_touched_again(tmp_path):
    crashes.play(ARM, tmp_path)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in crashes.contents(tmp_path)}
    assert crashes.play(ARM, tmp_path) == []
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in crashes.contents(tmp_path)} == before


@row(
    "C11",
    "a finished run is started again with more rounds",
    happens="it goes on from its last state; the results are those of the longer run from the beginning",
    seen="`extends` in `run.json` names the shorter run",
)
@pytest.mark.parametrize("arm", [ARM, {"algorithm": "fedyogi", "aggregator": "mean"}])
def test_c11_more_rounds_give_what_a_longer_run_gives(tmp_path, arm):
    crashes.play({**arm, "rounds": 8}, tmp_path / "whole")
    crashes.play({**arm, "rounds": 3}, tmp_path / "grown")
    assert crashes.play({**arm, "rounds": 8}, tmp_path / "grown") == [4, 5, 6, 7, 8]
    wanted, grown = crashes.outcome(tmp_path / "whole"), crashes.outcome(tmp_path / "grown")
    assert {name: grown[name] for name in wanted} == wanted


@row(
    "C15",
    "the temporary folder is on another file system, or missing",
    happens="nothing is staged there: temporary files are beside their targets",
    seen="nothing special",
)
def test_c15_temporary_files_are_beside_their_targets(tmp_path, monkeypatch, whole):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    seen = crashes.calls_of(lambda: crashes.play(ARM, tmp_path / "out"), tmp_path)
    moves = [call for call in seen if call[0] in ("rename", "replace")]
    assert len(moves) > 10
    assert all(os.path.dirname(source) == os.path.dirname(target) for _, source, target in moves)
    assert {call[1].split(os.sep)[0] for call in seen if call[0] in ("write", "mkdir")} == {"out"}
    assert crashes.outcome(tmp_path / "out") == whole


@row(
    "C20",
    "the clock jumps back or forward",
    happens="results stay the same; waiting and checkpoints go by a clock that cannot jump",
    seen="nothing special; `started` in `run.json` is the system's time",
)
def test_c20_a_clock_that_jumps_changes_nothing(tmp_path, whole, monkeypatch):
    rng = random.Random(20)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(0, 4e9))
    monkeypatch.setattr(time, "gmtime", lambda *_: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0)))
    crashes.play(ARM, tmp_path, every=0.01)
    monkeypatch.undo()
    assert crashes.outcome(tmp_path) == whole
