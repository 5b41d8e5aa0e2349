"""Where the time of one call of `masked_mean` goes, on a CUDA device: `python benchmarks/bench_aggregation.py call`.

Mean and mask are compared with those in float64 before any of them is timed.
"""

import cProfile
import io
import logging
import pstats
import statistics
import time
from functools import partial
from itertools import count, pairwise
from unittest import mock

import numpy as np
from shapes import resnet18_shapes

import fedgma


def call(repeats):
    """Wall time of a whole call, device and host, and of the parts of it, on a CUDA device."""
    import torch
    import triton

    logging.basicConfig()
    logging.getLogger("fedgma").setLevel(logging.DEBUG)  # says why a direct launch failed
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}, 10 clients x 11,173,962 float32, medians of {repeats}")
    step, weights = fedgma.masked_mean(0.4), np.random.default_rng(0).integers(100, 1000, 10).astype(float)
    share = torch.tensor(weights / weights.sum(), dtype=torch.float32, device="cuda")
    flat = torch.randn(10, 11_173_962, device="cuda")
    for _ in range(3000):  # until the device's clocks are up
        share @ flat
    for shapes in ({"w": (11_173_962,)}, resnet18_shapes()):
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        pieces = zip(shapes.items(), flat.split(sizes, 1), strict=True)
        arrays = {name: piece.reshape(10, *shape).contiguous() for (name, shape), piece in pieces}
        check_call(step, arrays, weights)
        whole, matvec = partial(step, arrays, weights), (lambda: share @ flat)
        rows = {"whole call": (whole,), "plain average, matrix-vector product": (matvec,)}
        rows |= parts_of_call(step, arrays, weights)
        print("\n| arrays | part | microseconds |\n| --- | --- | --- |")
        for name, way in rows.items():
            print(f"| {len(sizes)} | {name} | {microseconds(*way, repeats=repeats):.1f} |", flush=True)
        for name, figure in spans_of_call(whole, repeats).items():
            print(f"| {len(sizes)} | within a whole call: {name} | {figure:.1f} |", flush=True)
        for name, way in (("matrix-vector product", matvec), ("whole call", whole)):
            print(f"| {len(sizes)} | {name} again | {microseconds(way, repeats=repeats):.1f} |", flush=True)
        watched = cProfile.Profile()
        watched.runcall(lambda way=whole: [way() for _ in range(repeats)])
        lines = io.StringIO()
        pstats.Stats(watched, stream=lines).sort_stats("tottime").print_stats(16)
        print(f"\nprofile of {repeats} whole calls\n{lines.getvalue()[:3000]}", flush=True)


def microseconds(way, wait=True, first=None, repeats=200):
    """Median wall time, with the end of the device's work or without; `first` is not timed: its result is `way`'s."""
    import torch

    spans = []
    for repeat in range(repeats + 10):
        given = () if first is None else (first(),)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        result = way(*given)
        if wait:
            torch.cuda.synchronize()
        if repeat >= 10:
            spans.append(time.perf_counter() - begun)
        settle(result)
    return statistics.median(spans) * 1e6


def settle(result):
    """Read the flag of a pass whose result nobody needs, so that the flag's memory serves the next pass."""
    for part in result if isinstance(result, tuple) else ():
        if type(part).__name__ == "Flag":
            assert not part


def check_call(step, arrays, weights):
    """Mean and mask of several calls, by triton's launch and by direct ones, are those in float64."""
    import torch

    amounts = torch.tensor(weights, device="cuda")
    for call in range(3):
        result = step(arrays, weights if call < 2 else weights[::-1].copy())
        for name, array in arrays.items():
            shares = (amounts if call < 2 else amounts.flip(0)) / amounts.sum()
            mean = torch.tensordot(shares, array.double(), 1).float()
            torch.testing.assert_close(result.mean[name], mean, rtol=1e-6, atol=1e-9)
            votes = array.sign().sum(0).to(torch.int8)
            assert torch.equal(result.mask[name], step.mask(votes, 10, "float32")), name
    last = arrays[name].view(-1)
    kept, last[-1] = last[-1].item(), float("nan")
    assert [refusal.client for refusal in step(arrays, weights).notes["refused"]] == [9]
    last[-1] = kept
    assert step(arrays, weights).notes["refused"] == ()


