"""A deployment whose programs are stand-ins for Flower's, for the supervisor to start, watch and stop."""

import contextlib
import json
import os
import socket
import stat
import sys
from itertools import count as count_from

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")

from fedgma.flower import deployment, programs, supervisor
from fedgma.flower.deployment import Deployment
from fedgma.flower.supervisor import Supervisor

# answers at the fleet's port until it is ended; does not start with an empty database or a file `occupied`; starts the
# server app if there is one
SUPERLINK = """
import socket, subprocess, sys, time
from pathlib import Path
database = Path(sys.argv[sys.argv.index("--database") + 1])
if database.exists() and database.read_bytes() == b"":
    raise SystemExit(1)
if database.with_name("occupied").exists():
    raise SystemExit(98)
host, port = sys.argv[sys.argv.index("--fleet") + 1].split(":")
door = socket.create_server((host, int(port)), reuse_port=True)
app = database.with_name("flwr-serverapp")
if app.exists():
    app.with_name("app").write_text(str(subprocess.Popen([sys.executable, str(app)]).pid))
while True:
    time.sleep(60)
"""

# waits, or does as the file `node` says: end at once, leave a process in a session of its own, or sign off at its end
NODE = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
plan = Path(os.environ["FLWR_HOME"]).parent / "node"
order = plan.read_text() if plan.exists() else ""
def sign_off(*_):
    time.sleep(0.5)  # as Flower's node, which ends its loop first
    host, port = sys.argv[sys.argv.index("--superlink") + 1].split(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
        app = Path("/proc", (plan.parent / "superlink" / "app").read_text(), "cmdline")
        if not app.exists() or not app.read_bytes():  # a process that has ended has no words
            plan.with_name("signed off").touch()
    finally:
        os._exit(0)
if order == "sign off":
    signal.signal(signal.SIGTERM, sign_off)
    plan.with_name("ready").touch()
if order == "end":
    raise SystemExit(1)
if order == "leave":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
time.sleep(3600)
"""

# `flwr run` plays a round more at each call, or does as the file `plan` says; `flwr ls` tells that the run has ended
FLWR = """
import json, os, sys
from pathlib import Path
home = Path(os.environ["FLWR_HOME"])
if sys.argv[1] == "log":
    print((home / "printed").read_text() if (home / "printed").exists() else "")
    raise SystemExit
if sys.argv[1] == "ls":
    status = "running" if "--run-id" not in sys.argv and (home / "unfinished").exists() else "finished:failed"
    status = "finished:completed" if (home / "completed").exists() else status
    print(json.dumps({"runs": [{"run-id": "5", "status": status}]}))
    raise SystemExit
if sys.argv[1] == "stop":
    (home / "stopped").write_text(sys.argv[2])
    print(json.dumps({"success": True}))
    raise SystemExit
if sys.argv[1] == "register":
    if (home / "refuse").exists():
        (home / "refuse").unlink()
        raise SystemExit(1)
    for key in sys.argv[3:]:
        with (home / "registered").open("a") as stream:
            stream.write(key + "\\n")
        print(json.dumps({"success": True}))
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
if step == "end well":
    (home / "completed").touch()
if step == "bad config":
    with (run.parent / "logs" / "superlink.log").open("a") as stream:
        stream.write("ERROR: Could not start run: Key 'tua' is not present\\n")
answers = {"refuse": "no", "bad config": "Using SuperLink: fedgma\\n\\n[code: 15] Invalid run configuration."}
if step.startswith("answer "):
    answers[step] = step.removeprefix("answer ")
print(json.dumps({"run-id": None if step in answers else str(count + 7), "error-message": answers.get(step)}))
"""


@contextlib.contextmanager
def held_port(count=4):
    """The first of some ports that no other program is given meanwhile; sockets that say so too may share them.

    They lie below those that systems give to outgoing connections, so that they stay free after the end too.
    """
    for first in count_from(10000 + os.getpid() % 500 * 40, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    with socket.socket() as alone:
                        alone.bind(("127.0.0.1", port))  # nobody holds it, also not another test
                    holder = stack.enter_context(socket.socket())
                    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    holder.bind(("127.0.0.1", port))
            except OSError:
                continue
            yield first
            return


def set_stage(folder, port, patch=None):
    """A deployment in this folder whose programs are stand-ins, waited for as long as it takes."""
    programs_by_name = {"flower-superlink": SUPERLINK, "flower-supernode": NODE, "flwr": FLWR}
    for name, code in programs_by_name.items():
        program = folder / name
        program.write_text(f"#!{sys.executable}\n{code}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    changes = {
        (deployment, "_program"): lambda name: str(folder / name),
        (deployment, "_superlink_program"): lambda: [str(folder / "flower-superlink")],
        (deployment, "_registration_program"): lambda: [str(folder / "flwr"), "register"],
        (supervisor, "POLL_INTERVAL"): 0.02,
        (supervisor, "STATUS_INTERVAL"): 0.05,
        (supervisor, "PAUSE"): 0.01,
        (supervisor, "START_TIMEOUT"): 1e9,
        (supervisor, "LOW_FREE"): 0,
        (supervisor, "LEAST_FREE"): 0,
        (programs, "COMMAND_TIMEOUT"): 1e6,
    }
    for (module, name), value in changes.items():
        (patch.setattr if patch is not None else setattr)(module, name, value)
    for name in ("app", "state"):
        (folder / name).mkdir()
    (folder / "app" / "pyproject.toml").touch()
    return Deployment(folder / "app", folder / "state", port=port, insecure=True)


def supervised(stage, plan, **options):
    """Run the supervisor; `plan` is what each submission of the app does."""
    (stage.state / "plan").write_text(json.dumps(plan))
    messages = []
    watched = Supervisor(stage, say=messages.append, **options)
    return watched, messages, watched.run()
