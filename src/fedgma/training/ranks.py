"""One fleet over several processes (ranks): each trains some of the lanes, and all receive all results.

Every rank holds the same state and plays the same rounds. What takes the time is shared out: local training by lanes,
evaluation by batches of samples. The updates of a rank go to all others as they are, and every rank adds them to its
tally in the order of the lanes. So a round has the same bits with any number of ranks. Tallies of each rank's own lanes
would be fewer bytes, but buffers, metrics and control variates are plain floating-point sums, which depend on how they
are grouped.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedgma.errors import ConfigError
from fedgma.training.lane_batch import LaneBatch, Tilt, Trained
from fedgma.training.stacked import Stacked

Sent = Sequence[tuple[Tensor, int]]  # contiguous tensors, and the rank that each is taken from
LARGE = 1 << 16  # bytes of a row that are sent as they are; smaller rows are packed


def _alone(sent: Sent) -> None:
    """With one rank there is nobody to send to."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a fleet, seen from one of them."""

    rank: int = 0
    size: int = 1
    send: Callable[[Sent], None] = _alone  # tensors of some ranks to all others, in place; all ranks call it alike
    beside: int = 1  # ranks on the same GPU, this one included

    @property
    def first(self) -> bool:
        """Whether this rank writes the records and speaks to the user."""
        return self.rank == 0

    def map(self, function: Callable[[Any], tuple[Tensor, ...]], pieces: Sequence[Any]) -> Iterable[tuple[Tensor, ...]]:
        """What a function makes of each piece, in tensors of equal shapes; enough pieces are shared out."""
        if self.size == 1 or len(pieces) < self.size:
            return map(function, pieces)
        edges = cuts(np.ones(len(pieces)), self.size)
        results = [function(piece) for piece in pieces[slice(*edges[self.rank : self.rank + 2])]]
        columns = gather(self, edges, [torch.stack(column) for column in zip(*results, strict=True)])
        return list(zip(*(column.unbind() for column in columns), strict=True))


ALONE = Ranks()


class ReadyLanes(Protocol):
    """Lanes that are ready to train."""

    @property
    def batch(self) -> LaneBatch:
        """Their batches."""

    def take(self, rows: np.ndarray) -> Self:
        """Some of the lanes."""


Ready = TypeVar("Ready", bound=ReadyLanes)


def train_shared(
    ranks: Ranks, pieces: Iterable[Ready], train: Callable[[Ready], Trained], model: Tensor
) -> Iterator[tuple[Ready, Trained]]:
    """Pieces of the lanes of a round with the results of their training, in order and on every rank.

    Where there are as many pieces as ranks, each rank trains one. Those that are left are divided. `model` [run, entry]
    is compared between ranks.
    """
    waiting = iter(pieces)
    while group := list(itertools.islice(waiting, ranks.size)):
        own_piece = train(group[ranks.rank]) if len(group) == ranks.size else None
        for owner, ready in enumerate(group):
            size, costs = ready.batch.size, ready.batch.steps
            edges = [0] * (owner + 1) + [size] * (ranks.size - owner) if own_piece else cuts(costs, ranks.size)
            trained = own_piece or train(ready.take(_rows(ranks, edges)))
            yield ready, _gathered(ranks, edges, trained, model)


def _rows(ranks: Ranks, edges: Sequence[int]) -> np.ndarray:
    """This rank's lanes; without any, the first one, so that shapes and number types of results are known."""
    begin, end = edges[ranks.rank : ranks.rank + 2]
    return np.arange(begin, end) if begin < end else np.zeros(1, np.int64)


