"""A proxy on loopback between a Flower node and its SuperLink that delays, cuts, duplicates and replays requests.

It speaks plain HTTP/1.1, one connection per request, and binds to 127.0.0.1 only. Which request meets which fault is
drawn by a seed. A fault is what a network can do: bytes are lost or come again, but are never changed.

    async with Proxy(("127.0.0.1", 8000), Faults(cut_response=0.1)) as proxy:
        ...  # the node connects to 127.0.0.1:{proxy.port}; proxy.seen counts the faults
"""

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

LONGEST = 2**30  # bytes of a request
# Requests that Flower can repeat. A repeated upload loses the reply: Flower (1.41) takes each part once, and
# the node gives up when a part is refused. A message is handed out once, so a lost answer costs the node its round.
REPEATABLE = ("/get-run", "/get-fab", "/pull-object", "/send-node-heartbeat")
NEXT = "/pull-messages"  # what a node asks when its reply is on its way


@dataclass(frozen=True)
class Faults:
    """How often each fault happens, from 0 (never) to 1; `delay` is in seconds, drawn from 0 to it."""

    delay: float = 0.0
    cut_request: float = 0.0  # reset in the middle of a request
    cut_response: float = 0.0  # reset after the server has answered: the sender cannot know, and repeats itself
    duplicate: float = 0.0  # the request reaches the server twice at once
    replay: float = 0.0  # a captured request reaches the server again, before the node asks for its next message
    lossy: bool = False  # responses are cut and requests duplicated also where Flower loses a reply by it
    seed: int = 0


class Request(NamedTuple):
    """A request as it was read."""

    path: str
    raw: bytes


class Proxy:
    """Forwards requests to `upstream` with faults; an asynchronous context manager."""

    def __init__(self, upstream: tuple[str, int], faults: Faults) -> None:
        self.upstream, self.faults = upstream, faults
        self.seen: Counter[str] = Counter()
        self.port = 0
        self._random = random.Random(faults.seed)
        self._captured: list[bytes] = []

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one request, its faults, its answer."""
        try:
            request = await read_request(reader)
            if request is not None:
                await self._answer(request, writer)
        except (OSError, asyncio.IncompleteReadError, ValueError):
            self.seen["broken by others"] += 1
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self.seen["requests"] += 1
        repeatable = self.faults.lossy or request.path.endswith(REPEATABLE)
        await asyncio.sleep(self._random.random() * self.faults.delay)
        if self._happens("cut_request"):
            await self._send(request.raw[: len(request.raw) // 2], cut=True)
            writer.transport.abort()
            return
        if request.path.endswith(NEXT):
            await self._replay()
        if repeatable and self._happens("duplicate"):
            answer, _ = await asyncio.gather(self._send(request.raw), self._send(request.raw))
        else:
            answer = await self._send(request.raw)
        if not request.path.endswith(NEXT) and self._happens("replay"):
            self._captured.append(request.raw)
        if repeatable and self._happens("cut_response"):
            writer.transport.abort()
            return
        writer.write(answer)
        await writer.drain()

    async def _replay(self) -> None:
        captured, self._captured = self._captured, []
        for raw in captured:
            await self._send(raw)

    async def _send(self, raw: bytes, *, cut: bool = False) -> bytes:
        """Send bytes to the server and return its whole answer; with `cut`, reset the connection instead."""
        reader, writer = await asyncio.open_connection(*self.upstream)
        try:
            writer.write(raw)
            await writer.drain()
            return b"" if cut else await reader.read(-1)
        finally:
            if cut:
                writer.transport.abort()
            writer.close()

    def _happens(self, fault: str) -> bool:
        drawn = self._random.random() < getattr(self.faults, fault)
        self.seen[fault] += drawn
        return drawn


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """A whole request that asks for its connection to be closed; None if the sender closed it first."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head[:-4].split(b"\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    body = await _read_body(reader, fields)
    kept = [line for line in lines if line.partition(b":")[0].strip().lower() not in UNWANTED]
    length = [b"Content-Length: " + str(len(body)).encode(), b"Connection: close"]
    path = first.split(b" ")[1].decode("latin-1")
    return Request(path, b"\r\n".join([first, *kept, *length]) + b"\r\n\r\n" + body)


UNWANTED = (b"connection", b"content-length", b"transfer-encoding", b"expect")


async def _read_body(reader: asyncio.StreamReader, fields: dict[bytes, bytes]) -> bytes:
    if fields.get(b"transfer-encoding", b"").lower() != b"chunked":
        size = int(fields.get(b"content-length", b"0"))
        if size > LONGEST:
            raise ValueError(f"a request must have at most {LONGEST} bytes, got {size}")
        return await reader.readexactly(size)
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(parts)
