"""Network faults between nodes and SuperLink, by a proxy on loopback that delays, cuts, duplicates and replays."""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "faults"
sys.path.insert(0, str(BENCHMARKS))

from proxy import Faults, Proxy  # noqa: E402
from rows import row  # noqa: E402

PULL, PUSH, NEXT = (f"/v1/fleet/{name}" for name in ("pull-object", "push-object", "pull-messages"))


class Server:
    """An HTTP server that keeps what reaches it and answers with its number."""

    def __init__(self):
        self.bodies, self.broken = [], 0
        self.arrived = asyncio.Event()

    async def serve(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.broken += 1
            self.arrived.set()
        else:
            self.bodies.append(body)
            self.arrived.set()
            answer = str(len(self.bodies)).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        writer.close()


async def post(port, body, path=PULL, chunked=False):
    """The body of the answer; raises what a client sees of a cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = f"Content-Length: {len(body)}"
    if chunked:
        length, body = "Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode() + body)
    with contextlib.closing(writer):
        answer = await reader.read(-1)
    if not answer:
        raise ConnectionError("no answer")
    return answer.split(b"\r\n\r\n", 1)[1]


def through(faults, play):
    """Run `play(server, proxy)` with a server behind a proxy."""

    async def run():
        server = Server()
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with Proxy(listening.sockets[0].getsockname()[:2], faults) as proxy:
            await play(server, proxy)
        listening.close()

    asyncio.run(asyncio.wait_for(run(), 300))


def test_without_faults_the_proxy_passes_everything_on():
    async def play(server, proxy):
        assert await post(proxy.port, b"one") == b"1"
        assert await post(proxy.port, b"x" * 10**6, chunked=True) == b"2"
        assert server.bodies == [b"one", b"x" * 10**6]

    through(Faults(), play)


def test_a_cut_request_reaches_the_server_in_part_only():
    async def play(server, proxy):
        with pytest.raises(ConnectionError):
            await post(proxy.port, b"x" * 10**5)
        await server.arrived.wait()
        assert (server.broken, server.bodies) == (1, [])

    through(Faults(cut_request=1.0), play)


def test_a_cut_response_leaves_the_sender_in_doubt():
    async def play(server, proxy):
        with pytest.raises(ConnectionError):
            await post(proxy.port, b"one")
        assert server.bodies == [b"one"]

    through(Faults(cut_response=1.0), play)


def test_a_duplicate_reaches_the_server_twice():
    async def play(server, proxy):
        assert await post(proxy.port, b"one") in (b"1", b"2")
        while len(server.bodies) < 2:
            await asyncio.sleep(0.01)
        assert (server.bodies, proxy.seen["duplicate"]) == ([b"one"] * 2, 1)

    through(Faults(duplicate=1.0), play)


def test_captured_requests_are_replayed_before_the_next_message():
    async def play(server, proxy):
        assert await post(proxy.port, b"one", PUSH) == b"1"
        assert await post(proxy.port, b"two", PUSH) == b"2"
        assert await post(proxy.port, b"next", NEXT) == b"5"
        assert await post(proxy.port, b"next", NEXT) == b"6"
        assert server.bodies == [b"one", b"two", b"one", b"two", b"next", b"next"]

    through(Faults(replay=1.0), play)


@pytest.mark.parametrize("lossy", [False, True])
def test_what_flower_cannot_repeat_is_spared_unless_asked(lossy):
    async def play(server, proxy):
        await post(proxy.port, b"one", PUSH)
        while len(server.bodies) < 1 + lossy:
            await asyncio.sleep(0.01)
        assert proxy.seen["duplicate"] == lossy

    through(Faults(duplicate=1.0, lossy=lossy), play)


def test_faults_follow_their_seed():
    seen = []

    async def play(server, proxy):
        for number in range(30):
            with contextlib.suppress(ConnectionError):
                await post(proxy.port, b"%d" % number)
        seen.append((server.bodies, dict(proxy.seen)))

    for seed in (1, 1, 2):
        through(Faults(cut_request=0.3, cut_response=0.3, seed=seed), play)
    assert seen[0] == seen[1] != seen[2]


@row(
    "F4",
    "requests of nodes are delayed, cut, duplicated and replayed",
    happens="Flower repeats most of what was cut, and no reply counts twice; where one is lost, its node is late or "
    "failed, and the round is repeated if it misses the quorum",
    seen="`Connection attempt failed, retrying` in the node's log; at worst `gma-late` or `gma-failed`",
)
@pytest.mark.long(25)
def test_f4_a_run_on_a_bad_network_ends_in_the_undisturbed_model():
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")
    size = ["--count", "1", "--nodes", "2", "--rounds", "2", "--limit", "1200"]
    words = [sys.executable, str(BENCHMARKS / "network.py"), *size]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 runs on a bad network ended in the undisturbed model" in done.stdout
