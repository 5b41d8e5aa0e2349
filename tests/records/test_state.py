"""Whether a run is running or has stopped: after a kill, a restart of the machine, and seen from another machine."""

import json
import os
import signal
import subprocess
import sys

import pytest
from filelock import FileLock

from commands import call
from fedgma.machine import this_machine
from fedgma.records import state
from fedgma.records.reader import read_head
from fedgma.records.state import WRITER, elsewhere, is_running, last_written, state_of
from fedgma.records.writer import RunFolder
from fedgma.reports.live.runs import LiveRuns
from fedgma.reports.unfinished import advice, together
from run_folders import write_run

HEAD = {"settings": {}, "parameters": 1}
WRITES = """
import sys, time
from pathlib import Path
from fedgma.records.writer import RunFolder
with RunFolder(Path(sys.argv[1]), {"settings": {}, "parameters": 1}) as folder:
    folder.resume()
    folder.append({"round": 1})
    print("written", flush=True)
    sys.stdin.read()
"""
NODE = {"machine": "node-7", "boot": "of node-7"}


def left_by(folder, **writer):
    """The folder as a writer leaves it that could not close it."""
    (folder / WRITER).write_text(json.dumps(writer))
    (folder / "lock").touch()


@pytest.fixture
def stopped(tmp_path):
    return write_run(tmp_path / "runs", stop=3)


def test_a_killed_process_leaves_a_stopped_run(tmp_path):
    words = [sys.executable, "-c", WRITES, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert state_of(tmp_path / "run") == "running"
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / "run" / WRITER).exists()
    assert state_of(tmp_path / "run") == "stopped"


def test_a_writer_that_ends_names_no_machine_any_more(tmp_path):
    with RunFolder(tmp_path, HEAD):
        assert json.loads((tmp_path / WRITER).read_text()) == this_machine()
        assert state_of(tmp_path) == "running"
    assert not (tmp_path / WRITER).exists()
    assert state_of(tmp_path) == "stopped"


def test_after_a_restart_a_machine_knows_its_name_and_a_new_container_its_system(stopped):
    here = this_machine()
    for writer in (here, {**here, "boot": "before the restart"}, {**here, "machine": "the container before"}):
        left_by(stopped, **writer)
        if all(writer.values()) and here["boot"]:
            assert (elsewhere(stopped), state_of(stopped)) == (None, "stopped")


def test_what_does_not_say_its_name_is_no_machine_that_is_known(stopped, monkeypatch):
    monkeypatch.setattr(state, "this_machine", lambda: {"machine": "", "boot": ""})
    left_by(stopped, machine="", boot="")
    assert (elsewhere(stopped), state_of(stopped)) == ("", "unknown")


def test_of_another_machine_it_is_not_known_and_its_last_line_has_an_age(stopped):
    left_by(stopped, **NODE)
    os.utime(stopped / "rounds.jsonl", (1000.0, 1000.0))
    said = advice(stopped, state_of(stopped), read_head(stopped), now=1400.0)
    where = "written on node-7, whose lock may not be seen here"
    assert said == f"{where}; the last line is 7 min old; `fedgma ls` there knows"
    assert "0 s old" in advice(stopped, "unknown", {}, now=900.0)  # the disk has another clock
    with FileLock(stopped / "lock"):  # a lock that is seen is certain
        assert (state_of(stopped), advice(stopped, "running", {})) == ("running", "")
    (stopped / "rounds.jsonl").unlink()
    assert last_written(stopped) is None
    assert "it has no line yet" in advice(stopped, "unknown", {}, now=1400.0)


def test_who_goes_on_with_a_run_of_another_machine_is_warned(tmp_path, caplog):
    for writer, warned in (({}, False), (this_machine(), False), (NODE, True)):
        with RunFolder(tmp_path, HEAD):
            pass
        if writer:
            left_by(tmp_path, **writer)
        caplog.clear()
        with RunFolder(tmp_path, HEAD):
            assert ("was left unfinished by a process on node-7; if it still runs there" in caplog.text) == warned


def test_what_is_done_or_failed_is_so_on_every_machine(stopped):
    left_by(stopped, **NODE)
    (stopped / "failed").write_text("{}")
    assert state_of(stopped) == "failed"
    (stopped / "done").write_text("{}")
    assert state_of(stopped) == "done"


def test_a_disk_without_locks_is_no_proof_that_a_run_has_stopped(stopped, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_):
        raise OSError(95, "not supported")

    left_by(stopped, **this_machine())
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert (state_of(stopped), is_running(stopped)) == ("unknown", False)
    assert advice(stopped, "unknown", {}).startswith("its lock cannot be read here, so it may run or have stopped; ")


def test_a_damaged_name_of_a_machine_is_none(stopped):
    left_by(stopped)
    (stopped / WRITER).write_text("{")
    assert state_of(stopped) == "stopped"


def test_each_way_to_go_on_is_said_once(stopped, tmp_path, monkeypatch):
    assert advice(stopped, "stopped", {"command": "fedgma run a.toml\x1b"}) == "to resume: fedgma run a.toml?"
    assert advice(stopped, "stopped", {"settings": {"engine": "flower"}}).endswith("the same app with the same folder")
    again = "to resume: call fedgma.run again with the same arguments"
    assert together([("stopped", again), ("done", ""), ("stopped", again)]) == [f"2 runs stopped; {again}"]
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs", seed=1)
    for words in (["ls"], ["watch", "--once"]):
        _, printed, said = call(*words)
        assert said == f"1 run stopped; {again}\n"
        assert "3 of 30" in printed
        assert again not in printed
        assert sorted(row["advice"] for row in json.loads(call(*words, "--json")[1])) == ["", again]
    assert json.loads(call("show", stopped, "--json")[1])["advice"] == again


def test_the_live_page_says_how_to_go_on(stopped):
    runs = LiveRuns([stopped])
    (shown,) = runs.since(0)["changed"]
    assert (shown["state"], shown["problem"], shown["advice"][:10], shown["round"]) == ("stopped", "", "to resume:", 3)
