"""The tally: its wire form, its memory, its merges, and the compiled loops behind it."""

import hashlib
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import damaged_tallies
import fedgma
from fedgma.aggregation import kernels
from fedgma.aggregation.kernels import plain
from strategies import rows, same_bits, stacks

BATCHNORM = {"w": np.array([1.0, -2.0], np.float32), "bn.running_var": np.ones(2, np.float32), "steps": np.array(3)}


def counted(updates, weights, **options):
    tally = fedgma.Tally(**options)
    for update, weight in zip(updates, weights, strict=True):
        tally.add(update, weight)
    return tally


@given(stacks())
def test_a_packed_tally_is_the_tally(stack):
    updates, weights = stack
    tally = counted(rows(updates), weights)
    packed = fedgma.pack(tally)
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in packed.values())
    again = fedgma.unpack(packed)
    assert same_bits(fedgma.finish(tally).update, fedgma.finish(again).update)
    assert fedgma.finish(tally).notes == fedgma.finish(again).notes
    again.add(rows(updates)[0], 5)
    assert again.clients == len(weights) + 1


def test_a_packed_tally_survives_a_file(tmp_path):
    tally = counted([BATCHNORM, BATCHNORM], [10, 30])
    tally.add({"w": "rubbish"}, 1, client="eve")
    np.savez(tmp_path / "tally.npz", **fedgma.pack(tally))
    with np.load(tmp_path / "tally.npz") as file:
        again = fedgma.unpack(file)
    assert same_bits(fedgma.finish(tally).update, fedgma.finish(again).update)
    assert again.refused[0].client == "eve"


def test_torch_tallies_come_back_as_torch():
    update = {"w": torch.tensor([1.0, -1.0], dtype=torch.bfloat16)}
    again = fedgma.unpack(fedgma.pack(counted([update, update], [1, 2])))
    assert fedgma.finish(again).update["w"].dtype == torch.bfloat16


def test_an_empty_tally_can_be_packed_too():
    assert fedgma.unpack(fedgma.pack(fedgma.Tally())).clients == 0


def spoil(packed, key, change):
    return {**packed, key: change(packed[key].copy())}


def with_nan(array):
    array[0] = np.nan
    return array


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("header", lambda array: array[:-5]),
        ("header", lambda array: np.frombuffer(array.tobytes().replace(b'"clients": 2', b'"clients": 0'), np.uint8)),
        ("header", lambda array: np.frombuffer(array.tobytes().replace(b'"version": 2', b'"version": 9'), np.uint8)),
        ("header", lambda array: np.frombuffer(array.tobytes().replace(b"float32", b"objects"), np.uint8)),
        ("header", lambda array: np.frombuffer(b"[]", np.uint8)),
        ("total.0", with_nan),
        ("total.0", lambda array: array[:1]),
        ("total.0", lambda array: array.astype(np.float32)),
        ("rest.1", lambda array: array.astype(object)),
        ("votes.0", lambda array: array * 0 + 100),
        ("maximum.2", lambda array: array.astype(float)),
    ],
)
def test_arrays_that_no_tally_could_give_are_refused(key, change):
    packed = fedgma.pack(counted([BATCHNORM, BATCHNORM], [10, 30]))
    with pytest.raises(fedgma.DataError):
        fedgma.unpack(spoil(packed, key, change))


@pytest.mark.parametrize("key", ["header", "total.0", "rest.0", "votes.0", "total.1", "maximum.2"])
def test_a_missing_array_is_refused(key):
    packed = fedgma.pack(counted([BATCHNORM, BATCHNORM], [10, 30]))
    del packed[key]
    with pytest.raises(fedgma.DataError):
        fedgma.unpack(packed)


@given(stacks())
def test_bytes_of_a_tally_are_the_tally(stack):
    updates, weights = stack
    tally = counted(rows(updates), weights)
    sent = fedgma.to_bytes(tally)
    again = fedgma.from_bytes(bytearray(sent))
    assert same_bits(fedgma.pack(tally), fedgma.pack(again))
    assert fedgma.to_bytes(again) == sent


def test_tallies_sent_as_bytes_merge_like_local_ones():
    first, second = counted([BATCHNORM], [10]), counted([BATCHNORM, BATCHNORM], [30, 5])
    second.add({"w": "rubbish"}, 1, client="eve")
    far = fedgma.from_bytes(fedgma.to_bytes(first))
    far.merge(fedgma.from_bytes(memoryview(fedgma.to_bytes(second))))
    first.merge(second)
    assert same_bits(fedgma.pack(first), fedgma.pack(far))
    assert fedgma.from_bytes(fedgma.to_bytes(fedgma.Tally())).clients == 0


