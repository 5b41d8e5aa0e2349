"""What an analysis found, as numbers under an id: the only thing that claims take from an analysis.

An id is a path such as `paired/5/participating`. A claim names a finding, or the path above several of them.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.errors import DataError

FILE = "findings.json"
FORMAT = 1


class ClaimVerdict(StrEnum):
    """What runs or an analysis say of a claim."""

    HOLDS = "holds"
    CONTRADICTED = "contradicted"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not run"


class Finding(NamedTuple):
    """One result of an analysis; what does not apply is None."""

    id: str
    text: str
    verdict: ClaimVerdict | None = None  # on the claim that it is about; None where it only describes
    estimate: float | None = None
    interval: tuple[float, float] | None = None  # 95 % CI of the estimate
    n: int | None = None  # seeds, attacked models or cells that the estimate rests on

    def is_below(self, path: str) -> bool:
        """Whether this is the finding of that id, or one below it.

        >>> finding = Finding("paired/5/participating", "")
        >>> finding.is_below("paired/5"), finding.is_below("paired"), finding.is_below("paired/5/part")
        (True, True, False)
        """
        return f"{self.id}/".startswith(f"{path}/")


def judged(interval: tuple[float, float] | None) -> ClaimVerdict:
    """What a 95 % CI says of a claim that the estimate is above zero; one seed has none.

    >>> str(judged((0.5, 1.0))), str(judged((-1.0, -0.5))), str(judged((-0.5, 1.0))), str(judged(None))
    ('holds', 'contradicted', 'inconclusive', 'inconclusive')
    """
    if interval is None or interval[0] <= 0 <= interval[1]:
        return ClaimVerdict.INCONCLUSIVE
    return ClaimVerdict.HOLDS if interval[0] > 0 else ClaimVerdict.CONTRADICTED


def write_findings(findings: Sequence[Finding], folder: Path) -> Path:
    """Write findings.json into the folder of an analysis."""
    file = folder / FILE
    held = {"format": FORMAT, "findings": [finding._asdict() for finding in findings]}
    file.write_text(json.dumps(held, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return file


def read_findings(folder: Path) -> list[Finding]:
    """The findings that an analysis wrote into a folder; a file that is not one is refused by its name."""
    file = folder / FILE
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        written = held["format"]
        findings = [_finding(one) for one in held["findings"]] if written == FORMAT else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read as the findings of an analysis: {error!r}") from None
    if written != FORMAT:
        raise DataError(f"{file} has format {written!r}; this version reads {FORMAT}; run the analysis again")
    return findings


def _finding(held: dict[str, Any]) -> Finding:
    """A finding from JSON; raises ValueError or TypeError where a field has another type."""
    made = Finding(**held)
    verdict = None if made.verdict is None else ClaimVerdict(made.verdict)
    if not (isinstance(made.id, str) and made.id and isinstance(made.text, str)):
        raise TypeError(f"id and text should be text, got {made.id!r} and {made.text!r}")
    if made.interval is None:
        return made._replace(verdict=verdict)
    low, high = map(float, made.interval)
    return made._replace(verdict=verdict, interval=(low, high))
