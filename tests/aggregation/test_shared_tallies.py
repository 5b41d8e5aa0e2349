"""A tally among threads, interruptions and its own callers: clients count whole, once, and nobody holds its memory."""

import copy
import gc
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation import kernels, tally
from fedgma.aggregation.server import MaskedServer
from strategies import same_bits

UPDATE = {"w": np.array([1.0, -2.0], np.float32), "b": np.ones(3), "steps": np.array([4])}


def counted(clients=2):
    made = fedgma.Tally()
    for client in range(clients):
        made.add(UPDATE, 10, client=client)
    return made


# -- threads -----------------------------------------------------------------------------------------------------------


def in_threads(work, threads=4):
    started = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def test_clients_added_from_several_threads_are_all_counted():
    shared, ones = fedgma.Tally(), {"w": np.ones(100_000, np.float32), "steps": np.array([1])}
    in_threads(lambda thread: [shared.add(ones, 1, client=(thread, k)) for k in range(10)])
    merged = fedgma.finish(shared)
    assert merged.notes["clients"] == 40
    assert np.unique(merged.mean["w"]).tolist() == [1.0]
    assert np.unique(shared.votes["w"]).tolist() == [40]


@pytest.mark.parametrize("way", ["add", "add_many", "merge", "finish"])
def test_threads_take_turns(monkeypatch, way):
    shared, inside, most = counted(), [], []

    def slow(work):
        def wait(*arguments, **options):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()
            return work(*arguments, **options)

        return wait

    monkeypatch.setattr(tally.Tally, "count", slow(tally.Tally.count))
    monkeypatch.setattr(tally.Tally, "_take_over", slow(tally.Tally._take_over))
    monkeypatch.setattr(tally.Tally, "check_round", slow(tally.Tally.check_round))
    stack = {name: array[None] for name, array in UPDATE.items()}
    others = [fedgma.unpack(fedgma.pack(fedgma.Tally())) for _ in range(4)]
    ways = {
        "add": lambda thread: shared.add(UPDATE),
        "add_many": lambda thread: shared.add_many(stack),
        "merge": lambda thread: shared.merge(others[thread]),
        "finish": lambda thread: fedgma.finish(shared),
    }
    in_threads(ways[way])
    assert max(most) == 1


def test_two_tallies_merged_into_each_other_at_once_do_not_wait_for_ever():
    first, second = fedgma.Tally(), fedgma.Tally()
    first.add(UPDATE, 1)
    second.add(UPDATE, 1)
    in_threads(lambda thread: [(first, second)[thread % 2].merge((second, first)[thread % 2]) for _ in range(3)], 2)
    assert first.clients > 1


# -- interruptions -----------------------------------------------------------------------------------------------------


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


def interrupt(monkeypatch, place, work, by=interrupted):
    """Do something while Ctrl-C is pressed at a place of the library."""
    with monkeypatch.context() as patch:
        patch.setattr(f"fedgma.aggregation.{place}", by)
        with pytest.raises(KeyboardInterrupt):
            work()


def add_first_and_stop(sums, updates, weight):
    kernels.plain_add(sums[0], updates[0], weight)
    raise KeyboardInterrupt


USES = {
    "add": lambda half: half.add(UPDATE),
    "add_many": lambda half: half.add_many({name: array[None] for name, array in UPDATE.items()}),
    "finish": fedgma.finish,
    "votes": lambda half: half.votes,
    "to_bytes": fedgma.to_bytes,
    "merge": lambda half: half.merge(unnamed()),
    "merge into another": lambda half: fedgma.Tally().merge(half),
    "copy": copy.deepcopy,
}


def unnamed():
    other = fedgma.Tally()
    other.add(UPDATE)
    return other


@pytest.mark.parametrize("use", USES)
def test_a_tally_with_a_client_half_counted_is_not_used(monkeypatch, use):
    half = counted()
    interrupt(monkeypatch, "kernels.add", lambda: half.add(UPDATE, 10, client="c"), by=add_first_and_stop)
    with pytest.raises(fedgma.DataError, match="interrupted, so a client is counted in part; make a new tally"):
        USES[use](half)
    half.clear()
    assert half.add(UPDATE) is None


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("model_sums.merge", USES["add_many"]),
        ("model_sums.merge", USES["merge"]),
        ("kernels.add_if_finite", USES["add"]),
        ("aggregate._compute_mask", lambda half: fedgma.finish(half, release=True)),
    ],
)
def test_other_changes_that_are_interrupted_stop_the_tally_too(monkeypatch, place, change):
    half = counted()
    interrupt(monkeypatch, place, lambda: change(half))
    with pytest.raises(fedgma.DataError, match="interrupted"):
        fedgma.finish(half)


