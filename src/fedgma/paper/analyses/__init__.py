"""The paper's analyses beside its tables: who profits, where clients agree, what a mask does to stability and privacy.

Each analysis is a module with `analyse(request)`, and with functions that take arrays and give numbers, for models of
your own. `ANALYSES` names them as the paper's experiments are numbered here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgma.paper.findings import Finding

if TYPE_CHECKING:  # naming the analyses costs no import of torch or matplotlib
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AnalysisRequest:
    """What is asked of an analysis."""

    device: str = "auto"
    out: Path = Path("results")
    seeds: int = 4
    rounds: int | None = None  # None is the analysis's own number
    quick: bool = False  # embedded data and few rounds: to see that it works


@dataclass(frozen=True)
class AnalysisResult:
    """What an analysis gives back: tables as rows, findings, pictures."""

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    figures: "dict[str, Figure]" = field(default_factory=dict)


def _analysis(module: str) -> Callable[[AnalysisRequest], AnalysisResult]:
    def analyse(request: AnalysisRequest) -> AnalysisResult:
        return import_module(f"fedgma.paper.analyses.{module}").analyse(request)  # type: ignore[no-any-return]

    return analyse


ANALYSES: dict[str, Callable[[AnalysisRequest], AnalysisResult]] = {
    "E7": _analysis("participation"),
    "E11": _analysis("agreement"),
    "E16": _analysis("membership"),
    "E17": _analysis("stability"),
    "E18": _analysis("quadratic"),
}
