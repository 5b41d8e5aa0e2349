"""A Flower server's round over ResNet18-sized replies: fedgma's masked mean beside Flower's own FedAvg, in one run.

    python benchmarks/flower/bench_server.py                      # 10, 50 and 100 replies of 11,173,962 parameters

Each side plays a whole round by its own `start`, in a process of its own, with the same replies (messages as Flower
delivers them, 44.7 MB each, made when they are fetched; the time that takes is left out). Models are compared first:
fedgma's plain mean with Flower's, and fedgma's masked mean with the masked mean of a slice computed here. Seconds are
medians, of wall and of processor time (all threads); "held" is what the process holds before the round, and "beyond"
what the round takes on top at its peak, replies included. Figures of a run are in docs/scale.md.
"""

import argparse
import json
import logging
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from shapes import memory, resnet18_shapes

SIDES = ("Flower FedAvg", "fedgma mean", "fedgma masked mean")
LOOKED_AT = 2000  # entries of each array that are compared


def peak_reset():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def model_and_updates(count):
    """A start model, a function of what each client would send (slices of one long row of random numbers), weights."""
    shapes, rng = resnet18_shapes(), np.random.default_rng(0)
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    row = rng.standard_normal(size + 1_000_003, dtype=np.float32)
    starts = rng.integers(0, 1_000_003, count)

    def cut(values):
        parts, place = {}, 0
        for name, shape in shapes.items():
            length = int(np.prod(shape))
            parts[name] = values[place : place + length].reshape(shape)
            place += length
        return parts

    model = cut(np.full(size, 0.5, np.float32))
    counts = rng.integers(100, 1000, count)

    def arrays_of(client):
        begin = starts[client]
        return {name: model[name] + part for name, part in cut(row[begin : begin + size]).items()}

    return model, arrays_of, counts


class Federation:
    """A grid whose nodes answer at once, each with its arrays; counts the time that making replies takes."""

    def __init__(self, count, reply):
        self.count, self.reply, self.asked, self.wall, self.busy = count, reply, {}, 0.0, 0.0

    def get_node_ids(self):
        return list(range(1, self.count + 1))

    def get_nodes(self):
        from flwr.proto.node_pb2 import NodeInfo

        return [NodeInfo(node_id=node) for node in self.get_node_ids()]

    def push_messages(self, messages):
        self.asked = {f"m{message.metadata.dst_node_id}": message for message in messages}
        for name, message in self.asked.items():
            message.metadata.__dict__["_message_id"] = name
        return list(self.asked)

    def pull_messages(self, names):
        begun, worked = time.perf_counter(), time.process_time()
        replies = [self.reply(self.asked[name]) for name in names]
        self.wall += time.perf_counter() - begun
        self.busy += time.process_time() - worked
        return replies

    def send_and_receive(self, messages, timeout=None):
        return self.pull_messages(self.push_messages(list(messages)))


def child(side, count, repeats, out):
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    import fedgma
    from fedgma.flower import Masked

    logging.disable(logging.CRITICAL)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    record = lambda arrays: ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})  # noqa: E731
    model, arrays_of, counts = model_and_updates(count)

    def reply(message):
        place = message.metadata.dst_node_id - 1
        metrics = MetricRecord({"num-examples": int(counts[place])})
        return Message(content=RecordDict({"arrays": record(arrays_of(place)), "metrics": metrics}), reply_to=message)

    aggregators = {"fedgma mean": fedgma.mean(), "fedgma masked mean": fedgma.masked_mean(0.4)}
    start, seconds, busy, beyond, result = record(model), [], [], 0.0, None
    for _ in range(repeats + 1):
        options = {"fraction_evaluate": 0.0}
        strategy = FedAvg(**options) if side == SIDES[0] else Masked(aggregator=aggregators[side], **options)
        grid, result = Federation(count, reply), None
        held = memory("VmRSS")
        peak_reset()
        begun, worked = time.perf_counter(), time.process_time()
        result = strategy.start(grid, start, num_rounds=1)
        seconds.append(time.perf_counter() - begun - grid.wall)
        busy.append(time.process_time() - worked - grid.busy)
        beyond = max(beyond, memory("VmHWM") - held)
    np.savez(out, **{name: array.numpy().reshape(-1)[:LOOKED_AT] for name, array in result.arrays.items()})
    middle = {"seconds": statistics.median(seconds[1:]), "busy": statistics.median(busy[1:])}
    print(json.dumps({**middle, "held": held, "beyond": beyond}))


def expected(count):
    """The masked mean of the entries looked at, in float64, with plain numpy."""
    model, arrays_of, counts = model_and_updates(count)
    total = {name: np.zeros(min(array.size, LOOKED_AT)) for name, array in model.items()}
    votes = {name: np.zeros(len(array), int) for name, array in total.items()}
    for client, weight in enumerate(counts):
        for name, array in arrays_of(client).items():
            update = (array - model[name]).reshape(-1)[:LOOKED_AT]
            total[name] += weight * update.astype(float)
            votes[name] += np.sign(update).astype(int)
    means = {name: array / counts.sum() for name, array in total.items()}
    masks = {n: np.where(np.abs(v) * 10 >= 4 * count, 1, np.abs(v) / count) for n, v in votes.items()}
    return {name: 0.5 + masks[name] * means[name] for name in means}


def measured(count, repeats):
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for side in SIDES:
            out = pathlib.Path(folder) / f"{side}.npz"
            command = [sys.executable, __file__, "--child", side, str(count), str(repeats), str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{side}, {count} replies: {done.stderr[-2000:]}")
            results[side] = json.loads(done.stdout.splitlines()[-1])
            with np.load(out) as file:
                models[side] = {name: file[name] for name in file.files}
    right = expected(count)
    for name, array in models["Flower FedAvg"].items():
        np.testing.assert_allclose(models["fedgma mean"][name], array, rtol=0, atol=2e-6)
        np.testing.assert_allclose(models["fedgma masked mean"][name], right[name], rtol=0, atol=2e-6)
    return results


def main(counts, repeats):
    print("| replies | way | seconds a round | processor seconds | held, MB | beyond, MB | beyond, models |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for count in counts:
        for side, row in measured(count, repeats).items():
            models = row["beyond"] / (4 * 11.173962)
            figures = (
                f"{row['seconds']:.2f} | {row['busy']:.2f} | {row['held']:.0f} | {row['beyond']:.0f} | {models:.1f}"
            )
            print(f"| {count} | {side} | {figures} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replies", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    main(given.replies, given.repeats)