@given(st.data())
def test_damaged_bytes_are_refused(data):
    sent = fedgma.to_bytes(counted([BATCHNORM, BATCHNORM], [10, 30]))
    position = data.draw(st.integers(0, len(sent) - 1))
    flipped = bytearray(sent)
    flipped[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), sent[:position], sent + sent[: position + 1], sent[position + 1 :]):
        with pytest.raises(fedgma.DataError):
            fedgma.from_bytes(damaged)


def resealed(sent, old, new):
    """The same bytes with something else inside and a checksum that fits, as somebody who means harm would send."""
    body = sent[:-32].replace(old, new)
    start = len("fedgma tally 2\n")
    length = int.from_bytes(sent[start : start + 8], "little") + (len(new) - len(old) if old in sent[:300] else 0)
    body = body[:start] + length.to_bytes(8, "little") + body[start + 8 :]
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"float64"', b'"object "'),
        (b'["total.0", "float64", 2]', b'["total.0", "float64", 9]'),
        (b'["total.0", "float64", 2]', b'["total.0", "float64", -2]'),
        (b'["total.0", "float64", 2]', b"[[[[]]]]                 "),
        (b'["total.0", "float64", 2]', b"[" * 25),
        (b'["total.0", "float64", 2]', b'["total.0", "float64", 1]'),
        (b'"clients": 2', b'"clients": 9' + b"9" * 40),
        (b'"weight": [40.0, 0.0]', b'"weight": [1' + b"0" * 400 + b", 0.0]"),
        (b'"clients": 2', b'"clients": -1'),
        (b'"weight": [40.0, 0.0]', b'"weight": [1e-300, 0.0]'),
        (b'"weight": [40.0, 0.0]', b'"weight": [40.0, 9.0]'),
        (b'"heaviest": 30.0', b'"heaviest": 41.0'),
        (b'"heaviest": 30.0', b'"heaviest": 19.0'),
        (b'"seen": []', b'"seen": ["a", "a"]'),
        (b'"seen": []', b'"seen": ["a", "b", "c"]'),
        (b'"version": 2', b'"clients": 1, "version": 2'),
    ],
)
def test_bytes_with_a_right_checksum_that_no_tally_could_give_are_refused(old, new):
    sent = fedgma.to_bytes(counted([BATCHNORM, BATCHNORM], [10, 30]))
    assert old in sent
    assert fedgma.from_bytes(resealed(sent, old, old)).clients == 2
    with pytest.raises(fedgma.DataError):
        fedgma.from_bytes(resealed(sent, old, new))


def crafted(key, change):
    """A tally of two clients with another array and a checksum that fits."""
    arrays = damaged_tallies.read_parts(fedgma.to_bytes(counted([BATCHNORM, BATCHNORM], [10, 30])))
    return damaged_tallies.seal({**arrays, key: change(arrays[key].copy())})


@pytest.mark.parametrize(
    ("key", "change", "sentence"),
    [
        ("total.0", lambda array: array * 0 + 1e300, "a mean outside its number type"),
        ("rest.0", lambda array: array * 0 + np.float32(1e38), "a mean outside its number type"),
        ("total.0", lambda array: -array, "votes of all clients for one sign and a sum of the other"),
        ("votes.0", lambda array: -array, "votes of all clients for one sign and a sum of the other"),
        ("rest.0", lambda array: array + np.float32(1.0), "votes of all clients for one sign and a sum of the other"),
        ("votes.0", lambda array: array + np.int8(1), "more than 2 votes from 2 clients"),
        ("total.1", lambda array: array * np.inf, "a NaN or an infinity"),
    ],
)
def test_sums_that_contradict_votes_count_or_type_are_refused(key, change, sentence):
    assert fedgma.from_bytes(crafted(key, lambda array: array)).clients == 2
    with pytest.raises(fedgma.DataError, match=sentence):
        fedgma.from_bytes(crafted(key, change))


def test_a_sum_of_one_client_without_a_vote_is_refused():
    arrays = damaged_tallies.read_parts(fedgma.to_bytes(counted([BATCHNORM], [10])))
    arrays["votes.0"][:] = 0
    with pytest.raises(fedgma.DataError, match="a sum without a vote"):
        fedgma.from_bytes(damaged_tallies.seal(arrays))


def test_a_header_of_megabytes_is_refused_at_once():
    sent = fedgma.to_bytes(counted([BATCHNORM], [10]))
    shape = lambda header: {**header, "entries": [["w", [2**62] * 200_000, "float32", "masked"]]}  # noqa: E731
    for change in (shape, lambda header: b"[" + b"[]," * 2_000_000 + b"[]]", lambda header: b" " * 2**23):
        assert damaged_tallies.read(damaged_tallies.with_header(sent, change), seconds=9) is None


