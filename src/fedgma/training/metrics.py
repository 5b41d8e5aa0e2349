"""Metrics of a classification from all logits [sample, class] and targets [sample] of a split at once.

They are computed in float64 from whole counts, on the device of the logits, and are NaN where they are not defined.
"""

import torch
from torch import Tensor


def auc(outputs: Tensor, targets: Tensor) -> Tensor:
    """Area under the ROC curve of logits [sample, class]; of several classes the mean of each against all others.

    It is the share of pairs of a sample of the class and another one that the class's logarithm of the probability puts
    in order; a tie counts one half. Classes that have all of the samples or none are left out.

    >>> auc(torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0], [0.0, 3.0]]), torch.tensor([0, 1, 0, 0])).item()
    0.8333333333333334
    """
    wide = outputs.double()
    pair = wide.shape[1] == 2  # a difference is exact, and both classes have the same area
    scores = (wide[:, 1] - wide[:, 0])[None] if pair else wide.log_softmax(1).T.contiguous()
    classes = torch.arange(len(scores), device=targets.device)[:, None] + int(pair)
    inside = targets == classes
    ordered = scores.sort(1).values
    doubled = torch.searchsorted(ordered, scores) + torch.searchsorted(ordered, scores, right=True) + 1  # ranks, twice
    positive = inside.sum(1)
    pairs = positive * (len(targets) - positive)
    wins = torch.where(inside, doubled, 0).sum(1) - positive * (positive + 1)  # twice, as whole numbers
    areas = torch.where(pairs > 0, wins / (2 * pairs).double(), torch.nan)
    return torch.where(scores.isnan().any(), torch.nan, areas.nanmean())


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over classes that have samples of the share of their samples that the largest logit names.

    >>> balanced_accuracy(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1])).item()
    0.75
    """
    table = _confusion(outputs, targets)
    return (table.diagonal() / table.sum(1)).nanmean()


def macro_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of F1 over classes that have samples or are named.

    >>> round(macro_f1(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1])).item(), 4)
    0.7333
    """
    table = _confusion(outputs, targets)
    return (2 * table.diagonal() / (table.sum(0) + table.sum(1))).nanmean()


def _confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    """How often the largest logit names each class for samples of each: float64 [class, named]."""
    number = outputs.shape[1]
    cell = targets * number + outputs.argmax(1)
    table = torch.zeros(number * number, dtype=torch.int64, device=outputs.device)
    return table.scatter_add_(0, cell, torch.ones_like(cell)).view(number, number).double()
