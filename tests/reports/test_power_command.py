import pytest
from typer.testing import CliRunner

from fedgma.cli.app import app
from fedgma.errors import ConfigError
from fedgma.statistics.power import detectable, seeds_for
from run_folders import write_run


def call(*words):
    done = CliRunner().invoke(app, ["power", *map(str, words)], catch_exceptions=False)
    return done.output.splitlines()


def test_seeds_for_a_difference():
    head, *lines = call("--sd", 1, "--difference", 1)
    assert head == "Paired t test, two-sided, 5 %; standard deviation of the differences 1 points."
    assert lines == ["A difference of 1 point: 10 seeds for a power of 80 %, 13 for 90 %."]


def test_the_level_is_corrected_for_the_tests_of_the_page():
    head, line = call("--sd", 1, "--difference", 1, "--tests", 49)
    assert "5 % corrected for 49 tests" in head
    assert line.startswith(f"A difference of 1 point: {seeds_for(1, 1, tests=49)} seeds for a power of 80 %")


def test_the_difference_that_seeds_can_show():
    _, line = call("--sd", 2, "--seeds", 4)
    assert (
        line == f"4 seeds show {detectable(2, 4):.2f} points with a power of 80 %, "
        f"{detectable(2, 4, least=0.9):.2f} points with 90 %."
    )


def test_both_tables_without_a_difference_or_seeds():
    lines = call("--sd", 1)
    assert sum(line.startswith("A difference of") for line in lines) == 5
    assert sum("seeds show" in line for line in lines) == 8
    assert call("--sd", 100, "--difference", 0.1)[1].startswith("A difference of 0.1 points: more than 10000 seeds")


def test_the_deviation_of_earlier_runs(tmp_path):
    for seed, lift in enumerate((1.0, 2.0, 4.0)):
        write_run(tmp_path, aggregator="mean", seed=seed)
        write_run(tmp_path, aggregator="gma", seed=seed, lift=lift)
    head = call("gma", "mean", "--runs", tmp_path, "--seeds", 4)[0]
    assert "standard deviation of the differences 1.6" in head
    assert head.endswith("of 3 pairs in 1 setting; fewer than 4 pairs estimate it badly, train more first.")


def test_one_or_two_pairs_of_each_of_several_settings_estimate_a_deviation_badly(tmp_path):
    for seed, lift in enumerate((1.0, 2.0)):
        for rounds in (10, 20, 30):
            write_run(tmp_path, aggregator="mean", seed=seed, rounds=rounds)
            write_run(tmp_path, aggregator="gma", seed=seed, rounds=rounds, lift=lift)
    head = call("gma", "mean", "--runs", tmp_path, "--seeds", 4)[0]
    assert head.endswith("of 6 pairs in 3 settings.")
    head = call("gma", "mean", "--runs", tmp_path, "--seeds", 4, "--where", "rounds=10,20")[0]
    assert head.endswith("of 4 pairs in 2 settings; so few pairs of each setting estimate it badly, train more first.")


def test_a_diverged_pair_is_no_part_of_the_deviation_and_is_named(tmp_path):
    for seed, lift in enumerate((1.0, 2.0, 4.0, 3.0, -65.0)):
        write_run(tmp_path, aggregator="mean", seed=seed, rounds=60)
        write_run(tmp_path, aggregator="gma", seed=seed, rounds=60, lift=lift)
    head = call("gma", "mean", "--runs", tmp_path, "--seeds", 4)[0]
    assert "standard deviation of the differences 1.2" in head
    assert head.endswith(" points, within settings, of 4 pairs in 1 setting; 1 more had a run that diverged.")


def test_runs_of_one_data_set_are_chosen_among_several(tmp_path):
    for seed, lift in enumerate((1.0, 2.0, 4.0, 3.0)):
        for dataset, factor in (("a.npz", 1.0), ("b.npz", 5.0)):
            write_run(tmp_path, aggregator="mean", seed=seed, dataset=dataset)
            write_run(tmp_path, aggregator="gma", seed=seed, dataset=dataset, lift=factor * lift)
    heads = [call("gma", "mean", "--runs", tmp_path, "--where", f"dataset={name}.npz")[0] for name in "ab"]
    assert all(head.endswith("of 4 pairs in 1 setting.") for head in heads)
    first, second = (float(head.partition("differences ")[2].split()[0]) for head in heads)
    assert second > 3 * first


def test_differences_of_a_metric_without_points_are_multiples_of_their_deviation(tmp_path):
    for seed, lift in enumerate((1.0, 2.0, 4.0, 3.0)):
        write_run(tmp_path, aggregator="mean", seed=seed)
        write_run(tmp_path, aggregator="gma", seed=seed, lift=lift)
    head, *lines = call("gma", "mean", "--runs", tmp_path, "--of", "loss")
    deviation = float(head.partition("differences ")[2].split()[0])
    sizes = [float(line.split()[3]) for line in lines if line.startswith("A difference of")]
    assert sizes == pytest.approx([size * deviation for size in (0.25, 0.5, 1, 2, 4)], rel=0.06)


@pytest.mark.parametrize("words", [(), ("gma",), ("gma", "mean", "--sd", 1)])
def test_a_deviation_is_given_once(words):
    with pytest.raises(ConfigError, match="expected --sd with a number, or two arms"):
        call(*words)
