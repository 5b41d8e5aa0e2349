"""How many lanes fit into memory: the cost of a lane is measured on the model, the budget is a share of the device."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.errors import NotEnoughMemory
from fedgma.training.lane_batch import keyed_generators
from fedgma.training.task import Task, mean_loss
from fedgma.training.tasks import CLASSIFICATION

CPU_BUDGET = 512 * 2**20  # bytes; lanes do not get faster beyond a few on a CPU
CUDA_LANES = 8192  # more at a time are no faster; while these train, the host draws the batches of the next
CUDA_SHARE = 0.6  # of the total memory, not the free: the same chunks, and so the same bits, at each start
NO_MEMORY = re.compile(r"DefaultCPUAllocator: .*allocate (\d+) bytes")  # torch says so in a plain RuntimeError


class Capacity(NamedTuple):
    """How many lanes and samples fit into memory at a time."""

    lanes: int
    samples: int  # of one run, in evaluation
    bytes: int  # of a lane while it trains
    activations: int  # of these, what a lane keeps of a batch for the backward pass


def measure(
    model: nn.Module, pool: Pool, batch: int, *, budget: int | None = None, task: Task = CLASSIFICATION, kept: int = 1
) -> Capacity:
    """Lanes that can be trained and samples that can be evaluated at a time within the budget in bytes.

    `kept` is how many arrays of the size of the model a lane keeps for its optimiser and its algorithm.
    """
    device = pool.y.device
    if budget is None:
        cuda = device.type == "cuda"
        budget = int(torch.cuda.get_device_properties(device).total_memory * CUDA_SHARE) if cuda else CPU_BUDGET
    weights = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    frozen = sum(v.numel() * v.element_size() for v in model.parameters() if not v.requires_grad)
    activations = activation_bytes(model, pool, batch, task)
    # weights, anchor, gradient, correction and update, and what is kept; activations and their gradients
    lane = (5 + kept) * (weights - frozen) + frozen + 2 * activations
    most = CUDA_LANES if device.type == "cuda" else budget
    samples = max(1, budget // (4 * max(1, activations // batch)))
    return Capacity(max(1, min(most, budget // lane)), samples, lane, activations)


def activation_bytes(model: nn.Module, pool: Pool, batch: int, task: Task = CLASSIFICATION) -> int:
    """Bytes that one forward pass of a batch keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    index = torch.zeros(min(2, batch), dtype=torch.int64, device=pool.y.device)
    before: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    with keyed_generators(pool.y.device, 0), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x, y = pool.batch(index, index)
        mean_loss(task, model(x).float(), y)
    model.load_state_dict(before)  # the pass may have changed running statistics
    weights = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    size = sum(count for address, count in kept.items() if address not in weights)
    return size * batch // len(index)


@contextlib.contextmanager
def in_one_sentence(device: torch.device) -> Iterator[None]:
    """Turn memory that runs out, of the device or of the host, into `NotEnoughMemory`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemory(_device_is_full(device)) from error
    except MemoryError as error:
        raise NotEnoughMemory(_host_is_full(str(error))) from error
    except RuntimeError as error:
        if (more := NO_MEMORY.search(str(error))) is None:
            raise
        raise NotEnoughMemory(_host_is_full(f"{int(more[1]) / 2**30:,.1f} GiB more were needed")) from error


def _device_is_full(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    size, here, others = (f"{size / 2**30:.1f}" for size in (total, ours, max(0, total - free - ours)))
    return (
        f"the {size} GiB of memory of {device} are full: this program holds {here} GiB, others {others} GiB; end the "
        "others, lower batch_size, or train fewer runs at a time"
    )


def _host_is_full(detail: str) -> str:
    return f"the memory is full ({detail or 'an array'}); lower batch_size, or use a smaller model or less data"
