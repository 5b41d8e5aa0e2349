"""The server of a live page: this machine only, read-only, and nothing but the page and its data.

A page of another site cannot read it: only requests to `localhost` or an address of this machine itself are answered
(else another site's name could be pointed at this address), and answers may not be embedded or read elsewhere.
"""

import errno
import json
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedgma.errors import ConfigError
from fedgma.reports.live.page import POLICY, page
from fedgma.reports.live.runs import LiveRuns

ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "::1")  # also behind a tunnel, whatever its port
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
IDLE_SECONDS = 30  # that a connection may wait


class LiveServer(ThreadingHTTPServer):
    """Serves the runs of folders; `serve_forever` until `shutdown`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, runs: LiveRuns, port: int = 0) -> None:
        self.runs = runs
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError(_refused(port, error)) from None

    def server_bind(self) -> None:
        """Bind without asking for the name of the address, which may be a question to the network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless a page was closed in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = IDLE_SECONDS
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fedgma", ""

    def do_GET(self) -> None:
        """Answer with the page or its data."""
        try:
            asked = urlsplit(self.path)
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            self._say(HTTPStatus.BAD_REQUEST)
            return
        makers: dict[str, Callable[[str], tuple[str, str]]] = {"/": self._page, "/runs.json": self._runs}
        if host not in HOSTS:
            self._say(HTTPStatus.FORBIDDEN)
        elif asked.path not in makers:
            self._say(HTTPStatus.NOT_FOUND)
        else:
            self._say(HTTPStatus.OK, *makers[asked.path](asked.query))

    do_HEAD = do_GET

    def _page(self, query: str) -> tuple[str, str]:
        return page(self.server.runs), "text/html"

    def _runs(self, query: str) -> tuple[str, str]:
        since = parse_qs(query).get("since", ["0"])[0]
        number = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0
        return json.dumps(self.server.runs.since(number), allow_nan=False), "application/json"

    def _say(self, status: HTTPStatus, text: str = "", kind: str = "text/plain") -> None:
        content = (text or f"{status.value} {status.phrase}\n").encode(errors="replace")  # a path may be no text
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing is printed about requests."""


def _refused(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken by another process; give another --port, or none for a free one"
    if error.errno == errno.EACCES:
        return f"port {port} is not for this user; give a --port from 1024 on, or none for a free one"
    return f"cannot serve at {ADDRESS}:{port}: {error.strerror or error}"
