"""The paper's analyses besides its tables: participation, agreement, stability of the mask, membership inference.

Each analysis is a module with `analyse(request)`, and with functions from arrays to numbers that also serve your own
models. `ANALYSES` lists the analyses by the number of their experiment.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fedgma.paper.findings import Finding

if TYPE_CHECKING:  # listing the analyses does not import torch or matplotlib
    from matplotlib.figure import Figure

T = TypeVar("T")


class Follow(Protocol):
    """Shows the progress of a loop."""

    def __call__(self, steps: Iterable[T], total: int, what: str, /) -> Iterable[T]:
        """Hand the steps on one by one; show how many of the total are done, and what they are."""


def unseen(steps: Iterable[T], total: int, what: str, /) -> Iterable[T]:
    """The steps as they are, with nothing shown."""
    return steps


@dataclass(frozen=True)
class AnalysisRequest:
    """The parameters of an analysis."""

    device: str = "auto"
    out: Path = Path("results")
    seeds: int = 4
    first_seed: int = 0
    rounds: int | None = None  # None: the default of the analysis
    quick: bool = False  # embedded data and few rounds, as a check that it works
    follow: Follow = unseen  # what shows the progress of its loops

    @property
    def seed_range(self) -> range:
        """The seeds of its runs."""
        return range(self.first_seed, self.first_seed + self.seeds)


@dataclass(frozen=True)
class AnalysisResult:
    """The result of an analysis: tables as rows, findings, figures."""

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
    "C25": _analysis("usefulness"),
    "C35": _analysis("participation"),
    "C36": _analysis("agreement"),
}
