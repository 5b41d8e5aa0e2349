"""An update that is added while it is checked: the bits of checking first, and no trace if it is refused."""

import numpy as np
import pytest

import fedgma
from fedgma.aggregation import kernels

pytest.importorskip("numba")

from fedgma.aggregation.kernels import attempt, cpu

SHAPES = {"a": (700,), "b": (3, 100), "c": (), "d": (1300,)}


@pytest.fixture
def small(monkeypatch):
    """Arrays of any size take the way of large ones, in three threads."""
    monkeypatch.setattr(kernels, "LARGE", 1)
    monkeypatch.setattr(cpu, "SHARED", 1)
    monkeypatch.setattr(cpu, "THREADS", 3)
    kernels.load_cpu_kernels()


@pytest.fixture
def used(small, monkeypatch):
    """What `add_if_finite` answered, call by call."""
    answers, real = [], attempt.add_if_finite

    def watched(*given):
        answers.append(real(*given))
        return answers[-1]

    monkeypatch.setattr(attempt, "add_if_finite", watched)
    return answers


def updates_of(clients, *, wide, dtype=np.float32):
    """Random updates; `wide` ones span so many exponents that most additions are rounded."""
    draw = np.random.default_rng(5)
    spread = 60 if wide else 1
    return [
        {
            name: np.asarray(draw.standard_normal(shape) * 2.0 ** draw.integers(-spread, spread, shape), dtype)
            for name, shape in SHAPES.items()
        }
        for _ in range(clients)
    ]


def tally_of(updates, monkeypatch=None):
    """The tally of these updates, each with its own weight; with `monkeypatch`, every update is checked first."""
    if monkeypatch is not None:
        monkeypatch.setattr(kernels, "add_if_finite", lambda *given: False)
    tally = fedgma.Tally()
    for number, update in enumerate(updates):
        tally.add(update, 3 + number)
    return tally


def assert_same_bits(first, second):
    packed, other = fedgma.pack(first), fedgma.pack(second)
    assert packed.keys() == other.keys()
    for name, array in packed.items():
        np.testing.assert_array_equal(array.view(np.uint8), other[name].view(np.uint8), name)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("wide", [False, True])
def test_the_sums_have_the_bits_of_checking_first(wide, dtype, used, monkeypatch):
    updates = updates_of(6, wide=wide, dtype=dtype)
    assert_same_bits(tally_of(updates), tally_of(updates, monkeypatch))
    assert used == [True] * 5  # the first update makes the sums


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("name", "place"), [("a", 0), ("b", 299), ("d", 700), ("d", 1299)])
def test_a_refused_update_leaves_no_trace(name, place, wide, bad, used):
    *updates, spoilt, last = updates_of(5, wide=wide)
    spoilt[name].reshape(-1)[place] = bad
    tally = tally_of(updates)
    before = fedgma.pack(tally)
    refusal = tally.add(spoilt, 50, client="x")
    assert (refusal.reason, refusal.detail) == ("nonfinite", f"{name!r} holds a NaN or an infinity")
    after = fedgma.pack(tally)
    for key in before.keys() - {"header"}:
        np.testing.assert_array_equal(before[key].view(np.uint8), after[key].view(np.uint8), key)
    assert used[-1] is False
    tally.add(last, 9)
    assert (tally.clients, tally.weight) == (4, 3 + 4 + 5 + 9)


def mostly_exact(seed, rounded):
    """Whole numbers, whose sums are exact, and at these places a value too small for an exact sum."""
    update = np.random.default_rng(seed).integers(-9, 10, 90_000).astype(np.float32)
    update[rounded] = 1e-30
    return {"w": update, "v": update[:300].copy()}


@pytest.mark.parametrize("rounded", [[], [0], [300, 20_000, 89_999], [29_999, 30_000, 59_999]])
def test_blocks_that_wait_are_added_in_the_end(rounded, used, monkeypatch):
    updates = [mostly_exact(seed, rounded) for seed in range(4)]
    assert_same_bits(tally_of(updates), tally_of(updates, monkeypatch))
    assert used == [True] * 3


@pytest.mark.parametrize("rounded", [[], [0], [300, 20_000, 89_999], [29_999, 30_000, 59_999], list(range(90_000))])
@pytest.mark.parametrize("bad", [0, 301, 29_990, 50_000, 89_998])
def test_blocks_that_wait_are_passed_over_when_an_update_is_taken_back(rounded, bad, used):
    tally = tally_of([mostly_exact(seed, [5, 20_001]) for seed in range(3)])
    before = fedgma.pack(tally)
    spoilt = mostly_exact(9, rounded)
    spoilt["w"][bad] = np.nan
    assert tally.add(spoilt, 7).reason == "nonfinite"
    after = fedgma.pack(tally)
    for key in before.keys() - {"header"}:
        np.testing.assert_array_equal(before[key].view(np.uint8), after[key].view(np.uint8), key)
    assert used[-1] is False


def test_buffers_and_counters_come_along_and_a_bad_buffer_refuses(used, monkeypatch):
    updates = [
        {**update, "n.running_mean": np.full(3, k, np.float32), "n.num_batches_tracked": np.array(k)}
        for k, update in enumerate(updates_of(4, wide=False))
    ]
    tally = tally_of(updates)
    assert used == [True] * 3
    spoilt = {**updates[0], "n.running_mean": np.full(3, np.nan, np.float32)}
    assert tally.add(spoilt, 1).detail == "'n.running_mean' holds a NaN or an infinity"
    tally.refused.clear()
    assert_same_bits(tally, tally_of(updates, monkeypatch))


def test_more_votes_than_their_type_holds_and_norms_are_checked_first(used):
    update = updates_of(1, wide=False)[0]
    tally = fedgma.Tally()
    for _ in range(128):
        tally.add(update, 1)
    assert used == [True] * 126  # not the first, and not the last, for which the votes were widened
    assert tally.votes["a"].dtype == np.int16
    limited = fedgma.Tally(gate=fedgma.Gate(max_norm=1e9))
    assert [limited.add(update, 1) for _ in range(3)] == [None] * 3
    assert len(used) == 126


def test_an_overflowing_sum_is_taken_back_too(used):
    draw = np.random.default_rng(0)
    huge = {name: np.full(shape, 1.7e308) for name, shape in SHAPES.items()}
    tally = tally_of([{name: np.asarray(draw.standard_normal(shape)) for name, shape in SHAPES.items()}] * 2)
    before = fedgma.pack(tally)
    huge["d"][-1] = np.nan
    assert tally.add(huge, 1000).reason == "nonfinite"
    after = fedgma.pack(tally)
    assert all(np.array_equal(before[key], after[key]) for key in before.keys() - {"header"})
