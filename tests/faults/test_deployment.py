"""Rows F: a Flower deployment whose processes die, whose files are damaged, and that strangers reach."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from certificates import write_certificates, write_keys
from fedgma.errors import ConfigError, DataError, FedgmaError
from fedgma.flower import processes, supervisor
from fedgma.flower.certificates import check_certificates
from fedgma.flower.deployment import LOOPBACK, Deployment
from fedgma.flower.superlink import OCCUPIED, PortFilter, Server
from fedgma.flower.supervisor import Supervisor
from flower_stage import held_port, set_stage, supervised
from rows import row

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """A deployment with stand-ins for Flower's programs."""
    with held_port() as port:
        yield set_stage(tmp_path, port, monkeypatch)


def wait_until(condition):
    """Wait for an event; a test that waits in vain is ended by pytest's own limit."""
    while not condition():
        time.sleep(0.05)


# -- processes that die ------------------------------------------------------------------------------------------------


@row(
    "F1",
    "the SuperLink is killed (-9)",
    happens="`fedgma flower up` restarts it and submits the app again, which resumes; the final model is the "
    "undisturbed one, bit for bit",
    seen="`the SuperLink died`, `restarting after round N`",
)
@row(
    "F2",
    "the server app is killed (-9)",
    happens="it is submitted again and resumes; the final model is the undisturbed one, bit for bit",
    seen="`the server app died`, `restarting after round N`",
)
@row(
    "F3",
    "a node is killed (-9)",
    happens="it is restarted with its key and its part of the data; with `quorum` at all nodes the round is repeated "
    "and the final model is the undisturbed one",
    seen="`node-N died`, `node-N started`; with node keys between them `node-N is started in 43 s`, since Flower "
    "refuses the key of a node that it takes for connected",
)
@pytest.mark.long(30)
@pytest.mark.parametrize(
    "words",
    [
        ["--only", "superlink", "--count", "1", "--rounds", "2", "--nodes", "1", "--seed", "3"],  # after round 1
        # below, stand-ins of the server app and of a node are killed
        pytest.param(["--count", "3", "--a-run", "3"], marks=pytest.mark.slow),
    ],
    ids=["the SuperLink", "all three"],
)
def test_f1_f2_f3_superlink_server_app_and_node_killed_the_model_is_the_undisturbed_one(words):
    script, count = ROOT / "benchmarks" / "faults" / "flower_kills.py", words[words.index("--count") + 1]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} of {count} kills" in done.stdout


@row("F3")
def test_f3_a_node_that_was_killed_is_started_again(stage, monkeypatch):
    monkeypatch.setattr(supervisor, "STATUS_INTERVAL", 1e9)  # the run is not asked for, and goes on
    killed = []

    def stopping():
        if not killed and (alive := processes.find(stage.state, home="node-0")):
            os.kill(alive[0], signal.SIGKILL)
            killed.append(alive[0])
        return len(killed) == 1 and processes.find(stage.state, home="node-0") not in ([], killed)

    _, messages, code = supervised(replace(stage, nodes=1), ["nothing"], stopping=stopping)
    assert (code, len(killed)) == (0, 1)
    assert "node-0 died (exit code -9)" in messages
    assert len([text for text in messages if text.startswith("node-0 started")]) == 2