def test_an_interruption_before_anything_is_counted_changes_nothing(monkeypatch):
    whole = counted()
    before = fedgma.pack(whole)
    interrupt(monkeypatch, "tally.check_finite", lambda: whole.add(UPDATE, 10, client="c"))
    assert same_bits(before, fedgma.pack(whole))
    assert whole.add(UPDATE, 10, client="c") is None


def test_a_round_that_is_interrupted_leaves_the_usual_norm(monkeypatch):
    server, model = MaskedServer(), {"w": np.ones(2)}
    server.step(model, [({"w": np.ones(2)}, 1, "a")])
    medians = list(server.medians)
    interrupt(monkeypatch, "server.statistics", lambda: server.step(model, [({"w": np.full(2, 3.0)}, 1, "a")]))
    assert server.medians == medians


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [np.array, torch.tensor])
def test_what_a_tally_hands_out_is_not_its_own_memory(library):
    update = {"w": library([1.0, -2.0]), "bn.running_mean": library([3.0]), "steps": library([4])}
    held = fedgma.Tally()
    held.add(update, 10)
    before = fedgma.pack(held)
    merged = fedgma.finish(held)
    for array in (*held.votes.values(), *merged.update.values(), *merged.buffers.values(), *merged.mask.values()):
        array += 1
    fedgma.finish(held, mask=lambda votes, clients, dtype: np.multiply(votes, 0, out=votes).astype(dtype))
    for array in update.values():
        array += 1
    assert same_bits(before, fedgma.pack(held))


def test_a_tally_does_not_keep_the_first_array_alive():
    first = np.ones(1000)
    gone = weakref.ref(first)
    held, like = fedgma.Tally(), fedgma.Tally({"w": first})
    held.add({"w": first})
    del first
    gc.collect()
    assert gone() is None
    assert held.clients == 1
    assert like.clients == 0


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam", "yogi"])
def test_parameters_that_require_gradients_do_not_chain_rounds(name):
    model = {"w": torch.ones(2, requires_grad=True), "frozen": torch.ones(1, requires_grad=True)}
    clients = [{"w": torch.full((2,), 2.0, requires_grad=True), "frozen": torch.ones(1)}]
    state = None
    for _ in range(2):
        model, state, _ = fedgma.server_round(model, clients, optimizer=getattr(fedgma, name)(), state=state)
        arrays = [*model.values(), *(array for moment in state.values() for array in moment.values())]
        assert not any(array.requires_grad or array.grad_fn is not None for array in arrays)


def test_a_shallow_copy_shares_nothing_with_its_original():
    made = counted()
    before = fedgma.pack(made)
    snapshot = copy.copy(made)
    made.add({name: 4 * value for name, value in UPDATE.items()}, 10, client="c")
    assert same_bits(before, fedgma.pack(snapshot))
    snapshot.add(UPDATE, 10, client="d")
    assert made.seen == {0, 1, "c"}


def test_a_copy_waits_for_a_client_that_another_thread_is_adding(monkeypatch):
    made, adding, copied = counted(), threading.Event(), []
    work = kernels.add

    def slow(*arguments, **options):
        adding.set()
        time.sleep(0.05)
        return work(*arguments, **options)

    monkeypatch.setattr(kernels, "add", slow)
    monkeypatch.setattr(tally.Tally, "_add_unchecked", lambda *arguments: False)
    other = threading.Thread(target=made.add, args=(UPDATE, 10), kwargs={"client": "c"})
    other.start()
    adding.wait()
    copied.append(copy.deepcopy(made))
    other.join()
    assert same_bits(fedgma.pack(copied[0]), fedgma.pack(made))


def test_a_tally_can_be_copied_and_pickled_for_another_process():
    made = counted()
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert same_bits(fedgma.pack(made), fedgma.pack(again))
        assert again.add(UPDATE, client="c") is None
    assert made.clients == 2
