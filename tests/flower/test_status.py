"""What a person on call reads: the status of a deployment, and logs with dates, from real files and processes."""

import json
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from certificates import write_certificates, write_keys
from fedgma.errors import ConfigError
from fedgma.flower.certificates import as_pem
from fedgma.flower.database import nodes, printed
from fedgma.flower.journal import Journal
from fedgma.flower.status import in_words, left_out, status_of
from fedgma.flower.supervisor import Supervisor
from flower_stage import held_port, set_stage, supervised

TABLES = """
CREATE TABLE node (node_id BIGINT, public_key BLOB, status TEXT, name TEXT, online_until FLOAT, registered_at TEXT);
CREATE TABLE task_logs (timestamp FLOAT, task_id BIGINT, log TEXT);
"""


@pytest.fixture
def stage(tmp_path, monkeypatch):
    with held_port() as port:
        yield set_stage(tmp_path, port, monkeypatch)


def write_database(path, *rows, texts=()):
    """The tables of Flower's database that are read here."""
    path.parent.mkdir(exist_ok=True)
    database = sqlite3.connect(path)
    database.executescript(TABLES)
    database.executemany("INSERT INTO node VALUES (?, ?, ?, ?, ?, '')", rows)
    database.executemany("INSERT INTO task_logs VALUES (0.0, 1, ?)", [(text,) for text in texts])
    database.commit()
    return database


def test_a_deployment_that_was_stopped_says_so_and_how_it_goes_on(stage):
    supervised(stage, ["round"], stopping=lambda: (stage.folder / "rounds.jsonl").exists())
    found = status_of(stage.state)
    assert (found.state, found.rounds, found.is_well) == ("stopped", 1, False)
    assert "the same command continues it; 1 rounds are saved" in in_words(found)[0]
    assert "stopped: superlink" in found.said[-1]


def test_a_deployment_at_work_is_running_with_its_processes(stage):
    seen = []

    def stopping():
        seen.append(status_of(stage.state))
        return bool(seen[-1].processes["nodes here"])

    supervised(replace(stage, nodes=1), [], stopping=stopping)
    assert {found.state for found in seen} == {"running"}
    assert len(seen[-1].processes["nodes here"]) == 1
    assert status_of(stage.state).processes["nodes here"] == []


def test_the_end_of_a_run_is_said(stage):
    supervised(stage, ["round", "give up"])
    found = status_of(stage.state)
    assert (found.state, found.message, found.is_well) == ("failed", "too few clients", False)
    supervised(stage, ["done"])
    assert status_of(stage.state).is_well


def test_an_error_that_ends_the_supervisor_is_in_its_log(stage):
    with pytest.raises(ConfigError):
        supervised(stage, ["bad config"])
    assert any("Flower refuses the app's settings" in line for line in status_of(stage.state).said)


def test_nodes_are_told_by_the_names_of_their_keys(stage):
    supervised(stage, ["round", "done"])
    here = time.time() + 1e6
    write_database(stage.database, (-1, b"a", "online", "node0", here), (5, b"b", "offline", "node1", 0.0)).close()
    refused = [{"client": 2**64 - 1, "reason": "nonfinite"}]
    line = {"round": 1, "train": {"gma-late": 1, "gma-failed": 1}, "refused": refused, "failed": [7], "late": [5]}
    (stage.folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    found = status_of(stage.state)
    lost = ["node 7 failed", "node 5 (node1) late"]
    assert found.left_out == ["node 18446744073709551615 (node0) refused (nonfinite)", *lost]
    assert found.absent == ["node0", "node1"]  # no SuperLink runs
    assert Supervisor(stage)._without() == f" without: {', '.join(found.left_out)}"


def test_a_round_of_before_nodes_were_named_has_their_number():
    assert left_out({"round": 1, "train": {"gma-late": 2, "gma-failed": 0}}, {}) == ["2 late"]


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="name its folder by --state"):
        status_of(tmp_path)


def test_the_command_prints_json_and_fails_for_a_run_that_needs_somebody(stage):
    supervised(stage, ["round"], stopping=lambda: (stage.folder / "rounds.jsonl").exists())
    words = [sys.executable, "-m", "fedgma", "flower", "status", "--state", stage.state]
    asked = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    assert asked.returncode == 1, asked.stderr
    assert json.loads(asked.stdout)["rounds"] == 1
    shown = subprocess.run(words, capture_output=True, text=True, check=False)
    assert shown.stdout.startswith("run        stopped")


