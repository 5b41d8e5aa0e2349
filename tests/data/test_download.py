import hashlib
import threading
import time

import numpy as np
import pytest

from fedgma.data.files import download as downloads
from fedgma.data.files import load
from fedgma.data.files.download import download, fetch
from fedgma.data.files.registry import SPECS, Remote
from fedgma.errors import ConfigError, DataError, IntegrityError
from file_server import Server, send

pytest.importorskip("pooch")

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


def quick(*servers, checksum=MD5):
    return Remote("file.bin", checksum, tuple(server.url("file.bin") for server in servers))


def test_a_file_is_downloaded_completely_and_only_once(tmp_path):
    with Server({"file.bin": CONTENT}) as server:
        for _ in range(2):
            path = fetch(quick(server), tmp_path, pause=0)
        assert path.read_bytes() == CONTENT
        assert server.asked == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["file.bin"]


def test_progress_is_reported(tmp_path):
    told = []
    with Server({"file.bin": CONTENT}) as server:
        fetch(quick(server), tmp_path, progress=lambda *step: told.append(step))
    assert told[-1] == ("file.bin", 300_000, 300_000)
    assert len(told) > 2


def test_a_slow_server_is_not_a_failure(tmp_path):
    def dribble(server, request, content):
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        for start in range(0, len(content), 60_000):
            request.wfile.write(content[start : start + 60_000])
            request.wfile.flush()
            time.sleep(0.1)
        return True

    with Server({"file.bin": CONTENT}, dribble) as server:
        assert fetch(quick(server), tmp_path).read_bytes() == CONTENT


def test_a_stalled_transfer_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT", (60.0, 0.5))
    asked_again = threading.Event()

    def stall(server, request, content):
        if request.headers.get("Range"):
            asked_again.set()
            return False
        send(request, content[:100_000], len(content))
        asked_again.wait()
        return True

    with Server({"file.bin": CONTENT}, stall) as server:
        # on a busy machine the time may be over before the first bytes have come: then all is asked for once more
        assert fetch(quick(server), tmp_path, retries=1000, pause=0).read_bytes() == CONTENT
        assert server.asked[0] is None
        assert server.asked[-1].startswith("bytes=")


def test_a_broken_transfer_is_resumed(tmp_path):
    def cut(server, request, content):
        if len(server.asked) > 1:
            return False
        send(request, content[:200_000], len(content))
        request.close_connection = True
        return True

    with Server({"file.bin": CONTENT}, cut) as server:
        assert fetch(quick(server), tmp_path, pause=0).read_bytes() == CONTENT
        assert server.asked == [None, f"bytes={3 << 16}-"]  # the whole blocks of what had come


def test_a_download_is_resumed_by_the_next_call(tmp_path):
    def cut(server, request, content):
        send(request, content[:200_000], len(content))
        return True

    with Server({"file.bin": CONTENT}, cut) as server, pytest.raises(DataError, match="after 1 attempts"):
        fetch(quick(server), tmp_path, retries=0)
    assert [p.name for p in tmp_path.iterdir()] == ["file.bin.part"]
    with Server({"file.bin": CONTENT}) as server:
        assert fetch(quick(server), tmp_path).read_bytes() == CONTENT
        assert server.asked == [f"bytes={3 << 16}-"]


def test_a_server_without_range_support_sends_the_whole_file(tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])

    def whole(server, request, content):
        send(request, content, len(content))
        return True

    with Server({"file.bin": CONTENT}, whole) as server:
        assert fetch(quick(server), tmp_path, pause=0).read_bytes() == CONTENT


def test_a_part_that_is_longer_than_the_file_is_discarded(tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
    with Server({"file.bin": CONTENT}) as server:
        assert fetch(quick(server), tmp_path, pause=0).read_bytes() == CONTENT


def test_wrong_bytes_are_detected_and_discarded(tmp_path):
    with Server({"file.bin": CONTENT[:-1] + b"x"}) as liar, pytest.raises(IntegrityError, match="wrong checksum"):
        fetch(quick(liar), tmp_path, retries=1, pause=0)
    assert list(tmp_path.iterdir()) == []


def test_the_next_mirror_is_tried_after_wrong_bytes_or_an_error(tmp_path):
    with Server({"file.bin": b"lies"}) as liar, Server({}) as empty, Server({"file.bin": CONTENT}) as good:
        path = fetch(quick(liar, empty, good), tmp_path, retries=0, pause=0)
        assert path.read_bytes() == CONTENT


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    with Server({}) as gone:
        remote = quick(gone)
    with pytest.raises(DataError, match=r"file.bin could not be downloaded.*set FEDGMA_DATA"):
        fetch(remote, tmp_path, retries=0)


def test_a_downloaded_data_set_is_loaded_with_source_download(tmp_path, small_mnist, own_cache, monkeypatch):
    small_mnist(tmp_path / "served")
    files = {path.name: path.read_bytes() for path in (tmp_path / "served").iterdir()}
    with Server(files) as server:
        remote = tuple(
            Remote(name, "md5:" + hashlib.md5(content).hexdigest(), (server.url(name),))
            for name, content in files.items()
        )
        monkeypatch.setitem(SPECS, "mnist", SPECS["mnist"]._replace(remote=remote))
        download("mnist", own_cache)
    assert load("mnist").source.kind == "download"
    assert load("mnist").source.cached


def test_a_download_with_a_wrong_checksum_leaves_the_cached_set_untouched(
    tmp_path, small_mnist, own_cache, monkeypatch
):
    small_mnist(tmp_path / "mnist")
    load("mnist", folders=[tmp_path])
    before = {p.name: p.read_bytes() for p in (own_cache / "datasets" / "mnist").iterdir()}
    with Server({"file.bin": b"lies"}) as liar:
        monkeypatch.setitem(SPECS, "mnist", SPECS["mnist"]._replace(remote=(quick(liar),)))
        with pytest.raises(IntegrityError):
            download("mnist", own_cache, retries=0)
    assert {p.name: p.read_bytes() for p in (own_cache / "datasets" / "mnist").iterdir()} == before
    assert load("mnist").source.cached


def test_a_set_that_cannot_be_downloaded_says_which_can(own_cache):
    with pytest.raises(ConfigError, match="'femnist' cannot be downloaded; these can: cifar10, cifar100"):
        download("femnist", own_cache)
