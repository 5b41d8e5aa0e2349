"""Kernels of a call are compiled at the same time before it, and none is launched."""

import threading

import pytest

from fedgma.training.fast import gpu

triton = pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def runs(monkeypatch):
    """What triton is asked to run: names of kernels with their arguments, and whether they are only compiled."""
    asked, together = [], threading.Barrier(2, timeout=60)

    def run(kernel, *arguments, grid, warmup, **options):
        together.wait()  # passes only if two are compiled at the same time
        asked.append((kernel.fn.__name__, arguments, grid, warmup, options))
        if "broken" in arguments:
            raise RuntimeError("no registers left")

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    return asked


@triton.jit
def first(x):
    pass


@triton.jit
def second(x):
    pass


def test_kernels_are_compiled_together_and_not_launched(runs):
    known = triton.runtime.jit.JITFunction.run

    def call():
        first[(1,)](3, num_warps=4)
        second[(2,)]("broken")

    gpu.rehearse(call)  # a kernel that fails is left to the real call
    assert sorted(runs) == [("first", (3,), (1,), True, {"num_warps": 4}), ("second", ("broken",), (2,), True, {})]
    assert triton.runtime.jit.JITFunction.run is known


def test_launches_are_as_before_after_a_call_that_fails():
    known = triton.runtime.jit.JITFunction.run
    gpu.rehearse(lambda: 1 / 0)
    assert triton.runtime.jit.JITFunction.run is known
