"""Membership inference on arrays: was this sample in the training data? Attacks return scores; scores give rates.

Confidences are those of the true class, on the logit scale: log(p / (1 - p)), which is close to Gaussian over models.
Arrays are [model, sample]; `inside` marks the samples that each model was trained on. Each model in turn is the target
with the others as its shadow models, so K models give K targets.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedgma.errors import ConfigError
from fedgma.seeds import generator

Numbers = npt.NDArray[np.float64]
Inside = npt.NDArray[np.bool_]
EPOCHS, RATE = 5000, 1e-3  # of the paper's attacker; its optimiser is our choice, full-batch Adam
LOGISTIC = "logistic, as printed"  # the paper's attack in tables
FALSE_POSITIVES = {"tpr_at_0.1%": 0.001, "tpr_at_1%": 0.01}


def confidences(logits: npt.NDArray[np.floating[Any]], labels: npt.NDArray[np.int64]) -> Numbers:
    """log(p / (1 - p)) of the true class, computed without p: logits [..., sample, class] to [..., sample].

    >>> confidences(np.array([[0.0, np.log(3.0)]]), np.array([1])).round(4).tolist()  # p = 3/4
    [1.0986]
    """
    logits = np.asarray(logits, np.float64)
    true_class = np.take_along_axis(logits, np.broadcast_to(labels, logits.shape[:-1])[..., None], -1)[..., 0]
    others = np.where(np.arange(logits.shape[-1]) == np.asarray(labels)[..., None], -np.inf, logits)
    top = others.max(-1)
    return np.asarray(true_class - top - np.log(np.exp(others - top[..., None]).sum(-1)))


def halves(models: int, samples: int, *, seed: int = 0) -> Inside:
    """Which samples each model is trained on: every sample is inside exactly half of the models.

    >>> halves(4, 6).sum(0).tolist()
    [2, 2, 2, 2, 2, 2]
    """
    if models < 2 or models % 2:
        raise ConfigError(
            f"expected an even number of shadow models, 2 or more, got {models}; set `shadows` to an even number"
        )
    drawn = generator(seed, "halves").random((models, samples))
    return np.asarray(drawn.argsort(0).argsort(0) < models // 2)


class Curve(NamedTuple):
    """ROC curve of an attack: the shares of non-members and of members that are classified as members."""

    false_positives: Numbers
    true_positives: Numbers


def trade_off(scores: Numbers, members: Inside) -> Curve:
    """The ROC curve over all thresholds on a score; equal scores are classified alike.

    >>> trade_off(np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, True, False, False]))
    Curve(false_positives=array([0. , 0. , 0.5, 1. ]), true_positives=array([0. , 0.5, 1. , 1. ]))
    """
    order = np.argsort(-scores, kind="stable")
    ranked, hit = scores[order], members[order]
    last = np.append(ranked[1:] != ranked[:-1], True)  # the end of a run of equal scores
    true, false = np.cumsum(hit)[last], np.cumsum(~hit)[last]
    start = np.zeros(1)
    return Curve(
        np.concatenate([start, false / max(int((~members).sum()), 1)]),
        np.concatenate([start, true / max(int(members.sum()), 1)]),
    )


def area(curve: Curve) -> float:
    """Area under the ROC curve; 0.5 is chance.

    >>> area(trade_off(np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, True, False, False])))
    0.875
    """
    return float(np.trapezoid(curve.true_positives, curve.false_positives))


def rate_at(curve: Curve, false_positives: float) -> float:
    """The largest true positive rate with at most this false positive rate.

    >>> rate_at(trade_off(np.array([3.0, 2.0, 1.0]), np.array([True, False, True])), 0.0)
    0.5
    """
    return float(curve.true_positives[curve.false_positives <= false_positives + 1e-12].max())


def figures(scores: Numbers, members: Inside) -> dict[str, float]:
    """Summary of an attack in %: area, best balanced accuracy, and true positive rates at low false positive rates."""
    curve = trade_off(scores, members)
    best = float((1 + curve.true_positives - curve.false_positives).max() / 2)
    rates = {name: 100 * rate_at(curve, share) for name, share in FALSE_POSITIVES.items()}
    return {"auc_%": 100 * area(curve), "accuracy_%": 100 * best, **rates}


def lira(confidence: Numbers, inside: Inside, target: int, *, offline: bool = False, pooled: bool = True) -> Numbers:
    """Scores [sample] of the likelihood-ratio attack (Carlini et al. 2022) on one of the models.

    Gaussians are fitted sample by sample to the confidences of the other models that saw it and of those that did not.
    `pooled` uses one variance for all samples, as recommended for fewer than about 64 shadows. `offline` uses only the
    models that did not see the sample.

    >>> seen = np.array([[True, False], [True, False], [False, True], [False, True]])
    >>> lira(np.where(seen, 4.0, 0.0) + [[0.1], [-0.1], [0.1], [-0.1]], seen, 0).round().tolist()
    [280.0, -253.0]
    """
    others = np.arange(len(confidence)) != target
    known, saw, observed = confidence[others], inside[others], confidence[target]
    outer, spread_out = _distances(observed, known, ~saw, pooled)
    if offline:
        return outer
    inner, spread_in = _distances(observed, known, saw, pooled)
    return np.asarray((outer**2 - inner**2) / 2 + np.log(spread_out / spread_in))


def _distances(observed: Numbers, confidence: Numbers, chosen: Inside, pooled: bool) -> tuple[Numbers, Numbers]:
    """The distance of each sample from the chosen models' confidences in standard deviations; and these deviations.

    A mean over n models is itself uncertain, so a new value lies sqrt(1 + 1/n) deviations away on average. Without that
    factor a target's members, which have one model fewer inside than outside, would look less like members by chance.
    """
    count = chosen.sum(0)
    if not count.all():
        raise ConfigError(
            "expected every sample inside some shadow models and outside others, but some are not; use more models"
        )
    mean = np.where(chosen, confidence, 0.0).sum(0) / count
    squares = np.where(chosen, (confidence - mean) ** 2, 0.0).sum(0)
    if pooled:
        spread = np.full_like(mean, np.sqrt(squares.sum() / max(int((count - 1).sum()), 1)))
    else:
        spread = np.sqrt(squares / np.maximum(count - 1, 1))
    spread = np.maximum(spread, 1e-6)
    return (observed - mean) / (spread * np.sqrt(1 + 1 / count)), spread


def rmia(confidence: Numbers, inside: Inside, target: int) -> Numbers:
    """Scores [sample] of the relative attack (Zarifzadeh et al. 2024) on one of the models.

    Its score is the share of population samples z with (p(x) / mean p(x)) / (p(z) / mean p(z)) above a constant, means
    over the shadows. With one population for all x it rises with the first ratio, so the ratio ranks samples alike;
    its log is returned.

    >>> rmia(np.array([[0.0, 0.0], [np.log(3.0), 0.0]]), np.array([[True, False], [False, True]]), 1).round(3).tolist()
    [0.405, 0.0]
    """
    others = np.arange(len(confidence)) != target
    logs = -np.logaddexp(0.0, -confidence)  # log p
    half = inside[others].sum(0).clip(1), (~inside[others]).sum(0).clip(1)
    chances = np.exp(logs[others])
    seen = np.where(inside[others], chances, 0.0).sum(0) / half[0]
    unseen = np.where(inside[others], 0.0, chances).sum(0) / half[1]
    none = (~inside[others].any(0), inside[others].all(0))  # with two models, all shadows of a sample are of one kind
    mean = np.where(none[0], unseen, np.where(none[1], seen, (seen + unseen) / 2))
    return np.asarray(logs[target] - np.log(np.maximum(mean, 1e-300)))


def threshold(confidence: Numbers, inside: Inside, target: int) -> Numbers:
    """Scores of the simplest attack: the confidence itself, without shadow models."""
    return np.asarray(confidence[target])


Attack = Callable[[Numbers, Inside, int], Numbers]
ATTACKS: dict[str, Attack] = {
    "LiRA": lira,
    "LiRA, offline": lambda confidence, inside, target: lira(confidence, inside, target, offline=True),
    "RMIA": rmia,
    "threshold": threshold,
}


class Logistic(NamedTuple):
    """The paper's attacker on one model or on several."""

    accuracy: Numbers  # [model], on the attacker's own test half; 0.5 is chance
    auc: Numbers  # [model]
    epochs: npt.NDArray[np.int64]  # at which the losses were recorded
    train_loss: Numbers  # [model, epoch]
    test_loss: Numbers


