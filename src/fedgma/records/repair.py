"""Repair a damaged `rounds.jsonl` of a run that cannot be repeated with the same results, as those on Flower."""

import json

DAMAGED = "rounds.damaged"  # a copy of the file as it was found


def repaired(content: bytes, rounds: int) -> tuple[list[bytes], list[int]]:
    """One line for each round, and the rounds whose lines are lost: these have `"lost": true` and nothing else.

    >>> repaired(b'{"round": 1}\\n{"rou', 2)
    ([b'{"round": 1}\\n', b'{"round": 2, "lost": true}\\n'], [2])
    """
    readable = _readable(content)
    lost = [round for round in range(1, rounds + 1) if round not in readable]
    marked = {round: json.dumps({"round": round, "lost": True}).encode() for round in lost}
    return [(readable | marked)[round] + b"\n" for round in range(1, rounds + 1)], lost


def _readable(content: bytes) -> dict[int, bytes]:
    """The lines that can be read, by round; a line in its place goes before one that claims its round elsewhere."""
    in_place: dict[int, bytes] = {}
    displaced: dict[int, bytes] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            round = json.loads(line)["round"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if isinstance(round, int) and not isinstance(round, bool):
            (in_place if round == number else displaced)[round] = line
    return displaced | in_place