def test_the_gate_of_the_receiver_limits_the_weights_of_a_tally():
    sent = fedgma.to_bytes(counted([BATCHNORM, BATCHNORM], [10, 30]))
    assert fedgma.from_bytes(sent, gate=fedgma.Gate(max_weight=30)).clients == 2
    with pytest.raises(fedgma.DataError, match="a client's weight must be at most 29, got 30"):
        fedgma.from_bytes(sent, gate=fedgma.Gate(max_weight=29))


def test_names_too_long_to_send_are_refused_by_the_sender():
    tally = fedgma.Tally()
    tally.add(BATCHNORM, 10, client="x" * 2**22)
    with pytest.raises(fedgma.DataError, match="the names in this tally take"):
        fedgma.to_bytes(tally)


@pytest.mark.parametrize("data", ["text", None, 3, memoryview(b"fedgma tally 2")[::2]])
def test_what_is_not_bytes_is_refused(data):
    with pytest.raises(fedgma.DataError, match="a tally is read from bytes, got"):
        fedgma.from_bytes(data)


def test_merging_leaves_the_other_tally_alone():
    first, second = counted([BATCHNORM], [10]), counted([BATCHNORM], [30])
    before = fedgma.pack(second)
    empty = fedgma.Tally()
    empty.merge(second)
    empty.merge(first)
    first.merge(second)
    assert same_bits(before, fedgma.pack(second))
    assert first.clients == 2
    assert same_bits(fedgma.finish(first).update, fedgma.finish(empty).update)


def test_tallies_of_different_models_do_not_merge():
    first, second = counted([BATCHNORM], [10]), counted([{"w": np.ones(3, np.float32)}], [30])
    before = fedgma.pack(first)
    with pytest.raises(fedgma.DataError, match="different models"):
        first.merge(second)
    assert same_bits(before, fedgma.pack(first))


def test_a_client_in_both_tallies_is_not_counted_twice():
    first, second = fedgma.Tally(), fedgma.Tally()
    first.add(BATCHNORM, 10, client="a")
    second.add(BATCHNORM, 10, client="a")
    with pytest.raises(fedgma.DataError, match="clients are in both tallies, such as 'a'"):
        first.merge(second)
    assert first.clients == 1


def test_merging_keeps_the_refusals_of_both_tallies():
    first, second = fedgma.Tally(), fedgma.Tally()
    second.add({"w": np.array([np.nan])}, 1, client="x")
    first.merge(second)
    assert [refusal.client for refusal in first.refused] == ["x"]


def test_a_tally_can_be_finished_at_several_tau():
    tally = counted([{"w": np.array([1.0, 1.0])}, {"w": np.array([1.0, -2.0])}], [1, 1])
    assert fedgma.finish(tally, 0.0).mask["w"].tolist() == [1, 1]
    assert fedgma.finish(tally, 0.4).mask["w"].tolist() == [1, 0]
    assert fedgma.finish(tally, mask="none").mask is None
    assert fedgma.finish(tally, 0.4, mask="hard").update["w"].tolist() == [1, 0]
    squared = fedgma.finish(tally, mask=lambda votes, clients, dtype: (votes / clients).astype(dtype) ** 2)
    assert squared.mask["w"].tolist() == [1, 0]


def test_an_unknown_mask_names_the_known_ones():
    with pytest.raises(fedgma.ConfigError, match="unknown mask 'sofft'; known: hard, none, soft"):
        fedgma.finish(counted([BATCHNORM], [1]), mask="sofft")


def test_releasing_empties_the_tally():
    tally = counted([BATCHNORM], [10])
    kept = fedgma.finish(tally)
    merged = fedgma.finish(tally, release=True)
    assert same_bits(kept.update, merged.update)
    assert merged.notes["clients"] == 1
    assert tally.clients == 0
    assert tally.add({"other": np.ones(2)}, 1) is None


def test_streaming_takes_four_models_at_most_whatever_the_number_of_clients():
    shapes = {f"layer{k}": 50_000 for k in range(8)}
    model = 4 * sum(shapes.values())
    generator = np.random.default_rng(0)
    update = {name: generator.standard_normal(size, dtype=np.float32) for name, size in shapes.items()}
    peaks = []

    def stream(clients):
        tally = fedgma.Tally()
        for _ in range(clients):
            tally.add(update, 10)
        fedgma.finish(tally, release=True)

    stream(130)  # what is compiled on the way does not count: votes widen with the 128th client
    for clients in (10, 130):
        tracemalloc.start()
        stream(clients)
        peaks.append(tracemalloc.get_traced_memory()[1] / model)
        tracemalloc.stop()
    # blocks of 65,536 entries in float64 are the rest: a constant, here a large part of so small a model
    assert max(peaks) < 4 + 6 * 8 * 65_536 / model
    assert peaks[1] < peaks[0] + 0.3


