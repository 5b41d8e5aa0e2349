"""The library's tasks, and `TASKS`, the one list of them."""

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.data.files.own.targets import PADDING
from fedgma.errors import ConfigError
from fedgma.training.metrics import auc, balanced_accuracy, macro_f1
from fedgma.training.task import Columns, Means, Task


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def _hits(logits: Tensor, y: Tensor) -> Means:
    return {"accuracy": logits.argmax(-1) == y}


def _squared_error(output: Tensor, y: Tensor) -> Tensor:
    return (output.reshape(y.shape) - y).square().mean(-1)


def _errors(output: Tensor, y: Tensor) -> Means:
    """Errors of each sample, and what the coefficient of determination is computed from."""
    error, wide = output.reshape(y.shape) - y, y.double()  # float64: the variance is a difference of two means
    squares = error.square()
    absolute = error.abs().mean(-1)
    return {"mse": squares.mean(-1), "mae": absolute, "squares": squares, "y": wide, "y2": wide.square()}


def _determination(means: Means) -> Means:
    """Adds R2, the mean over outputs; a constant output has 1 where it is met exactly, else 0."""
    variance = means["y2"] - means["y"].square()
    varies = variance > 0
    ratio = 1 - means["squares"] / torch.where(varies, variance, 1.0)
    ratio = torch.where(varies, ratio, (means["squares"] == 0).to(ratio.dtype))
    several = ratio.dim() > means["mse"].dim()
    return {"mse": means["mse"], "mae": means["mae"], "r2": ratio.mean(-1) if several else ratio}


def _label_losses(logits: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(-1)


def _label_hits(logits: Tensor, y: Tensor) -> Means:
    said, true = logits > 0, y > 0.5
    right = said == true
    counts = {"both": said & true, "said": said, "true": true}
    return {
        **{name: value.float().sum(-1) for name, value in counts.items()},
        "accuracy": right.float().mean(-1),
        "exact": right.all(-1),
    }


def _f1(means: Means) -> Means:
    """Adds F1 over all labels and samples (micro average); 0 where no label is set or predicted."""
    of = means["said"] + means["true"]
    f1 = 2 * means["both"] / torch.where(of > 0, of, 1.0)
    return {"f1": f1, "accuracy": means["accuracy"], "exact": means["exact"]}


def _tokens(y: Tensor) -> Tensor:
    """How many tokens of each sample are real."""
    return (y != PADDING).sum(-1).float()


def _token_losses(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy over the real tokens of each sample."""
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    if smoothing:
        chosen = (1 - smoothing) * chosen + smoothing * logs.mean(-1)
    return -torch.where(y == PADDING, 0.0, chosen).sum(-1) / _tokens(y).clamp(min=1)


def _token_hits(logits: Tensor, y: Tensor) -> Means:
    return {"accuracy": (logits.argmax(-1) == y).float().sum(-1) / _tokens(y).clamp(min=1)}


def _perplexity(means: Means) -> Means:
    return {"perplexity": means["loss"].exp(), "accuracy": means["accuracy"]}


CLASSIFICATION = Task(
    name="classification",
    loss=_cross_entropy,
    metrics=_hits,
    better={"accuracy": "higher"},
    units={"accuracy": "%"},
    target="class",
    mean_loss=F.cross_entropy,
    columns=Columns(("accuracy",), (1,)),
)
IMBALANCED = replace(  # a classification in which the accuracy says little
    CLASSIFICATION,
    name="imbalanced",
    better=dict.fromkeys(("auc", "balanced_accuracy", "macro_f1", "accuracy"), "higher"),
    units=dict.fromkeys(("auc", "balanced_accuracy", "macro_f1", "accuracy"), "%"),
    whole={"auc": auc, "balanced_accuracy": balanced_accuracy, "macro_f1": macro_f1},
)
REGRESSION = Task(
    name="regression",
    loss=_squared_error,
    metrics=_errors,
    better={"mse": "lower", "mae": "lower", "r2": "higher"},
    target="float",
    summary=_determination,
)
MULTI_LABEL = Task(
    name="multi_label",
    loss=_label_losses,
    metrics=_label_hits,
    better={"f1": "higher", "accuracy": "higher", "exact": "higher"},
    units=dict.fromkeys(("f1", "accuracy", "exact"), "%"),
    target="labels",
    summary=_f1,
)
NEXT_TOKEN = Task(
    name="next_token",
    loss=_token_losses,
    metrics=_token_hits,
    better={"perplexity": "lower", "accuracy": "higher"},
    units={"accuracy": "%"},
    target="tokens",
    weight=_tokens,
    summary=_perplexity,
)


def classifies(task: Task) -> bool:
    """Whether a task trains as `CLASSIFICATION` does, however it is scored: what is written for that serves it too."""
    return task.loss is CLASSIFICATION.loss and task.metrics is CLASSIFICATION.metrics


def smoothed(task: Task, smoothing: float) -> Task:
    """The task with label smoothing in its loss: of each label, a share is spread evenly over all classes.

    (Szegedy and others, Rethinking the Inception Architecture for Computer Vision, 2016.) Metrics stay as they are.
    """
    if not smoothing:
        return task
    if classifies(task):
        by_sample = functools.partial(F.cross_entropy, label_smoothing=smoothing, reduction="none")
        return replace(task, loss=by_sample, mean_loss=functools.partial(F.cross_entropy, label_smoothing=smoothing))
    if task is NEXT_TOKEN:
        return replace(task, loss=functools.partial(_token_losses, smoothing=smoothing))
    raise ConfigError(
        f"label_smoothing is for the tasks classification, imbalanced and next_token, got task {task.name!r}"
    )


TASKS = {task.name: task for task in (CLASSIFICATION, IMBALANCED, REGRESSION, MULTI_LABEL, NEXT_TOKEN)}
