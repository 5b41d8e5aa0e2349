"""Downloads the files of a data set: tries each mirror in turn, resumes broken transfers, verifies checksums."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedgma.data.files.registry import SPECS, Remote
from fedgma.errors import ConfigError, DataError, FedgmaError, IntegrityError

LOG = logging.getLogger(__name__)
BLOCK = 1 << 16
TIMEOUT = (10.0, 30.0)  # seconds to connect, and to wait for the next bytes

Progress = Callable[[str, int, int], None]  # file, bytes so far, total bytes (0 if unknown)


def download_folder(cache: Path, name: str) -> Path:
    """The folder for the downloaded files of a data set."""
    return cache / "downloads" / name


def download(
    name: str, cache: Path, *, retries: int = 5, pause: float = 1.0, progress: Progress | None = None
) -> list[Path]:
    """Download all files of a data set into the cache; valid files that are there already are kept."""
    spec = SPECS.get(name)
    if spec is None or not spec.remote:
        downloadable = ", ".join(sorted(key for key, value in SPECS.items() if value.remote))
        raise ConfigError(f"{name!r} cannot be downloaded; these can: {downloadable}")
    folder = download_folder(cache, name)
    return [fetch(remote, folder, retries=retries, pause=pause, progress=progress) for remote in spec.remote]


def fetch(
    remote: Remote, folder: Path, *, retries: int = 5, pause: float = 1.0, progress: Progress | None = None
) -> Path:
    """Download one file from the first mirror whose bytes match the checksum; other bytes are discarded."""
    pooch = _pooch()
    reasons, mismatch = [], False
    for url in remote.urls:
        get = _Resuming(folder / f"{remote.file}.part", retries, pause, progress)
        try:
            return Path(pooch.retrieve(url, remote.checksum, fname=remote.file, path=folder, downloader=get))
        except DataError as error:
            reasons.append(f"{url}: {error}")
        except ValueError:  # pooch raises it if the checksum does not match, and deletes the file
            reasons.append(f"{url}: wrong checksum")
            mismatch = True
        LOG.info("giving up on %s", reasons[-1])
    kind = IntegrityError if mismatch else DataError
    raise kind(f"{remote.file} could not be downloaded ({'; '.join(reasons)}); get it by hand and set FEDGMA_DATA")


class _Resuming:
    """A downloader for pooch that stores the received bytes in a .part file and requests only the rest."""

    def __init__(self, part: Path, retries: int, pause: float, progress: Progress | None) -> None:
        self.part, self.retries, self.pause, self.progress = part, retries, pause, progress

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        import requests

        for attempt in range(self.retries + 1):
            try:
                self._transfer(requests, url)
                self.part.replace(output_file)
                return
            except (requests.RequestException, _Incomplete) as error:
                LOG.info("attempt %d at %s: %s", attempt + 1, url, error)
                reason = error
                time.sleep(self.pause * min(2**attempt, 30) if attempt < self.retries else 0)
        raise DataError(f"no complete response after {self.retries + 1} attempts ({reason})")

    def _transfer(self, requests: ModuleType, url: str) -> None:
        received = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Range": f"bytes={received}-"} if received else {}
        headers["Accept-Encoding"] = "identity"
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if response.status_code == 416:  # the .part file is at least as long as the file on the server
                self.part.unlink(missing_ok=True)
                raise _Incomplete("the server's file is not longer than the part received before; starting again")
            response.raise_for_status()
            received = received if response.status_code == 206 else 0  # 200: the server sends the whole file
            total = received + int(response.headers.get("Content-Length", 0))
            received = self._append(response, received, total)
        if total and received < total:
            raise _Incomplete(f"the transfer ended after {received} of {total} bytes")

    def _append(self, response: Any, received: int, total: int) -> int:
        with self.part.open("ab" if received else "wb") as stream:
            for block in response.iter_content(BLOCK):
                stream.write(block)
                received += len(block)
                if self.progress is not None:
                    self.progress(self.part.stem, received, total)
        return received


class _Incomplete(FedgmaError):
    """The transfer ended early."""


def _pooch() -> ModuleType:
    try:
        import pooch
    except ImportError:
        raise FedgmaError("downloading needs pooch: pip install 'fedgma[sim]'") from None
    pooch.get_logger().setLevel(logging.WARNING)
    module: ModuleType = pooch
    return module
