"""What a task is: what a model learns from a batch, as a loss, metrics and how a target looks.

A `Task` is a value with two functions of a batch, `loss` and `metrics`, each with one number for each sample. Only the
means over samples are kept, so a task works in batches of any size, in lanes and on a device. A metric that is not a
mean over samples is computed from such means by `summary`, as the perplexity is from the loss. One that needs all
outputs of a split, such as the AUC, is in `whole`; it is evaluated and not measured in training.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.errors import ConfigError
from fedgma.training.lane_batch import keyed_generators

Means = Mapping[str, Tensor]
Whole = Callable[[Tensor, Tensor], Any]  # outputs [sample, number] and targets of a split -> one number


class Columns(NamedTuple):
    """The measures of a task side by side in one tensor: their names, and how many columns each has."""

    names: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def number(self) -> int:
        """How many columns there are."""
        return sum(self.widths)


@dataclass(frozen=True, eq=False)
class Task:
    """A loss, metrics, which way each metric is better, and how a target looks."""

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]  # output and target of n samples -> [n]
    metrics: Callable[[Tensor, Tensor], Means]  # output and target -> measures by name, each [n] or [n, m]
    better: Mapping[str, str]  # metric -> "higher" or "lower"; verdicts are about the first
    units: Mapping[str, str] = field(default_factory=dict)  # "%": a share, shown in percent; else the unit of a metric
    target: str = "any"  # one of `data.targets.TARGETS`, or any of them
    weight: Callable[[Tensor], Tensor] | None = None  # target -> how much a sample counts [n]; None: all the same
    summary: Callable[[Means], Means] | None = None  # means of loss and measures -> metrics; None: they are the means
    mean_loss: Callable[[Tensor, Tensor], Tensor] | None = None  # a batch's mean loss in one call
    columns: Columns | None = None  # of the measures, if they are known without a trial
    whole: Mapping[str, Whole] = field(default_factory=dict)  # metrics of a whole split by name; `better` has them too

    @property
    def names(self) -> tuple[str, ...]:
        """What is recorded of a split: the loss and the metrics, last those of a whole split."""
        return ("loss", *self.averaged, *self.whole)

    @property
    def averaged(self) -> tuple[str, ...]:
        """The metrics that come from means over samples: of training too."""
        return tuple(name for name in self.better if name not in self.whole)

    @property
    def first(self) -> int:
        """The position in `names` of what verdicts are about: the first metric, or the loss if there is none."""
        return self.names.index(next(iter(self.better), "loss"))

    @property
    def lower(self) -> bool:
        """Whether lower is better for what verdicts are about."""
        return next(iter(self.better.values()), "lower") == "lower"


def measures(task: Task, output: Tensor, y: Tensor) -> Tensor:
    """The measures of every sample: [sample, column].

    >>> from fedgma.training.tasks import CLASSIFICATION
    >>> measures(CLASSIFICATION, torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 0])).tolist()
    [[True], [False]]
    """
    columns = [value.reshape(len(y), -1) for value in task.metrics(output, y).values()]
    return torch.cat(columns, 1) if columns else torch.zeros(len(y), 0, device=y.device)


def losses(task: Task, output: Tensor, y: Tensor) -> Tensor:
    """The loss of every sample: [sample]."""
    return task.loss(output, y).reshape(len(y))


def batch_loss(task: Task, output: Tensor, y: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss, loss sum and sums of the measures of the first `count` rows of a batch; the rest is padding.

    >>> from fedgma.training.tasks import CLASSIFICATION
    >>> mean, total, hits = batch_loss(CLASSIFICATION, torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]), torch.tensor(2))
    >>> round(mean.item(), 4), round(total.item(), 4), hits.tolist()
    (0.6931, 1.3863, [2])
    """
    real = torch.arange(len(y), device=y.device) < count
    loss, measured = losses(task, output, y), measures(task, output, y)
    if task.weight is None:
        total = torch.where(real, loss, 0.0).sum()
        return total / count.clamp(min=1), total, torch.where(real[:, None], measured, 0).sum(0)
    weight = torch.where(real, task.weight(y), 0.0)
    mean, middle = weighted_means(torch.where(real, loss, 0.0), torch.where(real[:, None], measured, 0), weight)
    return mean, mean * count, middle * count


