"""The settings of a Flower deployment (address, certificates, keys, nodes) and the commands that start it.

<state>/run/         the run's folder: one line per round, checkpoints, a file that marks the end
        logs/        output of SuperLink and nodes
        superlink/   FLWR_HOME of the SuperLink and of Flower's command line, database, token for control requests
        node-N/      FLWR_HOME of a node that was started here

Only the owner can read the state folder.
"""

import base64
import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgma.documents import parse_toml
from fedgma.errors import ConfigError, did_you_mean, nearest
from fedgma.flower.certificates import check_certificates, check_private, check_public
from fedgma.flower.processes import MARK

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# a host that means all addresses, and one of this machine
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # nosec B104: a user's host is looked up here, not bound
NAME = "fedgma"  # of the connection in Flower's configuration


@dataclass(frozen=True)
class Deployment:
    """A SuperLink, the app it runs, and nodes that are started on the same machine.

    `certificates` is a folder with ca.crt, server.pem and server.key. `keys` is a folder with a public key (.pub) for
    every node that may take part; private keys of the same name are needed only for nodes started here. Nodes connect
    to `host:port`. The port after it serves Flower's command line, on this machine alone; nodes started here take the
    ports after that.
    """

    app: Path
    state: Path
    host: str = "127.0.0.1"
    port: int = 8000
    certificates: Path | None = None
    keys: Path | None = None
    insecure: bool = False
    nodes: int = 0
    run_config: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Address of the fleet's port for nodes on this machine."""
        return _address(EVERYWHERE.get(self.host, self.host), self.port)

    @property
    def control(self) -> str:
        """Address of the port for Flower's command line and the app's process; on loopback."""
        return _address("127.0.0.1", self.port + 1)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.state / "run"

    @property
    def database(self) -> Path:
        """The SuperLink's database."""
        return self.state / "superlink" / "superlink.db"

    def node_address(self, number: int) -> str:
        """Address at which a node that was started here serves its app's process."""
        return _address("127.0.0.1", self.port + 2 + number)

    def addresses(self) -> list[str]:
        """All addresses of the deployment's processes on this machine."""
        return [self.address, self.control, *(self.node_address(number) for number in range(self.nodes))]

    def check(self) -> None:
        """Raise `ConfigError` for invalid or insecure settings, before anything is started."""
        if not (self.app / "pyproject.toml").is_file():
            raise ConfigError(f"there is no Flower app in {str(self.app)!r}: it has no pyproject.toml")
        if self.state.is_relative_to(self.app):
            raise ConfigError(
                f"{str(self.state)!r} is inside the app's folder and would be sent to the nodes; use another --state"
            )
        if self.port + 1 + self.nodes > 65535:
            raise ConfigError(f"port {self.port} leaves no ports after it; use a --port below {65535 - self.nodes}")
        if self.insecure == (self.certificates is not None):
            raise ConfigError("set either --certificates FOLDER or, for a test on one machine, --insecure")
        if self.host not in LOOPBACK:
            self._check_reach()
        if self.keys is not None and self.certificates is None:
            raise ConfigError("node keys need certificates: without TLS they do not authenticate a node")
        if self.certificates is not None:
            local_names = {"127.0.0.1", EVERYWHERE.get(self.host, self.host)}  # names by which local processes call it
            check_certificates(self.certificates, sorted(local_names))
        if self.keys is not None:
            self._check_keys(self.keys)

    def _check_reach(self) -> None:
        """A port that other machines can reach needs encryption, and node keys."""
        if self.insecure:
            raise ConfigError(f"without certificates the host must be 127.0.0.1, got {self.host!r}; add --certificates")
        if self.keys is None:
            raise ConfigError(f"at {self.host!r} everybody could join as a node; add --keys, see make_keys.sh")

    def _check_keys(self, folder: Path) -> None:
        if not self.public_keys():
            raise ConfigError(f"there is no public key (*.pub) in {str(folder)!r}; see make_keys.sh")
        for key in self.public_keys():
            check_public(key)
        needed = [self._key(number) for number in range(self.nodes)]
        if unknown := [key.name for key in needed if not key.with_suffix(".pub").exists()]:
            raise ConfigError(f"there is no {unknown[0]}.pub in {str(folder)!r}; see make_keys.sh")
        for key in (*needed, *(key.with_suffix("") for key in self.public_keys() if key.with_suffix("").exists())):
            check_private(key)

    def public_keys(self) -> list[Path]:
        """The keys of the nodes that may take part."""
        return [] if self.keys is None else sorted(self.keys.glob("*.pub"))

    def public_key(self, number: int) -> Path | None:
        """The public key of a node that is started here; None without keys."""
        return None if self.keys is None else self._key(number).with_suffix(".pub")

    def environment(self, home: str = "superlink") -> dict[str, str]:
        """Environment of a process: its own FLWR_HOME, no telemetry, no installation at run time."""
        programs = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
            MARK: os.path.realpath(self.state),
            "FLWR_HOME": str(self.state / home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }

    def write_connection(self) -> None:
        """Make the state folder, closed to others, and write address and token for Flower's command line."""
        home = self.state / "superlink"
        for folder in (self.state, home, self.state / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        security = "insecure = true"
        if self.certificates is not None:
            security = f"root-certificates = {_quote(self.certificates / 'ca.crt')}"
        token = secrets.token_urlsafe(32)
        account = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": token}
        written = {f"flower.account-auth.{self.control}.{key}": _base64(value) for key, value in account.items()}
        _write(
            home / "config.toml",
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{self.control}"\n{security}\n',
        )
        _write(home / "credentials.yaml", json.dumps(written, indent=1))  # JSON is YAML
        _write(home / "token", token)

    def superlink(self) -> list[str]:
        """The command that starts the SuperLink."""
        host, _, port = self.control.rpartition(":")
        command = [*_superlink_program(), "--fleet", _address(self.host, self.port)]
        command += ["--token", str(self.state / "superlink" / "token"), "--host", host, "--port", port]
        command += ["--disable-runtime-dependency-installation", "--database", str(self.database)]
        command += ["--insecure"] if self.insecure else self._certificate_options()
        return command + (["--enable-supernode-auth"] if self.keys is not None else [])

    def node(self, number: int) -> list[str]:
        """The command that starts a node on this machine."""
        host, _, port = self.node_address(number).rpartition(":")
        command = [_program("flower-supernode"), "--superlink", self.address, "--host", host, "--port", port]
        command += ["--node-config", f"partition-id={number} num-partitions={self.nodes}"]
        if self.insecure:
            return [*command, "--insecure"]
        assert self.certificates is not None
        command += ["--root-certificates", str(self.certificates / "ca.crt"), *self._certificate_options()]
        return command + (["--auth-supernode-private-key", str(self._key(number))] if self.keys is not None else [])

    def register(self, keys: Iterable[Path]) -> list[str]:
        """The command that registers public keys of nodes, with an answer for each."""
        return [*_registration_program(), NAME, *map(str, keys)]

    def submit(self) -> list[str]:
        """The command that starts the app; the app must have `state` in its config."""
        # one argument: of several, Flower uses only the last one that sets keys of a table
        settings = " ".join([f"state={_quote(self.folder)}", *self.run_config])
        return [_program("flwr"), "run", str(self.app), NAME, "--run-config", settings, "--format", "json"]

    def hint(self, reason: str) -> str:
        """How a sentence ends about a setting that Flower refuses: with one of that name in a table, or the nearest."""
        try:
            project = parse_toml((self.app / "pyproject.toml").read_text(encoding="utf-8"))
            known = list(_dotted(project["tool"]["flwr"]["app"]["config"]))
        except (OSError, ValueError, KeyError, TypeError):
            known = []
        wrong = next(iter(re.findall(r"'([^']+)'", reason)), "")
        meant = [key for key in known if key.endswith(f".{wrong}")] or nearest(wrong, known)
        if meant and wrong:
            return did_you_mean(meant[:1])
        return "; an app's settings are the keys of [tool.flwr.app.config] in its pyproject.toml"

    def status(self, run: str) -> list[str]:
        """The command that prints the status of a run."""
        return [_program("flwr"), "ls", NAME, "--run-id", run, "--format", "json"]

    def runs(self) -> list[str]:
        """The command that lists all runs."""
        return [_program("flwr"), "ls", NAME, "--format", "json"]

    def log(self, run: str) -> list[str]:
        """The command that prints what the app of a run has printed."""
        return [_program("flwr"), "log", run, NAME, "--show"]

    def stop(self, run: str) -> list[str]:
        """The command that stops a run."""
        return [_program("flwr"), "stop", run, NAME, "--format", "json"]

    def _certificate_options(self) -> list[str]:
        assert self.certificates is not None
        options = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
        return [part for option, name in options.items() for part in (option, str(self.certificates / name))]

    def _key(self, number: int) -> Path:
        assert self.keys is not None
        return self.keys / f"node{number}"


def private(path: str, flags: int) -> int:
    """An opener for `open` that makes files which only their owner can read."""
    return os.open(path, flags, 0o600)


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # a file that exists would keep its mode
    with open(path, "w", encoding="utf-8", opener=private) as stream:
        stream.write(text)


def _program(name: str) -> str:
    """One of Flower's programs, in the folder of the running Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"there is no {name} in {path.parent}: pip install 'fedgma[flower]'")
    return str(path)


def _superlink_program() -> list[str]:
    """Flower's SuperLink behind a door of its own."""
    return [sys.executable, "-m", "fedgma.flower.superlink"]


def _registration_program() -> list[str]:
    """Flower's command line for any number of keys."""
    return [sys.executable, "-m", "fedgma.flower.registration"]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _quote(path: Path) -> str:
    """A path as a TOML string."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _dotted(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The keys of nested tables as Flower writes them: `run.tau`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"
