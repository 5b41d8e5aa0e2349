"""The library's tasks, and `TASKS`, the one list of them."""

from torch import Tensor
from torch.nn import functional as F

from fedgma.training.task import Columns, Means, Task


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def _hits(logits: Tensor, y: Tensor) -> Means:
    return {"accuracy": logits.argmax(-1) == y}


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

TASKS = {task.name: task for task in (CLASSIFICATION,)}
