"""The supervisor with stand-ins for Flower's programs: what dies is started again, an end on purpose is not."""

import json
import os
import signal
import threading
import time
import traceback

import pytest

from certificates import write_certificates
from fedgma.errors import ConfigError, FedgmaError, InUseError
from fedgma.flower import processes, supervisor
from fedgma.flower.deployment import Deployment
from fedgma.flower.supervisor import Supervisor
from fedgma.records.writer import RunFolder
from flower_stage import held_port, set_stage, supervised


@pytest.fixture
def stage(tmp_path, monkeypatch):
    with held_port() as port:
        yield set_stage(tmp_path, port, monkeypatch)


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


def test_the_error_that_ended_an_app_is_said(stage):
    (stage.state / "superlink").mkdir(parents=True, exist_ok=True)
    printed = stage.state / "superlink" / "printed"
    printed.write_text("Traceback\nKeyError: 'a'\nRuntimeError: no disk\nExit Code: 201\n")
    _, messages, _ = supervised(stage, ["round", "done"])
    assert "the server app ended (finished:failed) (RuntimeError: no disk); restarting after round 1" in messages


def test_settings_that_the_app_refuses_end_the_run_and_are_not_tried_again(stage):
    (stage.state / "superlink").mkdir(parents=True, exist_ok=True)
    printed = stage.state / "superlink" / "printed"
    printed.write_text("Traceback\nfedgma.errors.ConfigError: 2 clients make 4 shards\n")
    with pytest.raises(ConfigError, match="the app ended: 2 clients make 4 shards"):
        supervised(stage, ["round", "round", "done"])


def test_a_folder_in_use_is_tried_again(stage, tmp_path):
    """An app that died may hold its folder for a moment longer."""
    with RunFolder(tmp_path / "run", {}), pytest.raises(InUseError) as busy:
        RunFolder(tmp_path / "run", {}, wait=0.1).__enter__()
    (stage.state / "superlink").mkdir(parents=True, exist_ok=True)
    (stage.state / "superlink" / "printed").write_text("".join(traceback.format_exception(busy.value)))
    _, messages, _ = supervised(stage, ["round", "done"])
    assert any("(InUseError: another process is writing" in said and "restarting" in said for said in messages)


def test_a_round_is_reported_with_its_missing_nodes(stage):
    stage.folder.mkdir()
    line = {"round": 1, "train": {"gma-failed": 0, "gma-late": 2}, "refused": [{"client": 9, "reason": "nonfinite"}]}
    (stage.folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    assert Supervisor(stage)._without() == " without: node 9 refused (nonfinite), 2 late"


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


def test_settings_that_the_app_does_not_have_end_the_run_with_the_reason(stage):
    with pytest.raises(ConfigError, match=r"refuses the app's settings: Key 'tua' is not present; .*pyproject.toml"):
        supervised(stage, ["bad config", "done"])
    project = '[tool.flwr.app.config]\nstate = ""\n[tool.flwr.app.config.run]\ntau = 0.4\npartition.clients = 5\n'
    (stage.app / "pyproject.toml").write_text(project)
    assert stage.hint("Key 'tau' is not present") == "; did you mean 'run.tau'?"
    assert stage.hint("Key 'partition.clients' is not present") == "; did you mean 'run.partition.clients'?"
    assert stage.hint("Key 'stade' is not present") == "; did you mean 'state'?"
    assert stage.hint("Type mismatch").endswith("pyproject.toml")


def test_the_end_of_an_app_whose_process_is_gone_is_asked_for(stage, monkeypatch):
    monkeypatch.setattr(supervisor, "STATUS_INTERVAL", 1e9)  # its end is seen
    home, find = stage.state / "superlink", processes.find
    home.mkdir()
    waiting = "while not Path(__file__).with_name('seen').exists(): time.sleep(0.01)"
    (home / "flwr-serverapp").write_text(f"import time\nfrom pathlib import Path\n{waiting}\n")

    def seeing(*places, **expected):
        actual = find(*places, **expected)
        if actual and "program" in expected:
            (home / "seen").touch()
        return actual

    monkeypatch.setattr(processes, "find", seeing)
    with pytest.raises(ConfigError, match="the app ended without an error but saved nothing"):
        supervised(stage, ["end well", "done"])


USING = "Using SuperLink: fedgma (127.0.0.1:8001)\n\n"
PROJECT = "Invalid Flower App configuration in '/a/pyproject.toml':\n"
INVALID = {  # answers of Flower's command line, with what is said
    f"{USING}The provided configuration string is in an invalid format. Ensure": "is in an invalid format. Ensure; cor",
    f"\n{PROJECT}- x is missing\n\n\nAn object": "'/a/pyproject.toml': - x is missing An object; correct",
    "\nFailed to load Flower App configuration in '/a/pyproject.toml'. File may be": "File may be; correct --run-con",
    f"{USING}fab-format-version = 1 requires the license.file": "requires the license.file; correct --run-config, or",
    f'{USING}The Flower App [project].name "my app" is invalid': '"my app" is invalid; correct --run-config, or',
    "\nThe value for key slow needs to be of type": "key slow needs to be of type; correct --run-config, or",
}


@pytest.mark.parametrize("answer", INVALID)
def test_settings_that_flowers_command_line_refuses_are_not_tried_again(stage, answer):
    with pytest.raises(ConfigError) as refused:
        supervised(stage, [f"answer {answer}", "done"])
    assert str(refused.value).startswith("Flower refuses the app's settings: ")
    assert INVALID[answer] in str(refused.value)
    assert str(refused.value).endswith(f"or {stage.app / 'pyproject.toml'}")


def test_a_superlink_out_of_reach_is_tried_again(stage):
    watched, messages, code = supervised(stage, [f"answer {USING}Connection to the SuperLink is unavailable.", "done"])
    assert (code, watched.starts) == (0, 2)
    assert any("not be submitted: Connection to the SuperLink is unavailable" in text for text in messages)


def test_an_app_that_ends_well_and_saves_nothing_is_not_trained_again(stage):
    with pytest.raises(
        ConfigError, match=r"saved nothing in \S+run; pass folder=context.run_config\[\"state\"\] to"
    ) as end:
        supervised(stage, ["round", "end well", "done"])
    assert str(stage.folder) in str(end.value)


def test_a_deployment_that_starts_no_nodes_says_for_whom_it_waits(stage):
    _, messages, _ = supervised(stage, ["round", "done"])
    waits = [text for text in messages if text.startswith("no nodes are started here")]
    assert len(waits) == (stage.nodes == 0)


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


def test_nodes_sign_off_at_a_superlink_that_still_runs_after_the_app_has_ended(stage):
    """A node that cannot sign off counts as connected for a minute; an app that runs would save a round without it."""
    (stage.state / "superlink").mkdir()
    (stage.state / "superlink" / "flwr-serverapp").write_text("import time; time.sleep(3600)")
    (stage.state / "node").write_text("sign off")
    one_node = Deployment(**{**vars(stage), "nodes": 1})
    watched, _, _ = supervised(one_node, ["nothing"], restarts=10**9, stopping=(stage.state / "ready").exists)
    assert (stage.state / "signed off").exists()
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


def test_a_deployment_beyond_this_machine_needs_node_keys(stage, tmp_path):
    certificates = write_certificates(tmp_path / "certificates")
    everywhere = Deployment(**{**vars(stage), "insecure": False, "certificates": certificates, "host": "0.0.0.0"})
    with pytest.raises(ConfigError, match="everybody could join as a node; add --keys"):
        everywhere.check()


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
