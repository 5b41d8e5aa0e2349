"""No network unless asked: commands run where there is none, and none of them tries.

Each command runs in a network namespace without any device, where the system permits that. A hook in it and in its
child processes writes down every name that is looked up and every connection that is tried, except Unix sockets.
"""

import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import pytest

HOOK = """
import os, sys

def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        note(event, arguments[0])
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        if not isinstance(arguments[-1], (str, bytes, type(None))):  # the path of a Unix socket, or connected before
            note(event, arguments[-1])

def note(event, what):
    handle = os.open(os.environ["TRIED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, f"{event} {what}\\n".encode())
    os.close(handle)

sys.addaudithook(watch)
"""
COMMANDS = """
import sys
from fedgma.cli import main

tiny = ["model=logistic", "rounds=2", "partition.clients=5", "clients_per_round=2", "seed=[0,1]"]
commands = [["run", *tiny, "--out", "runs"], ["report", "runs", "--out", "report"], ["doctor", "--seconds", "0"]]
for words in commands:
    sys.argv = ["fedgma", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
print(len(commands), "commands")
"""


@cache
def namespace():
    """The command that takes the network away; empty where the system does not permit it."""
    unshare = shutil.which("unshare")
    command = (unshare, "--map-root-user", "--net")
    permitted = unshare and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    return command if permitted else ()


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Runs a command without a network; returns its result and what it tried."""
    folder, tried = tmp_path / "hook", tmp_path / "tried"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("TRIED", str(tried))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def run(*command):
        done = subprocess.run([*namespace(), *command], capture_output=True, text=True, check=False, cwd=tmp_path)
        return done, tried.read_text() if tried.exists() else ""

    return run


def test_importing_needs_no_network(offline):
    modules = ["fedgma.flower", "fedgma.flower.supervisor"] if find_spec("flwr") else ["fedgma"]
    done, tried = offline(sys.executable, "-c", f"import {', '.join(modules)}")
    assert done.returncode == 0, done.stderr
    assert tried == ""


def test_a_run_its_report_and_the_doctor_need_no_network(offline, tmp_path):
    done, tried = offline(sys.executable, "-c", COMMANDS)
    assert done.returncode == 0, done.stderr
    assert tried == ""
    assert list((tmp_path / "report").iterdir())
    assert done.stdout.endswith("3 commands\n")


def test_a_try_would_be_seen(offline):
    code = "import socket; s = socket.socket(); s.settimeout(0.1); s.connect_ex(('127.0.0.1', 9))"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    _, tried = offline(sys.executable, "-c", inner)
    assert tried == "socket.connect ('127.0.0.1', 9)\n"


def test_flowers_programs_send_no_telemetry_ask_for_no_updates_and_install_nothing(tmp_path):
    pytest.importorskip("flwr")
    from fedgma.flower.deployment import Deployment

    environment = Deployment(app=tmp_path, state=tmp_path / "state").environment()
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
