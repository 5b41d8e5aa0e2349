"""The settings of a Flower deployment (address, certificates, keys, nodes) and the commands that start it.

<state>/run/         the run's folder: one line per round, checkpoints, a file that marks the end
        logs/        output of SuperLink and nodes
        superlink/   FLWR_HOME and database of the SuperLink
        node-N/      FLWR_HOME of a node that was started here
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedgma.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAME = "fedgma"  # of the connection in Flower's configuration


@dataclass(frozen=True)
class Deployment:
    """A SuperLink, the app it runs, and nodes that are started on the same machine.

    `certificates` is a folder with ca.crt, server.pem and server.key. `keys` is a folder with a public key (.pub) for
    every node that may take part; private keys of the same name are needed only for nodes started here.
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
        """Address of the SuperLink for processes on this machine."""
        return f"{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.state / "run"

    def check(self) -> None:
        """Raise `ConfigError` for invalid or insecure settings, before anything is started."""
        if not (self.app / "pyproject.toml").is_file():
            raise ConfigError(f"there is no Flower app in {str(self.app)!r}: it has no pyproject.toml")
        if self.state.is_relative_to(self.app):
            raise ConfigError(
                f"{str(self.state)!r} is inside the app's folder and would be sent to the nodes; use another --state"
            )
        if self.insecure == (self.certificates is not None):
            raise ConfigError("set either --certificates FOLDER or, for a test on one machine, --insecure")
        if self.insecure and self.host not in LOOPBACK:
            raise ConfigError(f"without certificates the host must be 127.0.0.1, got {self.host!r}; add --certificates")
        if self.keys is not None and self.certificates is None:
            raise ConfigError("node keys need certificates: without TLS they do not authenticate a node")
        for name in ("ca.crt", "server.pem", "server.key") if self.certificates is not None else ():
            if not (self.certificates / name).is_file():  # type: ignore[operator]
                raise ConfigError(f"there is no {name} in {str(self.certificates)!r}; see make_certificates.sh")
        if self.keys is not None and not self.public_keys():
            raise ConfigError(f"there is no public key (*.pub) in {str(self.keys)!r}; see make_keys.sh")
        for key in self._private_keys():
            if not key.is_file():
                raise ConfigError(f"there is no private key {str(key)!r}; see make_keys.sh")
            if os.name != "nt" and key.stat().st_mode & 0o077:
                raise ConfigError(f"other users can read {str(key)!r}; run: chmod 600 {key}")

    def public_keys(self) -> list[Path]:
        """The keys of the nodes that may take part."""
        return [] if self.keys is None else sorted(self.keys.glob("*.pub"))

    def environment(self, home: str = "superlink") -> dict[str, str]:
        """Environment of a process: its own FLWR_HOME, no telemetry, no installation at run time."""
        programs = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.state / home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }

    def write_connection(self) -> None:
        """Write Flower's configuration file, so that its command line finds the SuperLink."""
        home = self.state / "superlink"
        home.mkdir(parents=True, exist_ok=True)
        security = "insecure = true"
        if self.certificates is not None:
            security = f"root-certificates = {_quote(self.certificates / 'ca.crt')}"
        text = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{self.address}"\n{security}\n'
        (home / "config.toml").write_text(text, encoding="utf-8")

    def superlink(self) -> list[str]:
        """The command that starts the SuperLink."""
        command = [_program("flower-superlink"), "--host", self.host, "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--database", str(self.state / "superlink" / "superlink.db")]
        command += ["--insecure"] if self.insecure else self._certificate_options()
        return command + (["--enable-supernode-auth"] if self.keys is not None else [])

    def node(self, number: int) -> list[str]:
        """The command that starts a node on this machine."""
        command = [_program("flower-supernode"), "--superlink", self.address, "--port", str(self.port + 1 + number)]
        command += ["--node-config", f"partition-id={number} num-partitions={self.nodes}"]
        if self.insecure:
            return [*command, "--insecure"]
        assert self.certificates is not None
        command += ["--root-certificates", str(self.certificates / "ca.crt"), *self._certificate_options()]
        return command + (["--auth-supernode-private-key", str(self._key(number))] if self.keys is not None else [])

    def register(self, key: Path) -> list[str]:
        """The command that registers a node's public key."""
        return [_program("flwr"), "supernode", "register", str(key), NAME, "--format", "json"]

    def submit(self) -> list[str]:
        """The command that starts the app; the app must have `state` in its config."""
        # one argument: of several, Flower uses only the last one that sets keys of a table
        settings = " ".join([f"state={_quote(self.folder)}", *self.run_config])
        return [_program("flwr"), "run", str(self.app), NAME, "--run-config", settings, "--format", "json"]

    def status(self, run: str) -> list[str]:
        """The command that prints the status of a run."""
        return [_program("flwr"), "ls", NAME, "--run-id", run, "--format", "json"]

    def _certificate_options(self) -> list[str]:
        assert self.certificates is not None
        names: Mapping[str, str] = {"ca": "ca.crt", "": "server.pem", "key": "server.key"}
        options = {"ca": "--ssl-ca-certfile", "": "--ssl-certfile", "key": "--ssl-keyfile"}
        return [part for kind, name in names.items() for part in (options[kind], str(self.certificates / name))]

    def _key(self, number: int) -> Path:
        assert self.keys is not None
        return self.keys / f"node{number}"

    def _private_keys(self) -> list[Path]:
        server = [] if self.certificates is None else [self.certificates / "server.key"]
        return server + ([] if self.keys is None else [self._key(number) for number in range(self.nodes)])


def _program(name: str) -> str:
    """One of Flower's programs, in the folder of the running Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"there is no {name} in {path.parent}: pip install 'fedgma[flower]'")
    return str(path)


def _quote(path: Path) -> str:
    """A path as a TOML string."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
