"""What masked averaging costs beside plain averaging: time, bandwidth and memory, as ratios in one run.

    python benchmarks/bench_aggregation.py cpu        # 100 clients x ResNet18 streamed; Flower's own beside it
    python benchmarks/bench_aggregation.py memory     # 10,000 clients x 1 M parameters streamed
    python benchmarks/bench_aggregation.py gpu        # 10 and 100 clients x ResNet18 stacked, on a CUDA device
    python benchmarks/bench_aggregation.py call       # one call of `masked_mean` of 10 clients there, and where it goes
    python benchmarks/bench_aggregation.py import     # what `import fedgma` takes

Every way is checked to give the same mean (and the mask the oracle's bits) before any of them is timed. Ways are
interleaved and the median is taken; machines are noisy, so the ratio is the result. Figures of a run, with machine and
date, are in docs/performance/aggregation.md.
"""

import argparse
import platform
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from functools import partial

import numpy as np
from bench_call import call, settle
from shapes import resnet18_shapes

import fedgma

CLIENTS = 100


def timed(ways, repeats):
    """Median seconds of each way, interleaved; the first pass warms up."""
    seconds = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_models(way, model_bytes):
    tracemalloc.start()
    way()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / model_bytes


def cpu(repeats):
    cpu_table({"w": (11_173_962,)}, repeats)
    print()
    cpu_table(resnet18_shapes(), repeats)


def cpu_table(shapes, repeats):
    generator = np.random.default_rng(0)
    # eight different updates in memory stand for the hundred that a server would receive one by one
    base = [{n: generator.standard_normal(s, dtype=np.float32) for n, s in shapes.items()} for _ in range(8)]
    weights = generator.integers(100, 1000, CLIENTS)
    arrivals = [base[client % 8] for client in range(CLIENTS)]
    model_bytes = 4 * 11_173_962

    def running_mean():
        total = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        share = (weights / weights.sum()).astype(np.float32)
        for update, weight in zip(arrivals, share, strict=True):
            for name, array in update.items():
                total[name] += weight * array
        return total

    def streamed(mask):
        tally = fedgma.Tally()
        for update, weight in zip(arrivals, weights, strict=True):
            tally.add(update, weight)
        return fedgma.finish(tally, mask=mask, release=True)

    def stacked_mean():
        share = (weights / weights.sum()).astype(np.float32)
        return {n: np.tensordot(share, np.stack([update[n] for update in arrivals]), 1) for n in shapes}

    ways = {
        "running mean, numpy `acc += w * x`": running_mean,
        "fedgma masked mean, streamed": lambda: streamed("soft"),
        "fedgma plain mean, streamed": lambda: streamed("none"),
        "stack, then mean (numpy)": stacked_mean,
    }
    try:
        from flwr.server.strategy.aggregate import aggregate

        replies = [(list(update.values()), int(w)) for update, w in zip(arrivals, weights, strict=True)]
        ways["Flower's aggregate (plain mean)"] = lambda: dict(zip(shapes, aggregate(replies), strict=True))
    except ImportError:
        print("flwr is not installed: its row is left out", file=sys.stderr)

    expected = running_mean()
    for name, way in ways.items():
        result = way()
        mean = result.mean if isinstance(result, fedgma.Aggregate) else result
        error = max(float(np.abs(mean[n] - expected[n]).max()) for n in shapes)
        assert error < 1e-5, (name, error)
    last = list(shapes)[-1]
    votes = sum(np.sign(update[last][:1000]).astype(int) for update in arrivals)
    mask = np.where(np.abs(votes) * 10 >= 4 * CLIENTS, 1, np.abs(votes) / CLIENTS).astype(np.float32)
    assert np.array_equal(streamed("soft").mask[last][:1000], mask)

    seconds = timed(ways, repeats)
    plain = seconds["running mean, numpy `acc += w * x`"]
    print(f"{CLIENTS} clients x 11,173,962 float32 in {len(shapes)} arrays, one at a time; {platform.machine()}")
    print("| way | seconds | ratio | peak extra memory, models |\n| --- | --- | --- | --- |")
    for name, way in ways.items():
        print(f"| {name} | {seconds[name]:.2f} | {seconds[name] / plain:.2f} | {peak_models(way, model_bytes):.2f} |")


def memory():
    generator = np.random.default_rng(0)
    updates = [{"w": generator.standard_normal(1_000_000, dtype=np.float32)} for _ in range(4)]
    tally = fedgma.Tally()
    print("| clients | votes | tally, MB | resident, MB |\n| --- | --- | --- | --- |")
    for client in range(1, 10_001):
        tally.add(updates[client % 4], 10)
        if client in (1, 100, 1_000, 10_000):
            held = sum(array.nbytes for array in fedgma.pack(tally).values()) / 1e6
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            print(f"| {client:,} | {tally.votes['w'].dtype} | {held:.1f} | {resident:.0f} |", flush=True)
    merged = fedgma.finish(tally, release=True)
    assert merged.notes["clients"] == 10_000