@row("F2")
def test_f2_a_server_app_that_was_killed_is_submitted_again(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "STATUS_INTERVAL", 1e9)  # its death is seen, not asked for
    (tmp_path / "flwr-serverapp").write_text("import time; time.sleep(3600)")
    apps, find = [], processes.find

    def killing(*places, **expected):
        actual = find(*places, **expected)
        for app in apps if actual and "program" in expected else ():  # it was seen alive
            app.kill()
            app.wait()
        return actual

    def stopping():
        if not apps and (stage.folder / "rounds.jsonl").exists():  # the first submission
            words = [sys.executable, tmp_path / "flwr-serverapp"]
            apps.append(subprocess.Popen(words, env=stage.environment(), start_new_session=True))
        return False

    monkeypatch.setattr(processes, "find", killing)
    watched, messages, code = supervised(stage, ["round", "done"], stopping=stopping)
    assert (code, watched.starts, len(apps)) == (0, 2, 1)
    assert "the server app died; restarting after round 1" in messages


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path):
    with held_port() as port:
        code = (
            "import sys; from pathlib import Path; from dataclasses import replace;"
            "from flower_stage import set_stage, supervised; from fedgma.flower import supervisor;"
            "stage = set_stage(Path(sys.argv[1]), int(sys.argv[2])); supervisor.STATUS_INTERVAL = 1e9;"
            "(stage.state / 'node').write_text('leave'); supervised(replace(stage, nodes=1), [])"
        )
        paths = [str(ROOT / "tests" / "helpers"), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen([sys.executable, "-c", code, tmp_path, str(port)], env=environment)
        state = tmp_path / "state"
        wait_until(lambda: (state / "run").exists() and len(processes.find(state, home="node-0")) == 2)
        process.kill()
        process.wait()
        wait_until(lambda: not processes.find(state))


def test_a_start_ends_what_an_earlier_one_has_left(stage):
    words = [sys.executable, "-c", "import time; time.sleep(3600)"]
    left = subprocess.Popen(words, env=stage.environment("node-0"), start_new_session=True)
    unrelated = subprocess.Popen(words, env={**os.environ, "FLWR_HOME": str(stage.state / "node-0")})
    try:
        _, messages, code = supervised(stage, ["done"])
        assert left.wait() == -signal.SIGKILL
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()
    assert code == 0
    assert "ended 1 processes that an earlier start had left" in messages


def test_a_superexec_that_hides_its_environment_is_known_by_its_address():
    words = [b"/usr/bin/python", b"/x/flower-superexec", b"--insecure", b"--runtime-api-address", b"127.0.0.1:8001"]
    assert processes._is_superexec_of({b"127.0.0.1:8001"}, words)
    assert not processes._is_superexec_of({b"127.0.0.1:8002"}, words)
    assert not processes._is_superexec_of({b"127.0.0.1:8001"}, [b"vi", b"flower-superexec", *words[2:4]])


def test_a_client_app_does_not_outlive_its_run(stage):
    (stage.state / "node").write_text("leave")
    node = replace(stage, nodes=1)
    seen = []

    def stopping():
        seen[:] = processes.find(stage.state, home="node-0")
        return len(seen) == 2

    supervised(node, [], stopping=stopping)
    assert len(seen) == 2
    assert not processes.find(stage.state)


def test_an_earlier_run_is_stopped_before_the_app_is_submitted_again(stage, tmp_path):
    """Flower starts a server app again that died before it reported; it would write to the same folder."""
    (tmp_path / "flwr-serverapp").write_text("import time; time.sleep(3600)")
    earlier = []

    def stopping():
        if not earlier and (stage.folder / "rounds.jsonl").exists():  # the first submission
            (stage.state / "superlink" / "unfinished").touch()
            words = [sys.executable, tmp_path / "flwr-serverapp"]
            earlier.append(subprocess.Popen(words, env=stage.environment(), start_new_session=True))
        return False

    watched, _, code = supervised(stage, ["round", "done"], stopping=stopping)
    assert code == 0
    assert watched.starts == 2
    assert (stage.state / "superlink" / "stopped").read_text() == "5"
    assert earlier[0].wait() == -signal.SIGKILL


def test_nodes_started_here_begin_anew_with_every_submission(stage):
    """A node whose SuperLink died while it fetched a message would stay one reply behind until the end."""
    _, messages, code = supervised(replace(stage, nodes=1), ["round", "done"])
    assert code == 0
    assert len([text for text in messages if text.startswith("node-0 started")]) == 2
    assert not [text for text in messages if "died (exit code" in text]


def test_keys_that_were_not_registered_are_registered_after_the_next_start(stage, tmp_path, monkeypatch):
    write_keys(tmp_path / "keys", 2)
    plan = replace(stage, insecure=False, certificates=write_certificates(tmp_path / "c"), keys=tmp_path / "keys")
    (stage.state / "plan").write_text('["done"]')
    (stage.state / "superlink").mkdir()
    (stage.state / "superlink" / "refuse").touch()  # the first registration has no answer
    messages = []
    assert Supervisor(plan, say=messages.append).run() == 0
    assert "node0.pub could not be registered: no answer; restarting after round 0" in messages
    registered = (stage.state / "superlink" / "registered").read_text().split()
    assert registered == [str(key) for key in plan.public_keys()]


def test_two_supervisors_cannot_share_a_folder(stage):
    refusals = []

    def stopping():
        with pytest.raises(ConfigError, match="another process supervises") as refusal:
            Supervisor(stage).run()
        refusals.append(refusal)
        return True

    supervised(stage, ["done"], stopping=stopping)
    assert refusals


def test_another_program_at_the_port_is_not_taken_for_our_superlink(stage):
    import socket

    with (
        socket.create_server(("127.0.0.1", stage.port), reuse_port=True),
        pytest.raises(ConfigError, match=f"another program answers at 127.0.0.1:{stage.port}"),
    ):
        supervised(stage, ["done"])


def test_an_address_that_cannot_be_used_is_named_and_costs_no_database(stage):
    stage.database.parent.mkdir()
    made(stage.database, "CREATE TABLE run (id)").close()
    (stage.state / "superlink" / "occupied").touch()
    with pytest.raises(FedgmaError, match=f"the SuperLink cannot listen at 127.0.0.1:{stage.port}; no further round"):
        supervised(stage, ["done"], restarts=1)
    assert stage.database.exists()
    with pytest.raises(SystemExit) as ending:  # an address that no machine has
        Server("127.0.0.1:8000", "token").run(app=None, host="192.0.2.1", port=8001)
    assert ending.value.code == OCCUPIED


def test_a_node_that_cannot_start_is_given_up(stage, monkeypatch):
    monkeypatch.setattr(supervisor, "STATUS_INTERVAL", 1e9)
    (stage.state / "node").write_text("end")
    (stage.state / "plan").write_text("[]")
    messages = []
    with pytest.raises(FedgmaError, match="no node stays alive after 2 restarts"):
        Supervisor(replace(stage, nodes=2), restarts=2, say=messages.append).run()
    starts = [text for text in messages if text.startswith("node-0 started")]
    assert len(starts) == 3
    assert "node-0 died (exit code 1); it was restarted 2 times and is given up" in messages


# -- who may connect ---------------------------------------------------------------------------------------------------


@row(
    "F5",
    "no certificates",
    happens="nothing is started at an address beyond 127.0.0.1; without node keys neither",
    seen="`without certificates the host must be 127.0.0.1`, exit code 2",
)
def test_f5_beyond_this_machine_only_with_certificates_and_keys(stage, tmp_path):
    for host in ("0.0.0.0", "::", "10.0.0.1", "fl.example.org"):
        with pytest.raises(ConfigError, match="without certificates the host must be"):
            replace(stage, host=host).check()
    certificates = write_certificates(tmp_path / "certificates")
    open_to_all = replace(stage, insecure=False, certificates=certificates, host="0.0.0.0")
    with pytest.raises(ConfigError, match="add --keys"):
        open_to_all.check()
    write_keys(tmp_path / "keys")
    replace(open_to_all, keys=tmp_path / "keys").check()


WRONG = {
    "expired": ({"days": -1}, "certificate has expired"),
    "another authority": ({"trusted": False}, "unable to get local issuer certificate"),
    "another name": ({"names": ("fl.example.org",)}, "not valid for '127.0.0.1'"),
}


@row(
    "F6",
    "a certificate of another authority, expired, for another name, or with another key",
    happens="the server does not start with it; a node does not connect to such a server",
    seen="`nodes would refuse server.pem at 127.0.0.1: certificate has expired`, exit code 2",
)
@pytest.mark.parametrize("wrong", WRONG)
def test_f6_certificates_that_nodes_would_refuse_are_refused_at_the_start(stage, tmp_path, wrong):
    options, reason = WRONG[wrong]
    folder = write_certificates(tmp_path / "certificates", **options)
    with pytest.raises(ConfigError, match=reason):
        replace(stage, insecure=False, certificates=folder).check()


@row("F6")
def test_f6_a_node_that_trusts_another_authority_does_not_connect(federation, tmp_path):
    import httpx

    authority = (write_certificates(tmp_path) / "ca.crt").read_bytes()
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        activated(federation, federation.keys[0], authority)


@row("F6")
def test_f6_a_key_of_another_certificate_is_refused(tmp_path):
    folder = write_certificates(tmp_path / "certificates")
    other = write_certificates(tmp_path / "other")
    check_certificates(folder, list(LOOPBACK[:2]))
    (folder / "server.key").write_bytes((other / "server.key").read_bytes())
    with pytest.raises(ConfigError, match=r"cannot be used: .*mismatch"):
        check_certificates(folder, ["127.0.0.1"])


Federation = namedtuple("Federation", "plan keys supervisor messages")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Flower's own SuperLink with TLS and node keys, as `fedgma flower up` starts it."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").touch()
    certificates, keys = write_certificates(folder / "certificates"), write_keys(folder / "keys", 1)
    with held_port() as port:
        pass  # Flower's sockets do not share ports
    plan = Deployment(
        folder / "app", folder / "state", port=port, certificates=certificates, keys=folder / "keys", nodes=1
    )
    messages = []
    started = Supervisor(plan, say=messages.append)
    plan.check()
    plan.write_connection()
    try:
        assert started._start_superlink() is None, (plan.state / "logs" / "superlink.log").read_text()
        yield Federation(plan, keys, started, messages)
    finally:
        started.programs.stop()
        assert not processes.find(plan.state)


@contextlib.contextmanager
def connected(federation, port):
    """A connection of somebody who has ca.crt."""
    import ssl

    import httpx

    trust = ssl.create_default_context(cafile=federation.plan.certificates / "ca.crt")
    with httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{port}", timeout=600) as client:
        yield client


def asked(federation, path, *, port=None, method="POST", **options):
    with connected(federation, port or federation.plan.port) as client:
        return client.request(method, path, **options)


def test_a_stranger_with_ca_crt_cannot_register_a_node_or_run_an_app(federation):
    from flwr.superlink.routers.control import router

    control = {route.path for route in router.routes}
    assert {"/v1/control/register-node", "/v1/control/start-run"} <= control
    others = {"/v1/runtime/acquire-task", "/v1/fleet/../control/start-run", "/docs", "/openapi.json", "/"}
    with connected(federation, federation.plan.port) as client:
        assert {path: client.post(path).status_code for path in control | others} == dict.fromkeys(
            control | others, 404
        )
    with connected(federation, federation.plan.port + 1) as client:
        assert {path: client.post(path).status_code for path in control} == dict.fromkeys(control, 401)


def test_the_control_port_is_on_loopback_whatever_the_host(federation):
    open_to_nodes = replace(federation.plan, host="0.0.0.0")
    command = open_to_nodes.superlink()
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert open_to_nodes.control == f"127.0.0.1:{federation.plan.port + 1}"
    log = (federation.plan.state / "logs" / "superlink.log").read_text()
    assert f"Control HTTP API on 127.0.0.1:{federation.plan.port + 1}" in log


def test_flowers_command_line_has_the_token(federation):
    assert federation.supervisor._registered == set(federation.plan.public_keys())  # by `flwr supernode register`
    token = (federation.plan.state / "superlink" / "token").read_text()
    with_token = {"Authorization": f"Bearer {token}"}
    answer = asked(federation, "/v1/control/list-nodes", port=federation.plan.port + 1, headers=with_token)
    assert answer.status_code not in (401, 404)
    wrong = {"Authorization": f"Bearer {token[:-1]}"}
    assert asked(federation, "/v1/control/list-nodes", port=federation.plan.port + 1, headers=wrong).status_code == 401


def activated(federation, key, authority=None):
    """What the SuperLink answers to a node with this key."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    signs = NodeAuthHttpInterceptor(key, key.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    authority = authority or (federation.plan.certificates / "ca.crt").read_bytes()
    with FleetHttpClient.from_server_address(federation.plan.address, False, authority, [version, signs]) as client:
        request = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=30)
        return client.ActivateNode(request)


def test_a_file_that_is_no_public_key_is_refused(stage, tmp_path):
    write_keys(tmp_path / "keys", 1)
    (tmp_path / "keys" / "node1.pub").write_text("ssh-rsa nonsense")
    plan = replace(stage, insecure=False, certificates=write_certificates(tmp_path / "c"), keys=tmp_path / "keys")
    with pytest.raises(ConfigError, match="is not a public key of an elliptic curve"):
        plan.check()


@row(
    "F7",
    "a node with a key that is not registered",
    happens="Flower refuses it",
    seen="`Exit Code: 305` in the node's log; a line in `logs/superlink.log`",
)
def test_f7_an_unregistered_key_is_refused(federation, tmp_path):
    import httpx

    assert activated(federation, federation.keys[0]).node_id
    (stranger,) = write_keys(tmp_path, 1)
    with pytest.raises(httpx.HTTPStatusError):
        activated(federation, stranger)
    log = (federation.plan.state / "logs" / "superlink.log").read_text()
    assert re.search(r"POST /v1/fleet/activate-node.* 4\d\d", log)


@row(
    "F18",
    "the clock of a node is wrong by more than 5 s",
    happens="its requests are refused, as by Flower, but with the reason",
    seen="`the node's clock is 120 s ahead of the server's`, in the node's log",
)
def test_f18_a_wrong_clock_is_named(federation, monkeypatch):
    import datetime

    import httpx
    from flwr.supercore.error import FlowerError
    from flwr.supernode import node_auth_http_interceptor

    for shift, words in ((120, "120 s ahead of"), (-3600, "3600 s behind")):
        wrong = datetime.datetime.now(tz=datetime.UTC) + datetime.timedelta(seconds=shift)
        monkeypatch.setattr(node_auth_http_interceptor, "now", lambda wrong=wrong: wrong)
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            activated(federation, federation.keys[0])
        said = FlowerError.from_json(refusal.value.response.text).message  # what a node prints
        number, _, rest = words.partition(" s ")
        found = re.search(r"clock is (\d+) s (ahead of|behind) the server's", said)
        assert found[2] == rest
        assert abs(int(found[1]) - int(number)) < 100


def test_f18_a_small_difference_of_clocks_is_accepted():
    import datetime

    now = datetime.datetime.now(tz=datetime.UTC)
    ports = PortFilter(None, fleet_port=1, token="secret")
    for seconds, refused in ((-200, False), (0, False), (60, True)):
        timestamp = (now + datetime.timedelta(seconds=seconds)).isoformat().encode()
        scope = {"path": "/v1/fleet/pull-messages", "headers": [(b"flwr-timestamp", timestamp)], "server": ("h", 1)}
        assert (ports.refusal(scope) is not None) == refused


@row(
    "F20",
    "is it ready, and can it be stopped",
    happens="`/health` answers 200 at the nodes' port while the SuperLink serves; Ctrl-C ends all processes, and the "
    "round that was being played is repeated by the next start",
    seen="`stopped: node-0, superlink`, exit code 130 or 143",
)
def test_f20_health_is_answered_while_the_superlink_serves(federation):
    assert asked(federation, "/health", method="GET").status_code == 200


@row("F20")
def test_f20_a_stop_ends_all_processes_and_the_same_command_continues(stage):
    node = replace(stage, nodes=1)
    watched, messages, code = supervised(node, ["round"], stopping=lambda: (stage.folder / "rounds.jsonl").exists())
    assert code == 0
    assert messages[-1] == "stopped: node-0, superlink"
    assert all(process.poll() is not None for process in watched.processes.values())
    _, messages, code = supervised(node, ["done"])
    assert code == 0
    assert any("submitted after 1 completed rounds" in text for text in messages)


# -- files -------------------------------------------------------------------------------------------------------------


def made(path, *statements):
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    return database


@row(
    "F13",
    "the SuperLink's database is damaged, half migrated or locked",
    happens="a damaged one is set aside and a new one begun, since the run's folder has all that is needed; a locked "
    "one is refused",
    seen="`the SuperLink's database is damaged (...) and was moved to ...`; exit code 3 if it is locked",
)
@pytest.mark.parametrize("harm", ["bytes", "migration"])
def test_f13_a_damaged_database_is_set_aside(stage, harm):
    stage.database.parent.mkdir()
    if harm == "bytes":
        stage.database.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
    else:
        made(stage.database, "CREATE TABLE run (id)", "CREATE TABLE _alembic_tmp_run (id)").close()
    before = stage.database.read_bytes()
    _, messages, code = supervised(stage, ["done"])
    assert code == 0
    assert any("database is damaged" in text and "a new one is begun" in text for text in messages)
    assert stage.database.with_name("superlink.db.damaged").read_bytes() == before


@row("F13")
def test_f13_a_database_with_which_the_superlink_does_not_start_is_set_aside(stage):
    stage.database.parent.mkdir()
    stage.database.touch()  # valid and empty; the stand-in does not start with it
    _, messages, code = supervised(stage, ["done"], restarts=1)
    assert code == 0
    assert "the SuperLink failed to start (exit code 1); restarting after round 0" in messages
    assert not stage.database.exists()


@row("F13")
def test_f13_a_locked_database_is_refused(stage, monkeypatch):
    from fedgma.flower import database as module

    monkeypatch.setattr(module, "LOCK_TIMEOUT", 0.1)
    stage.database.parent.mkdir()
    holder = made(stage.database, "CREATE TABLE run (id)")
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(DataError, match="database is locked"):
            supervised(stage, ["done"])
    finally:
        holder.close()
    _, _, code = supervised(stage, ["done"])
    assert code == 0


@row("F13")
def test_f13_a_sound_database_is_kept(stage):
    stage.database.parent.mkdir()
    made(stage.database, "CREATE TABLE run (id)", "INSERT INTO run VALUES (1)").close()
    before = stage.database.read_bytes()
    _, messages, _ = supervised(stage, ["done"])
    assert stage.database.read_bytes() == before
    assert not any("database" in text for text in messages)


@row(
    "F14",
    "Flower installs an app's dependencies at run time",
    happens="switched off for the SuperLink and, by the environment, for every process",
    seen="nothing is downloaded",
)
def test_f14_no_dependency_is_installed_at_run_time(stage):
    assert "--disable-runtime-dependency-installation" in stage.superlink()
    assert "--allow-runtime-dependency-installation" not in replace(stage, nodes=1).node(0)
    assert stage.environment()["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"


@row(
    "F15",
    "secrets in logs, messages, command lines or settings",
    happens="private keys and the token are in their own files alone, which only the owner can read",
    seen="nothing",
)
def test_f15_secrets_are_in_their_own_files_alone(federation):
    plan = federation.plan
    token = (plan.state / "superlink" / "token").read_text()
    asked(federation, "/v1/control/list-runs", headers={"Authorization": f"Bearer {token}"})
    secrets = [token.encode()]
    for key in (plan.certificates / "server.key", plan.certificates / "ca.key", plan.keys / "node0"):
        secrets += key.read_bytes().splitlines()[1:-1]
    own = {plan.state / "superlink" / "token"}  # credentials.yaml has it in base64
    for path in plan.state.rglob("*"):
        if path.is_file() and path not in own:
            content = path.read_bytes()
            assert not [secret for secret in secrets if secret in content], path
    for text in (*federation.messages, *plan.superlink(), *plan.node(0)):
        assert not [secret for secret in secrets if secret in text.encode()]


@row(
    "F16",
    "a private key that others can read",
    happens="nothing is started; ca.key, server.key and the nodes' keys are looked at",
    seen="`other users can read ...; run: chmod 600 ...`, exit code 2",
)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620], ids=oct)
@pytest.mark.parametrize("name", ["certificates/server.key", "certificates/ca.key", "keys/node0", "keys/node1"])
def test_f16_a_private_key_that_others_can_read_is_refused(stage, tmp_path, name, mode):
    certificates = write_certificates(tmp_path / "certificates")
    write_keys(tmp_path / "keys", 2)
    plan = replace(stage, insecure=False, certificates=certificates, keys=tmp_path / "keys", nodes=1)
    plan.check()
    (tmp_path / name).chmod(mode)
    with pytest.raises(ConfigError, match=f"other users can read '.*{name}'; run: chmod 600"):
        plan.check()


def test_only_the_owner_can_read_the_state_folder(federation):
    state = federation.plan.state
    assert state.stat().st_mode & 0o777 == 0o700
    for path in state.rglob("*"):
        assert not path.stat().st_mode & 0o077, path


def test_a_state_folder_that_others_can_read_is_closed(stage):
    stage.state.chmod(0o755)
    supervised(stage, ["done"])
    assert stage.state.stat().st_mode & 0o777 == 0o700


@row(
    "F17",
    "the server's disk fills up",
    happens="below 1 GB of free disk the supervisor says so; below 64 MB it stops, and continues once there is space",
    seen="`only 812 MB of disk are free`; exit code 3",
)
def test_f17_a_disk_that_fills_up_is_reported_and_then_refused(stage, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(supervisor, "LOW_FREE", 2**30)
    monkeypatch.setattr(supervisor, "LEAST_FREE", 2**26)
    monkeypatch.setattr(supervisor.shutil, "disk_usage", lambda path: usage(2**40, 0, 812 * 2**20))
    _, messages, code = supervised(stage, ["done"])
    assert code == 0
    assert f"only 812 MB of disk are free for {stage.state}" in messages
    monkeypatch.setattr(supervisor.shutil, "disk_usage", lambda path: usage(2**40, 0, 2**20))
    with pytest.raises(DataError, match="has 1 MB of free disk"):
        supervised(stage, ["done"])
    assert json.loads((stage.state / "plan").read_text()) == ["done"]  # nothing was started
