"""Launches of a kernel that is compiled once, and the flag that a pass sets; here the kernel is a stand-in."""

import logging

import pytest
import torch

from fedgma.aggregation.kernels.flag import Flag, take_memory
from fedgma.aggregation.kernels.launch import Launcher

CPU = torch.device("cpu")
TABLE, TENSOR = torch.zeros(4), torch.zeros(64)
ODD = TENSOR[1:]  # four bytes further than triton compiles for


class Kernel:
    """Notes its launches as triton would make them: with tensors, or what it has compiled with addresses."""

    def __init__(self, compiled):
        self.compiled, self.by_triton, self.direct = compiled, [], []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.by_triton.append((grid, arguments, constants))
            return self.compiled(self)

        return launch


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.direct.append((grid, arguments))


class Changed(Compiled):
    """Of a triton that takes other arguments."""

    def __getitem__(self, grid):
        def launch(*arguments):
            raise TypeError("function takes exactly 3 arguments")

        return launch


def launcher(compiled):
    kernel = Kernel(compiled)
    return kernel, Launcher(kernel, 7, (TABLE, 10), {"MANY": False, "BLOCK": 512}, {"num_warps": 4})


def test_the_first_launch_is_tritons_and_the_next_ones_are_direct():
    kernel, launch = launcher(Compiled)
    for _ in range(3):
        launch(TENSOR, TABLE)
    assert kernel.by_triton == [((7,), (TENSOR, TABLE, TABLE, 10), {"MANY": False, "BLOCK": 512, "num_warps": 4})]
    places = (TENSOR.data_ptr(), TABLE.data_ptr(), TABLE.data_ptr(), 10, False, 512)
    assert kernel.direct == [((7, 1, 1), places)] * 2


def test_tensors_that_are_not_aligned_are_left_to_triton():
    """It compiles for them anew, so neither of the two kernels may serve the other's tensors."""
    kernel, launch = launcher(Compiled)
    for tensor in (ODD, ODD, TENSOR, TENSOR, ODD):
        launch(tensor)
    assert [arguments[0].data_ptr() for _, arguments, _ in kernel.by_triton] == [
        tensor.data_ptr() for tensor in (ODD, ODD, TENSOR, ODD)
    ]
    assert [places[0] for _, places in kernel.direct] == [TENSOR.data_ptr()]


@pytest.mark.parametrize(
    ("compiled", "begun"), [(Changed, 3), (lambda kernel: None, 3)], ids=["changed", "interpreter"]
)
def test_where_a_direct_launch_fails_triton_launches_each_time(compiled, begun, caplog):
    kernel, launch = launcher(compiled)
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            launch(TENSOR)
    assert (len(kernel.by_triton), kernel.direct, launch.direct) == (3, [], False)
    assert len(caplog.records) == 1
    assert "a direct launch failed" in caplog.text


def test_an_error_of_tritons_own_launch_is_raised():
    def broken(kernel):
        raise RuntimeError("no image for this device")

    _, launch = launcher(broken)
    with pytest.raises(RuntimeError, match="no image"):
        launch(TENSOR)


@pytest.mark.parametrize("found", [0, 1])
def test_a_flag_is_read_once_and_then_remembered(found):
    memory = take_memory(CPU)
    memory[0] = found
    flag = Flag(memory, CPU)
    assert bool(flag) == bool(found)
    assert memory.tolist() == [0]  # the next pass can use it
    memory[0] = 1
    assert bool(flag) == bool(found)


def test_memory_that_was_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        memory = take_memory(CPU)
        memory[0] = 1
    assert Flag(memory, CPU)
    assert not Flag(memory, CPU)
