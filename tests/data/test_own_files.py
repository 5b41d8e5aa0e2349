"""What users have: names, labels and client ids as they come, tables, folders of files by client."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgma.data.files import from_arrays, from_data, load, load_own
from fedgma.data.files.own.numbering import number_labels
from fedgma.errors import ConfigError, DataError

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20) % 2


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),  # Keras
        ("X", "y", "X_test", "y_test"),
        ("data", "labels", "test_data", "test_labels"),
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("features", "target", "x_val", "y_val"),
    ],
)
def test_the_usual_names_of_arrays_are_known(tmp_path, names):
    np.savez(tmp_path / "mine.npz", **dict(zip(names, (X, Y, X[:3], Y[:3]), strict=True)))
    data = load_own(tmp_path / "mine.npz")
    assert (len(data.train.y), len(data.test.y), data.notes, data.reading) == (20, 3, (), ())
    np.testing.assert_array_equal(data.test.x, X[:3])


def test_two_arrays_without_names_are_samples_and_labels(tmp_path):
    np.savez(tmp_path / "mine.npz", X, Y)
    assert load_own(tmp_path / "mine.npz").train.x.shape == (16, 2)


def test_arrays_that_are_not_used_are_named(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=Y, weights=Y, notes=Y)
    assert load_own(tmp_path / "mine.npz").notes == ("not used: notes, weights",)


@pytest.mark.parametrize(
    ("labels", "classes", "first"),
    [
        ([1, 2, 3, 1], ("1", "2", "3"), [0, 1, 2, 0]),
        ([0, 1000, 2000, 0], ("0", "1000", "2000"), [0, 1, 2, 0]),
        ([-1, 1, 1, -1], ("-1", "1"), [0, 1, 1, 0]),
        (["b", "a", "b", "c"], ("a", "b", "c"), [1, 0, 1, 2]),
        (np.array([b"b", b"a"]), ("a", "b"), [1, 0]),
        (np.array(["b", "a"], object), ("a", "b"), [1, 0]),
        ([True, False, True], ("0", "1"), [1, 0, 1]),
        ([[3], [4]], ("3", "4"), [0, 1]),
        ([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], ("0", "1", "2"), [2, 0]),  # one-hot
    ],
)
def test_labels_of_any_kind_are_numbered_from_zero(labels, classes, first):
    found = number_labels([labels], None, "mine")
    assert (found.classes, found.parts[0].tolist()) == (classes, first)
    assert (found.remark is None) == (classes == ("0", "1"))


def test_labels_that_cannot_be_written_are_refused():
    broken = b"Z\xfcrich".decode("utf-8", "surrogateescape")
    for labels in (["Bern", broken], np.array([broken], ">U9"), np.array([["Bern"], [broken]])):
        with pytest.raises(DataError, match="mine: labels and client ids must be UTF-8 text"):
            number_labels([labels], None, "mine")
    assert number_labels([["Z\u00fcrich", "\U0001f600"]], None, "mine").classes == ("Z\u00fcrich", "\U0001f600")


@given(st.lists(st.integers(-5, 5), min_size=1), st.lists(st.integers(-5, 5)))
def test_numbering_keeps_every_label_in_both_parts(train, test):
    found = number_labels([np.array(train, int), np.array(test, int)], None, "mine")
    names = np.array(found.classes)
    assert [names[part].astype(int).tolist() for part in found.parts] == [train, test]
    assert set(map(int, found.classes)) == {*train, *test}


def test_the_numbering_of_labels_is_said():
    data = from_arrays(X, Y + 1)
    assert data.reading == ("the labels 1, 2 are numbered from 0",)
    assert data.classes == ("1", "2")
    many = from_arrays(X, np.arange(20) % 10 * 2)
    assert many.reading == ("the labels 0, 2, 4, 6, 8, 10 and 4 more are numbered from 0",)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0.0, 1.0, np.nan, 1.0], "1 of 4 are missing or infinite, so leave these samples out first"),
        ([0.0, 1.5, 1.0, 1.0], "for numbers to predict, such as 1.5, set task=regression"),
        ([0.0, 1.0, 1.0, 0.0], "for classes convert them with y.astype"),
        (np.array(["ant", np.nan, "bee", "bee"]), "got 'nan' in 1 of 4 samples, first in sample 1"),
        (np.array(["ant", None, "bee", "bee"], object), "must be complete, got a missing one"),
        (np.array(["ant", float("nan"), "bee", "bee"], object), "must be complete, got a missing one"),
    ],
)
def test_labels_that_are_missing_or_no_classes_are_refused_with_the_fix(labels, said):
    with pytest.raises(DataError, match=said):
        from_arrays(np.zeros((4, 2)), labels)


def test_labels_by_name_follow_the_given_order_of_classes():
    data = from_arrays(X, ["no", "yes"] * 10, classes=("yes", "no"), test=(X[:1], ["yes"]))
    assert (data.train.y[:2].tolist(), data.test.y.tolist(), data.reading) == ([1, 0], [0], ())
    with pytest.raises(DataError, match="one of the classes yes, no, got 'maybe'"):
        from_arrays(X[:2], ["no", "maybe"], classes=("yes", "no"))
    with pytest.raises(DataError, match="labels must be from 0 to 1, got 1 to 2"):
        from_arrays(X, Y + 1, classes=("yes", "no"))
    with pytest.raises(DataError, match="both texts or both integers"):
        from_arrays(X, Y, test=(X[:1], ["yes"]))


def test_clients_may_be_named_and_may_have_test_samples_of_their_own():
    owners = np.array(["oslo", "rome"])[Y]
    data = from_arrays(X, Y, client=owners, test=(X[:2], Y[:2], ["rome", "bern"]))
    assert data.train.client.tolist() == (Y + 1).tolist()
    assert data.test.client.tolist() == [2, 0]
    assert data.reading == ("the clients bern, oslo, rome are numbered from 0",)
    assert data.own_tests
    with pytest.raises(DataError, match="the training samples have none"):
        from_arrays(X, Y, test=(X[:2], Y[:2], [0, 1]))


def test_float_images_with_channels_last_are_turned_round():
    images = np.random.default_rng(0).random((10, 8, 9, 3))
    data = from_arrays(images, [0, 1] * 5, test=(images, [0, 1] * 5))
    assert data.train.x.shape == (10, 3, 8, 9)
    np.testing.assert_array_equal(data.test.x[:, 1], images[..., 1].astype(np.float32))
    assert data.reading == ("the images have channels last, which are moved to the front",)


def test_texts_that_need_pickle_are_refused_without_numpys_advice(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=np.array(["a", "b"] * 10, object))
    with pytest.raises(DataError, match=r"save texts as np\.array\(texts, dtype=str\)") as caught:
        load_own(tmp_path / "mine.npz")
    assert "allow_pickle" not in str(caught.value)


TABLE = """\
,height,width,species,client
0,1.5,2,ant,anna
1,2.5,3,bee,bob
2,3.5,4,ant,bob
3,3.5,5,bee,anna
"""


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_of_text_is_a_data_set(tmp_path, delimiter):
    (tmp_path / "mine.csv").write_text(TABLE.replace("species", "label").replace(",", delimiter))
    data = load_own(tmp_path / "mine.csv")
    x, y = np.concatenate([data.train.x, data.test.x]), np.concatenate([data.train.y, data.test.y])
    assert sorted(map(tuple, x.tolist())) == [(1.5, 2), (2.5, 3), (3.5, 4), (3.5, 5)]
    assert data.classes == ("ant", "bee")
    assert y[x[:, 1] == 4].tolist() == [0]
    assert data.notes == ("not used, since it numbers the rows: ''", "the features are 'height', 'width'")
    assert sorted({*data.train.client.tolist(), *data.test.client.tolist()}) == [0, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,2\n3,4\n", "must begin with a line of column names"),
        ("a,b\n1,2\n", "has no column of labels: name it `label` .*; it has 'a', 'b'"),
        ("a,label\n1\n", "line 2: expected 2 cells as in the header, got 1"),
        ("a,a,label\n1,2,3\n", "several columns named 'a'"),
        ("a,label\n1,x\n,y\n", "column 'a' must hold numbers, got an empty cell in row 2"),
        ("a,label\nred,x\n1,y\n", "column 'a' must hold numbers, got 'red' in row 1; replace it by numbers"),
        (
            "a,when,town,label\n1,2020-01-01,rome,x\n,2020-01-02,oslo,y\n",
            r"these columns must hold numbers: 'a' \(an empty cell in row 2\), 'when' \('2020-01-01' in row 1\), "
            r"'town' \('rome' in row 1\); replace texts by numbers and fill in empty cells",
        ),
        (
            "a;label\n1,5;x\n2;y\n",
            r"got '1,5' in row 1 \(a decimal comma: write a point\).*; `fedgma data prepare mine.csv --decimal-comma` ",
        ),
        ("a,label\n1,x\n2,x\n", "all labels are x; a classification needs two classes or more"),
        ("a,label\n1,x\nnan,y\n", "column 'a' has no finite number in row 2"),
        ("a,label\n1,x\n2,\n", "row 2 has no 'label'"),
        ("a,label\n1,x\n2,NaN\n", "row 2 has no 'label'"),
        ("a,label,client\n1,x,rome\n2,y,\n", "row 2 has no 'client'"),
        ("label\nx\ny\n", "has no columns of features"),
        ('a,label\n1,"x\n', "cannot be read as a table"),
        ("", "must begin with a line of column names"),
    ],
)
def test_a_table_that_cannot_be_understood_is_refused_with_the_fix(tmp_path, text, said):
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(DataError, match=said):
        load_own(tmp_path / "mine.csv")


def test_a_table_that_can_be_prepared_is_refused_with_the_command_and_pieces_of_one_are_not(tmp_path):
    (tmp_path / "my table.csv").write_text("town,income\nrome,1\noslo,2\n")
    with pytest.raises(DataError, match=r"; `fedgma data prepare 'my table.csv'` makes a file of a table as it is$"):
        load_own(tmp_path / "my table.csv")
    with pytest.raises(DataError, match=r"it has 'town', 'income'$"):  # a folder may hold one file for each client
        load_own(tmp_path)


def test_truth_values_are_numbers(tmp_path):
    (tmp_path / "mine.csv").write_text("sex,label\nTrue,x\nFalse,y\nTrue,y\nFalse,x\n")
    data = load_own(tmp_path / "mine.csv")
    assert sorted(np.concatenate([data.train.x, data.test.x])[:, 0].tolist()) == [0, 0, 1, 1]


def test_columns_that_look_like_ids_are_named(tmp_path):
    rows = "".join(f"{7 * i},{i % 9}.5,{'xy'[i % 2]}\n" for i in range(30))
    (tmp_path / "mine.csv").write_text(f"patient,age,label\n{rows}")
    said = "another whole number in each row: 'patient'; remove it if it is an id"
    assert load_own(tmp_path / "mine.csv").notes == ("the features are 'patient', 'age'", said)


@pytest.mark.parametrize("names", [("oslo", "rome"), ("train", "test"), ("train/oslo", "test/oslo")])
def test_columns_of_several_tables_are_matched_by_their_names(tmp_path, names):
    for name, order in zip(names, (("age", "dose"), ("dose", "age")), strict=True):
        rows = [{"age": str(30 + i), "dose": str(1000 + i), "label": "xy"[i % 2]} for i in range(10)]
        lines = [",".join((*order, "label")), *(",".join(row[key] for key in (*order, "label")) for row in rows)]
        (tmp_path / f"{name}.csv").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    data = load_own(tmp_path)
    x = np.concatenate([data.train.x, data.test.x])
    assert x[:, 0].max() < 100 < x[:, 1].min()
    second = tmp_path / f"{names[1]}.csv"
    second.write_text(second.read_text().replace("dose", "Dose"))
    with pytest.raises(DataError, match="must have the same columns of features, but not all have 'Dose', 'dose'"):
        load_own(tmp_path)


def test_the_last_column_holds_the_labels_if_it_alone_holds_texts(tmp_path):
    (tmp_path / "iris.csv").write_text("a,species\n1,x\n2,y\n3,x\n4,y\n")
    assert load_own(tmp_path / "iris.csv").classes == ("x", "y")


def test_a_coordinate_named_y_is_no_label_beside_a_column_of_labels(tmp_path):
    (tmp_path / "points.csv").write_text("x,y,class\n" + "".join(f"{i},{-i},{i % 2}\n" for i in range(10)))
    data = load_own(tmp_path / "points.csv")
    assert data.train.x.shape[1:] == (2,)
    assert len(data.classes) == 2


def client_file(folder, name, samples, value):
    rows = "".join(f"{value},{i},{i % 2}\n" for i in range(samples))
    (folder / f"{name}.csv").write_text("who,number,label\n" + rows)


def test_every_file_of_a_folder_is_a_client(tmp_path):
    client_file(tmp_path, "rome", 10, 3)
    client_file(tmp_path, "oslo", 20, 5)
    (tmp_path / "README.txt").write_text("not data")
    data = load_own(tmp_path)
    assert data.reading == ("the clients oslo, rome are numbered from 0",)
    for split, sizes in ((data.train, [16, 8]), (data.test, [4, 2])):
        assert np.bincount(split.client).tolist() == sizes
        assert (split.x[:, 0] == np.array([5, 3])[split.client]).all()
    assert data.own_tests


def test_targets_that_are_no_classes_are_split_client_by_client_too(tmp_path):
    for name, samples, value in (("oslo", 20, 5.0), ("rome", 10, 3.0)):
        np.savez(tmp_path / f"{name}.npz", x=np.full((samples, 2), value), y=np.linspace(0.0, 1.0, samples))
    data = load_own(tmp_path, target="float")
    for split, sizes in ((data.train, [16, 8]), (data.test, [4, 2])):
        assert np.bincount(split.client).tolist() == sizes
        assert (split.x[:, 0] == np.array([5, 3])[split.client]).all()
    assert data.own_tests
    np.savez(tmp_path / "rome.npz", x=np.zeros((2, 2)), y=np.zeros(2))
    np.savez(tmp_path / "oslo.npz", x=np.zeros((2, 2)), y=np.zeros(2))
    with pytest.raises(DataError, match="too few samples for a training and a test part, got 4"):
        load_own(tmp_path, target="float")


def test_clients_may_bring_their_tests(tmp_path):
    for name, count in (("a", 4), ("b", 6)):
        np.savez(tmp_path / f"{name}.npz", x=X[:count], y=Y[:count], x_test=X[:1], y_test=Y[:1])
    data = load_own(tmp_path)
    assert (np.bincount(data.train.client).tolist(), data.test.client.tolist()) == ([4, 6], [0, 1])
    np.savez(tmp_path / "c.npz", x=X, y=Y)
    with pytest.raises(DataError, match="every client must have a test part, or none; c has none"):
        load_own(tmp_path)


def test_train_and_test_folders_hold_the_files_of_clients(tmp_path):
    for part, names in (("train", ("a", "b")), ("test", ("b", "c"))):
        (tmp_path / part).mkdir()
        for name in names:
            client_file(tmp_path / part, name, 4, ord(name))
    data = load_own(tmp_path)
    assert (sorted({*data.train.client}), sorted({*data.test.client})) == ([0, 1], [1, 2])


def test_files_named_after_splits_are_splits_and_no_clients(tmp_path):
    for name, count in (("train", 10), ("test", 4), ("val", 3)):
        client_file(tmp_path, name, count, 0)
    data = load_own(tmp_path)
    assert (len(data.train.y), len(data.test.y), data.train.client) == (10, 4, None)
    assert data.notes[:1] == ("not used: val",)
    (tmp_path / "train.csv").unlink()
    with pytest.raises(DataError, match="a file named train and one named test, got test, val"):
        load_own(tmp_path)


def test_pieces_of_one_table_keep_the_clients_that_they_name(tmp_path):
    for piece in range(2):
        (tmp_path / f"part-{piece}.csv").write_text(TABLE)
    data = load_own(tmp_path)
    assert len(data.train.y) + len(data.test.y) == 8
    assert set(data.train.client) == {0, 1}


def test_files_of_other_shapes_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    np.savez(tmp_path / "b.npz", x=X[:, :1], y=Y)
    with pytest.raises(DataError, match=r"must have one shape and type, got float32\[2\] and float32\[1\]"):
        load_own(tmp_path)
    client_file(tmp_path, "a", 3, 0)
    with pytest.raises(DataError, match="several files named 'a'"):
        load_own(tmp_path)


def test_arrays_in_files_of_their_own_belong_together_by_their_names(tmp_path):
    for name, array in {"x": X, "y": Y, "x_test": X[:2], "y_test": Y[:2]}.items():
        np.save(tmp_path / f"{name}.npy", array)
    first, second = load_own(tmp_path), load_own(tmp_path / "x.npy")
    assert len(first.train.y) == len(second.train.y) == 20
    assert len(first.test.y) == len(second.test.y) == 2
    np.save(tmp_path / "other.npy", X)
    with pytest.raises(DataError, match=r"other\.npy is neither samples nor labels by its name"):
        load_own(tmp_path)


def test_pairs_of_arrays_are_clients(tmp_path):
    for name in ("anna", "bob"):
        np.save(tmp_path / f"{name}_x.npy", X)
        np.save(tmp_path / f"{name}_y.npy", Y)
    assert np.bincount(load_own(tmp_path).train.client).tolist() == [16, 16]
    assert load_own(tmp_path / "anna_x.npy").train.client is None


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    (tmp_path / "mine.xls").write_text("")
    with pytest.raises(ConfigError, match=r"mine\.xls has an unknown ending; known: \.npz, \.csv"):
        load(str(tmp_path / "mine.xls"))


def test_a_parquet_file_is_a_table(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {"a": [1.0, 2.0, 3.0, 4.0], "label": ["x", "y", "x", "y"], "client": [7, 7, 9, 9]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "mine.parquet")
    data = load_own(tmp_path / "mine.parquet")
    assert (data.train.x.shape[1:], data.classes) == ((1,), ("x", "y"))
    assert set(data.train.client) <= {7, 9}
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as a parquet file"):
        load_own(tmp_path / "bad.parquet")


def test_an_arrow_table_in_python_may_hold_a_column_of_arrays():
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"x": X.tolist(), "label": Y, "note": ["-"] * 20})
    data = from_data(table)
    assert data.train.x.shape == (16, 2)
    assert data.notes == ("not used: note",)


def test_a_data_frame_is_a_data_set():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": X[:, 0], "b": Y > 0, "label": pandas.Categorical(["x", "y"] * 10), "user": Y})
    data = from_data(frame)
    assert (data.train.x.shape, data.classes) == ((16, 2), ("x", "y"))
    assert (data.train.client == data.train.x[:, 1]).all()
    with pytest.raises(DataError, match="column 'c' must hold numbers, got 'red'"):
        from_data(frame.assign(c="red"))


def test_a_hugging_face_data_set_is_a_data_set():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Array2D((2, 2), "uint8"), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {"image": np.zeros((6, 2, 2), np.uint8), "label": [1, 1, 1, 0, 0, 1]}
    made = datasets.Dataset.from_dict(rows, features=features)
    data = from_data(datasets.DatasetDict({"train": made, "test": made.select(range(2))}))
    assert (data.train.x.shape, data.train.x.dtype, data.classes) == ((6, 1, 2, 2), np.uint8, ("cat", "dog"))
    assert data.test.y.tolist() == [1, 1]


class Frame:
    """The least that is a table: named columns."""

    def __init__(self, columns):
        self.columns = list(columns)
        self._columns = columns

    def __getitem__(self, name):
        return self._columns[name]


@pytest.mark.parametrize(
    "given",
    [
        (X, Y),
        ((X, Y), (X, Y)),
        {"x": X, "y": Y},
        {"train": (X, Y), "test": (X, Y)},
        Frame({"a": X[:, 0], "b": X[:, 1], "label": Y}),
        {"train": Frame({"a": X[:, 0], "b": X[:, 1], "label": Y})},
    ],
    ids=["pair", "pairs", "mapping", "splits", "table", "a split of a table"],
)
def test_objects_in_python_are_data_sets(given):
    data = from_data(given)
    assert data.train.x.shape[1:] == (2,)
    assert data.classes == ("0", "1")


def test_a_list_of_clients_is_not_read_as_something_else_without_a_word():
    with pytest.raises(DataError, match=r"several clients are a mapping .*, such as dict\(enumerate\(data\)\)"):
        from_data([(X, Y)] * 3)
    assert from_data([(X, Y), (X, Y)]).notes == ("the first part is for training, the second for testing",)


def test_three_arrays_are_samples_labels_and_clients():
    assert set(from_data((X, Y, ["a", "b"] * 10)).train.client) == {0, 1}


class Numbers:
    """As torch's `Dataset`: a length, and an item for each number."""

    classes = ("odd", "even")

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]


