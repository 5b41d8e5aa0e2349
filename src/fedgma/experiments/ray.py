"""A sweep on a Ray cluster: each fleet is a task, and all run folders are in a folder that all nodes share.

A task receives its settings as JSON and returns its answer as JSON. Run folders are written directly to the shared
folder. If a node dies, its task is restarted on another node, waits until the locks of the dead one are free and
resumes from the checkpoints. A file in the shared folder, the token, exists as long as the sweep should run. A node
checks by it that it has the right folder; when it is removed, every fleet finishes its round, writes a checkpoint and
stops.
"""

import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fedgma
from fedgma.errors import ConfigError, FedgmaError
from fedgma.experiments.grid import Grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import Planned, alike, missing, pack, plan
from fedgma.experiments.play import play_fleet
from fedgma.experiments.settings import Settings
from fedgma.records.checkpoints import checkpoint_rounds, write_synced, written_to
from fedgma.records.state import is_running

RETRIES = 8  # of a task whose node or process died
WAIT = 180.0  # seconds for the lock of a dead node to be freed; a file server takes a minute or two to notice
POLL = 2.0  # seconds between two checks of the folders


class Share(NamedTuple):
    """The runs of one task, and how to train them."""

    settings: tuple[Settings, ...]
    fingerprints: tuple[str, ...]
    out: Path
    token: Path
    device: str
    precision: str
    checkpoint_seconds: float
    keep_state: bool
    version: str | None = None


class Progress(NamedTuple):
    """The progress of a sweep in numbers of runs and of rounds; rounds count up to the last checkpoints."""

    done: int
    running: int
    missing: int
    rounds: int
    total: int


class Cluster(NamedTuple):
    """The capacity of a Ray cluster: how many fleets at once, and the resources that each requests."""

    fleets: int
    asks: Mapping[str, float]
    nodes: int


def spread(runs: Sequence[Planned], fleets: int) -> list[list[Planned]]:
    """Runs split into about `fleets` shares of even size; the runs of a share can train in one fleet."""
    groups = alike(runs)
    shares = []
    for members in groups:
        pieces = max(1, min(len(members), round(fleets * len(members) / len(runs))))
        shares += [list(members[first::pieces]) for first in range(pieces)]
    return shares


