"""Clients in threads train to the bits of the loop, and models that threads would disturb stay with the loop."""

import itertools
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.training import loop
from fedgma.training.choose import choose, lanes_of_a_chunk
from fedgma.training.lane_batch import Assignment, Tilt
from fedgma.training.threads import trainer
from fedgma.training.threads.safety import GlobalGenerators, equal, why_not_threads
from fedgma.training.threads.trainer import Threads
from lane_twins import correction_like, make_lane_batch, start_of
from plain_pools import make_federation
from run_specs import make_spec

SIZES = [9, 3, 17, 8, 5, 1]


class Net(nn.Module):
    """A small convolution with batch normalisation."""

    def __init__(self, shape=(1, 6, 6), classes=10):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(48, classes)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x))).flatten(1))


class Pools(Net):
    """Many channels, with max pooling."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.norm = nn.Conv2d(1, 16, 3), nn.MaxPool2d(2, 1), nn.BatchNorm2d(16)
        self.out = nn.Linear(144, 10)

    def forward(self, x):
        return self.out(torch.relu(self.pool(self.norm(self.conv(x)))).flatten(1))


class Drops(Net):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class DropLayers(Net):
    """Dropout as layers, one of them in place."""

    def __init__(self):
        super().__init__()
        self.before, self.after, self.never = nn.Dropout(0.3), nn.Dropout(0.5, inplace=True), nn.Dropout(0.0)

    def forward(self, x):
        return self.never(self.after(super().forward(self.before(x))))


class Counts(Net):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) / self.calls


class Caches(Net):
    """Computes something once, and keeps it."""

    table = None

    def forward(self, x):
        self.table = torch.ones(()) if self.table is None else self.table
        return super().forward(x) * self.table


class Chances(Net):
    def forward(self, x):
        return super().forward(x) * random.random()


class Sparse(Net):
    """The gradient of an embedding is sparse."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Embedding(2, 10, sparse=True)

    def forward(self, x):
        return super().forward(x) + self.shift(torch.zeros(len(x), dtype=torch.int64))


class Rarely(Net):
    """Draws at the third batch only."""

    def forward(self, x):
        if int(self.norm.num_batches_tracked) == 2:
            x = x + torch.rand(())
        return super().forward(x)


def task_of(model, sizes=SIZES, **settings):
    torch.manual_seed(0)
    federation = make_federation(sizes, (1, 6, 6))
    batch = make_lane_batch(federation, range(len(sizes)), **settings)
    return Assignment(model, batch, [federation.train], *start_of(model))


def by_the_loop(task):
    """What the loop gives on one thread of torch."""
    with trainer.one_thread():
        return loop.train(task)


def assert_same(first, second):
    assert torch.equal(first.flat, second.flat)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.measures, second.measures)
    assert all(torch.equal(first.buffers[name], second.buffers[name]) for name in first.buffers)


SETTINGS = [
    {},
    {"mu": 0.1, "clip": 0.5},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": 1.0},
    {"optimizer": "adamw", "lr": 0.01},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", [Net, Pools, DropLayers])
def test_threads_give_the_bits_of_the_loop(kind, settings):
    task = task_of(kind(), **settings)
    trainer = Threads(workers=3)
    wanted = by_the_loop(task)
    for _ in range(3):  # the second call measures, the third goes by what it found
        assert_same(wanted, trainer(task))
    for useful in (True, False):
        assert_same(wanted, Threads(workers=2, useful=useful)(task))


def test_corrections_and_tilts_are_those_of_the_lane():
    task = task_of(Net(), rho=0.1, blend=1.0, tilted=1.0)
    tilt = Tilt(*(correction_like(task.start, len(SIZES), seed) for seed in (1, 2, 3)))
    task = task._replace(correction=correction_like(task.start, len(SIZES)), tilt=tilt)
    before = tilt.mapped(lambda part: {name: value.clone() for name, value in part.items()})
    first, second = (trainer(task) for trainer in (by_the_loop, Threads(workers=2)))
    assert_same(first, second)
    assert equal(tuple(first.tilt), tuple(second.tilt))
    assert equal(tuple(before), tuple(tilt))


def test_a_fleet_chooses_threads_for_a_small_module_of_a_user():
    specs = [make_spec(make_federation(SIZES, (1, 6, 6)), model=Net, clients_per_round=6)]
    fleets = [assemble(specs, trainer=name) for name in ("auto", "threads", "loop")]
    ends = [play_round(fleet, start(fleet))[0].params for fleet in fleets]
    assert torch.equal(ends[0], ends[1])
    assert [isinstance(fleet.train.train, Threads) for fleet in fleets] == [True, True, False]
    assert torch.get_num_threads() > 1 or torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Net, None),
        (Caches, None),
        (DropLayers, None),
        (Drops, "Drops draws random numbers"),
        (Chances, "Chances draws random numbers"),
        (Counts, "Counts remembers something from batch to batch"),
        (Sparse, "Sparse has sparse or complex gradients"),
    ],
)
def test_what_threads_would_disturb_is_found_in_a_trial(kind, reason):
    pool, model = make_federation(SIZES, (1, 6, 6)).train, kind()
    before = GlobalGenerators.read()
    assert why_not_threads(model, pool) == reason
    assert not before.have_moved()


def test_hooks_and_errors_stay_with_the_loop():
    pool, model = make_federation(SIZES, (1, 6, 6)).train, Net()
    model.conv.register_forward_hook(lambda *_: None)
    assert why_not_threads(model, pool) == "Net has hooks"
    assert why_not_threads(nn.Linear(2, 2), pool) == "Linear could not be tried (RuntimeError)"
    recurrent = nn.Sequential(nn.Flatten(1, 2), nn.GRU(6, 10, batch_first=True))
    assert "could not be tried" in why_not_threads(recurrent, pool)  # its output is a pair


