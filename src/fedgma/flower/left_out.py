"""The nodes that a round is without: refused, failed or late, with the reasons."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedgma.aggregation.gate import Refusal
from fedgma.errors import FedgmaError, NotEnoughClients

NAMED = 20  # nodes of a kind that are named


class LeftOut(NamedTuple):
    """Nodes whose replies a round does not count."""

    refused: tuple[Refusal, ...] = ()
    failed: Mapping[int, str] = {}  # what each said
    late: tuple[int, ...] = ()  # no reply in time

    def record(self) -> dict[str, Any]:
        """The nodes as a round's line has them."""
        refused = [refusal._asdict() for refusal in self.refused]
        return {"refused": refused, "failed": sorted(self.failed), "late": list(self.late)}

    def explain(self, error: FedgmaError, valid: int, quorum: int) -> FedgmaError:
        """The error of a round with so many valid replies, with the nodes that it is without."""
        kinds = [words for words in (self._refusals(), self._failures(), self._silence()) if words]
        if not isinstance(error, NotEnoughClients) or not kinds:
            return error
        if valid < quorum:
            error = NotEnoughClients(
                f"the round needs {quorum} valid replies, got {valid}" if valid else "no valid update to average"
            )
        return NotEnoughClients(f"{error}: {'; '.join(kinds)}")

    def _refusals(self) -> str:
        if not self.refused:
            return ""
        first, reasons = self.refused[0], ", ".join(sorted({refusal.reason for refusal in self.refused}))
        return f"{len(self.refused)} refused ({reasons}), the first, of node {first.client}: {first.detail}"

    def _failures(self) -> str:
        if not self.failed:
            return ""
        node, reason = next(iter(self.failed.items()))
        return f"{len(self.failed)} failed, the first, node {node}: {reason}"

    def _silence(self) -> str:
        return f"{len(self.late)} late (no reply in time): {listed(self.late)}" if self.late else ""


def listed(nodes: tuple[int, ...]) -> str:
    """Nodes for a message; of many, the first ones.

    >>> listed((5, 7))
    'nodes 5, 7'
    """
    more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    return f"node{'s' * (len(nodes) != 1)} {', '.join(map(str, nodes[:NAMED]))}{more}"