def parts_of_call(step, arrays, weights):
    """What a call does, each by itself: (way, whether to wait for the device, what comes first)."""
    import torch

    from fedgma.aggregation import gpu_stack
    from fedgma.aggregation.kernels import gpu as kernels
    from fedgma.aggregation.kernels.layout import common_layout, views

    listed, amounts = list(arrays.values()), weights.tolist()
    layout, device = common_layout(listed), listed[0].device
    launcher = kernels._plan(layout, torch.float32, step.mask, device).launch
    print(f"launched {'directly' if launcher.direct and launcher._again else 'by triton each time'}")
    total, fresh = sum(amounts), count(1)
    flats = {place: torch.empty(sum(layout.sizes), device=place) for place in ("cuda", "cpu")}

    def launch():
        return kernels.aggregate(listed, layout, amounts, total, step.mask)

    def launch_by_triton():
        launcher.direct, launcher._again = False, None
        result = launch()
        launcher.direct = True
        return result

    print(f"pass alone, by the device's clock: {device_time(launch):.1f} microseconds")
    return {
        "whole call, other weights each time": (lambda: step(arrays, weights + next(fresh)), True),
        "launch and pass": (launch, True),
        "launch and pass, its flag read": (lambda: bool(launch()[2]), False),
        "launch alone": (launch, False),
        "launch alone, by triton": (launch_by_triton, False),
        "wait alone, device done": (lambda begun: bool(begun[2]), False, launch),
        "numbers sent, as before": (lambda: kernels._send(bytes(96), device), False),
        "numbers sent, others each time": (lambda: kernels._send(next(fresh).to_bytes(96), device), False),
        "two results allocated": (lambda: [torch.empty(11_173_962, device=device) for _ in range(2)], False),
        "look at the stack": (partial(gpu_stack._ordinary, arrays, weights, None, gpu_stack.OPEN), False),
        "views of means and masks": (lambda: [views(flats["cuda"], layout) for _ in range(2)], False),
        "the same views of the host's memory": (lambda: [views(flats["cpu"], layout) for _ in range(2)], False),
        "a tally made": (step.open, False),
    }


def device_time(launch, repeats=50):
    """Median microseconds that the device works on a pass."""
    import torch

    spans = []
    for _ in range(repeats):
        torch.cuda._sleep(2_000_000)  # the device is busy while the host prepares the launch
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = launch()
        stop.record()
        torch.cuda.synchronize()
        settle(result)
        spans.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(spans)


def spans_of_call(way, repeats):
    """Median microseconds between the stations of a whole call, read on the host."""
    from fedgma.aggregation.kernels import gpu as kernels
    from fedgma.aggregation.kernels.flag import Flag

    clock, stamps, spans = time.perf_counter, [], []
    stations = ("until launched", "work of the host beside the pass", "wait", "after it")

    def stamped(function, before):
        def inner(*given):
            if before:
                stamps.append(clock())
            result = function(*given)
            stamps.append(clock())
            return result

        return inner

    launched = mock.patch.object(kernels, "aggregate", stamped(kernels.aggregate, before=False))
    with launched, mock.patch.object(Flag, "__bool__", stamped(Flag.__bool__, before=True)):
        for _ in range(repeats + 10):
            stamps[:] = [clock()]
            way()
            stamps.append(clock())
            spans.append([after - before for before, after in pairwise(stamps)])
    return {name: statistics.median(span) * 1e6 for name, *span in zip(stations, *spans[10:], strict=True)}
