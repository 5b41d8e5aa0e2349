"""Read what a run has written since the last look: `rounds.jsonl` of a run that may be writing it at this moment.

    records, place = read_on(file, Place())       # the complete lines so far
    records, place = read_on(file, place)         # those that came since; `place.again` if the file began again

A line that is being written is left for the next look. A resumed run may replace the file by a shorter one: the end of
what was read is compared with the file, and if it is not there any more, reading starts from the first line.
"""

import stat
from pathlib import Path
from typing import NamedTuple

from fedgma.errors import DataError
from fedgma.records.format import Record
from fedgma.records.reader import parse_object

PIECE = 2**23  # bytes that a look reads, at most; also the longest line
END = 64  # bytes before the place that are compared


class Place(NamedTuple):
    """How far a file was read."""

    offset: int = 0  # the first byte that was not read
    line: int = 0  # lines before it
    end: bytes = b""  # the last bytes before it
    stamp: tuple[int, int] = (0, 0)  # time of change and size of the file at the last look
    again: bool = False  # whether the last look began at the first line again
    more: bool = False  # whether further lines may be there already
    problem: str = ""  # what is wrong with the next line; nothing is read beyond it


def read_on(file: Path, place: Place, most: int = PIECE) -> tuple[list[Record], Place]:
    """The complete lines after a place, up to `most` bytes, and the place after them."""
    place = place._replace(again=False)
    try:
        status = file.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        if (stamp == place.stamp and not place.more) or not stat.S_ISREG(status.st_mode):  # a pipe would wait
            return [], place
        with file.open("rb") as stream:
            stream.seek(place.offset - len(place.end))
            if stream.read(len(place.end)) != place.end:
                stream.seek(0)
                place = Place(again=True)
            content = stream.read(most)
    except OSError:  # not there yet
        return [], place
    return _read(content, place._replace(stamp=stamp, more=len(content) == most, problem=""), file)


def _read(content: bytes, place: Place, file: Path) -> tuple[list[Record], Place]:
    *lines, rest = content.split(b"\n")
    records: list[Record] = []
    if place.more and not lines:
        place = place._replace(problem=f"{file}, line {place.line + 1}, is longer than {len(rest)} bytes", more=False)
    for line in lines:
        number = place.line + 1
        try:
            record = parse_object(line, f"{file}, line {number},")
            if record.get("round") != number:
                raise DataError(f"{file}, line {number}, should be round {number}, got {record.get('round')!r}")
        except DataError as error:
            return records, place._replace(problem=str(error), more=False)
        records.append(record)
        end = (place.end + line + b"\n")[-END:]
        place = place._replace(offset=place.offset + len(line) + 1, line=number, end=end)
    return records, place
