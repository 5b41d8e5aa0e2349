"""GPU kernels in triton, each for many lanes at once: convolutions, normalisation, dense layers, steps of SGD."""

import importlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

from fedgma.aggregation.kernels import TRITON

log = logging.getLogger(__name__)
THREADS = 8  # that compile kernels

# Modules of kernels that are in use. A layer whose kernels are not listed is computed by torch, which is how
# benchmarks measure what they buy.
ALL = ("conv_3x3", "conv_matrix", "conv_thread", "dense_head", "group_norm", "sgd_step")
KERNELS: tuple[str, ...] = ALL if TRITON else ()


def kernels(name: str) -> ModuleType | None:
    """The module of kernels with that name, or None where it is not in use."""
    return importlib.import_module(f"fedgma.training.fast.gpu.{name}") if name in KERNELS else None


def rehearse(call: Callable[[], object]) -> None:
    """Compile all kernels that a call launches at the same time: one after the other they take many seconds.

    The call is made without launching them, so its results are arbitrary numbers. Whatever fails is left to the real
    call.
    """
    if not KERNELS:
        return
    import torch
    from triton.runtime.jit import JITFunction

    run, begun = JITFunction.run, []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def compile_kernel(kernel: Any, arguments: Any, options: Any) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        compiled = run(kernel, *arguments, **options)
        getattr(compiled, "run", None)  # a property: loads the kernel and compiles the code that launches it

    def begin(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        begun.append(threads.submit(compile_kernel, kernel, arguments, {**options, "warmup": True}))

    with ThreadPoolExecutor(THREADS) as threads:
        JITFunction.run = begin
        try:
            call()
        except Exception as error:
            log.debug("a rehearsal failed: %s", error)
        finally:
            JITFunction.run = run
    _report(begun)


def _report(begun: list[Future[None]]) -> None:
    for failed in filter(None, (future.exception() for future in begun)):
        log.debug("a kernel could not be compiled ahead: %s", failed)
