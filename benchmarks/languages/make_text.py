"""Write text.tar.xz: about 16,000 bytes in each of 50 languages, out of the translations in a Django wheel.

    pip download --no-deps Django==5.2 && python benchmarks/languages/make_text.py Django-5.2-py3-none-any.whl

The translations of Django are under the BSD licence in LICENSE.txt. Regional variants are left out. Messages stand in
an order by their checksums, so that the end of a text, on which models are tested, is like its beginning.
"""

import ast
import hashlib
import io
import lzma
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

LANGUAGES, SIZE = 50, 16_000
ARCHIVE = Path(__file__).with_name("text.tar.xz")
MESSAGE = re.compile(r'(msgid_plural|msgid|msgstr(?:\[\d+\])?|msgctxt) (".*")$')


def messages(catalogue: str) -> Iterator[str]:
    """The translated messages of a catalogue of gettext."""
    pieces: list[tuple[str, list[str]]] = []
    for line in catalogue.splitlines():
        if match := MESSAGE.match(line):
            pieces.append((match[1], [ast.literal_eval(match[2])]))
        elif line.startswith('"') and pieces:
            pieces[-1][1].append(ast.literal_eval(line))
    for kind, parts in pieces:
        text = "".join(parts)
        if kind.startswith("msgstr") and text and not text.startswith("Project-Id-Version"):
            yield text


def read(wheel: Path) -> dict[str, bytes]:
    """The text of each language, the longest languages first."""
    found: dict[str, set[str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if match := re.search(r"locale/([a-z]+|zh_Hans)/LC_MESSAGES/\w+\.po$", name):
                found.setdefault(match[1], set()).update(messages(archive.read(name).decode()))
    texts = {name: "\n".join(sorted(own, key=_order)).encode() for name, own in found.items()}
    longest = sorted(texts, key=lambda name: (-len(texts[name]), name))[:LANGUAGES]
    return {name: texts[name][:SIZE] for name in sorted(longest)}


def _order(message: str) -> bytes:
    return hashlib.sha256(message.encode()).digest()


def pack(texts: dict[str, bytes]) -> bytes:
    """The texts as an archive; the same texts give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in texts.items():
            entry = tarfile.TarInfo(f"{name}.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    texts = read(Path(sys.argv[1]))
    ARCHIVE.write_bytes(pack(texts))
    sizes = sorted(len(text) for text in texts.values())
    print(f"{len(texts)} languages of {sizes[0]} to {sizes[-1]} bytes in {ARCHIVE.name}: {', '.join(texts)}")
