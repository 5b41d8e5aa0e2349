"""Memory that runs out is one sentence with what was needed and what to do; other errors stay what they are."""

import numpy as np
import pytest
import torch

from commands import call
from fedgma.errors import NotEnoughMemory
from fedgma.training.memory import in_one_sentence

CPU = torch.device("cpu")
GREEDY = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(784, 10)

    def forward(self, x):
        flat = x.flatten(1)
        return super().forward(flat.repeat(1, 10**9)[:, :784] if len(flat) > 2 else flat)
"""


def test_an_array_that_torch_cannot_hold_is_named_by_its_size():
    with (
        pytest.raises(NotEnoughMemory, match=r"the memory is full \(1,048,576\.0 GiB more were needed\); lower batch_"),
        in_one_sentence(CPU),
    ):
        torch.empty(2**50, dtype=torch.uint8)


def test_an_array_that_numpy_cannot_hold_is_told_as_numpy_tells_it():
    with (
        pytest.raises(
            NotEnoughMemory, match=r"full \(Unable to allocate 1\.00 EiB for an array .*\); lower batch_size"
        ),
        in_one_sentence(CPU),
    ):
        np.empty(2**60, np.uint8)


def test_a_full_gpu_is_told_with_who_fills_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * 2**30)
    sentence = "80.0 GiB of memory of cuda:0 are full: this program holds 50.0 GiB, others 28.0 GiB; end the others"
    with pytest.raises(NotEnoughMemory, match=sentence) as caught, in_one_sentence(torch.device("cuda:0")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.61 GiB.")
    assert isinstance(caught.value, MemoryError)


def test_other_errors_stay_what_they_are():
    for error in (RuntimeError("shapes do not fit"), ValueError("no"), KeyError("x")):
        with pytest.raises(type(error)) as caught, in_one_sentence(CPU):
            raise error
        assert caught.value is error


def test_the_command_line_prints_the_sentence_and_keeps_its_exit_code(tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    model = f"model={tmp_path / 'greedy.py'}:Net"
    code, _, said = call("run", model, "rounds=1", "aggregator=mean", "--device", "cpu", "--out", tmp_path / "runs")
    assert code == NotEnoughMemory.exit_code == 3
    assert said.startswith("fedgma: the memory is full (")
    assert "Traceback" not in said
    assert said.count("\n") == 1
