"""The processes of one run (ranks) meet by `torch.distributed`, wherever they are.

gloo carries what the ranks agree on and what is on CPUs; NCCL what is on GPUs, where every rank has a GPU of its own.
"""

import atexit
import contextlib
import hashlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fedgma.errors import ConfigError, RankLost
from fedgma.experiments.ranks.places import Place
from fedgma.training.ranks import ALONE, Ranks, Sent, gather


@contextlib.contextmanager
def joined(place: Place | None, device: str) -> Iterator[tuple[Ranks, str]]:
    """Inside, this process is one of the ranks, or alone without a place; yields the ranks and this one's device.

    For the devices "auto" and "cuda", ranks of one machine take its GPUs in turn.
    """
    if place is None:
        yield ALONE, device
        return
    dist = _distributed()
    chosen = _device(place, device)
    try:
        if not dist.is_initialized():  # a user's script, or an earlier run of it, may have joined already
            with _ended_by_signals():
                _meet(dist, place)
            atexit.register(_leave)
        talk = dist.new_group(backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"rank {place.rank} of {place.size} did not meet the others ({_first(error)})") from None
    speaking = Ranks(place.rank, place.size, partial(_send, talk, None))
    beside, apart = _neighbours(speaking, chosen)
    fast = dist.new_group(backend="nccl") if apart and dist.is_nccl_available() else None
    yield Ranks(place.rank, place.size, partial(_send, talk, fast), beside), chosen
    with contextlib.suppress(RuntimeError):  # the work is done
        dist.barrier(talk)


def _distributed() -> Any:
    import torch.distributed as dist

    if not dist.is_available():
        raise ConfigError("--on torchrun needs torch.distributed, which this build of torch lacks; install another one")
    return dist


def _leave() -> None:
    dist = _distributed()
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(dist: Any, place: Place) -> None:
    if place.store:
        store = dist.FileStore(place.store, place.size)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
        return
    os.environ |= {**place.environment, "RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
    dist.init_process_group("gloo")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM end this process at once: Python's handlers do not run while torch waits for ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # it was set by other code than Python's
                signal.signal(number, handler)


def _device(place: Place, device: str) -> str:
    if device in ("auto", "cuda") and torch.cuda.is_available():
        gpu = place.local % torch.cuda.device_count()
        torch.cuda.set_device(gpu)
        return f"cuda:{gpu}"
    return device


def _neighbours(ranks: Ranks, device: str) -> tuple[int, bool]:
    """How many ranks are on this one's GPU, and whether every rank has a GPU of its own."""
    key = 0
    if device.startswith("cuda"):
        name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") + 1
    (keys,) = gather(ranks, range(ranks.size + 1), [torch.tensor([key])])
    if bool((keys == 0).any()) and bool((keys != 0).any()):
        raise ConfigError("some ranks have a GPU and some have none; give all ranks --device cpu or a GPU")
    return int((keys == key).sum()) if key else 1, bool(key) and len(set(keys.tolist())) == ranks.size


def _send(talk: Any, fast: Any, sent: Sent) -> None:
    """Send tensors of some ranks to all others; an error means that one of them has ended."""
    import torch.distributed as dist

    try:
        groups = [fast if fast is not None and tensor.is_cuda else talk for tensor, _ in sent]
        waiting = [
            dist.broadcast(tensor.view(torch.uint8), source, group=group, async_op=True)
            for (tensor, source), group in zip(sent, groups, strict=True)
        ]
        for exchange in waiting:
            exchange.wait()
    except RuntimeError as error:
        raise RankLost(
            f"another rank ended in the middle of a round ({_first(error)}); run the same command again to continue"
        ) from None


def _first(error: Exception) -> str:
    """The first line of an error, without the place in torch's source."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", line)[:200]
