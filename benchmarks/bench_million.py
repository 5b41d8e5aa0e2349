"""A round with a million clients through a tree of tallies: edges, regions, root.

    python benchmarks/bench_million.py                      # LeNet, 1,000,000 clients, 1,000 leaf tallies
    python benchmarks/bench_million.py --model resnet18 --clients 400 --leaves 4 --regions 2     # a large model's rates

Clients are added one at a time to the tally of their edge; a full edge's tally travels to its region as checksummed
bytes, is read back and merged; regions travel to the root in the same way. Every client has an update of its own: a
slice of one long row of random numbers, at its own offset. Before the round a small one is played both as a tree and as
one long line and their bits are compared; after it a sample of entries is compared with exact sums over all clients
(integer votes, `math.fsum`). Regions are played by `--processes` processes; rates are of processor time, so that other
jobs on the machine do not count. Figures of a run are in docs/scale.md.
"""

import argparse
import math
import multiprocessing
import sys
import time

import numpy as np
from shapes import LENET, memory, resnet18_shapes

import fedgma
from fedgma.aggregation.kernels import load_cpu_kernels

MODELS = {"lenet": LENET, "resnet18": resnet18_shapes(), "small": {"w": (1000,)}}
TAU = 0.4
WORK = ("adding", "to bytes", "from bytes", "merging")


class Clients:
    """Clients' updates and weights by number; nothing is kept of them."""

    def __init__(self, shapes):
        self.cuts, place = [], 0
        for name, shape in shapes.items():
            self.cuts.append((name, place, place + math.prod(shape), shape))
            place += math.prod(shape)
        self.size = place
        spread = max(1 << 24, 2 * place)
        self.row = np.random.default_rng(0).standard_normal(spread + place, dtype=np.float32)
        self.spread = spread

    def offset(self, client):
        return client * 2_654_435_761 % self.spread

    def weight(self, client):
        return 10 + client * 7919 % 491

    def update(self, client):
        start = self.offset(client)
        return {name: self.row[start + a : start + b].reshape(shape) for name, a, b, shape in self.cuts}


def edge(clients, numbers):
    tally = fedgma.Tally()
    for number in numbers:
        tally.add(clients.update(number), clients.weight(number))
    return tally


def region(clients, leaves):
    """Play a region: its edges one after the other; its tally, and processor seconds by what they went into."""
    tally, spent = fedgma.Tally(), dict.fromkeys(WORK, 0.0)

    def clocked(what, work, *arguments):
        begun = time.process_time()
        result = work(*arguments)
        spent[what] += time.process_time() - begun
        return result

    for numbers in leaves:
        sent = clocked("to bytes", fedgma.to_bytes, clocked("adding", edge, clients, numbers))
        size, arrived = len(sent), clocked("from bytes", fedgma.from_bytes, sent)
        del sent
        clocked("merging", tally.merge, arrived)
        del arrived
    return tally, spent, size


STATE = {}  # of a worker process


def start(model):
    load_cpu_kernels()  # the compiled loops, also for a small model: it is added many times
    STATE["clients"] = Clients(MODELS[model])


def work(leaves):
    tally, spent, leaf_bytes = region(STATE["clients"], leaves)
    return fedgma.to_bytes(tally), spent, leaf_bytes, memory("VmHWM")


def split(count, leaves, regions):
    """Client numbers by region and edge."""
    edges = [range(count * k // leaves, count * (k + 1) // leaves) for k in range(leaves)]
    return [edges[leaves * k // regions : leaves * (k + 1) // regions] for k in range(regions)]


def check_small(model, count):
    """The same bits from a tree as from one long line."""
    clients = Clients(MODELS[model])
    line = fedgma.finish(edge(clients, range(count)), TAU)
    root = fedgma.Tally()
    for leaves in reversed(split(count, min(10, count), 3)):
        root.merge(region(clients, leaves)[0])
    tree = fedgma.finish(root, TAU)
    for name in line.mean:
        assert np.array_equal(line.mean[name].view(np.uint32), tree.mean[name].view(np.uint32)), name
        assert np.array_equal(line.mask[name], tree.mask[name]), name
    print(f"{count:,} clients as a tree and as one line: the same bits", file=sys.stderr)


def check_sample(merged, clients, count, entries=24):
    """A sample of entries against exact sums over all clients."""
    numbers = np.arange(count, dtype=np.int64)
    offsets, weights = clients.offset(numbers), clients.weight(numbers)
    mean = np.concatenate([merged.mean[name].reshape(-1) for name, *_ in clients.cuts])
    mask = np.concatenate([merged.mask[name].reshape(-1) for name, *_ in clients.cuts])
    for place in np.random.default_rng(1).integers(0, clients.size, entries):
        values = clients.row[offsets + place]
        votes = abs(int(np.sign(values).astype(np.int64).sum()))
        exact = math.fsum((values.astype(np.float64) * weights).tolist()) / int(weights.sum())
        assert mean[place] == np.float32(exact), (place, mean[place], exact)
        assert mask[place] == np.float32(1 if 10 * votes >= 4 * count else votes / count), place
    print(f"{entries} entries checked against exact sums over all clients", file=sys.stderr)


def main(model, count, leaves, regions, processes):
    start(model)
    clients = STATE["clients"]
    with multiprocessing.get_context("spawn").Pool(1, start, (model,)) as pool:
        pool.apply(check_small, (model, min(count, 2000)))
    root, spent, peaks, sizes = fedgma.Tally(), dict.fromkeys(WORK, 0.0), [], []
    with multiprocessing.get_context("spawn").Pool(processes, start, (model,)) as pool:
        pool.map(len, [[]] * processes)  # start-up is not part of the round
        begun = time.perf_counter()
        for data, seconds, size, peak in pool.imap_unordered(work, split(count, leaves, regions)):
            root.merge(fedgma.from_bytes(data))
            spent = {what: spent[what] + seconds[what] for what in spent}
            peaks.append(peak)
            sizes.append(size)
            print(f"{root.clients:,} clients after {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        merged = fedgma.finish(root, TAU)
        wall, own = time.perf_counter() - begun, memory("VmHWM")
    assert root.clients == count
    check_sample(merged, clients, count)
    print(f"| {model}, {clients.size:,} parameters | {count:,} clients, {leaves:,} edges, {regions} regions |")
    print("| --- | --- |")
    print(f"| the round, wall, {processes} processes | {wall:.1f} s |")
    each, rate = spent["adding"] / count * 1e6, count / spent["adding"]
    print(f"| adding a client to a leaf, processor time | {each:.0f} us, {rate:,.0f}/s |")
    for what in WORK[1:]:
        print(f"| a leaf: {what}, processor time | {spent[what] / leaves * 1e3:.2f} ms |")
    print(f"| a leaf's tally on the wire | {max(sizes):,} bytes, {max(sizes) / clients.size / 4:.2f} models |")
    print(f"| the root's tally on the wire | {len(fedgma.to_bytes(root)):,} bytes |")
    print(f"| peak memory: a region's process, the root's | {max(peaks):.0f} MB, {own:.0f} MB |")
    print(f"| of it the stand-in for the clients' updates, in each | {clients.row.nbytes / 1e6:.0f} MB |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="lenet")
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--leaves", type=int, default=1_000)
    parser.add_argument("--regions", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    main(given.model, given.clients, given.leaves, given.regions, given.processes)
