"""A table as it is: `fedgma data prepare` makes a file of it that `fedgma run` understands."""

import csv
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import call
from fedgma.data.files import load_own
from fedgma.data.files.own.prepare import apply, as_json, fit, read_prepared
from fedgma.data.files.own.prepare_table import Wanted, prepare_table, read_table
from fedgma.data.files.own.tables import read_csv
from fedgma.data.splits import divide
from fedgma.errors import ConfigError, DataError

ROWS = 60
PREPARE = ["data", "prepare", "patients.csv", "--label", "income", "--client", "hospital"]


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    """Commands run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def patients(rows=ROWS, seed=0):
    """A table with an id, missing numbers and texts, a rare text, truth values and a constant, as texts."""
    rng = np.random.default_rng(seed)
    age = rng.integers(20, 90, rows)
    towns = rng.choice(["Oslo", "Rome", "Rome", "Rome", ""], rows)
    towns[rng.permutation(rows)[:2]] = ["Bonn", "Lyon"]
    return {
        "patient": [f"P{row}" for row in rng.permutation(rows)],
        "age": ["" if gap else str(value) for value, gap in zip(age, rng.random(rows) < 0.1, strict=True)],
        "pressure": [f"{value:.2f}" for value in rng.normal(120, 15, rows)],
        "smoker": rng.choice(["True", "False"], rows).tolist(),
        "town": towns.tolist(),
        "unit": ["mmHg"] * rows,
        "hospital": rng.choice(["north", "south", "west"], rows).tolist(),
        "income": np.where(age > 50, "high", "low").tolist(),
    }


def write(path, table):
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([list(table), *zip(*table.values(), strict=True)])
    return path


def changed(table, **columns):
    return {**table, **columns}


def arrays_of(file):
    with np.load(file, allow_pickle=False) as archive:
        return dict(archive)


def test_a_table_as_it_is_becomes_a_file_that_trains(tmp_path):
    write(tmp_path / "patients.csv", patients())
    code, printed, said = call(*PREPARE, "--most-values", "2")
    assert (code, said) == (0, "")
    uses = {line.split()[0]: line for line in printed.splitlines()[1:9]}
    assert "left out: another text in each row, as ids have" in uses["patient"]
    assert "left out: always 'mmHg'" in uses["unit"]
    assert "number, standardised, missing cells filled with" in uses["age"]
    assert "one feature for each of 2 texts, one for all others, one for missing cells" in uses["town"]
    assert "48 training and 12 test rows, 8 features, 2 classes, 3 clients" in printed
    assert printed.endswith("next: fedgma run dataset=patients.npz\n")

    data = load_own(tmp_path / "patients.npz")
    assert data.notes == ()
    assert (data.classes, data.train.x.shape) == (("high", "low"), (48, 8))
    assert len(divide(data, "natural").clients) == 3
    code, printed, said = call("run", "dataset=patients.npz", "rounds=1", "seed=0")
    assert code == 0, said
    assert "partition: natural, because the data name 3 clients" in printed + said


def test_features_are_those_of_a_plain_recomputation(tmp_path):
    table = patients()
    columns = read_csv(write(tmp_path / "patients.csv", table))
    made = prepare_table(columns, Wanted("income", "hospital", most_values=2), "patients.csv")
    plain = load_own(  # the same labels, with the row as the only feature: the library's own split
        write(tmp_path / "plain.csv", {"x": [f"{row}.0" for row in range(ROWS)], "label": table["income"]})
    )
    train, test = (part.x[:, 0].astype(int) for part in (plain.train, plain.test))
    age = np.array([float(cell or "nan") for cell in table["age"]])
    filled = np.where(np.isnan(age), np.nanmedian(age[train]), age)
    pressure = np.array(table["pressure"], float)
    town = np.array(table["town"])
    expected = np.stack(
        [
            (filled - filled[train].mean()) / filled[train].std(),
            np.isnan(age),
            (pressure - pressure[train].mean()) / pressure[train].std(),
            np.array(table["smoker"]) == "True",
            town == "Rome",
            town == "Oslo",
            (town == "Bonn") | (town == "Lyon"),
            town == "",
        ],
        1,
    ).astype(np.float32)
    np.testing.assert_allclose(made.arrays["x"], expected[train], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(made.arrays["x_test"], expected[test], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(made.arrays["y"], plain.train.y)
    np.testing.assert_array_equal(made.arrays["client"], np.array(table["hospital"])[train])
    assert made.prepared.names == [
        *("age", "age missing", "pressure", "smoker", "town Rome", "town Oslo", "town other", "town missing")
    ]


def test_what_is_written_prepares_the_table_again_to_the_bit(tmp_path):
    file = write(tmp_path / "patients.csv", patients())
    write(tmp_path / "test.csv", patients(20, seed=1))
    assert call(*PREPARE, "--test", "test.csv", "--quiet") == (0, "", "")
    arrays, prepared = arrays_of("patients.npz"), read_prepared("patients.json")
    assert apply(read_csv(file), prepared).tobytes() == arrays["x"].tobytes()
    assert apply(read_csv(tmp_path / "test.csv"), prepared).tobytes() == arrays["x_test"].tobytes()
    assert prepared.classes == ("high", "low")
    assert set(arrays["client_test"]) <= {"north", "south", "west"}  # each client is tested on its own rows
    assert load_own(tmp_path / "patients.npz").own_tests
    new = {name: column for name, column in read_csv(file).items() if name in ("age", "pressure", "smoker", "town")}
    assert apply(new, prepared).tobytes() == arrays["x"].tobytes()  # labels and ids are not needed


def test_rows_for_testing_change_no_feature_of_those_for_training(tmp_path):
    write(tmp_path / "patients.csv", patients())
    seen = []
    for seed, shift in ((1, 0), (2, 500)):
        test = patients(20, seed)
        test = changed(
            test,
            pressure=[str(float(cell) + shift) for cell in test["pressure"]],
            town=["Paris" if shift else "Rome"] * 20,
            unit=["kPa" if shift else "mmHg"] * 20,
            patient=["P1" if shift else cell for cell in test["patient"]],
        )
        write(tmp_path / "test.csv", test)
        assert call(*PREPARE, "--test", "test.csv", "--yes", "-q")[0] == 0
        seen.append((arrays_of("patients.npz"), (tmp_path / "patients.json").read_text()))
    (first, one), (second, other) = seen
    assert one == other
    assert first["x"].tobytes() == second["x"].tobytes()
    assert first["x_test"].tobytes() != second["x_test"].tobytes()


def test_the_part_split_off_changes_no_feature_of_the_rest():
    rng = np.random.default_rng(0)
    table = {"a": rng.normal(size=50), "b": rng.choice(["u", "v"], 50), "label": np.arange(50) % 2}
    before = prepare_table(table, Wanted(), "mine.csv")
    for row in np.flatnonzero(~np.isin(table["a"], _training(table))):
        table["a"][row], table["b"][row] = 1e6, "w"
    after = prepare_table(table, Wanted(), "mine.csv")
    assert before.arrays["x"].tobytes() == after.arrays["x"].tobytes()
    assert before.prepared == after.prepared
    assert (after.arrays["x_test"][:, 0] > 1e5).all()
    assert (after.arrays["x_test"][:, 1:] == 0).all()  # a value that no training row has, and no column for others


def _training(table):
    kept = prepare_table(table, Wanted(drop=("b",), standardise=False), "mine.csv").arrays["x"][:, 0]
    return table["a"][np.isin(table["a"].astype(np.float32), kept)]


@pytest.mark.parametrize("words", [["--label", "pressure"], ["--label", "pressure", "--regression"]])
def test_a_number_to_predict_is_left_as_it_is(tmp_path, words):
    table = patients()
    write(tmp_path / "patients.csv", table)
    code, printed, said = call("data", "prepare", "patients.csv", *words, "--client", "hospital")
    assert code == 0, said
    assert "label, a number that is not scaled" in printed
    assert printed.endswith("next: fedgma run task=regression dataset=patients.npz\n")
    data = load_own(tmp_path / "patients.npz", target="float")
    targets = np.concatenate([data.train.y, data.test.y])[:, 0]
    np.testing.assert_array_equal(np.sort(targets), np.sort(np.array(table["pressure"], np.float32)))
    assert data.test.client is not None  # without classes, a client's tests are its own
    assert call("run", "task=regression", "dataset=patients.npz", "rounds=1", "seed=0")[0] == 0


def test_whole_numbers_are_classes_unless_they_are_to_be_predicted():
    table = {"a": np.arange(40) / 7, "label": np.arange(40) % 3}
    assert prepare_table(table, Wanted(), "t").prepared.classes == ("0", "1", "2")
    as_floats = {**table, "label": table["label"].astype(float)}
    assert prepare_table(as_floats, Wanted(), "t").prepared.classes == ("0", "1", "2")
    assert prepare_table(table, Wanted(regression=True), "t").arrays["y"].dtype == np.float32


def test_numbers_may_stay_as_they_are_and_codes_may_be_texts():
    table = {"code": np.arange(40) % 3 + 10, "a": np.arange(40) / 8, "label": np.arange(40) % 2}
    made = prepare_table(table, Wanted(standardise=False, as_text=("code",)), "t")
    assert made.prepared.names == ["code 10", "code 11", "code 12", "a"]
    assert set(made.arrays["x"][:, 3].tolist()) <= set(table["a"].tolist())
    assert (made.arrays["x"][:, :3].sum(1) == 1).all()


def test_columns_that_look_like_ids_are_used_if_one_says_so():
    table = {"id": np.arange(40), "pay": np.arange(40) * 7 % 41, "a": np.arange(40) % 5, "label": np.arange(40) % 2}
    assert prepare_table(table, Wanted(), "t").prepared.names == ["a"]
    assert prepare_table(table, Wanted(keep=("pay",)), "t").prepared.names == ["pay", "a"]
    assert dict(prepare_table(table, Wanted(drop=("pay",)), "t").prepared.left_out) == {
        "id": "it numbers the rows",
        "pay": "as asked",
    }


def test_a_constant_with_gaps_says_only_where_the_gaps_are():
    table = {"a": np.array([1.0, np.nan] * 20), "none": np.full(40, np.nan), "label": np.arange(40) // 4 % 2}
    made = prepare_table(table, Wanted(), "t")
    assert made.prepared.names == ["a missing"]
    assert dict(made.prepared.left_out) == {"none": "all cells are missing"}
    assert set(made.arrays["x"][:, 0].tolist()) == {0.0, 1.0}


def test_cells_without_a_value_are_written_in_several_ways():
    cells = np.array(["1", "NA", "2.5", "?", "nan", "n/a", "", "4"])
    prepared = fit({"a": cells}, np.arange(8), "label", standardise=False)
    expected = [[1, 0], [2.5, 1], [2.5, 0], [2.5, 1], [2.5, 1], [2.5, 1], [2.5, 1], [4, 0]]
    assert apply({"a": cells}, prepared).tolist() == expected


def test_rows_without_a_label_are_left_out_if_one_says_so(tmp_path):
    table = patients()
    table["income"][3] = table["hospital"][7] = ""
    write(tmp_path / "patients.csv", table)
    code, _, said = call(*PREPARE)
    assert (code, said) == (
        3,
        "fedgma: patients.csv: row 4 has no 'income'; fill it in or remove the row, or leave such rows out with "
        "--drop-incomplete\n",
    )
    code, printed, _ = call(*PREPARE, "--drop-incomplete")
    assert code == 0
    assert "left out: 2 rows without a label or a client" in printed
    assert sum(len(arrays_of("patients.npz")[name]) for name in ("y", "y_test")) == ROWS - 2


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("--label incme", 2, "patients.csv has no column 'incme', it has 'patient', 'age', .*; did you mean 'income'"),
        ("--label income --client hospitl", 2, "no column 'hospitl'.*did you mean 'hospital'"),
        ("--label income --drop twon", 2, "no column 'twon'.*did you mean 'town'"),
        ("--label income --drop income", 2, "column 'income' is named twice"),
        ("--label income --client income", 2, "column 'income' is named twice"),
        ("--label income --most-values 0", 2, "--most-values must be 1 or more, got 0"),
        ("--label income --out mine.csv", 2, "--out must be a file that ends in .npz, got 'mine.csv'"),
        ("", 3, "no column of labels: .* or say which it is with --label"),
        ("--label unit", 3, "all labels are mmHg"),
        ("--label town --regression --drop-incomplete", 3, "column 'town' must hold numbers, got '.*' in row"),
        ("--label income --drop age,pressure,smoker,town,hospital", 3, "expected a column that can be a feature"),
        ("--label income --test other.txt", 2, "other.txt has an unknown ending for a table"),
    ],
)
def test_what_cannot_be_prepared_is_said_in_one_sentence(tmp_path, words, code, sentence):
    write(tmp_path / "patients.csv", patients())
    given, printed, said = call("data", "prepare", "patients.csv", *words.split())
    assert (given, printed, said.count("\n")) == (code, "", 1)
    assert re.search(sentence, said), said
    assert not (tmp_path / "patients.npz").exists()


@pytest.mark.parametrize(
    ("column", "row", "cell", "sentence"),
    [
        ("pressure", 5, "120,5", "column 'pressure' must hold numbers, got '120,5' in row 6 .a decimal comma"),
        ("age", 8, "old", "column 'age' must hold numbers, got 'old' in row 9; .* --as-text 'age'"),
        ("pressure", 2, "1e39", "column 'pressure' has no finite number in row 3"),
        ("age", 2, "inf", "column 'age' has no finite number in row 3"),
    ],
)
def test_a_wrong_cell_is_named_with_its_row(tmp_path, column, row, cell, sentence):
    table = patients()
    table[column][row] = cell
    columns = read_csv(write(tmp_path / "patients.csv", table))
    with pytest.raises(DataError, match=sentence):
        prepare_table(columns, Wanted("income"), "patients.csv")


def test_a_table_with_decimal_commas_is_prepared_as_with_points(tmp_path):
    points = "a;b;town;label\n" + "".join(f"{n / 4};{1000 * n};Rome, old;{n % 2}\n" for n in range(10))
    commas = re.sub(r"(\d+)\.(\d+)", r"\1,\2", points).replace("000;", ".000;").replace("Rome, old", "Rome, 1.5")
    (tmp_path / "points.csv").write_text(points)
    (tmp_path / "commas.csv").write_text(commas)
    assert "0,25;1.000;Rome, 1.5;1" in commas
    assert call("data", "prepare", "points.csv", "--quiet") == (0, "", "")
    assert call("data", "prepare", "commas.csv", "--decimal-comma", "--quiet") == (0, "", "")
    with np.load("points.npz") as first, np.load("commas.npz") as second:
        assert {name: first[name].tobytes() for name in first} == {name: second[name].tobytes() for name in second}


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        ("2.5", "mine.csv: column 'a' has '2.5' in row 2: with --decimal-comma a point only separates thousands"),
        ("1,2,3", "mine.csv: column 'a' must hold numbers, got '1,2,3' in row 2; correct or empty such cells, or take"),
    ],
)
def test_what_is_no_number_with_a_decimal_comma_is_refused(tmp_path, cell, sentence):
    (tmp_path / "mine.csv").write_text(f"a;label\n1,5;x\n{cell};y\n0,5;x\n")
    code, _, said = call("data", "prepare", "mine.csv", "--decimal-comma")
    assert code == 3
    assert sentence in said


@pytest.mark.parametrize(
    ("cells", "said", "advised"),
    [
        (["920", "850", "77", "1,037"], "got '1,037' in row 4 (commas between thousands: write 1037)", False),
        (["9", "5", "7", "1,234,567"], "got '1,234,567' in row 4 (commas between thousands: write 1234567)", False),
        (["9.5", "5.25", "7", "1,037.5"], "got '1,037.5' in row 4 (commas between thousands: write 1037.5)", False),
        (["9200", "8500", "7000", "1,037"], "thousands: write 1037; or a decimal comma: write 1.037)", True),
        (["920", "850", "77", "0,375"], "got '0,375' in row 4 (a decimal comma: write a point)", True),
    ],
)
def test_a_comma_between_thousands_is_not_taken_for_a_decimal_one(tmp_path, cells, said, advised):
    rows = [f'"{cell}",{"no" if n % 2 else "yes"}' for n, cell in enumerate(cells * 6)]
    (tmp_path / "mine.csv").write_text("\n".join(["price,label", *rows, ""]))
    for command in (["data", "prepare", "mine.csv"], ["run", "dataset=mine.csv", "rounds=1", "--quiet"]):
        code, _, sentence = call(*command)
        assert (code, said in sentence, "--decimal-comma" in sentence) == (3, True, advised), sentence
    code, _, sentence = call("data", "prepare", "mine.csv", "--decimal-comma", "--quiet")
    assert (code, sentence.count("\n")) == ((0, 0) if advised else (3, 1))
    if not advised:
        assert f"mine.csv: column 'price' has '{cells[3]}' in row 4, with commas between thousands" in sentence


def test_a_column_of_dates_or_lists_is_refused():
    for cells in (np.array(["2020-01-01"] * 4, "datetime64[D]"), np.zeros((4, 2))):
        with pytest.raises(DataError, match="column 'a' must hold numbers, truth values or texts"):
            prepare_table({"a": cells, "label": np.arange(4) % 2}, Wanted(), "t")


def test_a_test_table_without_a_needed_column_is_refused():
    table = {"a": np.arange(9) % 4, "b": np.arange(9) % 5, "label": np.arange(9) % 2}
    with pytest.raises(ConfigError, match=r"t \(test\) has no column 'a'"):
        prepare_table(table, Wanted(), "t", {"b": np.arange(3), "label": np.arange(3) % 2})


def test_a_class_that_only_test_rows_have_is_named(tmp_path):
    rows = [f"{n % 7},{'yes' if n % 2 else 'no'}" for n in range(20)]
    (tmp_path / "tr.csv").write_text("\n".join(["a,label", *rows, ""]))
    (tmp_path / "te.csv").write_text("\n".join(["a,label", *rows[:4], "1,maybe", "2,maybe", ""]))
    code, printed, _ = call("data", "prepare", "tr.csv", "--test", "te.csv")
    assert (code, "\nclass 'maybe' has 2 test samples and no training sample\n" in printed) == (0, True)
    code, printed, said = call("run", "dataset=tr.npz", "rounds=1", "partition.clients=2", "seed=0")
    assert (code, "tr: class 'maybe' has 2 test samples and no training sample" in printed + said) == (0, True)
    assert "no training sample" not in call("data", "prepare", "tr.csv", "--yes")[1]


def test_files_are_replaced_only_if_one_says_so(tmp_path):
    write(tmp_path / "patients.csv", patients())
    assert call(*PREPARE, "--out", "new/mine.npz", "--quiet") == (0, "", "")
    before = (tmp_path / "new" / "mine.npz").read_bytes()
    (tmp_path / "new" / "mine.json").write_text("mine")
    code, _, said = call(*PREPARE, "--out", "new/mine.npz")
    assert code == 2
    assert "'new/mine.npz' exists; give --yes to replace it" in said
    assert (tmp_path / "new" / "mine.json").read_text() == "mine"
    assert call(*PREPARE, "--out", "new/mine.npz", "--yes")[0] == 0
    assert (tmp_path / "new" / "mine.npz").read_bytes() == before
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"mine.npz", "mine.json"}


def test_what_is_printed_comes_as_json_too(tmp_path):
    write(tmp_path / "patients.csv", patients())
    summary = json.loads(call(*PREPARE, "--json")[1])
    assert summary["rows"] == {"train": 48, "test": 12, "left_out": 0}
    assert (summary["clients"], summary["classes"], summary["target"]) == (3, ["high", "low"], "class")
    assert sum(row["features"] for row in summary["columns"]) == len(summary["features"])
    assert summary["next"] == "fedgma run dataset=patients.npz"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "names": [], "features": [{}]}'])
def test_another_file_is_no_preparation(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(DataError, match="is not what `fedgma data prepare` writes"):
        read_prepared(tmp_path / "p.json")


def test_parquet_tables_are_prepared_like_others(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"age": [1.5, None, 3.0, 4.0] * 5, "town": ["a", None, "b", "a"] * 5, "label": [0, 1] * 10}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    texts = {name: ["" if cell is None else cell for cell in cells] for name, cells in columns.items()}
    made, same = (
        prepare_table(read_table(file), Wanted(), "t").arrays
        for file in (tmp_path / "t.parquet", write(tmp_path / "t.csv", texts))
    )
    assert made["x"].tobytes() == same["x"].tobytes()


CELLS = {
    "numbers": st.one_of(st.just(""), st.integers(-9, 9).map(str), st.floats(-1e6, 1e6).map(str)),
    "texts": st.sampled_from(["", "a", "b", "c", "d", "e"]),
    "truths": st.sampled_from(["", "True", "False"]),
}


@st.composite
def tables(draw):
    rows = draw(st.integers(10, 40))
    kinds = draw(st.lists(st.sampled_from(sorted(CELLS)), min_size=1, max_size=4))
    columns = {
        f"{kind} {number}": np.array(draw(st.lists(CELLS[kind], min_size=rows, max_size=rows)), "U")
        for number, kind in enumerate(kinds)
    }
    return {**columns, "sure": np.arange(rows) % 3, "label": np.arange(rows) % 2}


@given(tables(), st.randoms(use_true_random=False), st.integers(1, 4))
def test_features_are_finite_and_do_not_depend_on_the_order_of_columns(table, random, most):
    wanted = Wanted(most_values=most)
    made = prepare_table(table, wanted, "t")
    x, x_test, names = made.arrays["x"], made.arrays["x_test"], made.prepared.names
    assert np.isfinite(x).all()
    assert np.isfinite(x_test).all()
    assert x.shape[1] == x_test.shape[1] == len(names) == len(set(names))
    assert len(x) + len(x_test) == len(table["label"])
    shuffled = dict(random.sample(list(table.items()), len(table)))
    other = prepare_table(shuffled, wanted, "t")
    order = [other.prepared.names.index(name) for name in names]
    np.testing.assert_array_equal(other.arrays["x"][:, order], x)
    np.testing.assert_array_equal(other.arrays["x_test"][:, order], x_test)
    assert json.loads(as_json(made.prepared))["names"] == names
