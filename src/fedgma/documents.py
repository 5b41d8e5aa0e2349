"""JSON and TOML of unknown origin: limits on size and depth, and an error of one sentence in place of a traceback."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from fedgma.errors import DataError

PathLike = str | os.PathLike[str]  # a path as users give it

LARGEST = 2**30  # bytes of a file
DEPTH = 64  # tables and lists inside each other

# A TOML parser keeps every prefix of a dotted key: a key of 200,000 parts, in a file of 400 kB, takes 100 GB.
_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART}){{{DEPTH}}}")


def read_json(path: Path, largest: int = LARGEST) -> Any:
    """The value in a JSON file; raises `DataError` with the name of the file."""
    return parse_json(read_bytes(path, largest), str(path))


def read_bytes(path: Path, largest: int = LARGEST, what: str = "the file") -> bytes:
    """The content of a file of at most `largest` bytes; `what` it is called in an error."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:  # a device or a pipe has no size
            content = b"" if size > largest else stream.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise DataError(f"cannot read {what} {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    if max(size, len(content)) > largest:
        raise DataError(f"{what} {str(path)!r} is larger than {largest} bytes; give another")
    return content


def parse_json(content: bytes, where: str) -> Any:
    """The value that UTF-8 JSON text holds; `where` names it in the error.

    >>> parse_json(b'{"a": [1]}', "here")
    {'a': [1]}
    >>> parse_json(b"[" * 5000, "run.json")
    Traceback (most recent call last):
    ...
    fedgma.errors.DataError: run.json is not JSON (nested too deep); the file is damaged, restore it or run again
    """
    try:
        value = json.loads(content.decode("utf-8"))
        if content.count(b"[") + content.count(b"{") > DEPTH:
            check_depth(value)
        if b"\\ud" in content.lower():
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be written back
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8 text; the file is damaged, restore it or run again") from None
    except RecursionError:
        raise DataError(
            f"{where} is not JSON (nested too deep); the file is damaged, restore it or run again"
        ) from None
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); the file is damaged, restore it or run again") from None
    return value


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8; the name of a file in another encoding cannot.

    >>> is_utf8("Zürich"), is_utf8(b"Z\\xfcrich".decode("utf-8", "surrogateescape"))
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_toml(text: str) -> dict[str, Any]:
    """The tables that TOML text holds; raises `ValueError` for whatever is wrong with it.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    >>> parse_toml("a." * 5000 + "a = 1")
    Traceback (most recent call last):
    ...
    ValueError: nested too deep
    """
    if _DEEP_KEY.search(text):
        raise ValueError("nested too deep")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    check_depth(tables)
    return tables


def check_depth(value: Any) -> None:
    """Raise `ValueError` if lists and tables are nested deeper than `DEPTH`, so that a walk over them can recurse."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError("nested too deep")
