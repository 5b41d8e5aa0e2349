"""Targets that are not classes: what is read, what is refused, and how their samples are divided."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import call
from fedgma.data.federation import federate
from fedgma.data.files import from_arrays, load
from fedgma.data.files.own.targets import PADDING
from fedgma.data.files.own.text import lines, load_text, windows
from fedgma.data.partitions import Partition
from fedgma.data.splits import divide
from fedgma.errors import ConfigError, DataError

X = np.zeros((10, 3), np.float32)


@pytest.mark.parametrize("y", [np.arange(10), np.arange(10) / 2, np.ones((10, 1))])
def test_numbers_become_rows_of_float32(y):
    data = from_arrays(X, y, target="float")
    assert data.train.y.dtype == np.float32
    assert data.train.y.shape == (8, 1)
    assert data.target == "float"
    assert sorted(np.concatenate([data.train.y, data.test.y]).ravel()) == sorted(np.ravel(y))


def test_the_kind_of_targets_is_found_where_a_task_takes_any():
    kinds = {"class": [0, 1] * 5, "float": np.arange(10.0), "labels": np.eye(10, dtype=int), "tokens": [[1, 5]] * 10}
    for kind, y in kinds.items():
        x = np.ones((10, 2), int) if kind == "tokens" else X
        assert from_arrays(x, y, target="any").target == kind


WRONG = [
    ("float", X, [["a"]] * 10, "must be numbers"),
    ("float", X, np.full(10, np.nan), "must be finite"),
    ("float", X, np.arange(9), "one target for each of 10 samples"),
    ("labels", X, np.full((10, 2), 2), "row of 0 and 1 .*got 2"),
    ("tokens", X, None, "x must be a row of whole numbers"),
    ("tokens", np.full((10, 3), -1), None, "from 0 to"),
    ("tokens", np.ones((10, 1), int), None, "needs two or more"),
    ("tokens", np.ones((10, 3), int), np.ones((10, 2), int), "same shape"),
]


@pytest.mark.parametrize(("target", "x", "y", "words"), WRONG)
def test_wrong_targets_are_refused_with_a_sentence(target, x, y, words):
    with pytest.raises(DataError, match=words):
        from_arrays(x, y, target=target)


def test_tokens_alone_are_their_own_targets(tmp_path):
    tokens = np.arange(40).reshape(8, 5) % 11
    np.savez(tmp_path / "mine.npz", x=tokens)
    data = load(str(tmp_path / "mine.npz"), target="tokens")
    assert len(data.classes) == 11
    assert data.train.x.shape[1:] == (4,)
    np.testing.assert_array_equal(data.train.x[:, 1:], data.train.y[:, :-1])


@given(st.binary(min_size=2, max_size=60), st.integers(1, 20))
def test_windows_hold_a_text_once(text, length):
    x, y = windows(np.frombuffer(text, np.uint8), length)
    real = y != PADDING
    assert bytes([text[0], *y[real].tolist()]) == text
    assert bytes([*x[real].tolist(), text[-1]]) == text
    assert real.any(1).all()


def test_lines_are_cut_and_padded():
    x, y = lines(np.frombuffer(b"one\n\nlonger line", np.uint8), 5)
    assert bytes(x[1].tolist()) == b"longe"
    assert y[0].tolist() == [*b"ne\n", PADDING, PADDING]


@pytest.fixture
def books(tmp_path):
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / f"{name}.txt").write_bytes(bytes(65 + number + at % 3 for at in range(60 + 40 * number)))
    return tmp_path


def test_each_file_of_a_folder_is_a_client_and_is_tested_on_its_end(books):
    data = load(str(books), target="tokens", length=10)
    parts = divide(data, "natural", None)
    assert [len(index) for index in parts.clients] == [5, 8, 11]
    federation = federate(data, parts, client_test_size=100)
    for client, (train, test) in enumerate(zip(parts.clients, federation.client_tests, strict=True)):
        assert set(data.train.client[train]) == set(data.test.client[test]) == {client}
    assert len(data.test.y) == 1 + 2 + 3
    single = load_text(books / "b.txt", length=10)
    assert single.train.client is None
    assert bytes(single.test.x[0].tolist()) in (books / "b.txt").read_bytes()[80:]


def test_a_text_that_is_too_short_or_missing_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(DataError, match="too short"):
        load_text(tmp_path / "short.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no text"):
        load_text(tmp_path / "empty")


def test_without_classes_samples_are_divided_by_owner_or_not_at_all():
    owners = np.repeat(np.arange(5), 20)
    data = from_arrays(np.zeros((100, 2), np.float32), np.arange(100.0), client=owners, target="float")
    parts = divide(data, "dirichlet", 4, alpha=0.05, min_size=1)
    assert parts.sizes.sum() == len(data.train.y)
    shares = [np.bincount(data.train.client[index], minlength=5).max() / len(index) for index in parts.clients]
    assert max(shares) > 0.5  # one owner prevails, as one class would
    with pytest.raises(ConfigError, match=r"has none; use iid, quantity, natural, dirichlet .by owner.$"):
        divide(data, "label_skew", 4)
    unowned = from_arrays(np.zeros((100, 2), np.float32), np.arange(100.0), target="float")
    with pytest.raises(ConfigError, match=r"has none; use iid, quantity$"):
        divide(unowned, "dirichlet", 4)
    assert federate(unowned, divide(unowned, "iid", 4), validation=0.2, client_test_size=5).client_tests is None


def test_data_without_classes_are_shown_by_owner(books, capsys):
    code, out, _ = call("data", "show", f"{books}/", "--partition", "natural", "--out", str(books / "shown"))
    assert code == 0
    assert "jensen shannon mean" in out
    assert (books / "shown" / "classes.png").exists()


def test_validation_samples_are_drawn_from_all():
    data = from_arrays(np.zeros((50, 2), np.float32), np.arange(50.0), target="float")
    federation = federate(data, Partition((np.arange(40),)), validation=0.25)
    assert (len(federation.clients[0]), len(federation.validation[0])) == (30, 10)
