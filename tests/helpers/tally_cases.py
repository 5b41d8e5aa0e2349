"""Clients' updates summed and averaged: by the fused GPU passes and by the plain implementation.

Run as a script under TRITON_INTERPRET=1 it takes the passes through triton's interpreter (`test_fused_passes`).
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from fedgma.aggregation.kernels import plain
from fedgma.aggregation.kernels.layout import common_layout, views
from fedgma.aggregation.masks import hard_mask, reversing_mask, soft_mask

DTYPES = [torch.float32, torch.float64, torch.float16]  # the interpreter compares bfloat16 by its bits
SIZES = [1, 512, 600]  # a block has 512 entries
SHAPES = [(), (512,), (20, 30)]
CLIENTS = [1, 7]  # five clients are read at a time, the rest one by one
MASKS = [soft_mask(0.4), hard_mask(0.4), reversing_mask(3)]


def draw(clients, size, dtype, device, seed=0):
    """Updates [client, entry], half of them zero, and the clients' weights."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(clients, size, generator=generator) * torch.randint(0, 2, (clients, size), generator=generator)
    return values.to(device, dtype), np.arange(1, clients + 1) / 7  # so that sums are rounded


def empty(updates, clients, further=()):
    kind = str(updates.dtype).removeprefix("torch.")
    return plain.empty_sums(updates.shape[1], kind, clients, True, updates[:0], further)


def summed(updates, weights, clients=None, further=()):
    """The sums of these updates by the plain implementation; wide enough for so many clients."""
    sums = empty(updates, clients or len(updates), further)
    plain.add_rows(sums, updates, weights)
    return sums


def check_sums(sums, wanted, rest=0.0):
    """The same bits, but what float64 rounded away may be rounded once in place of once a client."""
    for name, actual, expected in zip(plain.Sums._fields, sums, wanted, strict=True):
        if expected is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, expected, rtol=rest if name.endswith("rest") else 0, atol=0)


def check_streams(fused, dtype, device="cpu"):
    """`add` counts one client at a time, `add_rows` all of them; both tell nothing from the plain sums."""
    for clients in CLIENTS:
        updates, weights = draw(clients, SIZES[-1], dtype, device)
        for further in ((), plain.FURTHER if clients > 1 else ("counts", "squares")):
            streamed, stacked = empty(updates, clients, further), empty(updates, clients, further)
            for update, weight in zip(updates, weights, strict=True):
                fused.add(streamed, update, float(weight))
            assert fused.add_rows(stacked, updates, weights)
            check_sums(streamed, summed(updates, weights, further=further))
            check_sums(stacked, summed(updates, weights, further=further), rest=1e-5)
    updates[1, 599] = float("inf")
    assert not fused.add_rows(empty(updates, clients), updates, weights)


def check_runs(fused, dtype, device="cpu"):
    """`add_runs` sums the lanes of several runs, one of them without lanes, and passes over those not kept."""
    edges = [0, 6, 6, 8]
    updates, weights = draw(8, SIZES[-1], dtype, device)
    amounts, places = torch.from_numpy(weights).to(device), torch.tensor(edges, device=device)
    all_but_some = torch.arange(8, device=device) % 3 > 0
    for keep, further in ((None, ()), (all_but_some, ()), (all_but_some, plain.FURTHER)):
        sums = plain.Sums(*(None if part is None else torch.stack([part] * 3) for part in empty(updates, 8, further)))
        flags = None if keep is None else keep.to(torch.uint8)
        found = fused.add_runs(sums, updates, amounts, flags, places)
        assert found.item() == 0
        for run in range(3):
            lanes = [lane for lane in range(edges[run], edges[run + 1]) if keep is None or keep[lane]]
            check_sums(plain.select(sums, run), summed(updates[lanes], weights[lanes], 8, further), rest=1e-5)


def check_aggregates(fused, dtype, device="cpu"):
    """`aggregate` gives mean and mask of several arrays, or of one, in one pass."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for clients in CLIENTS:
        drawn = [draw(clients, size, dtype, device, seed=size) for size in SIZES]
        arrays, weights = [updates for updates, _ in drawn], drawn[0][1]
        for mask, chosen in ((None, arrays), *((mask, arrays) for mask in MASKS), (MASKS[0], arrays[-1:])):
            shapes = SHAPES[-len(chosen) :]
            given = [updates.view(clients, *shape) for updates, shape in zip(chosen, shapes, strict=True)]
            layout = common_layout(given)
            flat, masks, actual = fused.aggregate(given, layout, weights.tolist(), math.fsum(weights), mask)
            assert not actual
            assert (masks is None) == (mask is None)
            means, masks = (None if part is None else views(part, layout) for part in (flat, masks))
            for place, updates in enumerate(chosen):
                assert means[place].shape == shapes[place]
                sums = summed(updates, weights)
                check_mean(means[place].view(-1), sums, math.fsum(weights), dtype)
                if mask is not None:
                    expected = mask(sums.votes, clients, str(wide).removeprefix("torch."))
                    torch.testing.assert_close(masks[place].view(-1), expected, rtol=0, atol=0)
    arrays[1][2, 511] = float("nan")
    _, _, found = fused.aggregate(arrays, common_layout(arrays), weights.tolist(), math.fsum(weights), None)
    assert found


def check_mean(actual, sums, weight, dtype):
    """Rounded once, but halves through float32; without a fused multiply-add the last digit may differ."""
    expected = plain.mean(sums, weight, str(dtype).removeprefix("torch."))
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=0)


def main():
    from fedgma.aggregation.kernels import gpu

    for dtype in DTYPES:
        check_streams(gpu, dtype)
        check_runs(gpu, dtype)
        check_aggregates(gpu, dtype)


if __name__ == "__main__":
    main()
