"""The supervisor with stand-ins for Flower's programs: what dies is started again, an end on purpose is not."""

import json
import os
import signal
import socket
import stat
import sys
import threading
import time

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")

from fedgma.errors import ConfigError, FedgmaError
from fedgma.flower import deployment, supervisor
from fedgma.flower.deployment import Deployment
from fedgma.flower.supervisor import Supervisor

# answers at its port until it is ended, or left alone
SUPERLINK = """
import os, socket, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
door, parent = socket.create_server(("127.0.0.1", port), reuse_port=True), os.getppid()
while os.getppid() == parent:
    time.sleep(0.5)
"""

# `flwr run` plays a round more at each call, or does as the file `plan` says; `flwr ls` tells that the run has ended
FLWR = """
import json, sys
from pathlib import Path
if sys.argv[1] == "ls":
    print(json.dumps({"runs": [{"status": "finished:failed"}]}))
    raise SystemExit
settings = sys.argv[sys.argv.index("--run-config") + 1]
run = Path(settings.split('"')[1])
run.mkdir(exist_ok=True)
plan = json.loads((run.parent / "plan").read_text())
step = plan.pop(0) if plan else "nothing"
(run.parent / "plan").write_text(json.dumps(plan))
lines = run / "rounds.jsonl"
count = len(lines.read_text().splitlines()) if lines.exists() else 0
if step == "round":
    with lines.open("a") as stream:
        stream.write(json.dumps({"round": count + 1}) + "\\n")
if step == "done":
    (run / "done").write_text(json.dumps({"rounds": count}))
if step == "give up":
    (run / "failed").write_text(json.dumps({"exit_code": 4, "message": "too few clients"}))
print(json.dumps({"run-id": None if step == "refuse" else str(count + 7), "error-message": "no"}))
"""


