import pytest

from fedgma.errors import ConfigError
from fedgma.records.reader import read_runs
from fedgma.statistics.arms import score
from fedgma.statistics.comparisons import compare, select
from run_folders import write_duel, write_run


def arms(runs, first, second, **options):
    (one, words), (other, more) = select(runs, first), select(runs, second)
    return compare(one, other, (first, second), apart=[*words, *more], **options)


def test_runs_of_one_seed_are_paired_and_the_difference_is_first_minus_second(tmp_path):
    folders = write_duel(tmp_path, seeds=3, lift=2.0)
    runs = read_runs([tmp_path])
    made = arms(runs, "gma", "mean")
    by_folder = {run.folder: run for run in runs}
    means, masked = folders[:3], folders[3:]
    expected = [score(by_folder[b]) - score(by_folder[a]) for a, b in zip(means, masked, strict=True)]
    assert made.cells[0].seeds == (0, 1, 2)
    assert made.cells[0].differences == pytest.approx(expected)
    assert made.differ == ("aggregator",)


def test_every_setting_is_a_cell_and_p_is_corrected_for_their_number(tmp_path):
    for algorithm in ("fedavg", "fedadam"):
        write_duel(tmp_path, algorithm=algorithm)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert [cell.label for cell in made.cells] == [{"algorithm": "fedadam"}, {"algorithm": "fedavg"}]
    assert made.cells[0].corrected == pytest.approx(2 * made.cells[0].p)
    assert "significant after Holm's correction for 2 tests: gma ahead in 2, mean in 0" in made.text


def test_a_setting_with_one_seed_is_shown_but_is_no_test(tmp_path):
    write_duel(tmp_path, algorithm="fedavg", seeds=3)
    write_duel(tmp_path, algorithm="fedadam", seeds=1)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert [cell.says(made.names) for cell in made.cells] == ["one seed", "gma ahead"]
    assert made.cells[1].corrected == made.cells[1].p
    assert [cell.outcome for cell in made.cells] == ["one seed", "first ahead"]
    assert "after Holm's correction for 1 test:" in made.text


def test_one_plain_mean_is_the_partner_of_every_tau(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, aggregator="mean", seed=seed)
        for tau in (0.2, 0.6):
            write_run(tmp_path, tau=tau, seed=seed)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert [(cell.label, cell.seeds) for cell in made.cells] == [({"tau": "0.2"}, (0, 1)), ({"tau": "0.6"}, (0, 1))]


def test_two_taus_or_two_algorithms_are_arms_too(tmp_path):
    for tau in (0.2, 0.6):
        write_run(tmp_path, tau=tau, lift=tau)
    write_run(tmp_path, algorithm="fedyogi", tau=0.6)
    runs = read_runs([tmp_path])
    assert arms(runs, "algorithm=fedavg,tau=0.6", "tau=0.2").cells[0].differences == pytest.approx([0.4])
    assert arms(runs, "fedyogi", "fedavg").cells[0].label == {}


def test_rates_chosen_for_each_arm_are_paired_and_said_to_differ(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, aggregator="mean", server_learning_rate=0.5, seed=seed)
        write_run(tmp_path, aggregator="gma", server_learning_rate=1.5, seed=seed)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert made.differ == ("aggregator", "server_learning_rate")
    assert made.cells[0].verdict.of == 2


def test_runs_without_a_partner_are_counted_and_unfinished_ones_never_paired(tmp_path):
    write_duel(tmp_path, seeds=2)
    write_run(tmp_path, seed=7)
    write_run(tmp_path, seed=8, stop=20)
    write_run(tmp_path, seed=8, aggregator="mean")
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert made.cells[0].seeds == (0, 1)
    assert made.alone == 2  # seed 7 of GMA, and seed 8 of the mean, whose partner is unfinished


def test_where_nothing_is_shared_nothing_is_compared(tmp_path):
    write_run(tmp_path, seed=0)
    write_run(tmp_path, seed=1, aggregator="mean")
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert made.cells == ()
    assert "nothing can be paired" in made.text


def test_a_short_name_of_a_setting_is_enough(tmp_path):
    for clients in (50, 100):
        write_run(tmp_path, partition={"clients": clients})
    chosen, spoken = select(read_runs([tmp_path]), "clients=50")
    assert [run.settings["partition.clients"] for run in chosen] == [50]
    assert spoken == ["partition.clients"]


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [("gm", "no run has 'gm' .*aggregator: gma"), ("taw=0.4", "did you mean tau"), ("tau=0.5", "the runs have 0.4")],
)
def test_an_arm_that_is_not_there_is_refused_with_those_that_are(tmp_path, wanted, sentence):
    write_run(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        select(read_runs([tmp_path]), wanted)
