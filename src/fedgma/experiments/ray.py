"""A sweep spread over a Ray cluster: each fleet is a task, and every run folder lies in a folder that all nodes share.

What travels is text: a task's settings as JSON, its answer as JSON. Run folders are written where they will be read, so
nothing is lost with a node: its task is started again elsewhere, waits until the dead one's locks are free and goes on
from the checkpoints. A file in the shared folder stands as long as the sweep is wanted; it tells a node that the folder
is the right one, and its absence tells a fleet to stop after its round and write a checkpoint.
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
from fedgma.records.writer import is_running

RETRIES = 8  # of a task whose node or process died
WAIT = 180.0  # seconds for the lock of a dead node to be freed; a file server takes a minute or two to notice
POLL = 2.0  # seconds between two looks at the folders


class Share(NamedTuple):
    """The runs of one task, and how to play them."""

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
    """Where a sweep stands; rounds as of the last checkpoints."""

    done: int
    running: int
    missing: int
    rounds: int
    total: int


class Cluster(NamedTuple):
    """What a Ray cluster gives: how many fleets at once, and what each asks for."""

    fleets: int
    asks: Mapping[str, float]
    nodes: int


def spread(runs: Sequence[Planned], fleets: int) -> list[list[Planned]]:
    """Runs in about so many shares: only those that can play in one fleet are in one, and shares are even."""
    groups = alike(runs)
    shares = []
    for members in groups:
        pieces = max(1, min(len(members), round(fleets * len(members) / len(runs))))
        shares += [list(members[first::pieces]) for first in range(pieces)]
    return shares


def write_share(share: Share) -> str:
    """A share as it travels."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in share._asdict().items()}
    settings = [json.loads(one.model_dump_json()) for one in share.settings]
    return json.dumps({**plain, "settings": settings, "fedgma": fedgma.__version__})


def read_share(text: str) -> Share:
    """A share as it arrived."""
    given = json.loads(text)
    if (theirs := given.pop("fedgma")) != fedgma.__version__:
        raise ConfigError(
            f"{_here()} has fedgma {fedgma.__version__}, the sweep was started by {theirs}; use one version"
        )
    settings = tuple(Settings.model_validate_json(json.dumps(one)) for one in given.pop("settings"))
    out, token = Path(given.pop("out")), Path(given.pop("token"))
    return Share(settings, tuple(given.pop("fingerprints")), out, token, **given)


def play_share(text: str) -> str:
    """The body of a task: plays what is missing of a share; `{}` or an error as JSON. Never raises on purpose."""
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
    """The runs of a share, checked: this node must see the same folder and the same files as the one that asks."""
    if not share.token.exists():
        raise ConfigError(f"{_here()} does not see {share.out}; --out must lie in a folder that all nodes share")
    planned = plan(Grid(share.settings, ()), materials, share.out)
    if tuple(run.fingerprint for run in planned) != share.fingerprints:
        raise ConfigError(
            f"{_here()} has other files of data or model under the same names; put them in a shared folder"
        )
    return planned


def _here() -> str:
    return f"node {os.uname().nodename}"


@contextlib.contextmanager
def standing(out: Path) -> Iterator[Path]:
    """A file that stands in a folder until the end, or until somebody takes it away."""
    token = out.absolute() / f".sweep-{secrets.token_hex(8)}"
    with written_to(out):
        out.mkdir(parents=True, exist_ok=True)
        write_synced(token, b"while this file stands, the tasks of a sweep go on\n")
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def progress(runs: Sequence[Planned]) -> Progress:
    """Look at the run folders."""
    left = missing(runs)
    folders = [run.folder for run in left if run.folder is not None]
    running = sum(is_running(folder) for folder in folders)
    saved = sum(sum(checkpoint_rounds(folder / "checkpoints")[-1:]) for folder in folders)
    total, open_rounds = (sum(run.settings.rounds for run in some) for some in (runs, left))
    return Progress(len(runs) - len(left), running, len(left) - running, total - open_rounds + saved, total)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """Join a Ray cluster: "ray:HOST:PORT"; "ray" is that of RAY_ADDRESS, else one of this machine, else one started."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray needs the package ray: pip install 'fedgma[ray]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless asked for
    place = address.removeprefix("ray").removeprefix(":") or os.environ.get("RAY_ADDRESS")
    try:
        if place and (known := re.fullmatch(r"([^:/]+):(\d+)", place)):
            socket.create_connection((known[1], int(known[2])), 10).close()  # Ray itself would try for minutes
        ray.init(place, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"no Ray cluster at {place or 'hand'} ({first}); is it started, and RAY_ADDRESS right?"
        ) from None
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield look(ray.nodes())  # what its nodes have to say Ray prints where our results go
    finally:
        ray.shutdown()


def look(nodes: Sequence[Mapping[str, Any]]) -> Cluster:
    """How fleets fit on nodes: one to a GPU where there are any, else one to a machine, as each uses all its cores.

    >>> look([{"Alive": True, "Resources": {"CPU": 8.0}}, {"Alive": True, "Resources": {"CPU": 16.0}}])
    Cluster(fleets=3, asks={'num_cpus': 8.0}, nodes=2)
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in alive))
    if gpus:
        return Cluster(gpus, {"num_cpus": 1.0, "num_gpus": 1.0}, len(alive))
    cores = [node["CPU"] for node in alive if node.get("CPU", 0) >= 1]
    if not cores:
        raise ConfigError("the Ray cluster has no CPU to give; start its nodes with --num-cpus")
    return Cluster(int(sum(held // min(cores) for held in cores)), {"num_cpus": min(cores)}, len(alive))


def play_on(cluster: Cluster, shares: Sequence[Share]) -> Iterator[tuple[int, list[str]]]:
    """Play shares as tasks: every few seconds the number of nodes and the errors that came, until all tasks ended."""
    import ray
    from ray.exceptions import RayError

    options = {"max_retries": RETRIES, "scheduling_strategy": "SPREAD", **cluster.asks}
    task = ray.remote(play_share).options(**options)
    waiting = [task.remote(write_share(share)) for share in shares]
    while waiting:
        answers = []
        ended, waiting = ray.wait(waiting, timeout=POLL)
        for one in ended:
            try:
                answers.append(ray.get(one))
            except RayError as error:
                said = f"a fleet came to no end, after {RETRIES} retries: {str(error).strip().splitlines()[-1]}"
                answers.append(json.dumps({"error": said, "exit_code": 1}))
        alive = sum(node["Alive"] for node in ray.nodes())
        yield alive, [answer for answer in answers if answer != "{}"]