ITEMS = [(torch.full((2,), float(n)), torch.tensor(n % 2)) for n in range(20)]


def test_a_data_set_that_hands_out_samples_is_read_item_by_item():
    data = from_data(Numbers(ITEMS))
    assert (data.classes, data.train.x.shape, len(data.test.y)) == (("odd", "even"), (16, 2), 4)
    apart = from_data((Numbers(ITEMS[:12]), Numbers(ITEMS[12:])))
    assert apart.test.x[:, 0].tolist() == list(range(12, 20))
    assert from_data({"train": Numbers(ITEMS[:12]), "test": Numbers(ITEMS[12:])}).test.y.tolist() == [0, 1] * 4


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "must be .sample, label., got none"),
        ([torch.zeros(2)], "must be .sample, label., got a Tensor of 2"),
        ([(np.zeros(2), 0), (np.zeros(3), 0)], r"one shape, got \[2\] and \[3\]"),
    ],
)
def test_items_that_are_no_samples_with_labels_are_refused(items, said):
    with pytest.raises(DataError, match=said):
        from_data(Numbers(items))


@pytest.mark.parametrize("names", [("rome", "oslo"), (1, 0)])
def test_a_mapping_of_names_to_data_holds_clients_with_tests_of_their_own(names):
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2
    data = from_data({names[0]: (x, y), names[1]: (x + 100, y)})
    assert data.own_tests
    for part in (data.train, data.test):
        assert np.array_equal(part.client == 0, part.x[:, 0] >= 100)  # the second name comes first in order
    assert len(data.test.y) == 4