def logistic_attack(
    members: Tensor, others: Tensor, *, epochs: int = EPOCHS, rate: float = RATE, seed: int = 0
) -> Logistic:
    """The paper's attack: logistic regression on the logits, trained on one half and tested on the other.

    Logits are [model, sample, class], or [sample, class] for one model, with as many members as non-members, on any
    device. They are standardised, and full-batch Adam trains the attacker.

    >>> noise = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    >>> logistic_attack(noise[:200] + 3, noise[200:], epochs=500, rate=0.05).accuracy.round(1).tolist()
    [1.0]
    """
    sides = [side[None] if side.dim() == 2 else side for side in (members, others)]
    size = min(sides[0].shape[1], sides[1].shape[1])
    rng = generator(seed, "attacker")
    orders = [torch.from_numpy(rng.permutation(side.shape[1])[:size]).to(side.device) for side in sides]
    shuffled = [side[:, order].double() for side, order in zip(sides, orders, strict=True)]
    half = size // 2
    x = torch.cat([shuffled[0][:, :half], shuffled[1][:, :half]], 1)
    centre, scale = x.mean(1, keepdim=True), x.std(1, keepdim=True).clamp(min=1e-9)
    label = torch.cat([torch.ones(half), torch.zeros(half)]).to(x)
    tests = torch.cat([shuffled[0][:, half : 2 * half], shuffled[1][:, half : 2 * half]], 1)
    return _fit_logistic(_with_one((x - centre) / scale), _with_one((tests - centre) / scale), label, epochs, rate)


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def _fit_logistic(x: Tensor, tests: Tensor, label: Tensor, epochs: int, rate: float) -> Logistic:
    """Full-batch Adam over all models at once: x [model, sample, feature]."""
    weights = x.new_zeros(len(x), x.shape[2], 1)
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    read, losses = [], []
    for epoch in range(epochs + 1):
        score = (x @ weights)[..., 0]
        if epoch % max(1, epochs // 100) == 0:
            read.append(epoch)
            losses.append(torch.stack([_loss(score, label), _loss((tests @ weights)[..., 0], label)]))
        if epoch < epochs:
            gradient = x.mT @ ((torch.sigmoid(score) - label) / len(label))[..., None]
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            grown = (second / (1 - 0.999 ** (epoch + 1))).sqrt() + 1e-8
            weights = weights - rate * first / (1 - 0.9 ** (epoch + 1)) / grown
    score = (tests @ weights)[..., 0]
    accuracy = ((score > 0) == (label > 0)).double().mean(1)
    known = (label > 0).cpu().numpy()
    areas = np.array([area(trade_off(row, known)) for row in score.cpu().numpy()])
    curves = torch.stack(losses, -1).cpu().numpy()  # [side, model, epoch]
    return Logistic(accuracy.cpu().numpy(), areas, np.array(read), curves[0], curves[1])


def _loss(score: Tensor, label: Tensor) -> Tensor:
    """Binary cross-entropy of each model."""
    return (torch.nn.functional.softplus(score) - score * label).mean(1)
