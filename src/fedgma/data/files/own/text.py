"""Reads a user's text for next-token prediction: a file, or a folder of files of which each is one client.

A token is a byte, so any text works without a vocabulary. A sample is a window of a file, or a line; its targets are
its tokens moved by one. The end of every file is the test split.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Dataset, Labels, Source, Split
from fedgma.data.files.own.targets import PADDING
from fedgma.data.files.reader import largest, sha256_of
from fedgma.documents import PathLike
from fedgma.errors import ConfigError, DataError

LENGTH = 64  # tokens of a sample
UNITS = ("window", "line")
SUFFIXES = {".txt", ".text", ".md", ".rst"}
LARGEST = 1 << 28  # bytes of all files
VOCABULARY = 256
Bytes = npt.NDArray[np.uint8]


def load_text(path: PathLike, *, length: int = LENGTH, unit: str = "window", test_share: float = 0.2) -> Dataset:
    """Text as a data set of tokens: windows of `length` tokens, or lines cut or padded to it.

    The last `test_share` of the samples of every file are the test split.
    """
    if unit not in UNITS:
        raise ConfigError(f"unknown unit of text {unit!r}; known: {', '.join(UNITS)}")
    if length < 1 or not 0 < test_share < 1:
        raise ConfigError(
            f"expected a length of 1 or more and a test share between 0 and 1, got {length}, {test_share}"
        )
    path = Path(path)
    files = _files(path)
    cut = windows if unit == "window" else lines
    parts = [_divided(*cut(np.frombuffer(file.read_bytes(), np.uint8), length), test_share) for file in files]
    train, test = (_joined([part[side] for part in parts]) for side in (0, 1))
    if not len(train.y) or not len(test.y):
        raise DataError(
            f"{path.name} is too short: expected two {unit}s or more of {length} bytes; use a shorter length"
        )
    names = tuple(map(str, range(VOCABULARY)))
    source = Source("folder", path.name, sha256_of(files))
    return Dataset(path.stem if path.is_file() else path.resolve().name, train, test, names, source, target="tokens")


def is_text(path: Path) -> bool:
    """Whether a path is a .txt file, or a folder that holds text files and nothing else."""
    if not path.is_dir():
        return path.suffix.lower() == ".txt"
    files = [file for file in path.iterdir() if not file.name.startswith(".")]
    return bool(files) and all(file.is_file() and file.suffix.lower() in SUFFIXES for file in files)


def windows(text: Bytes, length: int) -> tuple[Labels, Labels]:
    """Consecutive windows of a text, and their next tokens: two [window, length]; the last one is padded.

    >>> x, y = windows(np.frombuffer(b"abcdef", np.uint8), 3)
    >>> bytes(x[0].tolist()), bytes(y[0].tolist()), y[1].tolist()
    (b'abc', b'bcd', [101, 102, -100])
    """
    if len(text) < 2:
        return _empty(length)
    return _rows([text[at : at + length + 1] for at in range(0, len(text) - 1, length)], length)


def lines(text: Bytes, length: int) -> tuple[Labels, Labels]:
    """The lines of a text with their line ends, and their next tokens; long ones are cut, empty ones left out.

    >>> x, y = lines(np.frombuffer(b"ab\\n\\nabcdef\\n", np.uint8), 4)
    >>> len(x), y[0].tolist(), bytes(y[1].tolist())
    (2, [98, 10, -100, -100], b'bcde')
    """
    kept = [np.frombuffer(line + b"\n", np.uint8) for line in text.tobytes().splitlines() if line.strip()]
    return _rows([line[: length + 1] for line in kept], length) if kept else _empty(length)


def _rows(pieces: list[Bytes], length: int) -> tuple[Labels, Labels]:
    """Pieces of up to length + 1 tokens as samples and targets, padded."""
    x, y = np.zeros((len(pieces), length), np.int64), np.full((len(pieces), length), PADDING, np.int64)
    for row, piece in enumerate(pieces):
        x[row, : len(piece) - 1], y[row, : len(piece) - 1] = piece[:-1], piece[1:]
    return x, y


def _empty(length: int) -> tuple[Labels, Labels]:
    return np.zeros((0, length), np.int64), np.zeros((0, length), np.int64)


def _divided(x: Labels, y: Labels, share: float) -> tuple[tuple[Labels, Labels], tuple[Labels, Labels]]:
    """A file's samples without its end, and its end; a single sample is for training."""
    last = max(1, round(share * len(y))) if len(y) > 1 else 0
    at = len(y) - last
    return (x[:at], y[:at]), (x[at:], y[at:])


def _joined(parts: list[tuple[Labels, Labels]]) -> Split:
    """The samples of all files, with the number of its file for each if there are several."""
    owner = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts]) if len(parts) > 1 else None
    return Split(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), owner)


def _files(path: Path) -> list[Path]:
    """The files of a text: the file itself, or the text files in a folder, sorted by name."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"{path.name} holds no text; known endings: {', '.join(sorted(SUFFIXES))}")
    size, limit = sum(file.stat().st_size for file in files), largest(LARGEST)
    if size > limit:
        raise DataError(f"{path.name} must hold at most {limit} bytes of text, got {size}")
    return files