def cuts(costs: np.ndarray, parts: int) -> list[int]:
    """Where a row of lanes is cut into consecutive parts of about equal cost: the first of each part, and the end.

    >>> cuts(np.array([5, 5, 5, 5, 5]), 2), cuts(np.array([9, 1, 1, 1]), 2), cuts(np.array([1]), 2)
    ([0, 2, 5], [0, 1, 4], [0, 0, 1])
    """
    middle = np.cumsum(costs) - costs / 2
    owner = np.minimum(middle * parts // max(float(np.sum(costs)), 1e-12), parts - 1)
    return [*np.searchsorted(owner, np.arange(parts)).tolist(), len(costs)]


def _gathered(ranks: Ranks, edges: Sequence[int], trained: Trained, model: Tensor) -> Trained:
    """The results of all lanes, of which rank r has edges[r] to edges[r + 1]."""
    if ranks.size == 1:
        return trained
    tilts = () if trained.tilt is None else (trained.tilt.own, trained.tilt.last)
    stacks: list[Stacked] = [trained.buffers, *tilts]
    began = model.view(torch.int32).sum(dtype=torch.int64).expand(len(trained.loss))
    small = [began, trained.loss, trained.measures, *(value for stack in stacks for value in stack.values())]
    flat, began, loss, measures, *rest = gather(ranks, edges, [trained.flat, *small])
    _check_same(began, edges)
    values = iter(rest)
    buffers, *turned = [{name: next(values) for name in stack} for stack in stacks]
    tilt = None if trained.tilt is None else Tilt(turned[0], {}, turned[1])  # what is shared, all ranks have
    return trained._replace(flat=flat, buffers=buffers, loss=loss, measures=measures, tilt=tilt)


def _check_same(began: Tensor, edges: Sequence[int]) -> None:
    """Raise an error if ranks began from different weights; on a GPU this is not checked, since reading would wait."""
    if began.is_cuda or bool((began == began[0]).all()):
        return
    other = int((began != began[0]).nonzero()[0])
    first, rank = (int(np.searchsorted(edges, lane, side="right")) - 1 for lane in (0, other))
    raise ConfigError(
        f"ranks {first} and {rank} computed different models; all ranks need the same kind of processor or GPU and "
        "the same versions of packages, and your own rules must not draw random numbers of their own"
    )


def gather(ranks: Ranks, edges: Sequence[int], parts: Sequence[Tensor]) -> list[Tensor]:
    """The rows of all ranks, in order, of each part; rank r has rows edges[r] to edges[r + 1] of the result."""
    tables = [part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts]
    rows = [table.contiguous().view(torch.uint8) for table in tables]
    large = [index for index, row in enumerate(rows) if row.shape[1] >= LARGE]
    small = [index for index in range(len(rows)) if index not in large]
    packed = [torch.cat([rows[index] for index in small], 1)] if small else []
    exchanged = _exchanged(ranks, edges, [*(rows[index] for index in large), *packed])
    gathered = dict(zip(large, exchanged, strict=False))
    if small:
        pieces = torch.split(exchanged[-1], [rows[index].shape[1] for index in small], 1)
        gathered |= {index: piece.flatten().clone() for index, piece in zip(small, pieces, strict=True)}  # aligned
    shapes = [(edges[-1], *part.shape[1:]) for part in parts]
    return [gathered[index].flatten().view(part.dtype).view(shapes[index]) for index, part in enumerate(parts)]


def _exchanged(ranks: Ranks, edges: Sequence[int], tables: Sequence[Tensor]) -> list[Tensor]:
    """Tables with the rows of all ranks, of which this one has filled in its own."""
    whole = [torch.empty((edges[-1], *table.shape[1:]), dtype=table.dtype, device=table.device) for table in tables]
    begin, end = edges[ranks.rank : ranks.rank + 2]
    for table, rows_of_this_rank in zip(whole, tables, strict=True):
        table[begin:end] = rows_of_this_rank[: end - begin]
    ranges = [(source, slice(*ends)) for source, ends in enumerate(itertools.pairwise(edges))]
    sent = [(table[rows], source) for source, rows in ranges for table in whole]
    ranks.send([(table, source) for table, source in sent if table.numel()])
    return whole


def agreed(ranks: Ranks, ask: Callable[[], bool]) -> Callable[[], bool]:
    """A question that the first rank answers for all; every rank must ask it as often."""
    if ranks.size == 1:
        return ask

    def answer() -> bool:
        flag = torch.tensor([ask()], dtype=torch.uint8)
        ranks.send([(flag, 0)])
        return bool(flag)

    return answer


def from_first(ranks: Ranks, data: bytes) -> bytes:
    """The bytes of the first rank, on every rank."""
    if ranks.size == 1:
        return data
    length = torch.tensor([len(data)], dtype=torch.int64)
    ranks.send([(length, 0)])
    content = np.frombuffer(data, np.uint8).copy() if ranks.first else np.empty(int(length), np.uint8)
    if len(content):
        ranks.send([(torch.from_numpy(content), 0)])
    return content.tobytes()
