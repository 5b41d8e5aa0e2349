"""A real federation on loopback with TLS and node authentication, and everything that should go wrong with it.

    python benchmarks/flower/faults.py                  # all of it; about half an hour on two cores
    python benchmarks/flower/faults.py clean restart    # some scenarios
    python benchmarks/flower/faults.py restart --nodes 2 --rounds 3 --dataset fmnist-mini

Needs fedgma[flower,sim], openssl and ssh-keygen. Everything runs on 127.0.0.1 in a temporary folder.

    clean     5 nodes, 10 rounds, GMA + FedYogi on Fashion-MNIST; a node with an unregistered key knocks in between.
              The final model must have the simulator's hash.
    faults    the same with a NaN, a wrong shape, a weight of 1e18, a node killed and a straggler, each in its round.
              The final model must be the one that the simulator gives with these replies left out.
    restart   the same with the SuperLink killed (-9) in round 4. The final model must have the hash of `clean`.
    server    the same with the server app killed (-9) in round 4.
    flower    every fault again, under Flower's own FedAvg and FedAdam: what becomes of the global model.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "flower_app"
sys.path[:0] = [str(ROOT / "src"), str(EXAMPLE)]

from flwr.common.config import flatten_dict  # noqa: E402
from fmnist_gma import server_app, task  # noqa: E402

import fedgma  # noqa: E402
from fedgma.flower import processes  # noqa: E402
from fedgma.flower.deployment import NAME, Deployment  # noqa: E402
from fedgma.flower.supervisor import Supervisor  # noqa: E402
from fedgma.records.checkpoints import digest  # noqa: E402
from fedgma.simulation.fleet import play  # noqa: E402
from fedgma.simulation.state import export  # noqa: E402

TIMEOUT = 120.0  # seconds a round waits for replies
FAULTS = {"nan": "1@2", "shape": "2@3", "weight": "3@4", "killed": "4@5", "late": "0@7"}


class Scene:
    """A temporary folder with certificates, keys and the app, and what every scenario shares."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="flower-faults-"))
        self.nodes, self.rounds, self.kinds = options.nodes, options.rounds, options.kinds
        self.words = [f'run.dataset="{options.dataset}"', f"run.rounds={self.rounds}", "run.local_steps=5"]
        self.words += [
            f"run.partition.clients={self.nodes}",
            f"run.clients_per_round={self.nodes}",
            f"timeout={TIMEOUT}",
        ]
        self.words += ['run.partition.name="iid"'] if self.nodes % 5 else []
        self.app, self.signs = self.folder / "app", self.folder / "signs"
        self.signs.mkdir()
        build_app(self.app)
        for script, *words in (("make_certificates.sh", "certificates"), ("make_keys.sh", "keys", str(self.nodes))):
            subprocess.run(
                ["sh", EXAMPLE / script, self.folder / words[0], *words[1:]], check=True, capture_output=True
            )
        subprocess.run(
            ["sh", EXAMPLE / "make_keys.sh", self.folder / "strangers", "1"], check=True, capture_output=True
        )

    def deployment(self, name: str, *words: str) -> Deployment:
        config = (*self.words, f'signs="{self.signs}"', *words)
        return Deployment(
            self.app,
            self.folder / name,
            port=free_port(self.nodes + 3),
            certificates=self.folder / "certificates",
            keys=self.folder / "keys",
            nodes=self.nodes,
            run_config=config,
        )

    def config(self) -> dict[str, Any]:
        """The app's settings as the nodes see them."""
        shipped = tomllib.loads((self.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        given = tomllib.loads("\n".join(self.words))
        return {**flatten_dict(shipped), **flatten_dict(given)}


def build_app(folder: Path) -> None:
    """The example app with the faulty client in the place of its own."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "certificates", "keys"))
    for file in (HERE / "faults_app").glob("*.py"):
        shutil.copy(file, folder / "fmnist_gma")
    settings = folder / "pyproject.toml"
    text = settings.read_text().replace("fmnist_gma.client_app:app", "fmnist_gma.faulty_client:app")
    more = '[tool.flwr.app.config]\nfaults = ""\nsigns = ""\nstrategy = ""\n'
    settings.write_text(text.replace("[tool.flwr.app.config]\n", more))


def free_port(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for first in range(20000 + os.getpid() % 20000, 60000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise SystemExit("no free ports")


def simulated(scene: Scene, left_out: dict[int, int]) -> str:
    """The hash that the simulator gives; `left_out` maps a round to the client whose reply does not count."""
    words = task.words_of(scene.config())
    spec, fleet = task.spec_of(words), task.fleet_of(words)
    if not left_out:
        plain = export(fleet, list(play([spec], trainer="loop"))[-1].state, 0)
        return digest({key.removeprefix("params/"): one for key, one in plain.items() if key.startswith("params/")})
    params = {name: value.numpy().copy() for name, value in task.initial_model(words).items()}
    strategy, state = server_app.masked(spec, wait=1.0).server, None
    for round in range(1, spec.rounds + 1):
        counted = [client for client in range(scene.nodes) if left_out.get(round) != client]
        begun = {name: task.torch.from_numpy(value.copy()) for name, value in params.items()}
        local = [task.train(words, begun, round=round, client=client) for client in counted]
        models = [{name: value.numpy() for name, value in one.model.items()} for one in local]
        pieces = {"aggregator": strategy.rule, "optimizer": strategy.optimizer, "state": state}
        params, state, _ = fedgma.server_round(params, models, [one.samples for one in local], **pieces)
    return digest(params)


def supervised(deployment: Deployment, watch: Any = None) -> tuple[int, Supervisor, str, float]:
    """Play a run under the supervisor; exit code, supervisor, hash of the final model, seconds."""
    supervisor = Supervisor(deployment, say=lambda text: print(f"    {time.strftime('%H:%M:%S')} {text}", flush=True))
    ended = threading.Event()
    thread = threading.Thread(target=watch, args=(supervisor, ended)) if watch is not None else None
    began = time.monotonic()
    if thread is not None:
        thread.start()
    try:
        code = supervisor.run()
    finally:
        ended.set()
        if thread is not None:
            thread.join()
    done = deployment.folder / "done"
    found = json.loads(done.read_text())["sha256"] if done.exists() else "none"
    return code, supervisor, found, time.monotonic() - began


def knocked(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """How a node that nobody knows is sent away; through a file, for its children hold on to pipes."""
    folder.mkdir()
    with (folder / "log").open("wb") as log:
        node = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            code = str(node.wait(120))
        except subprocess.TimeoutExpired:
            node.kill()
            code = "none after 120 s"
    said = re.sub(r"\x1b\[[0-9;]*m", "", (folder / "log").read_text(errors="replace")).splitlines()
    first = next((place for place, line in enumerate(said) if "Exit Code" in line), len(said))
    return f"exit code {code}; {' '.join(line.strip() for line in said[first : first + 4])[:300]}"


def clean(scene: Scene) -> bool:
    answers: list[str] = []

    def knock(supervisor: Supervisor, ended: threading.Event) -> None:
        """A node whose key nobody registered, once the federation is at work."""
        while not ended.wait(0.5) and supervisor._rounds() < 1:
            pass
        own = supervisor.deployment
        command = own.node(0)
        command[command.index("--auth-supernode-private-key") + 1] = str(scene.folder / "strangers" / "node0")
        command[command.index("--port") + 1] = own.node_address(scene.nodes).rpartition(":")[2]
        answers.append(knocked(command, own.state / "stranger", own.environment("stranger")))

    code, _, actual, seconds = supervised(scene.deployment("clean"), knock)
    expected = simulated(scene, {})
    print(f"  federation {actual[:16]}, simulator {expected[:16]}: {'same' if actual == expected else 'DIFFERENT'}")
    print(f"  exit code {code}, {seconds:.0f} s; unregistered key: {answers[0] if answers else 'NOT TRIED'}")
    return actual == expected and bool(answers) and not answers[0].startswith(("exit code 0;", "exit code none"))


def faults(scene: Scene) -> bool:
    words = " ".join(f"{kind}:{where}" for kind, where in FAULTS.items())
    left_out = {int(where.split("@")[1]): int(where.split("@")[0]) for where in FAULTS.values()}

    def kill(supervisor: Supervisor, ended: threading.Event) -> None:
        """The node that has begun to train and left a sign."""
        while not ended.wait(0.2):
            for sign in scene.signs.iterdir():
                supervisor.processes[sign.name].send_signal(signal.SIGKILL)
                sign.unlink()

    deployment = scene.deployment("faults", f'faults="{words}"')
    code, _, actual, seconds = supervised(deployment, kill)
    expected = simulated(scene, left_out)
    for line in map(json.loads, (deployment.folder / "rounds.jsonl").read_text().splitlines()):
        kinds = [kind for kind, where in FAULTS.items() if where.endswith(f"@{line['round']}")]
        counts = {name.removeprefix("gma-"): line["train"][name] for name in line["train"] if name.startswith("gma-")}
        shown = {name: counts[name] for name in ("clients", "refused", "failed", "late")}
        reasons = "; ".join(f"{one['reason']}: {one['detail']}" for one in line["refused"])
        print(f"  round {line['round']:2d} {kinds[0] if kinds else '-':7s} {shown} {reasons}")
    same = "same" if actual == expected else "DIFFERENT"
    print(f"  federation {actual[:16]}, simulator without them {expected[:16]}: {same}")
    print(f"  exit code {code}, {seconds:.0f} s")
    return actual == expected


def restart(scene: Scene, who: str = "superlink") -> bool:
    at = min(4, scene.rounds - 1)
    killed: list[float] = []

    def kill(supervisor: Supervisor, ended: threading.Event) -> None:
        while not ended.wait(0.2):
            if supervisor._rounds() == at - 1:
                time.sleep(8)  # in the middle of the round
                own = supervisor.processes["superlink"].pid
                os.kill(own if who == "superlink" else serverapp(supervisor.deployment.state), signal.SIGKILL)
                killed.append(time.monotonic())
                while supervisor._rounds() < at and not ended.wait(0.2):
                    pass
                killed.append(time.monotonic())
                return

    deployment = scene.deployment(f"restart-{who}")
    code, supervisor, actual, seconds = supervised(deployment, kill)
    expected = simulated(scene, {})
    print(f"  federation {actual[:16]}, simulator {expected[:16]}: {'same' if actual == expected else 'DIFFERENT'}")
    print(
        f"  exit code {code}, {seconds:.0f} s, {supervisor.starts} starts; {who} killed in round {at}, "
        f"which was saved {killed[1] - killed[0]:.0f} s later"
    )
    return actual == expected and supervisor.starts == 2


def server(scene: Scene) -> bool:
    return restart(scene, "server app")


def serverapp(state: Path) -> int:
    """The process of the server app of this deployment."""
    for process in processes.find(state, home="superlink", program="flwr-serverapp"):
        return process
    raise SystemExit("there is no server app")


def flower(scene: Scene) -> bool:
    """Two rounds of Flower's own strategies for every fault, which falls into the first; three nodes."""
    text = (scene.app / "pyproject.toml").read_text()
    (scene.app / "pyproject.toml").write_text(text.replace("server_app:app", "plain_server:app"))
    plan = Deployment(scene.app, scene.folder / "flower", port=free_port(5), insecure=True, nodes=3)
    supervisor = Supervisor(plan)
    plan.write_connection()
    try:
        for kind in scene.kinds or ("none", *FAULTS, "superlink"):
            for strategy in ("fedavg", "fedadam"):
                print(f"  {kind:9s} {strategy:8s} {observed(scene, supervisor, kind, strategy)}", flush=True)
    finally:
        supervisor.programs.stop()
    return True


def observed(scene: Scene, supervisor: Supervisor, kind: str, strategy: str) -> str:
    """What becomes of the global model under one of Flower's own strategies."""
    words = [
        f'faults="{kind}:1@1"',
        f'strategy="{strategy}"',
        "run.rounds=2",
        "run.partition.clients=3",
        "run.clients_per_round=3",
    ]
    words += ['run.dataset="fmnist-mini"', 'run.partition.name="iid"', "run.local_steps=2", "timeout=60.0"]
    plan = replace(supervisor.deployment, run_config=(*words, f'signs="{scene.signs}"'))
    supervisor.deployment = plan
    shutil.rmtree(plan.folder, ignore_errors=True)
    trouble = supervisor._begin()
    assert trouble is None, trouble
    ended, killed, began = None, False, time.monotonic()
    while not (plan.folder / "ended").exists() and ended is None:
        if time.monotonic() - began > 600:
            return "the run has no end after 600 s"
        for sign in scene.signs.iterdir():
            supervisor.processes[sign.name].send_signal(signal.SIGKILL)
            sign.unlink()
        if kind == "superlink" and not killed and (plan.folder / "notes.jsonl").exists():
            killed = True
            time.sleep(5)
            supervisor.processes["superlink"].send_signal(signal.SIGKILL)
            supervisor.processes["superlink"].wait()
            supervisor._start_superlink()
        time.sleep(3)
        ended = supervisor._ended()
    log = [plan.status("")[0], "log", supervisor._run, NAME, "--show"]
    said = subprocess.run(log, env=plan.environment(), capture_output=True, text=True).stdout.splitlines()
    counted = [line.split("aggregate_train: ")[1] for line in said if "aggregate_train: Received" in line]
    errors = [line.strip() for line in said if "Error" in line or "Exception" in line][-1:]
    notes = plan.folder / "notes.jsonl"
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    shown = [
        f"round {line['round']}: {'finite' if line['finite'] else 'NOT FINITE'}, largest {line['largest']:.3g}, "
        f"last bias {min(line['last']):.2g} to {max(line['last']):.2g}, {line['type']}"
        + "".join(f", it is the model of client {client} alone" for client in line["owners"])
        for line in lines[1:]
    ]
    return "; ".join([*counted, *shown, ended or "", *(errors if ended else [])])


SCENARIOS = {"clean": clean, "faults": faults, "restart": restart, "server": server, "flower": flower}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO")
    asked.add_argument("--nodes", type=int, default=5)
    asked.add_argument("--rounds", type=int, default=10)
    asked.add_argument("--dataset", default="fmnist")
    asked.add_argument("--kinds", nargs="*", help="faults of the scenario `flower`: none, superlink, and as in FAULTS")
    asked.add_argument("--keep", action="store_true", help="leave the temporary folder")
    options = asked.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    scene = Scene(options)
    right = []
    for name in options.scenarios:
        print(f"{name}:", flush=True)
        right.append(SCENARIOS[name](scene))
    if not options.keep:
        shutil.rmtree(scene.folder)
    print("all as it should be" if all(right) else "NOT as it should be")
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