def mean_loss(task: Task, output: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a batch without padding."""
    if task.mean_loss is not None:
        return task.mean_loss(output, y)
    return sample_means(task, losses(task, output, y), output.new_zeros(len(y), 0), y)[0]


def measure_sums(task: Task, output: Tensor, y: Tensor) -> Tensor:
    """Sums of the measures over a batch without padding: [column]."""
    measured = measures(task, output, y)
    return measured.sum(0) if task.weight is None else sample_means(task, measured[:, 0], measured, y)[1] * len(y)


def sample_means(task: Task, loss: Tensor, measured: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Means over the samples of loss [..., sample] and measures [..., sample, column]."""
    if task.weight is None:
        return loss.mean(-1), (measured if measured.is_floating_point() else measured.float()).mean(-2)
    return weighted_means(loss, measured, task.weight(y))


def weighted_means(loss: Tensor, measured: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Means of loss [..., sample] and measures [..., sample, column] with the given weights [..., sample].

    >>> loss, hits, tokens = torch.tensor([1.0, 4.0]), torch.tensor([[0.0], [1.0]]), torch.tensor([2.0, 1.0])
    >>> mean, measured = weighted_means(loss, hits, tokens)
    >>> mean.item(), round(measured.item(), 3)
    (2.0, 0.333)
    """
    total = weight.sum(-1)
    total = torch.where(total > 0, total, 1.0)
    return (loss * weight).sum(-1) / total, (measured * weight[..., None]).sum(-2) / total[..., None]


def figures(task: Task, columns: Columns, loss: Tensor, means: Tensor) -> Tensor:
    """Loss and averaged metrics, [..., name] in the order of `task.names`, from means of loss and measures."""
    parts = torch.split(means, list(columns.widths), -1) if columns.widths else ()
    known = {
        name: part.squeeze(-1) if part.shape[-1] == 1 else part for name, part in zip(columns.names, parts, strict=True)
    }
    metrics = known if task.summary is None else task.summary({"loss": loss, **known})
    return torch.stack([loss, *(metrics[name].to(loss.dtype) for name in task.averaged)], -1)


def whole_number(task: Task, name: str, outputs: Tensor, y: Tensor) -> Tensor:
    """A metric of a whole split, from outputs [sample, number] and targets; an error if it fails or is not a number."""
    try:
        number = torch.as_tensor(task.whole[name](outputs, y), dtype=torch.float64, device=outputs.device)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(
            f"task {task.name}: metric {name!r} failed on {len(y)} samples ({type(error).__name__}: {error}); "
            "return nan where it is not defined, such as for samples of one class"
        ) from error
    if number.numel() != 1:
        _refuse(task, f"metric {name!r} in `whole` to return one number", f"{_form(number)} for {len(y)} samples")
    return number.reshape(())


def columns_of(task: Task, model: nn.Module, pool: Pool) -> Columns:
    """The measures of a task, found by a trial on two samples; an error if loss or metrics do not have their form."""
    if task.columns is not None:
        return task.columns
    index = torch.zeros(2, dtype=torch.int64, device=pool.y.device)
    x, y = pool.batch(index, index)
    with torch.no_grad(), keyed_generators(pool.y.device, 0):
        output = copy.deepcopy(model).eval()(x)
        loss, metrics = (_tried(task, part, output, y) for part in ("loss", "metrics"))
    if not isinstance(loss, Tensor) or loss.numel() != 2:
        _refuse(task, "loss to return a tensor with one number for each sample", f"{_form(loss)} for two samples")
    if not isinstance(metrics, Mapping):
        _refuse(task, "metrics to return a mapping from names to tensors", _form(metrics))
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != 2:
            _refuse(task, f"metric {name!r} to have one number for each sample", f"{_form(value)} for two samples")
    columns = Columns(tuple(metrics), tuple(value[0].numel() for value in metrics.values()))
    _check_figures(task, columns, loss.reshape(2).mean(), metrics)
    for name in task.whole:
        whole_number(task, name, output.float().flatten(1), y)
    return columns


def _check_figures(task: Task, columns: Columns, loss: Tensor, metrics: Means) -> None:
    """Refuse metrics that `better` does not name or that `whole` has too, and those of several numbers."""
    if task.summary is not None:
        means = {name: value.float().mean(0).squeeze(-1) for name, value in metrics.items()}
        metrics = task.summary({"loss": loss, **means})
    elif wide := [name for name, width in zip(*columns, strict=True) if width != 1]:
        _refuse(task, f"one number for each sample of metric {wide[0]!r}", "several; average them, or add `summary`")
    if twice := sorted(set(metrics) & set(task.whole)):
        _refuse(task, f"metric {twice[0]!r} in `metrics` or in `whole`", "both; leave one of them out")
    if set(metrics) != set(task.averaged):
        names = sorted({*metrics, *task.whole})
        wanted = ", ".join(f'"{name}": "{task.better.get(name, "lower")}"' for name in names)
        got = ", ".join(sorted(task.better)) or "none"
        _refuse(task, f"better = {{{wanted}}} to say of each metric whether lower or higher is better", got)


def _tried(task: Task, part: str, output: Tensor, y: Tensor) -> Any:
    try:
        return getattr(task, part)(output, y)
    except Exception as error:  # a user's function may raise anything
        shapes = f"an output of shape {list(output.shape)} and a target of shape {list(y.shape)}"
        raise ConfigError(f"task {task.name}: {part} failed on {shapes} ({type(error).__name__}: {error})") from error


def _refuse(task: Task, expected: str, got: str) -> NoReturn:
    raise ConfigError(f"task {task.name}: expected {expected}, got {got}")


def _form(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
