"""A captured function of tensors gives what the function gives; on a CPU it is replayed without a graph."""

import contextlib
import gc

import numpy as np
import pytest
import torch

from fedgma.training.replay import WARM_UP, Replayed, capturing
from fedgma.training.stacked import pack, packed_size, ship_many, unpack


def test_replayed_calls_follow_their_inputs_and_keep_their_results():
    calls = []

    def function(x, count):
        calls.append(1)
        return x * 2, count + 1

    replayed, kept = Replayed(function), []
    for round in range(WARM_UP + 4):
        x, count = torch.full((3, 2), float(round)), torch.tensor([round])
        kept.append(replayed(x, count))
    for round, (double, following) in enumerate(kept):
        assert double.tolist() == [[2.0 * round] * 2] * 3
        assert following.tolist() == [round + 1]
    assert len({value[0].data_ptr() for value in kept}) == len(kept)


def test_every_shape_is_captured_on_its_own():
    replayed = Replayed(lambda x: [x.cumsum(0)])
    for _ in range(WARM_UP + 2):
        for size in (2, 3):
            assert replayed(torch.ones(size))[0].tolist() == [1.0, 2.0, 3.0][:size]
    assert len(replayed._captured) == 2


ARRAYS = [
    np.arange(6, dtype=np.int32).reshape(1, 2, 3).transpose(2, 0, 1),
    np.array([True, False, True]),
    np.arange(3.0),
    np.zeros((0, 4), np.int64),
    np.array(7, np.int64),
    np.linspace(0, 1, 5, dtype=np.float32)[::2],
]


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_waits_while_a_graph_is_captured(monkeypatch, collects):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with contextlib.suppress(RuntimeError), capturing(None):
            assert not gc.isenabled()
            raise RuntimeError("the capture fails")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_packed_arrays_come_out_as_they_went_in():
    buffer = torch.empty(packed_size(ARRAYS), dtype=torch.uint8)
    pack(ARRAYS, buffer.numpy())
    for sent in (unpack(ARRAYS, buffer), ship_many(ARRAYS, "cpu")):
        for array, tensor in zip(ARRAYS, sent, strict=True):
            assert tensor.numpy().dtype == array.dtype
            np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_every_packed_array_starts_at_an_aligned_place(array):
    assert packed_size([array]) % 16 == 0
