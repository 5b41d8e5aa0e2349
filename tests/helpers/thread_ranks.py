"""Ranks as threads of this process: what `fedgma.training.ranks` asks of a group of processes, without starting any."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fedgma.training.ranks import Ranks

LONGEST = 600  # seconds that a rank waits for the others


def on_ranks(size, work):
    """What `work(ranks)` returns on each of so many ranks; an error of one rank ends all."""
    barrier, slot = threading.Barrier(size), {}

    def send(rank, sent):
        for place, (tensor, source) in enumerate(sent):
            assert tensor.is_contiguous()
            if rank == source:
                slot[place] = tensor.clone()
        barrier.wait(LONGEST)
        for place, (tensor, _) in enumerate(sent):
            tensor.copy_(slot[place])
        barrier.wait(LONGEST)

    def play(rank):
        try:
            return work(Ranks(rank, size, partial(send, rank)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        waiting = [pool.submit(play, rank) for rank in range(size)]
    errors = [error for one in waiting if (error := one.exception()) is not None]
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [one.result() for one in waiting]
