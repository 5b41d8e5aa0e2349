"""A Flower deployment said in full: where the SuperLink listens, how it is secured, and the commands that start it.

<state>/run/         the run's folder: one line a round, checkpoints, the mark at the end
        logs/        what SuperLink and nodes print
        superlink/   Flower's own home and data base
        node-N/      Flower's home of a node that was started here
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedgma.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAME = "fedgma"  # of the connection in Flower's own configuration


@dataclass(frozen=True)
class Deployment:
    """A SuperLink, the app it runs, and nodes that are started beside it.

    `certificates` is a folder with ca.crt, server.pem and server.key, `keys` one with a public key (.pub) for every
    node that may take part; private keys of the same name are needed only for nodes started here.
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
        """Where the SuperLink is reached from here."""
        return f"{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.state / "run"

    def check(self) -> None:
        """Refuse what cannot be, and what would be open to anyone, before anything is started."""
        if not (self.app / "pyproject.toml").is_file():
            raise ConfigError(f"there is no Flower app in {str(self.app)!r}: it has no pyproject.toml")
        if self.state.is_relative_to(self.app):
            raise ConfigError(
                f"{str(self.state)!r} lies in the app's folder and would travel with it; use another --state"
            )
        if self.insecure == (self.certificates is not None):
            raise ConfigError("give either --certificates FOLDER or, on this machine alone, --insecure")
        if self.insecure and self.host not in LOOPBACK:
            raise ConfigError(f"without certificates the SuperLink listens on 127.0.0.1 only, not on {self.host!r}")
        if self.keys is not None and self.certificates is None:
            raise ConfigError("node keys need certificates too: a key proves nothing over a line that anyone can read")
        for name in ("ca.crt", "server.pem", "server.key") if self.certificates is not None else ():
            if not (self.certificates / name).is_file():  # type: ignore[operator]
                raise ConfigError(f"there is no {name} in {str(self.certificates)!r}; see make_certificates.sh")
        if self.keys is not None and not self.public_keys():
            raise ConfigError(f"there is no public key (*.pub) in {str(self.keys)!r}; see make_keys.sh")
        for key in self._private_keys():
            if not key.is_file():
                raise ConfigError(f"node keys: there is no {str(key)!r}; see make_keys.sh")
            if os.name != "nt" and key.stat().st_mode & 0o077:
                raise ConfigError(f"{str(key)!r} can be read by others; run: chmod 600 {key}")

    def public_keys(self) -> list[Path]:
        """The keys of the nodes that may take part."""
        return [] if self.keys is None else sorted(self.keys.glob("*.pub"))

    def environment(self, home: str = "superlink") -> dict[str, str]:
        """For every process: its own home, no telemetry, nothing fetched at run time."""
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
        """Flower's configuration file, so that its command line finds the SuperLink."""
        home = self.state / "superlink"
        home.mkdir(parents=True, exist_ok=True)
        secured = "insecure = true"
        if self.certificates is not None:
            secured = f"root-certificates = {_quoted(self.certificates / 'ca.crt')}"
        text = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{self.address}"\n{secured}\n'
        (home / "config.toml").write_text(text, encoding="utf-8")

    def superlink(self) -> list[str]:
        """The command that starts the SuperLink."""
        command = [_program("flower-superlink"), "--host", self.host, "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--database", str(self.state / "superlink" / "superlink.db")]
        command += ["--insecure"] if self.insecure else self._certified()
        return command + (["--enable-supernode-auth"] if self.keys is not None else [])

    def node(self, number: int) -> list[str]:
        """The command that starts a node on this machine."""
        command = [_program("flower-supernode"), "--superlink", self.address, "--port", str(self.port + 1 + number)]
        command += ["--node-config", f"partition-id={number} num-partitions={self.nodes}"]
        if self.insecure:
            return [*command, "--insecure"]
        assert self.certificates is not None
        command += ["--root-certificates", str(self.certificates / "ca.crt"), *self._certified()]
        return command + (["--auth-supernode-private-key", str(self._key(number))] if self.keys is not None else [])

    def register(self, key: Path) -> list[str]:
        """The command that lets a node in."""
        return [_program("flwr"), "supernode", "register", str(key), NAME, "--format", "json"]

    def submit(self) -> list[str]:
        """The command that starts the app; the app must have `state` in its config."""
        # one word: of several, Flower takes only the last that speaks of a table
        settings = " ".join([f"state={_quoted(self.folder)}", *self.run_config])
        return [_program("flwr"), "run", str(self.app), NAME, "--run-config", settings, "--format", "json"]

    def status(self, run: str) -> list[str]:
        """The command that tells how a run stands."""
        return [_program("flwr"), "ls", NAME, "--run-id", run, "--format", "json"]

    def _certified(self) -> list[str]:
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
    """One of Flower's programs, beside the Python that runs this."""
    found = Path(sys.executable).parent / name
    if not found.exists():
        raise ConfigError(f"there is no {name} beside {sys.executable}: pip install 'fedgma[flower]'")
    return str(found)


def _quoted(path: Path) -> str:
    """A path as a TOML string."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
