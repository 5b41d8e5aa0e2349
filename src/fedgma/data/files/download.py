"""Fetch a data set's files on request: each mirror in turn, continuing where a broken transfer stopped, checked."""

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

Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all (0 where unknown)


def download_folder(cache: Path, name: str) -> Path:
    """Where the downloaded files of a data set are kept."""
    return cache / "downloads" / name


def download(
    name: str, cache: Path, *, retries: int = 5, pause: float = 1.0, progress: Progress | None = None
) -> list[Path]:
    """Fetch all files of a data set into the cache; files already there and sound are not fetched again."""
    spec = SPECS.get(name)
    if spec is None or not spec.remote:
        can = ", ".join(sorted(key for key, value in SPECS.items() if value.remote))
        raise ConfigError(f"{name!r} cannot be downloaded; these can: {can}")
    folder = download_folder(cache, name)
    return [fetch(remote, folder, retries=retries, pause=pause, progress=progress) for remote in spec.remote]


def fetch(
    remote: Remote, folder: Path, *, retries: int = 5, pause: float = 1.0, progress: Progress | None = None
) -> Path:
    """One file, from the first mirror that gives the right bytes; a wrong one never takes the file's name."""
    pooch = _pooch()
    reasons, wrong = [], False
    for url in remote.urls:
        get = _Resuming(folder / f"{remote.file}.part", retries, pause, progress)
        try:
            return Path(pooch.retrieve(url, remote.checksum, fname=remote.file, path=folder, downloader=get))
        except DataError as error:
            reasons.append(f"{url}: {error}")
        except ValueError:  # pooch's word for a checksum that does not match; it has thrown the bytes away
            reasons.append(f"{url}: wrong checksum")
            wrong = True
        LOG.info("giving up on %s", reasons[-1])
    kind = IntegrityError if wrong else DataError
    raise kind(f"{remote.file} could not be downloaded ({'; '.join(reasons)}); fetch it by hand and set FEDGMA_DATA")


class _Resuming:
    """A downloader for pooch that keeps what has arrived in a .part file and asks only for the rest."""

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
        raise DataError(f"no complete answer after {self.retries + 1} attempts ({reason})")

    def _transfer(self, requests: ModuleType, url: str) -> None:
        have = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        headers["Accept-Encoding"] = "identity"
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            if answer.status_code == 416:  # nothing left to send, or the file is shorter than what we have
                self.part.unlink(missing_ok=True)
                raise _Incomplete("the server has less than was received before; starting again")
            answer.raise_for_status()
            have = have if answer.status_code == 206 else 0  # a server may ignore the range and send everything
            total = have + int(answer.headers.get("Content-Length", 0))
            have = self._append(answer, have, total)
        if total and have < total:
            raise _Incomplete(f"cut off after {have} of {total} bytes")

    def _append(self, answer: Any, have: int, total: int) -> int:
        with self.part.open("ab" if have else "wb") as stream:
            for block in answer.iter_content(BLOCK):
                stream.write(block)
                have += len(block)
                if self.progress is not None:
                    self.progress(self.part.stem, have, total)
        return have


class _Incomplete(FedgmaError):
    """The transfer stopped before its end."""


def _pooch() -> ModuleType:
    try:
        import pooch
    except ImportError:
        raise FedgmaError("downloading needs pooch: pip install 'fedgma[sim]'") from None
    pooch.get_logger().setLevel(logging.WARNING)
    module: ModuleType = pooch
    return module
