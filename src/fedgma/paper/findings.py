"""Findings of an analysis: numbers and a verdict under an id. Claims use nothing else from an analysis.

An id is a path such as `paired/5/participating`. A claim names one finding, or a prefix of several.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.documents import read_json
from fedgma.errors import DataError

FILE = "findings.json"
FORMAT = 1


class ClaimVerdict(StrEnum):
    """The verdict of runs or of an analysis on a claim."""

    HOLDS = "holds"
    CONTRADICTED = "contradicted"
    INCONCLUSIVE = "inconclusive"
    PRELIMINARY = "preliminary"  # fewer than four seeds, or no cell has converged
    NOT_RUN = "not run"


class Finding(NamedTuple):
    """One result of an analysis; fields that do not apply are None."""

    id: str
    text: str
    verdict: ClaimVerdict | None = None  # on its claim; None if the finding only describes
    estimate: float | None = None
    interval: tuple[float, float] | None = None  # 95 % CI of the estimate
    n: int | None = None  # number of seeds, attacked models or cells in the estimate

    def is_below(self, path: str) -> bool:
        """Whether the id of this finding is `path` or starts with it as a parent path.

        >>> finding = Finding("paired/5/participating", "")
        >>> finding.is_below("paired/5"), finding.is_below("paired"), finding.is_below("paired/5/part")
        (True, True, False)
        """
        return f"{self.id}/".startswith(f"{path}/")


def judged(interval: tuple[float, float] | None) -> ClaimVerdict:
    """The verdict of a 95 % CI on the claim that the estimate is above zero; one seed has no CI.

    >>> str(judged((0.5, 1.0))), str(judged((-1.0, -0.5))), str(judged((-0.5, 1.0))), str(judged(None))
    ('holds', 'contradicted', 'inconclusive', 'inconclusive')
    """
    if interval is None or interval[0] <= 0 <= interval[1]:
        return ClaimVerdict.INCONCLUSIVE
    return ClaimVerdict.HOLDS if interval[0] > 0 else ClaimVerdict.CONTRADICTED


def write_findings(findings: Sequence[Finding], folder: Path) -> Path:
    """Write findings.json into the folder of an analysis."""
    file = folder / FILE
    content = {"format": FORMAT, "findings": [finding._asdict() for finding in findings]}
    file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return file


def read_findings(folder: Path) -> list[Finding]:
    """Read the findings that an analysis wrote into a folder; a broken file raises an error that names it."""
    file = folder / FILE
    try:
        content = read_json(file)
        written = content["format"]
        findings = [_finding(finding) for finding in content["findings"]] if written == FORMAT else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"expected the findings of an analysis in {file}, got {error!r}; run the analysis again"
        ) from None
    if written != FORMAT:
        raise DataError(f"{file} has format {written!r}; this version reads {FORMAT}; run the analysis again")
    return findings


def _finding(fields: dict[str, Any]) -> Finding:
    """A finding from JSON; raises ValueError or TypeError if a field has the wrong type."""
    finding = Finding(**fields)
    verdict = None if finding.verdict is None else ClaimVerdict(finding.verdict)
    if not (isinstance(finding.id, str) and finding.id and isinstance(finding.text, str)):
        raise TypeError(f"id and text should be text, got {finding.id!r} and {finding.text!r}")
    if finding.interval is None:
        return finding._replace(verdict=verdict)
    low, high = map(float, finding.interval)
    return finding._replace(verdict=verdict, interval=(low, high))
