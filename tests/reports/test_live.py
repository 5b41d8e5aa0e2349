"""`fedgma watch`: what is read of runs that are being written, and what the server answers."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from html import escape

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from commands import call
from fedgma.errors import ConfigError
from fedgma.records.format import with_checksum
from fedgma.records.label import Label, write_label
from fedgma.records.reader import read_runs
from fedgma.records.tail import Place, read_on
from fedgma.reports.live import runs as live
from fedgma.reports.live.curves import MOST_POINTS, Curve, Pace
from fedgma.reports.live.page import page
from fedgma.reports.live.runs import LiveRuns
from fedgma.reports.live.server import LiveServer
from live_server import serving
from run_folders import play_small, write_duel, write_run


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(live, "LEAST_SECONDS", 0.0)


def line(round, **more):
    return json.dumps({"round": round, **more}).encode() + b"\n"


def rounds_of(records):
    return [record["round"] for record in records]


def test_only_new_complete_lines_are_read(tmp_path):
    file = tmp_path / "rounds.jsonl"
    records, place = read_on(file, Place())
    assert records == []
    file.write_bytes(line(1) + line(2) + line(3)[:5])
    records, place = read_on(file, place)
    assert (rounds_of(records), place.offset) == ([1, 2], len(line(1)) + len(line(2)))
    assert read_on(file, place)[0] == []
    file.write_bytes(line(1) + line(2) + line(3) + line(4))
    records, place = read_on(file, place)
    assert (rounds_of(records), place.again, place.problem) == ([3, 4], False, "")


@pytest.mark.parametrize("after", [b"", line(1), line(1, seconds=2) + line(2, seconds=3) + line(3)])
def test_a_file_that_was_replaced_is_read_from_its_first_line(tmp_path, after):
    file = tmp_path / "rounds.jsonl"
    file.write_bytes(line(1, seconds=9) + line(2, seconds=9))
    _, place = read_on(file, Place())
    file.write_bytes(after)
    records, place = read_on(file, place)
    assert place.again
    assert len(records) == after.count(b"\n") == place.line


def test_a_resumed_run_with_the_same_lines_is_read_on(tmp_path):
    file = tmp_path / "rounds.jsonl"
    file.write_bytes(line(1) + line(2))
    _, place = read_on(file, Place())
    file.unlink()
    file.write_bytes(line(1) + line(2) + line(3))
    records, place = read_on(file, place)
    assert (rounds_of(records), place.again) == ([3], False)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(60, 200))
def test_however_a_file_is_written_and_read_every_line_is_read_once(tmp_path_factory, writes, most):
    file = tmp_path_factory.mktemp("tail") / "rounds.jsonl"
    content, place, found = b"".join(line(round, seconds=round / 7) for round in range(1, 15)), Place(), []
    for end in [*np.cumsum(writes).tolist(), len(content)]:
        file.write_bytes(content[:end])
        records, place = read_on(file, place, most)
        found += records
    while place.more:
        records, place = read_on(file, place, most)
        found += records
    assert found == [json.loads(one) for one in content.splitlines()]
    assert (place.problem, place.offset, place.line) == ("", len(content), 14)


def test_a_long_file_is_read_in_pieces(tmp_path):
    file = tmp_path / "rounds.jsonl"
    file.write_bytes(b"".join(map(line, range(1, 101))))
    place, found = Place(), []
    while not found or place.more:
        records, place = read_on(file, place, most=100)
        assert len(records) < 10
        found += rounds_of(records)
    assert found == list(range(1, 101))


@pytest.mark.parametrize("bad", [b"no JSON\n", line(7), b'["round"]\n', b"x" * 200])
def test_a_damaged_line_is_named_and_what_is_before_it_is_kept(tmp_path, bad):
    file = tmp_path / "rounds.jsonl"
    file.write_bytes(line(1) + bad)
    records, place = read_on(file, Place(), most=100)
    records += read_on(file, place, most=100)[0] if place.more else []
    place = read_on(file, place, most=100)[1] if place.more else place
    assert rounds_of(records) == [1]
    assert "rounds.jsonl, line 2," in place.problem
    assert not place.more


@pytest.mark.parametrize("planned", [None, 30, 10_000])
def test_a_curve_stays_short_and_keeps_its_last_point(planned):
    curve, rounds = Curve(planned), planned or 10_000
    for round in range(1, rounds + 1):
        curve.add(round, float(round))
    points = curve.points
    assert min(rounds, MOST_POINTS // 2) <= len(points) <= 2 * MOST_POINTS
    assert points[-1] == (rounds, float(f"{rounds:.6g}"))
    assert [at for at, _ in points] == sorted({at for at, _ in points})


def test_the_time_left_is_that_of_the_pace_between_looks():
    pace = Pace()
    assert pace.left(10, together=2) is None
    pace.add(100.0, 4, [0.5] * 4)
    assert pace.left(10, together=2) == 10.0  # nothing but the recorded seconds, of two runs
    pace.add(106.0, 7, [0.5] * 3)
    assert pace.left(10, together=2) == 20.0
    pace.add(300.0, 8, [])
    pace.add(301.0, 9, [])
    assert pace.left(10, together=2) == pytest.approx(10 * (301 - 106) / 2)  # the last minute, and what leads up to it


def test_states_are_told_apart(tmp_path):
    done, stopped, running, failed, damaged = [
        write_run(tmp_path, seed=s, stop=None if s == 0 else 3) for s in range(5)
    ]
    (failed / "failed").write_text('{"exit_code": 4, "message": "too few clients"}')
    (damaged / "run.json").write_text("{")
    runs = LiveRuns([tmp_path])
    with FileLock(running / "lock"):
        shown = {run["key"]: run for run in runs.since(0)["changed"]}
    states = {folder: shown[str(folder)]["state"] for folder in (done, stopped, running, failed, damaged)}
    assert list(states.values()) == ["done", "stopped", "running", "failed", "damaged"]
    assert shown[str(failed)]["problem"] == "too few clients"
    assert "run.json is not JSON" in shown[str(damaged)]["problem"]
    assert shown[str(running)]["left"] == pytest.approx(27 * 0.05)
    assert runs.since(0)["summary"]["states"] == {"done": 1, "stopped": 2, "failed": 1, "damaged": 1}


def test_a_look_reports_what_has_changed_since_another(tmp_path):
    runs = LiveRuns([tmp_path / "runs"])
    assert runs.since(0)["changed"] == []
    assert runs.since(0)["summary"]["missing"] == [str(tmp_path / "runs")]
    write_duel(tmp_path / "runs", seeds=2, stop=5)
    first = runs.since(0)
    assert (len(first["runs"]), len(first["changed"])) == (4, 4)
    assert first["summary"]["arms"] == [{"name": "mean", "plain": True}, {"name": "GMA", "plain": False}]
    assert runs.since(first["number"])["changed"] == []
    write_label(next((tmp_path / "runs").iterdir()), Label("mine", "a note"))
    second = runs.since(first["number"])
    assert [(run["name"], run["note"]) for run in second["changed"]] == [("mine", "a note")]
    assert "runs" not in second
    for folder in [*(tmp_path / "runs").iterdir()][:1]:
        folder.rename(folder.with_name(f".gone-{folder.name}"))
    assert len(runs.since(second["number"])["runs"]) == 3
    assert len(runs.since(10**9)["changed"]) == 3  # a page of an earlier server


def test_a_run_that_is_played_is_followed_to_its_end(tmp_path):
    runs = LiveRuns([tmp_path])
    playing = play_small(tmp_path)
    for _ in range(2):
        next(playing)
    answer = runs.since(0)
    (shown,) = answer["changed"]
    assert (shown["state"], shown["round"], shown["planned"]) == ("running", 2, 4)
    assert shown["left"] > 0
    assert answer["summary"]["rounds"] == 2
    list(playing)
    (shown,) = runs.since(answer["number"])["changed"]
    (read,) = read_runs(tmp_path)
    assert (shown["state"], shown["round"], shown["left"]) == ("done", 4, None)
    expected = [(one["round"], 100 * one["test"]["accuracy"]) for one in read.rounds if "test" in one]
    assert [round for round, _ in shown["curves"]["score"]] == [round for round, _ in expected]
    assert [value for _, value in shown["curves"]["score"]] == pytest.approx([value for _, value in expected], rel=1e-5)
    assert {"loss", "train", "mask", "agreement"} <= shown["curves"].keys()


def test_a_run_of_a_flower_app_is_shown_with_what_it_records(tmp_path):
    head = {"format": 2, "settings": {"engine": "flower", "aggregator": ["gma", {"tau": 0.4}], "seed": 3}}
    (tmp_path / "run.json").write_text(json.dumps(head))
    lines = [line(r, train={"gma-mask-mean": 0.5}, server={"accuracy": 0.25 * r, "loss": 1 / r}) for r in (1, 2)]
    (tmp_path / "rounds.jsonl").write_bytes(b"".join(lines))
    (shown,) = LiveRuns([tmp_path]).since(0)["changed"]
    assert (shown["arm"], shown["seed"], shown["round"], shown["planned"]) == ("GMA (Flower)", 3, 2, None)
    assert shown["curves"] == {
        "score": [(1, 0.25), (2, 0.5)],
        "loss": [(1, 1.0), (2, 0.5)],
        "mask": [(1, 0.5), (2, 0.5)],
    }


ODD = [None, [], {}, {"a": []}, "x", -1, 1e400, 10**400, True, "\ud800", [None, [1]]]
PARTS = ("settings", "identity", "metrics", "format", "data", "lineage")  # of run.json
SETTINGS = ("tau", "aggregator", "rounds", "seed", "partition")


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_whatever_a_folder_holds_the_others_are_shown(tmp_path, odd):
    fine = write_run(tmp_path / "fine", rounds=3)
    os.mkfifo(fine / "lock")  # opening it would wait
    for name in (*PARTS, *SETTINGS):
        folder = write_run(tmp_path / name, rounds=3)
        head = json.loads((folder / "run.json").read_text())
        changed = {name: odd} if name in PARTS else {"settings": {**head["settings"], name: odd}}
        (folder / "run.json").write_text(json.dumps({**head, **changed}))
        scores = {"accuracy": odd, "loss": odd}
        lines = [{"round": 1, "train": odd, "test": odd}, {"round": 2, "test": scores, "mask": odd}, {"round": odd}]
        (folder / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        (folder / "label.json").write_text(json.dumps(with_checksum({"name": odd, "note": odd})))
    runs = LiveRuns([tmp_path])
    assert json.loads(json.dumps(runs.since(0), allow_nan=False))["summary"]["planned"] >= 3
    assert fine.name in page(runs)
    assert "3 of 3" in [row[3] for row in runs.table(whole=True).rows]


def test_a_look_reads_a_bounded_part_and_a_table_everything(tmp_path, monkeypatch):
    write_duel(tmp_path, seeds=2)
    monkeypatch.setattr(live, "MOST_BYTES", 40_000)
    monkeypatch.setattr(live, "PIECE", 20_000)
    runs = LiveRuns([tmp_path])
    first = runs.since(0)
    assert first["summary"]["unread"]
    assert 0 < first["summary"]["rounds"] < 120
    assert [row[3] for row in runs.table(whole=True).rows] == ["30 of 30"] * 4
    assert not runs.since(0)["summary"]["unread"]


@pytest.fixture
def served(tmp_path):
    write_run(tmp_path, rounds=3, aggregator="<script>alert(1)</script>")
    with serving(tmp_path) as server:
        yield server


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer, content


def test_the_server_listens_to_this_machine_only(served):
    assert served.server_address[0] == "127.0.0.1"
    assert served.address == f"http://127.0.0.1:{served.server_port}/"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[", "localhost@x"])
def test_a_request_to_another_host_name_is_refused(served, host):
    answer, content = ask(served, "/runs.json", Host=host)
    assert answer.status in (400, 403)
    assert "runs" not in content


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST"])
def test_a_tunnel_may_have_another_port(served, host):
    assert ask(served, Host=host)[0].status == 200


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/run.json", "/%2e%2e/", "//etc/passwd", "/runs.json/x", "*"])
def test_nothing_but_the_page_and_its_data_is_served(served, path):
    assert ask(served, path)[0].status in (400, 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_server_only_reads(served, method):
    assert ask(served, method=method)[0].status == 501


def test_the_page_allows_its_own_script_and_nothing_else(served):
    answer, content = ask(served)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "<script>alert" not in content
    assert escape("<script>alert(1)</script>") in content  # in the table that is there without a script
    assert ask(served, method="HEAD")[1] == ""


@pytest.mark.parametrize("query", ["", "?since=0", "?since=x", "?since=-1", "?since=9" * 2, "?since=" + "9" * 400])
def test_data_are_json_whatever_is_asked(served, query):
    answer, content = ask(served, "/runs.json" + query)
    assert (answer.status, answer.headers.get_content_type()) == (200, "application/json")
    assert json.loads(content)["summary"]["planned"] == 3


def test_a_folder_whose_name_is_no_text_is_served_too():
    with serving(os.fsdecode(b"\xff")) as server:
        assert ask(server)[0].status == ask(server, "/runs.json")[0].status == 200


def test_a_port_that_is_taken_is_one_sentence(served):
    with pytest.raises(
        ConfigError, match=f"port {served.server_port} is taken by another process; give another --port"
    ):
        LiveServer(LiveRuns([]), served.server_port)


def test_a_page_without_runs_says_so(tmp_path):
    assert "No run yet" in page(LiveRuns([tmp_path]))


def test_the_command_prints_how_far_runs_are(tmp_path, monkeypatch):
    write_duel(tmp_path / "runs", seeds=1, stop=4)
    monkeypatch.chdir(tmp_path)
    rows = json.loads(call("watch", "--once", "--json")[1])
    assert [(row["arm"], row["state"], row["round"]) for row in rows] == [
        ("mean", "stopped", "4 of 30"),
        ("GMA", "stopped", "4 of 30"),
    ]
    assert "4 of 30" in call("watch", "--once")[1]
    assert call("watch", "--once", tmp_path / "none")[0] == 3
    (tmp_path / "file").write_text("")
    code, _, said = call("watch", tmp_path / "file")
    assert (code, said) == (
        3,
        f"fedgma: {str(tmp_path / 'file')!r} is a file; give a folder that `fedgma run` writes to\n",
    )


def test_the_command_serves_a_folder_that_comes_later_until_a_signal(tmp_path):
    words = [sys.executable, "-m", "fedgma", "watch", str(tmp_path / "runs"), "--json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        address = json.loads(process.stdout.readline())["address"]
        port = int(address.rstrip("/").rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        write_run(tmp_path / "runs", stop=3)
        connection.request("GET", "/runs.json")
        assert json.loads(connection.getresponse().read())["summary"]["rounds"] == 3
        connection.close()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said) == (128 + signal.SIGINT, "")
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again