def test_what_the_app_prints_is_copied_once_with_dates_and_without_colours(tmp_path):
    database = write_database(tmp_path / "flower" / "superlink.db", texts=["\x1b[92mINFO\x1b[0m: a\nb\n"])
    journal = Journal(tmp_path, tmp_path / "flower" / "superlink.db")
    journal.copy()
    journal.copy()
    database.execute("INSERT INTO task_logs VALUES (0.0, 1, 'c')")
    database.commit()
    journal.copy()
    written = (tmp_path / "app.log").read_text().splitlines()
    assert [line[20:] for line in written] == ["INFO: a", "b", "c"]
    assert {line[:4] for line in written} <= {"1970", "1969"}  # local time
    journal = Journal(tmp_path, tmp_path / "flower" / "superlink.db")  # of the next supervisor
    journal.copy()
    assert (tmp_path / "app.log").read_text().splitlines() == written
    assert (tmp_path / "app.log").stat().st_mode & 0o077 == 0


def test_a_database_of_another_flower_has_no_nodes_and_no_prints(tmp_path):
    path = tmp_path / "superlink.db"
    sqlite3.connect(path).execute("CREATE TABLE node (id)").connection.close()
    assert (nodes(path), printed(path)) == ([], [])
    path.write_bytes(b"no database")
    assert (nodes(path), printed(path)) == ([], [])


# -- nodes whose predecessor still counts as connected -----------------------------------------------------------------


@pytest.fixture
def keyed(stage, tmp_path):
    """A deployment with TLS and the keys of two nodes, of which one is started here."""
    write_keys(tmp_path / "keys", 2)
    return replace(
        stage, insecure=False, certificates=write_certificates(tmp_path / "c"), keys=tmp_path / "keys", nodes=1
    )


def test_a_killed_node_is_started_when_the_superlink_has_forgotten_it(keyed):
    """Flower refuses a key while it counts as connected, so earlier starts would fail until the node is given up."""
    key = as_pem(keyed.keys / "node0.pub")
    until = time.time() + 2.0
    write_database(keyed.database, (1, key, "online", "node0", until)).close()
    started = []

    def stopping():
        return bool(started)

    (keyed.state / "plan").write_text("[]")
    watched = Supervisor(keyed, say=messages_at(started), stopping=stopping, restarts=10**9)  # the app ends at once
    watched.run()
    assert started[0] >= until


def messages_at(started):
    """Notes the time at which a node was started."""

    def say(text):
        if text.startswith("node-0 started as"):
            started.append(time.time())

    return say


def test_a_key_that_another_process_goes_on_using_is_waited_for_once(keyed, monkeypatch):
    key = as_pem(keyed.keys / "node0.pub")
    write_database(keyed.database, (1, key, "online", "node0", time.time() + 1e6)).close()
    watched = Supervisor(keyed, say=(said := []).append)
    watched.deployment.write_connection()
    watched._start_node(0)
    assert not watched.programs.is_alive("node-0")
    assert any("no longer takes it for connected" in text for text in said)
    watched._node_pauses["node-0"] = 0.0  # the pause is over
    try:
        watched._start_node(0)
        assert watched.programs.is_alive("node-0")
    finally:
        watched.programs.stop()


def test_keys_that_the_superlink_knows_are_not_registered_again(keyed):
    rows = [(number, as_pem(key), "offline", key.stem, 0.0) for number, key in enumerate(keyed.public_keys())]
    write_database(keyed.database, *rows[:1]).close()
    (keyed.state / "plan").write_text('["done"]')
    messages = []
    assert Supervisor(keyed, say=messages.append).run() == 0
    assert (keyed.state / "superlink" / "registered").read_text().split() == [str(keyed.public_keys()[1])]
    assert "registering 1 node keys" in messages


def test_a_node_started_here_needs_its_public_key_too(keyed):
    (keyed.keys / "node0.pub").unlink()
    with pytest.raises(ConfigError, match=r"there is no node0\.pub"):
        keyed.check()