def test_tables_may_be_clients_or_a_training_and_a_test_part():
    table = {"a": X[:, 0], "b": X[:, 1], "label": Y}
    data = from_data({"rome": Frame(table), "oslo": Frame(table)})
    assert (set(data.train.client), len(data.train.y) + len(data.test.y)) == ({0, 1}, 40)
    assert len(from_data((Frame(table), Frame(table))).test.y) == 20


def test_samples_and_labels_in_tables_of_their_own_are_no_clients():
    pandas = pytest.importorskip("pandas")
    data = from_data({"x": pandas.DataFrame({"a": X[:, 0], "b": X[:, 1]}), "y": pandas.DataFrame({"label": Y})})
    assert (data.train.x.shape, data.train.client) == ((16, 2), None)


def test_tensors_of_any_floating_type_are_samples():
    x = torch.arange(20.0).reshape(10, 2).requires_grad_()
    for kind in (torch.bfloat16, torch.float16, torch.float64):
        assert from_data((x.to(kind), torch.arange(10) % 2)).train.x.dtype == np.float32


def test_an_object_of_no_known_kind_is_refused():
    with pytest.raises(DataError, match="a table of pandas, Arrow or datasets, got int"):
        from_data(5)


def test_a_folder_of_pictures_with_a_table_beside_them_stays_a_folder_of_pictures(tmp_path):
    from PIL import Image

    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("RGB", (4, 4)).save(tmp_path / name / f"{i}.png")
    client_file(tmp_path, "notes", 3, 0)
    assert load_own(tmp_path).classes == ("ant", "bee")