@given(stacks(dtypes=("float32", "float64"), min_clients=2), st.integers(1, 10**6))
def test_the_compiled_loops_give_the_bits_of_the_plain_ones(stack, factor):
    cpu = pytest.importorskip("fedgma.aggregation.kernels.cpu", reason="numba is not installed")
    updates, weights = stack
    for entry in updates.values():
        columns = np.ascontiguousarray(entry.reshape(len(weights), -1)) / np.array(3, entry.dtype)
        scaled = np.array(weights, float) * factor
        layout = columns.shape[1], entry.dtype.name, len(weights), True, columns, plain.FURTHER
        sums = [plain.empty_sums(*layout) for _ in range(3)]
        for column, weight in zip(columns, scaled, strict=True):
            plain.add(sums[0], column, weight)
            cpu.add([sums[1]], [column], weight)
        assert cpu.add_rows(sums[2], columns, scaled)
        for compiled in sums[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(sums[0], compiled, strict=True))


@pytest.mark.parametrize("view", [lambda a: a[::-1], lambda a: a[:, ::-1], lambda a: a.T, lambda a: a[::2, ::2]])
def test_compiled_loops_read_any_view_of_an_array(view):
    pytest.importorskip("fedgma.aggregation.kernels.cpu", reason="numba is not installed")
    base = np.arange(-32.0, 32.0).reshape(8, 8)
    tallies = fedgma.Tally(), fedgma.Tally()
    for _ in range(2):  # the second update has the schema of the first
        tallies[0].add({"w": view(base)}, 3)
        tallies[1].add({"w": view(base).copy()}, 3)
    assert np.array_equal(tallies[0].votes["w"], tallies[1].votes["w"])
    assert np.array_equal(tallies[0].votes["w"], 2 * np.sign(view(base)))


def test_the_compiled_loops_find_values_that_are_not_finite():
    cpu = pytest.importorskip("fedgma.aggregation.kernels.cpu", reason="numba is not installed")
    for dtype in (np.float32, np.float64):
        for value in (np.nan, np.inf, -np.inf):
            column = np.ones(10_000, dtype)
            assert cpu.first_nonfinite([column, column]) is None
            column[7777] = value
            assert cpu.first_nonfinite([np.ones(5, dtype), column]) == 1
            sums = plain.empty_sums(10_000, column.dtype.name, 2, True, column)
            assert not cpu.add_rows(sums, np.stack([column, column]), np.ones(2))


def test_large_arrays_take_the_compiled_path_with_the_same_answer(monkeypatch):
    pytest.importorskip("numba", reason="numba is not installed")
    generator = np.random.default_rng(0)
    updates = {"w": generator.standard_normal((5, kernels.LARGE + 3), dtype=np.float32)}
    updates["w"][2, -1] = np.inf
    compiled = fedgma.masked_mean()(updates, [1, 2, 3, 4, 5])
    streamed = fedgma.masked_mean()(rows(updates), [1, 2, 3, 4, 5])
    monkeypatch.setattr(kernels, "_cpu_kernels_for", lambda arrays: None)
    fallback = fedgma.masked_mean()(updates, [1, 2, 3, 4, 5])
    assert same_bits(compiled.update, fallback.update)
    assert same_bits(compiled.update, streamed.update)
    assert compiled.notes == fallback.notes
    assert [refusal.client for refusal in compiled.notes["refused"]] == [2]


def test_many_small_arrays_import_the_compiled_loops_in_the_end(monkeypatch):
    loads = []

    def load():
        loads.append("numba")

    load.cache_info = lambda: SimpleNamespace(currsize=0)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(kernels, "load_cpu_kernels", load)
    monkeypatch.setattr(kernels, "_done", kernels._Done())
    monkeypatch.setattr(kernels, "ENOUGH", 100)
    updates = np.ones((2, 25), np.float32)
    for wanted in (0, 1, 2):  # after 50, 100 and 150 entries
        assert kernels.add_rows(plain.empty_sums(25, "float32", 2, True, updates), updates, np.ones(2))
        assert len(loads) == wanted


def test_the_total_weight_is_the_exact_sum_of_the_clients_weights():
    tally = fedgma.Tally()
    for _ in range(10):
        tally.add({"w": np.ones(1)}, weight=0.1)
    assert tally.weight == 1.0  # a plain sum gives 0.9999999999999999


def test_a_client_without_a_weight_counts_once():
    tally = fedgma.Tally()
    tally.add({"w": np.array([1.0])})
    tally.add({"w": np.array([4.0])}, weight=2)
    assert tally.weight == 3
    assert fedgma.finish(tally).mean["w"].tolist() == [3.0]


def test_a_stack_of_another_model_is_refused_as_a_whole():
    tally = fedgma.Tally(like={"w": np.zeros(2)})
    with pytest.raises(fedgma.DataError, match="updates:"):
        tally.add_many({"w": np.ones((3, 3))})
    assert tally.clients == 0
