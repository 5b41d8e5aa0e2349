"""On a GPU: batches of shifted data are made without waiting for the device."""

import pytest
import torch

from fedgma.data.federation import federate
from fedgma.data.files import load
from fedgma.data.partitions import iid
from fedgma.data.shifts import Colour, Rotation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shift", [None, Colour(), Rotation()])
def test_a_batch_can_be_captured_in_a_cuda_graph(shift):
    mini = load("fmnist-mini")
    pool = federate(mini, iid(mini.train.y, 5), shift=shift, device="cuda").train
    index, client = torch.arange(6, device="cuda").reshape(2, 3), torch.tensor([[1], [4]], device="cuda")
    expected = pool.batch(index, client)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # raises at a host sync
        captured = pool.batch(index, client)[0]
    graph.replay()
    torch.testing.assert_close(captured, expected)
