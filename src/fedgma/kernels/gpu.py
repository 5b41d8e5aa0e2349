"""The tally fused for the GPU by triton: one pass over the updates, sums in registers, the bits of `plain`.

`aggregate` is tally and finish in one: it reads each update once and writes mean and mask, nothing else. Many arrays go
in one launch: a table tells each program which array and which block of it is its own.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fedgma.masks import VoteMask

BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add would round differently from `plain`
POINTERS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


@triton.jit
def _count(total, rest, votes, value, weight):
    """One client into the sums: Knuth's two-sum, and the sign."""
    term = value.to(tl.float64) * weight
    after = total + term
    back = after - total
    lost = (total - (after - back)) + (term - back)
    rest = (rest.to(tl.float64) + lost).to(rest.dtype)
    votes += (value > 0).to(votes.dtype) - (value < 0).to(votes.dtype)
    return after, rest, votes


@triton.jit
def _add_rows(total_at, rest_at, votes_at, rows_at, weights_at, found_at, clients, size, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    total = tl.load(total_at + entry, inside, 0.0)
    rest = tl.load(rest_at + entry, inside, 0.0)
    votes = tl.load(votes_at + entry, inside, 0).to(tl.int32)
    for client in range(clients):
        value = tl.load(rows_at + client.to(tl.int64) * size + entry, inside, 0.0)
        total, rest, votes = _count(total, rest, votes, value, tl.load(weights_at + client))
    tl.store(total_at + entry, total, inside)
    tl.store(rest_at + entry, rest, inside)
    tl.store(votes_at + entry, votes.to(votes_at.dtype.element_ty), inside)
    if tl.max((tl.abs(total) < float("inf")).to(tl.int32) ^ 1, 0) > 0:  # NaN and infinities end up in the total
        tl.store(found_at, 1)


@triton.jit
def _aggregate(
    table_at, arrays_at, sizes_at, starts_at, weights_at, mean_at, mask_at, found_at,
    clients, weight, needed, below,
    KIND: tl.constexpr, MASKED: tl.constexpr, SOFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    array = tl.load(table_at + 2 * program)
    block = tl.load(table_at + 2 * program + 1)
    size = tl.load(sizes_at + array)
    address = tl.load(arrays_at + array)
    if KIND == 0:
        rows_at = address.to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        rows_at = address.to(tl.pointer_type(tl.float64))
    elif KIND == 2:
        rows_at = address.to(tl.pointer_type(tl.float16))
    else:
        rows_at = address.to(tl.pointer_type(tl.bfloat16))
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    total = tl.zeros([BLOCK], tl.float64)
    rest = tl.zeros([BLOCK], tl.float64 if KIND == 1 else tl.float32)
    votes = tl.zeros([BLOCK], tl.int32)
    for client in range(clients):
        value = tl.load(rows_at + client.to(tl.int64) * size + entry, inside, 0.0)
        total, rest, votes = _count(total, rest, votes, value, tl.load(weights_at + client))
    out = tl.load(starts_at + array) + entry
    mean = (total + rest.to(tl.float64)) / weight
    tl.store(mean_at + out, mean.to(mean_at.dtype.element_ty), inside)
    if MASKED:
        amount = tl.abs(votes)
        # float64 first: its quotient, rounded once more to float32, is the float32 quotient
        score = amount.to(tl.float64) / clients.to(tl.float64) if SOFT else tl.zeros([BLOCK], tl.float64) + below
        tl.store(mask_at + out, tl.where(amount >= needed, 1.0, score).to(mask_at.dtype.element_ty), inside)
    if tl.max((tl.abs(total) < float("inf")).to(tl.int32) ^ 1, 0) > 0:
        tl.store(found_at, 1)


def add(total: Any, rest: Any, votes: Any, update: Any, weight: float) -> None:
    """Add one client's flat update, in place; the caller has seen that it is finite."""
    _launch_rows(total, rest, votes, update.view(1, -1), np.array([weight]))


def add_rows(total: Any, rest: Any, votes: Any, updates: Any, weights: np.ndarray[Any, Any]) -> bool:
    """Add clients' updates [client, entry] in their order, in place; whether all of them were finite."""
    return not bool(_launch_rows(total, rest, votes, updates, weights))


def _launch_rows(total: Any, rest: Any, votes: Any, updates: Any, weights: np.ndarray[Any, Any]) -> Any:
    clients, size = updates.shape
    found = torch.zeros(1, dtype=torch.int32, device=updates.device)
    amounts = torch.as_tensor(weights, dtype=torch.float64, device=updates.device)
    grid = (triton.cdiv(size, BLOCK),)
    _add_rows[grid](total, rest, votes, updates, amounts, found, clients, size, BLOCK=BLOCK, **OPTIONS)
    return found


def aggregate(
    updates: Sequence[Any], weights: np.ndarray[Any, Any], weight: float, mask: VoteMask | None
) -> tuple[list[Any], list[Any] | None, Any]:
    """Means and masks of arrays [client, entry] of one number type, flat, in one pass; and a flag on the device.

    The flag is not zero where a sum was not finite: then look for the client, leave it out and call again.
    """
    clients, kind, device = updates[0].shape[0], updates[0].dtype, updates[0].device
    sizes = tuple(array.shape[1] for array in updates)
    table, lengths, starts = _table(sizes, device)
    addresses = torch.tensor([array.data_ptr() for array in updates], dtype=torch.int64).to(device, non_blocking=True)
    amounts = torch.as_tensor(weights, dtype=torch.float64).to(device, non_blocking=True)
    mean = torch.empty(sum(sizes), dtype=kind, device=device)
    masks = torch.empty_like(mean, dtype=torch.float64 if kind == torch.float64 else torch.float32) if mask else mean
    found = torch.zeros(1, dtype=torch.int32, device=device)
    _aggregate[(len(table),)](
        table, addresses, lengths, starts, amounts, mean, masks, found,
        clients, weight, mask.needed(clients) if mask else 0, (mask.below or 0.0) if mask else 0.0,
        KIND=POINTERS[kind], MASKED=mask is not None, SOFT=mask is not None and mask.below is None, BLOCK=BLOCK,
        **OPTIONS,
    )  # fmt: skip
    return list(mean.split(sizes)), list(masks.split(sizes)) if mask else None, found


@lru_cache(maxsize=64)
def _table(sizes: tuple[int, ...], device: Any) -> tuple[Any, Any, Any]:
    """For each program its array and block; each array's length and where it starts in the flat results."""
    blocks = [-(-size // BLOCK) for size in sizes]
    array = np.repeat(np.arange(len(sizes)), blocks)
    block = np.concatenate([np.arange(count) for count in blocks])
    table = torch.as_tensor(np.stack([array, block], 1).astype(np.int32), device=device)
    lengths = torch.as_tensor(np.array(sizes, np.int64), device=device)
    starts = torch.as_tensor(np.cumsum([0, *sizes[:-1]]).astype(np.int64), device=device)
    return table, lengths, starts
