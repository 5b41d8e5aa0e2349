"""Ranks on a GPU: what NCCL and gloo carry arrives."""

import pytest
import torch

from fedgma.experiments.ranks.places import Place
from fedgma.experiments.ranks.rendezvous import joined

pytestmark = pytest.mark.gpu


def test_a_rank_with_a_gpu_of_its_own_sends_by_nccl(tmp_path):
    with joined(Place(0, 1, 0, {}, str(tmp_path / "store")), "cuda") as (ranks, device):
        assert (ranks.beside, device) == (1, "cuda:0")
        talk, fast = ranks.send.args
        assert torch.distributed.get_backend(fast) == "nccl"
        for kind, group in ((torch.float32, fast), (torch.int64, fast), (torch.float32, None)):
            numbers = torch.arange(10, dtype=kind, device=device)
            ranks.send.func(talk, group, [(numbers, 0)])
            assert numbers.tolist() == list(range(10))