@pytest.fixture
def stage(tmp_path, monkeypatch, port):
    """A deployment whose programs are stand-ins, and are waited for as long as it takes."""
    for name, code in {"flower-superlink": SUPERLINK, "flwr": FLWR}.items():
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\n{code}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(deployment, "_program", lambda name: str(tmp_path / name))
    monkeypatch.setattr(supervisor, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(supervisor, "STATUS_INTERVAL", 0.05)
    monkeypatch.setattr(supervisor, "START_TIMEOUT", 1e9)
    monkeypatch.setattr(supervisor, "COMMAND_TIMEOUT", 1e6)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").touch()
    (tmp_path / "state").mkdir()
    return Deployment(tmp_path / "app", tmp_path / "state", port=port, insecure=True)


@pytest.fixture
def port():
    """A port that no other program is given while the test lasts; sockets that say so too may share it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def supervised(stage, plan, **options):
    (stage.state / "plan").write_text(json.dumps(plan))
    messages = []
    watched = Supervisor(stage, say=messages.append, **options)
    return watched, messages, watched.run()


def test_a_run_that_is_done_ends_with_code_0_and_nothing_is_left_running(stage):
    watched, messages, code = supervised(stage, ["done"])
    assert code == 0
    assert watched.starts == 1
    assert watched.processes["superlink"].poll() is not None
    assert any(text.startswith("done") for text in messages)


def test_a_server_app_that_ended_is_submitted_again(stage):
    watched, messages, code = supervised(stage, ["round", "round", "done"])
    assert code == 0
    assert watched.starts == 3
    assert "the server app ended (finished:failed); restarting after round 2" in messages


def test_a_round_is_reported_with_its_missing_nodes(stage):
    stage.folder.mkdir()
    line = {"round": 1, "train": {"gma-failed": 0, "gma-late": 2}, "refused": [{"client": 9, "reason": "nonfinite"}]}
    (stage.folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    assert Supervisor(stage)._losses() == " without: node 9 refused (nonfinite), 2 late"


def test_an_older_end_file_is_ignored(stage):
    stage.folder.mkdir()
    (stage.folder / "done").write_text("{}")
    (stage.folder / "failed").write_text("{}")
    watched, _, code = supervised(stage, ["round", "done"])
    assert code == 0
    assert watched.starts == 2


def test_a_fedgma_error_is_passed_on_and_not_retried(stage):
    watched, messages, code = supervised(stage, ["round", "give up"])
    assert code == 4
    assert watched.starts == 2
    assert "the run failed: too few clients" in messages


def test_restarts_without_progress_are_limited(stage):
    with pytest.raises(FedgmaError, match="no further round after 2 restarts"):
        supervised(stage, ["round"], restarts=2)


def test_failed_submissions_are_limited(stage):
    with pytest.raises(FedgmaError, match="could not be submitted: no"):
        supervised(stage, ["refuse", "refuse"], restarts=1)


def test_a_superlink_that_was_killed_is_started_again(stage, monkeypatch):
    monkeypatch.setattr(supervisor, "STATUS_INTERVAL", 1e9)  # the SuperLink's death is seen, not asked for
    (stage.state / "plan").write_text(json.dumps(["nothing", "done"]))
    messages = []
    watched = Supervisor(stage, say=messages.append)

    def kill():
        while watched.starts < 1:
            time.sleep(0.01)
        os.kill(watched.processes["superlink"].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert watched.run() == 0
    killer.join()
    assert watched.starts == 2
    assert "the SuperLink died (exit code -9); restarting after round 0" in messages


def test_being_asked_to_stop_stops_everything(stage):
    looks = iter([False] * 5)
    watched, _, code = supervised(stage, [], stopping=lambda: next(looks, True))
    assert code == 0
    assert watched.processes["superlink"].poll() is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"insecure": False}, "either --certificates FOLDER or"),
        ({"host": "0.0.0.0"}, "the host must be 127.0.0.1"),
        ({"keys": "keys"}, "node keys need certificates"),
        ({"insecure": False, "certificates": "certificates"}, "no ca.crt"),
        ({"app": "nowhere"}, "no Flower app"),
        ({"state": "app/state"}, "is inside the app's folder"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_started(stage, tmp_path, changes, message):
    paths = {
        name: tmp_path / value for name, value in changes.items() if name in ("keys", "certificates", "app", "state")
    }
    wrong = Deployment(**{**vars(stage), **changes, **paths})
    with pytest.raises(ConfigError, match=message):
        Supervisor(wrong).run()


def test_a_private_key_that_others_can_read_is_refused(stage, tmp_path):
    for name in ("ca.crt", "server.pem", "server.key"):
        (tmp_path / name).touch()
    (tmp_path / "server.key").chmod(0o644)
    open_to_all = Deployment(**{**vars(stage), "insecure": False, "certificates": tmp_path})
    with pytest.raises(ConfigError, match="other users can read"):
        open_to_all.check()
    (tmp_path / "server.key").chmod(0o600)
    open_to_all.check()


def test_all_settings_of_the_app_are_one_argument(stage):
    command = Deployment(**{**vars(stage), "run_config": ("run.rounds=3", "run.tau=0.2")}).submit()
    word = command[command.index("--run-config") + 1]
    assert word == f'state="{stage.folder}" run.rounds=3 run.tau=0.2'
    assert command.count("--run-config") == 1


def test_the_command_reports_errors_and_passes_exit_codes_on(stage, monkeypatch):
    typer_testing = pytest.importorskip("typer.testing")
    from fedgma.cli.app import app

    def call(*words):
        return typer_testing.CliRunner().invoke(app, ["flower", "up", str(stage.app), *words])

    options = ["--state", str(stage.state), "--port", str(stage.port)]
    assert isinstance(call(*options).exception, ConfigError)
    (stage.state / "plan").write_text(json.dumps(["give up"]))
    given_up = call(*options, "--insecure", "-c", "run.rounds=3")
    assert given_up.exit_code == 4
    assert "the run failed: too few clients" in given_up.output
