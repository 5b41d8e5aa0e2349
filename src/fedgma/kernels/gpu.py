"""The tally fused for the GPU by triton: one pass over the updates, sums in registers, votes and masks as in `plain`.

`aggregate` is tally and finish in one: it reads each update once and writes mean and mask, nothing else. Many arrays go
in one launch: a table tells each program which array and which block of it is its own. What limits it is memory, so
several clients' loads are kept in flight (`UNROLL`), and the mask, which has only clients + 1 values, is looked up.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fedgma.masks import VoteMask

BLOCK = 512
UNROLL = 5
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}  # a fused multiply-add rounds otherwise
KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


@triton.jit
def _count(total, rest, votes, value, weight):
    """One client into the sums: Knuth's two-sum, and the sign."""
    term = value.to(tl.float64) * weight
    after = total + term
    back = after - total
    rest += (total - (after - back)) + (term - back)
    votes += (value > 0).to(tl.int32) - (value < 0).to(tl.int32)
    return after, rest, votes


@triton.jit
def _count_rows(total, rest, votes, rows_at, weights_at, entry, inside, clients, size, UNROLL: tl.constexpr):
    """All clients into the sums of one block, in their order."""
    whole = clients - clients % UNROLL
    for first in range(0, whole, UNROLL):
        for step in tl.static_range(UNROLL):
            at = rows_at + tl.cast(first + step, tl.int64) * size + entry
            value = tl.load(at, inside, 0.0)
            total, rest, votes = _count(total, rest, votes, value, tl.load(weights_at + first + step))
    for client in range(whole, clients):
        value = tl.load(rows_at + tl.cast(client, tl.int64) * size + entry, inside, 0.0)
        total, rest, votes = _count(total, rest, votes, value, tl.load(weights_at + client))
    return total, rest, votes


@triton.jit
def _report(total, found_at):
    """NaN and infinities end up in the total."""
    if tl.max((tl.abs(total) < float("inf")).to(tl.int32) ^ 1, 0) > 0:
        tl.store(found_at, 1)


@triton.jit
def _add_rows(
    total_at, rest_at, votes_at, rows_at, weights_at, found_at, clients, size,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    total = tl.load(total_at + entry, inside, 0.0)
    rest = tl.load(rest_at + entry, inside, 0.0).to(tl.float64)
    votes = tl.load(votes_at + entry, inside, 0).to(tl.int32)
    total, rest, votes = _count_rows(
        total, rest, votes, rows_at, weights_at, entry, inside, clients, size, UNROLL=UNROLL
    )
    tl.store(total_at + entry, total, inside)
    tl.store(rest_at + entry, rest.to(rest_at.dtype.element_ty), inside)
    tl.store(votes_at + entry, votes.to(votes_at.dtype.element_ty), inside)
    _report(total, found_at)


@triton.jit
def _aggregate(
    blocks_at, arrays_at, sizes_at, starts_at, weights_at, mean_at, mask_at, masks_at, found_at,
    clients, weight, inverse, KIND: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    array = tl.load(blocks_at + 2 * program)
    block = tl.load(blocks_at + 2 * program + 1)
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
    rest = tl.zeros([BLOCK], tl.float64)
    votes = tl.zeros([BLOCK], tl.int32)
    total, rest, votes = _count_rows(
        total, rest, votes, rows_at, weights_at, entry, inside, clients, size, UNROLL=UNROLL
    )
    out = tl.load(starts_at + array) + entry
    total += rest
    near = total * inverse
    mean = tl.fma(tl.fma(-near, weight, total), inverse, near)  # the rounded quotient, without a division
    tl.store(mean_at + out, mean.to(mean_at.dtype.element_ty), inside)
    if MASKED:
        value = tl.load(masks_at + tl.abs(votes), inside, 0.0)
        tl.store(mask_at + out, value.to(mask_at.dtype.element_ty), inside)
    _report(total, found_at)


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
    _add_rows[grid](total, rest, votes, updates, amounts, found, clients, size, BLOCK=BLOCK, UNROLL=UNROLL, **OPTIONS)
    return found


def aggregate(
    updates: Sequence[Any], weights: np.ndarray[Any, Any], weight: float, mask: VoteMask | None
) -> tuple[list[Any], list[Any] | None, Any]:
    """Means and masks of arrays [client, entry] of one number type, flat, in one pass; and a flag on the device.

    The flag is not zero where a sum was not finite: then look for the client, leave it out and call again.
    """
    clients, kind, device = updates[0].shape[0], updates[0].dtype, updates[0].device
    sizes = tuple(array.shape[1] for array in updates)
    blocks, lengths, starts = _plan(sizes, device)
    precise = kind == torch.float64
    values = np.empty(0) if mask is None else mask(np.arange(clients + 1), clients, "float64" if precise else "float32")
    amounts, addresses, values = _sent(device, weights, [array.data_ptr() for array in updates], values)
    mean = torch.empty(sum(sizes), dtype=kind, device=device)
    masks = mean if mask is None else torch.empty_like(mean, dtype=torch.float64 if precise else torch.float32)
    found = torch.zeros(1, dtype=torch.int32, device=device)
    _aggregate[(len(blocks),)](
        blocks, addresses, lengths, starts, amounts, mean, masks, values, found,
        clients, weight, 1 / weight, KIND=KINDS[kind], MASKED=mask is not None, BLOCK=BLOCK, UNROLL=UNROLL, **OPTIONS,
    )  # fmt: skip
    return list(mean.split(sizes)), None if mask is None else list(masks.split(sizes)), found


def _sent(device: Any, weights: Any, addresses: list[int], values: Any) -> tuple[Any, Any, Any]:
    """Weights, addresses and mask values on the device, by one copy."""
    parts = [np.asarray(weights, np.float64), np.array(addresses, np.int64), np.asarray(values, np.float64)]
    packed = np.concatenate([part.view(np.int64) for part in parts])
    sent = torch.from_numpy(packed).to(device).split([len(part) for part in parts])
    return sent[0].view(torch.float64), sent[1], sent[2].view(torch.float64)


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...], device: Any) -> tuple[Any, Any, Any]:
    """For each program its array and block; each array's length and where it starts in the flat results."""
    counts = [-(-size // BLOCK) for size in sizes]
    array = np.repeat(np.arange(len(sizes)), counts)
    block = np.concatenate([np.arange(count) for count in counts])
    blocks = torch.as_tensor(np.stack([array, block], 1).astype(np.int32), device=device)
    lengths = torch.as_tensor(np.array(sizes, np.int64), device=device)
    starts = torch.as_tensor(np.cumsum([0, *sizes[:-1]]).astype(np.int64), device=device)
    return blocks, lengths, starts