def imports():
    command = "import time; s = time.perf_counter(); import fedgma; print(time.perf_counter() - s)"
    bare = command.replace("fedgma", "numpy")
    times = {name: [] for name in ("fedgma", "numpy")}
    for _ in range(7):
        for name, code in (("fedgma", command), ("numpy", bare)):
            result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            times[name].append(float(result.stdout))
    print({name: f"{statistics.median(values):.3f} s" for name, values in times.items()})


def gpu(repeats):
    import torch

    from fedgma.aggregation.kernels import gpu as kernels
    from fedgma.aggregation.kernels.layout import common_layout
    from fedgma.aggregation.masks import soft_mask

    def events(way, count=30, ahead=True):
        for _ in range(5):
            way()
        spans = []
        for _ in range(count):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if ahead:  # keep the device busy while the host prepares the launch, so that the kernel alone is timed
                torch.cuda._sleep(2_000_000)
            start.record()
            result = way()
            stop.record()
            torch.cuda.synchronize()
            settle(result)
            spans.append(start.elapsed_time(stop) * 1e-3)
        return statistics.median(spans)

    shapes = resnet18_shapes()
    size = 11_173_962
    block = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    other = torch.empty_like(block)
    bandwidth = 2 * block.nbytes / events(partial(other.copy_, block))
    del block, other
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print("| clients | way | microseconds | TB/s | share of copy |\n| --- | --- | --- | --- | --- |")
    for clients in (10, 100):
        generator = torch.Generator("cuda").manual_seed(0)
        flat = torch.randn(clients, size, generator=generator, device="cuda")
        weights = np.random.default_rng(0).integers(100, 1000, clients).astype(float)
        share = torch.tensor(weights / weights.sum(), dtype=torch.float32, device="cuda")
        arrays, start = {}, 0
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            arrays[name] = flat[:, start : start + count].reshape(clients, *shape).contiguous()
            start += count
        listed = [array.view(clients, -1) for array in arrays.values()]
        rule, step = soft_mask(0.4), fedgma.masked_mean(0.4)

        def unfused(flat=flat, share=share, clients=clients):
            mean = (share[:, None] * flat).sum(0)
            score = torch.sign(flat).mean(0).abs()
            return torch.where(score >= 0.4, 1.0, score) * mean

        def matvec(flat=flat, share=share):
            return share @ flat

        def fused(flat=flat, weights=weights, rule=rule):
            return kernels.aggregate([flat], common_layout([flat]), weights.tolist(), weights.sum(), rule)

        def fused_arrays(listed=listed, weights=weights, rule=rule):
            return kernels.aggregate(listed, common_layout(listed), weights.tolist(), weights.sum(), rule)

        def whole(flat=flat, weights=weights, step=step):
            return step({"w": flat}, weights)

        def whole_arrays(arrays=arrays, weights=weights, step=step):
            return step(arrays, weights)

        tally = fedgma.Tally()

        def streamed(flat=flat, tally=tally):
            tally.add({"w": flat[0]}, 10)

        # the same answers first: float64 on the CPU for a slice, the streamed tally for the whole
        means, masks, found = fused()
        part = flat[:, :4096].cpu()
        plain = fedgma.masked_mean(0.4)({"w": part}, weights)
        assert not bool(found)
        assert torch.equal(masks[:4096].cpu(), plain.mask["w"])
        assert torch.equal(means[:4096].cpu(), plain.mean["w"])
        again = torch.cat([mask.reshape(-1) for mask in whole_arrays().mask.values()])
        assert torch.equal(again, masks)
        torch.testing.assert_close(matvec(), means, rtol=1e-3, atol=1e-4)

        written = 8 * size  # mean and mask
        rows = {
            "plain average, matrix-vector product": (matvec, 4 * size),
            "masked, unfused torch": (unfused, 4 * size),
            "fedgma kernel, one array": (fused, written),
            "fedgma kernel, ResNet18's 62 arrays": (fused_arrays, written),
            "fedgma masked_mean, whole call, one array": (whole, written),
            "fedgma masked_mean, whole call, 62 arrays": (whole_arrays, written),
        }
        for name, (way, out) in rows.items():
            seconds = events(way, repeats, ahead="whole call" not in name)
            rate = (4 * clients * size + out) / seconds
            print(
                f"| {clients} | {name} | {seconds * 1e6:.0f} | {rate / 1e12:.2f} | {rate / bandwidth:.0%} |", flush=True
            )
        seconds = events(streamed, 20)
        rate = (4 + 2 * 13) * size / seconds
        print(f"| 1 | fedgma Tally.add, streamed | {seconds * 1e6:.0f} | {rate / 1e12:.2f} | {rate / bandwidth:.0%} |")
        del flat, arrays, listed, tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cpu", "memory", "gpu", "call", "import"])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    {
        "cpu": lambda: cpu(given.repeats),
        "memory": memory,
        "gpu": lambda: gpu(max(30, given.repeats)),
        "call": lambda: call(max(200, given.repeats)),
        "import": imports,
    }[given.part]()
