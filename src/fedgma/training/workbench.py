"""The working tensors of local training: those of all lanes, with the lane axis first."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgma.training.features import Features
from fedgma.training.lane_batch import LaneBatch, Tilt, ship_batches
from fedgma.training.stacked import Stacked, ship

Rows = slice | Tensor


@dataclass
class Bench:
    """The working tensors of local training: weights, momentum, batches and sums of all lanes.

    They are on the device with the lane axis first, and the steps of a round change them in place.
    """

    params: Stacked
    momentum: Stacked  # or AdamW's first moment; empty if no lane needs it, as are the next three
    squares: Stacked  # AdamW's second moment
    anchor: Stacked
    correction: Stacked
    tilt: Tilt | None  # None if no lane needs it
    buffers: Stacked
    index: Tensor  # [step, lane, batch]
    counts: Tensor  # [step, lane]
    client: Tensor  # [lane]
    lr: Tensor  # [step, lane], or [1, lane] if no rate changes within the round
    rates: Tensor  # [rate, lane], in the order of `RATES`
    sums: Tensor  # [lane, 1 + column], of losses and of the task's measures: one tensor, so that adding is one kernel


def lay_out(
    lane_batch: LaneBatch,
    features: Features,
    start: Stacked,
    buffers: Stacked,
    rows: Tensor,
    measures: int = 1,
    order: Callable[[Stacked], Stacked] | None = None,
) -> Bench:
    """The working tensors of the lane batch, on the device of `rows`; each host array is copied once.

    `order` gives parameters, and all that is shaped like them, another order in memory.
    """
    device, lanes = rows.device, len(rows)
    params = take_rows(start, rows) if order is None else order(take_rows(start, rows))

    def zeros(needed: bool) -> Stacked:
        return {name: torch.zeros_like(value) for name, value in params.items()} if needed else {}

    return Bench(
        params=params,
        momentum=zeros(features.momentum or features.adamw),
        squares=zeros(features.adamw),
        anchor={name: value.clone() for name, value in params.items()} if features.prox else {},
        correction=zeros(features.correction),
        tilt=Tilt(zeros(True), zeros(True), zeros(True)) if features.tilt else None,
        buffers=take_rows(buffers, rows),
        index=ship_batches(lane_batch, device),
        counts=ship(lane_batch.counts.T, device),
        client=ship(lane_batch.client, device),
        lr=ship(step_rates_of(lane_batch, features), device),
        rates=ship(lane_batch.rates.T, device),
        sums=torch.zeros(lanes, 1 + measures, device=device),
    )


def step_rates_of(lane_batch: LaneBatch, features: Features) -> np.ndarray:
    """Learning rates as float32 [step, lane]; one row if they do not change within the round."""
    return lane_batch.lr.T if features.schedule else lane_batch.lr.T[:1]


def take_part(bench: Bench, rows: Rows) -> Bench:
    """The working tensors of some lanes: views if `rows` is a slice, else copies."""
    return Bench(
        params=take_rows(bench.params, rows),
        momentum=take_rows(bench.momentum, rows),
        squares=take_rows(bench.squares, rows),
        anchor=take_rows(bench.anchor, rows),
        correction=take_rows(bench.correction, rows),
        tilt=None if bench.tilt is None else bench.tilt.mapped(lambda part: take_rows(part, rows)),
        buffers=take_rows(bench.buffers, rows),
        index=bench.index[:, rows],
        counts=bench.counts[:, rows],
        client=bench.client[rows],
        lr=bench.lr[:, rows],
        rates=bench.rates[:, rows],
        sums=bench.sums[rows],
    )


def changing(bench: Bench) -> list[Stacked]:
    """The arrays of lanes that a step changes, besides its sums."""
    tilt = () if bench.tilt is None else (bench.tilt.own, bench.tilt.last)
    return [bench.params, bench.momentum, bench.squares, bench.buffers, *tilt]


def take_rows(stacked: Stacked, rows: Rows) -> Stacked:
    """The same rows of every array."""
    return {name: value[rows] for name, value in stacked.items()}
