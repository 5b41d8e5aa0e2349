"""Which runs of two arms are partners, where the arms differ in model or data."""

import pytest

from fedgma.records.label import Label, write_label
from fedgma.records.reader import read_runs
from fedgma.reports.report import make_report
from fedgma.statistics.comparisons import compare
from fedgma.statistics.selection import select_arm
from run_folders import write_run

OTHER = {"sha256": "ef" * 32}


def arms(folder, first, second):
    runs = read_runs([folder])
    (one, words), (other, more) = (select_arm(runs, name) for name in (first, second))
    return compare(one, other, (first, second), apart=[*words, *more])


def write_arm(out, *, name, seeds=range(4), **changes):
    for seed in seeds:
        write_label(write_run(out, seed=seed, aggregator="mean", rounds=60, **changes), Label(name))


@pytest.mark.parametrize(
    ("first", "second"), [("wide nets", "usual nets"), ("model=mlp", "model=lenet"), ("name=wide nets", "lenet")]
)
def test_two_models_are_paired_by_seed(tmp_path, first, second):
    write_arm(tmp_path, name="wide nets", model="mlp", lift=2.0)
    write_arm(tmp_path, name="usual nets", model="lenet")
    made = arms(tmp_path, first, second)
    assert [cell.seeds for cell in made.cells] == [(0, 1, 2, 3)]
    assert made.overall.mean == pytest.approx(2.0)
    assert (made.differ, made.alone, made.apart) == (("model",), 0, ())


def test_two_data_sets_are_paired_by_seed_though_a_model_has_another_shape_on_each(tmp_path):
    write_arm(tmp_path, name="a", dataset="a.npz", model="m.py:Net")
    write_arm(tmp_path, name="b", dataset="b.npz", model="mlp", data=OTHER)
    for first, second in (("dataset=a.npz,model=m.py:Net", "dataset=b.npz,model=mlp"), ("a", "b")):
        made = arms(tmp_path, first, second)
        assert [cell.seeds for cell in made.cells] == [(0, 1, 2, 3)]
        assert made.differ == ("dataset", "model")


def test_where_a_data_set_has_several_versions_two_data_sets_are_not_compared(tmp_path):
    write_arm(tmp_path, name="a", dataset="a.npz")
    write_arm(tmp_path, name="b", dataset="b.npz", data=OTHER)
    write_arm(tmp_path, name="b", dataset="b.npz", data={"sha256": "01" * 32}, seeds=(5, 6))
    made = arms(tmp_path, "dataset=b.npz", "dataset=a.npz")
    assert made.cells == ()
    assert made.versions == ("the arms used different versions of b.npz",)


def test_two_models_on_other_data_of_one_name_are_not_compared(tmp_path):
    write_arm(tmp_path, name="a", dataset="t.npz", model="mlp")
    write_arm(tmp_path, name="b", dataset="t.npz", model="lenet", data=OTHER)
    made = arms(tmp_path, "mlp", "lenet")
    assert made.cells == ()
    assert made.versions == ("the arms used different versions of t.npz",)


def test_arms_named_after_their_rule_are_not_compared_over_two_models(tmp_path):
    for seed in range(4):
        write_run(tmp_path, seed=seed, aggregator="mean", model="lenet")
        write_run(tmp_path, seed=seed, aggregator="gma", model="mlp")
    made = arms(tmp_path, "gma", "mean")
    assert (made.cells, made.versions) == ((), ())
    assert "nothing can be paired" in make_report(tmp_path).verdicts[0]