def test_a_recurrent_layer_remembers_nothing():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(6, 10, batch_first=True)

        def forward(self, x):
            return self.layer(x[:, 0])[0][:, -1]

    assert why_not_threads(Reads(), make_federation(SIZES, (1, 6, 6)).train) is None


def test_a_named_trainer_says_why_it_is_the_loop(caplog):
    pool = make_federation(SIZES, (1, 6, 6)).train
    choose("threads", Drops(), [pool])
    assert [record.message for record in caplog.records] == [
        "Drops draws random numbers; training one client at a time"
    ]


@pytest.mark.parametrize(
    ("clients", "seconds", "useful"),
    [(6, [0.0, 1.0, 2.0], True), (6, [0.0, 1.0, 9.0], False), (8, [0.0, 2.0, 5.0], True), (8, [0.0, 2.0, 8.0], False)],
)
def test_threads_that_are_slower_than_one_of_them_are_not_used(monkeypatch, clients, seconds, useful):
    ticks = itertools.cycle(seconds)
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(ticks))
    task, threads = task_of(Net(), sizes=[4] * clients), Threads(workers=2, calls=1)
    for _ in range(2):
        assert threads.useful
        threads(task)  # a quarter of the clients in one thread, a second each, then the others in two
    assert threads.useful is useful


def test_one_comparison_alone_changes_nothing(monkeypatch):
    slower, faster = [0.0, 1.0, 9.0], [0.0, 1.0, 2.0]
    ticks = iter(slower + faster)
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(ticks))
    task, threads = task_of(Net()), Threads(workers=2, calls=1)
    seen = []
    for _ in range(3):  # the third call compares nothing: no tick is left for it
        threads(task)
        seen.append((threads.useful, threads.doubted))
    assert seen == [(True, True), (True, False), (True, False)]


def test_memory_for_updates_is_used_again_unless_somebody_holds_it(monkeypatch):
    monkeypatch.setattr(trainer, "LARGEST_KEPT", 0)
    task, threads = task_of(Net()), Threads(workers=2)
    wanted = by_the_loop(task)
    first = threads(task)
    part = first.updates["conv.weight"][2]
    place, before = first.flat.data_ptr(), part.clone()
    del first
    second = threads(task)
    assert_same(wanted, second)
    assert torch.equal(part, before)
    assert second.flat.data_ptr() != place  # a view of the first was alive
    place = second.flat.data_ptr()
    del second
    assert threads(task).flat.data_ptr() == place


def test_a_model_that_draws_later_is_trained_again_by_the_loop():
    task, trainer = task_of(Rarely()), Threads(workers=2)
    assert why_not_threads(task.model, task.pools[0]) is None
    states = GlobalGenerators.read()
    assert_same(by_the_loop(task), trainer(task))
    assert trainer.draws
    assert not states.have_moved()


def test_copies_of_the_model_are_kept_for_the_next_call_and_not_for_another_model():
    first, second, trainer = task_of(Net()), task_of(Pools()), Threads(workers=2)
    assert_same(by_the_loop(first), trainer(first))
    kept = dict(trainer.copies)
    assert_same(by_the_loop(first), trainer(first))
    assert kept.items() <= trainer.copies.items()
    trainer.useful = True
    assert_same(by_the_loop(second), trainer(second))
    assert all(type(one.model) is Pools for one in trainer.copies.values())


def test_an_error_in_a_thread_reaches_the_caller_and_no_further_client_begins():
    begun = []

    class Fails(Net):
        def forward(self, x):
            begun.append(len(x))
            raise ArithmeticError("a user's error")

    with pytest.raises(ArithmeticError, match="a user's error"):
        Threads(workers=2)(task_of(Fails()))
    assert len(begun) <= 4


@pytest.mark.parametrize("main_fails", [True, False])
def test_an_error_in_one_thread_stops_the_others(main_fails):
    main, begun, failed = threading.get_ident(), [], threading.Event()

    class Fails(Net):
        def forward(self, x):
            begun.append(len(x))
            if (threading.get_ident() == main) is main_fails:
                failed.set()
                raise ArithmeticError("a user's error")
            failed.wait(60)
            return super().forward(x)

    with pytest.raises(ArithmeticError, match="a user's error"):
        Threads(workers=2)(task_of(Fails(), sizes=[4] * 60))
    assert len(begun) < 60


def test_the_number_of_torch_threads_is_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Threads(workers=2)(task_of(Net()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({"LOCAL_WORLD_SIZE": "16", "OMP_NUM_THREADS": "5"}, 1),
    ],
)
def test_the_environment_limits_the_threads(monkeypatch, variables, wanted):
    monkeypatch.setattr(trainer.os, "sched_getaffinity", lambda process: range(8), raising=False)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, variables.get(name, ""))
    assert trainer.cores() == wanted


def test_threads_take_a_quarter_of_the_memory_and_chunks_that_keep_them_busy(monkeypatch):
    monkeypatch.setattr(trainer, "cores", lambda: 16)
    monkeypatch.setattr(trainer.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1024}[name])
    assert [trainer.workers_for(size) for size in (0, 2**10, 2**18, 2**30)] == [16, 16, 4, 1]
    pool = make_federation(SIZES, (1, 6, 6)).train
    trainers = [choose(name, Net(), [pool]) for name in ("threads", "loop")]
    assert [lanes_of_a_chunk(trainer, 3) for trainer in trainers] == [64, 3]
    assert lanes_of_a_chunk(trainers[0], 100) == 100


def test_numpy_draws_count_as_random_numbers():
    before = GlobalGenerators.read()
    np.random.rand()  # noqa: NPY002
    assert before.have_moved()
    before.restore()
    assert not before.have_moved()
