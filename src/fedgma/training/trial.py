"""One batch before the start: what does not fit between a model and its data is said in one sentence.

The model, in training mode, sees two samples of the real data, and the loss is differentiated, as in `loop`. Nothing is
changed and nothing is written.
"""

import copy
import inspect

import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.errors import ConfigError
from fedgma.training.lane_batch import keyed_generators
from fedgma.training.task import Task, columns_of, mean_loss
from fedgma.training.tasks import CLASSIFICATION, classifies

NEAR_ONE = 1e-3  # as close the probabilities of a sample sum to one, in any precision


def try_model(model: nn.Module, pool: Pool, name: str, task: Task = CLASSIFICATION) -> str | None:
    """Raise `ConfigError` if the model cannot be trained on samples of the pool; `name` is the model's in messages.

    A model that can be trained, but is hardly what its user means, gets a remark.
    """
    _check_parameters(model, name)
    model = copy.deepcopy(model).train()
    x, y = _first(pool, 2)
    with keyed_generators(pool.y.device, 0):
        try:
            outputs = model(x)
        except Exception as error:  # a module may raise anything
            raise ConfigError(
                f"model {name} could not be applied to a batch of shape {list(x.shape)} ({_first_line(error)}); "
                f"{_fix(model, x)}"
            ) from error
        check_outputs(outputs, x, pool.classes if classifies(task) else None, name)
        columns_of(task, model, pool)  # raises if loss and metrics do not fit the outputs
        try:
            mean_loss(task, outputs.float(), y).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ConfigError(
                f"the loss of model {name} could not be differentiated ({_first_line(error)}); "
                "its outputs must depend on its parameters by differentiable operations, without .detach() or .data"
            ) from error
    return _doubt(outputs.detach(), pool.classes, name) if classifies(task) else None


def _doubt(outputs: Tensor, classes: int, name: str) -> str | None:
    """What is doubtful about logits: that they are probabilities already, or more than there are classes."""
    if bool((outputs >= 0).all()) and bool(((outputs.sum(1) - 1).abs() < NEAR_ONE).all()):
        return (
            f"model {name} seems to put out probabilities, which slows its training down; the loss takes logits: "
            "remove the softmax"
        )
    if outputs.shape[1] > classes:
        return f"model {name} has {outputs.shape[1]} outputs for {classes} classes; the others are never right"
    return None


def _fix(model: nn.Module, x: Tensor) -> str:
    """What to change in a model that cannot be applied to a batch."""
    try:
        inspect.signature(model.forward).bind(x)
    except TypeError:
        return "forward is called with one tensor, the batch; join several inputs in the samples and divide them there"
    except ValueError:  # a function without a signature
        pass
    return f"its first layer must take samples of shape {list(x.shape[1:])}"


def _check_parameters(model: nn.Module, name: str) -> None:
    kinds = {value.dtype for value in model.parameters() if value.requires_grad}
    if not kinds:
        raise ConfigError(
            f"model {name} has no trainable parameters, so there is nothing to train; "
            "make its layers attributes in __init__, and leave requires_grad of at least one parameter on"
        )
    if kinds not in ({torch.float32}, {torch.float64}):
        types = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise ConfigError(
            f"the trainable parameters of model {name} must be float32, got {types}; "
            f"{'use real numbers' if any(kind.is_complex for kind in kinds) else 'call .float() on it'}, "
            "and choose faster arithmetic with --precision"
        )


def check_outputs(outputs: object, x: Tensor, classes: int | None, name: str) -> None:
    """Raise `ConfigError` unless a model's outputs for the batch `x` are finite, and logits of `classes` if given."""
    what = "outputs" if classes is None else "logits"
    wanted = f"model {name} must return one tensor of {what}"
    if classes is not None:
        wanted = f"{wanted}, [{len(x)}, {classes}] for {len(x)} samples"
    if not isinstance(outputs, Tensor):
        raise ConfigError(f"{wanted}, got {_kind(outputs)}; return the {what} alone")
    if classes is not None and (outputs.ndim != 2 or len(outputs) != len(x) or outputs.shape[1] < classes):
        raise ConfigError(f"{wanted}, got {list(outputs.shape)}; end it with a layer of {classes} outputs")
    if not outputs.is_floating_point():
        raise ConfigError(f"{wanted}, got {outputs.dtype}; return scores before argmax, as floating-point numbers")
    if not bool(torch.isfinite(outputs).all()):
        largest = float(x.abs().max())
        raise ConfigError(
            f"the outputs of model {name} for its first two samples must be finite, got a NaN or an infinity; "
            f"check its initial weights, or scale the samples, whose values reach {largest:.3g}"
        )


def trains_on_one(model: nn.Module, pool: Pool, task: Task = CLASSIFICATION) -> bool:
    """Whether a model that trains on two samples also trains on one; with batch normalisation it may not."""
    model = copy.deepcopy(model).train()
    x, y = _first(pool, 1)
    with keyed_generators(pool.y.device, 0):
        try:
            outputs = model(x)
            mean_loss(task, outputs.float(), y).backward()  # type: ignore[no-untyped-call]
        except Exception:  # torch's own is a ValueError; a module may raise anything
            return False
    return bool(torch.isfinite(outputs).all())


def _first(pool: Pool, count: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(count, device=pool.y.device) % len(pool.y)
    return pool.batch(index, torch.zeros_like(index))


def _kind(outputs: object) -> str:
    """What a model returned instead of a tensor."""
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"a {type(outputs).__name__}"


def _first_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
