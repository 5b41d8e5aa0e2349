"""Flower's SuperLink with two ports: nodes are served at one, the owner of the run at the other.

    python -m fedgma.flower.superlink --fleet HOST:PORT --token FILE [options of flower-superlink]

Flower serves its fleet API (for nodes), its control API (which registers nodes and starts apps) and its runtime API
(for the app's process) at one port. Without Flower's enterprise edition the control API accepts everybody: whoever
reaches the port can register a node and run code on all of them. Here the fleet's port serves nodes alone. All other
requests are served at the address that flower-superlink is given, on loopback, and control requests need the token.
"""

import argparse
import datetime
import hmac
import importlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FLEET, CONTROL, HEALTH = "/v1/fleet/", "/v1/control/", "/health"
AHEAD, BEHIND = 5.0, 305.0  # seconds that the clock of a node may differ; Flower refuses more
TIMESTAMP = "flwr-timestamp"
OCCUPIED = 98  # exit code if an address is in use or not of this machine

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class Refusal(NamedTuple):
    """The answer to a request that is not passed on."""

    status: int
    detail: str


class PortFilter:
    """An ASGI application that passes on requests of nodes at the fleet's port, and others at the other port."""

    def __init__(self, app: Asgi, *, fleet_port: int, token: str) -> None:
        self.app, self.fleet_port, self.token = app, fleet_port, token

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on, or answer it."""
        refusal = self.refusal(scope) if scope["type"] == "http" else None
        if scope["type"] == "websocket":  # Flower has none
            await send({"type": "websocket.close"})
        elif refusal is None:
            await self.app(scope, receive, send)
        else:
            body = json.dumps({"code": refusal.status, "detail": refusal.detail}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def refusal(self, scope: Mapping[str, Any]) -> Refusal | None:
        """Why a request is refused; None if it is passed on."""
        path, headers = scope["path"], dict(scope["headers"])
        if scope["server"][1] == self.fleet_port:
            if not path.startswith(FLEET) and path != HEALTH:
                return Refusal(404, "only nodes are served at this port")
            return _clock_refusal(headers.get(TIMESTAMP.encode(), b"").decode("latin-1"))
        given = headers.get(b"authorization", b"")
        if path.startswith(CONTROL) and not hmac.compare_digest(given, b"Bearer " + self.token.encode()):
            return Refusal(401, "control requests need the token in the state folder of the run")
        return None


def _clock_refusal(timestamp: str) -> Refusal | None:
    """Flower refuses a node whose clock is wrong without saying so; this names the difference."""
    try:
        signed_at = datetime.datetime.fromisoformat(timestamp)
        age = (datetime.datetime.now(tz=datetime.UTC) - signed_at).total_seconds()
    except (ValueError, TypeError):
        return None  # not signed: for Flower to refuse
    if -AHEAD < age < BEHIND:
        return None
    side = f"{-age:.0f} s ahead of" if age < 0 else f"{age:.0f} s behind"
    return Refusal(
        401, f"the node's clock is {side} the server's; at most {AHEAD:g} s ahead are accepted, set the clock"
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address that does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


class Server:
    """Takes the place of uvicorn in Flower's module: `run` serves the app at two ports, behind the filter."""

    def __init__(self, fleet: str, token: str) -> None:
        host, _, port = fleet.rpartition(":")
        self.fleet, self.token = (host.strip("[]"), int(port)), token

    def run(self, *, app: Asgi, host: str, port: int, **options: Any) -> None:
        """Serve until the process is asked to stop."""
        import uvicorn

        filtered = PortFilter(app, fleet_port=self.fleet[1], token=self.token)
        server = uvicorn.Server(uvicorn.Config(filtered, host=host, port=port, **options))
        try:
            sockets = [bound(host, port), bound(*self.fleet)]
        except OSError as error:
            sys.stderr.write(f"cannot listen at {host}:{port} and {self.fleet[0]}:{self.fleet[1]}: {error}\n")
            sys.exit(OCCUPIED)
        server.run(sockets=sockets)
        sys.exit(0 if server.started else 3)


def main() -> None:
    """Start Flower's SuperLink behind the port filter."""
    asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    asked.add_argument("--fleet", required=True)
    asked.add_argument("--token", required=True, type=Path)
    options, rest = asked.parse_known_args()
    flower: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    flower.uvicorn = Server(options.fleet, options.token.read_text(encoding="utf-8").strip())
    sys.argv[1:] = rest
    flower.flower_superlink()


if __name__ == "__main__":
    main()