def write_share(share: Share) -> str:
    """A share as JSON, to send to a node."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in share._asdict().items()}
    settings = [json.loads(settings.model_dump_json()) for settings in share.settings]
    return json.dumps({**plain, "settings": settings, "fedgma": fedgma.__version__})


def read_share(text: str) -> Share:
    """A share from its JSON; refuses one of another version of fedgma."""
    given = json.loads(text)
    if (version := given.pop("fedgma")) != fedgma.__version__:
        raise ConfigError(
            f"{_here()} has fedgma {fedgma.__version__}, the sweep was started by {version}; use one version"
        )
    settings = tuple(Settings.model_validate_json(json.dumps(part)) for part in given.pop("settings"))
    out, token = Path(given.pop("out")), Path(given.pop("token"))
    return Share(settings, tuple(given.pop("fingerprints")), out, token, **given)


def play_share(text: str) -> str:
    """The body of a task: train the missing runs of a share; returns `{}`, or an expected error as JSON."""
    try:
        share = read_share(text)
        materials = Materials(share.device, precision=share.precision, version=share.version)
        planned = _planned(share, materials)
        for members in pack(missing(planned), materials):
            for _ in play_fleet(
                members,
                materials,
                checkpoint_seconds=share.checkpoint_seconds,
                keep_state=share.keep_state,
                wait=WAIT,
                stop=lambda: not share.token.exists(),
            ):
                pass
            if not share.token.exists():
                break
    except FedgmaError as error:
        return json.dumps({"error": str(error), "exit_code": error.exit_code})
    return "{}"


def _planned(share: Share, materials: Materials) -> list[Planned]:
    """The runs of a share; checks that this node has the same folder and files as the one that started the sweep."""
    if not share.token.exists():
        raise ConfigError(f"{_here()} does not see {share.out}; --out must lie in a folder that all nodes share")
    planned = plan(Grid(share.settings, ()), materials, share.out)
    if tuple(run.fingerprint for run in planned) != share.fingerprints:
        raise ConfigError(
            f"{_here()} has different data or model files under the same names; put them in a shared folder"
        )
    return planned


def _here() -> str:
    return f"node {os.uname().nodename}"


@contextlib.contextmanager
def standing(out: Path) -> Iterator[Path]:
    """Inside, a token file exists in the folder, until the end or until it is deleted to stop the sweep."""
    token = out.absolute() / f".sweep-{secrets.token_hex(8)}"
    with written_to(out):
        out.mkdir(parents=True, exist_ok=True)
        write_synced(token, b"the tasks of a sweep run while this file exists\n")
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def progress(runs: Sequence[Planned]) -> Progress:
    """The progress of runs, read from their folders."""
    left = missing(runs)
    folders = [run.folder for run in left if run.folder is not None]
    running = sum(is_running(folder) for folder in folders)
    saved = sum(sum(checkpoint_rounds(folder / "checkpoints")[-1:]) for folder in folders)
    total, open_rounds = (sum(run.settings.rounds for run in some) for some in (runs, left))
    return Progress(len(runs) - len(left), running, len(left) - running, total - open_rounds + saved, total)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """Connect to a Ray cluster: "ray:HOST:PORT", or "ray" for that of RAY_ADDRESS, a local one, or else a new one."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray needs the package ray: pip install 'fedgma[ray]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent by default
    host = address.removeprefix("ray").removeprefix(":") or os.environ.get("RAY_ADDRESS")
    try:
        if host and (known := re.fullmatch(r"([^:/]+):(\d+)", host)):
            socket.create_connection((known[1], int(known[2])), 10).close()  # Ray would try for minutes
        ray.init(host, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"no Ray cluster at {host}" if host else "could not find or start a Ray cluster"
        raise ConfigError(f"{what} ({first}); check that it is running, and RAY_ADDRESS") from None
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield cluster_of(ray.nodes())  # Ray prints its nodes' messages to stdout, which is for our results
    finally:
        ray.shutdown()


def cluster_of(nodes: Sequence[Mapping[str, Any]]) -> Cluster:
    """The capacity of nodes: one fleet for each GPU; without GPUs, fleets with as many cores as the smallest node has.

    >>> cluster_of([{"Alive": True, "Resources": {"CPU": 8.0}}, {"Alive": True, "Resources": {"CPU": 16.0}}])
    Cluster(fleets=3, asks={'num_cpus': 8.0}, nodes=2)
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in alive))
    if gpus:
        return Cluster(gpus, {"num_cpus": 1.0, "num_gpus": 1.0}, len(alive))
    cores = [node["CPU"] for node in alive if node.get("CPU", 0) >= 1]
    if not cores:
        raise ConfigError("the Ray cluster offers no CPU; start its nodes with --num-cpus")
    return Cluster(int(sum(count // min(cores) for count in cores)), {"num_cpus": min(cores)}, len(alive))


def play_on(cluster: Cluster, shares: Sequence[Share]) -> Iterator[tuple[int, list[str]]]:
    """Train shares as tasks; yields the number of live nodes and new errors every few seconds, until all have ended."""
    import ray
    from ray.exceptions import RayError

    options = {"max_retries": RETRIES, "scheduling_strategy": "SPREAD", **cluster.asks}
    task = ray.remote(play_share).options(**options)
    waiting = [task.remote(write_share(share)) for share in shares]
    while waiting:
        answers = []
        ended, waiting = ray.wait(waiting, timeout=POLL)
        for answer in ended:
            try:
                answers.append(ray.get(answer))
            except RayError as error:
                message = f"a fleet failed after {RETRIES} retries: {str(error).strip().splitlines()[-1]}"
                answers.append(json.dumps({"error": message, "exit_code": 1}))
        alive = sum(node["Alive"] for node in ray.nodes())
        yield alive, [answer for answer in answers if answer != "{}"]
