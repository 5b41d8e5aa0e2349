import json

import pytest

from fedgma.errors import ConfigError
from fedgma.records.label import Label, write_label
from fedgma.records.reader import curve, read_runs
from fedgma.statistics.arms import score
from fedgma.statistics.baseline import against_baseline
from fedgma.statistics.comparisons import compare
from fedgma.statistics.selection import select, select_arm, where
from fedgma.statistics.verdicts import holm
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


def test_scores_that_differ_by_rounding_alone_are_equal(monkeypatch, tmp_path):
    write_duel(tmp_path, seeds=4, lift=0.0)
    scores = iter([33.1, 33.1 + 1e-14] * 4)
    monkeypatch.setattr("fedgma.statistics.comparisons.score", lambda *_: next(scores))
    assert arms(read_runs([tmp_path]), "gma", "mean").cells[0].verdict.outcome == "equal"


def test_every_setting_is_a_cell_and_p_is_corrected_for_their_number(tmp_path):
    for algorithm in ("fedavg", "fedadam"):
        write_duel(tmp_path, algorithm=algorithm, seeds=4)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert [cell.label for cell in made.cells] == [{"algorithm": "fedadam"}, {"algorithm": "fedavg"}]
    assert made.cells[0].verdict.corrected == pytest.approx(2 * made.cells[0].verdict.p)
    assert "single settings after Holm's correction for 2 tests: gma ahead in 2, mean in 0" in made.text


def test_a_setting_with_few_seeds_is_shown_but_is_no_test(tmp_path):
    write_duel(tmp_path, algorithm="fedavg", seeds=4)
    write_duel(tmp_path, algorithm="fedadam", seeds=3)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert [cell.says for cell in made.cells] == ["preliminary", "gma ahead"]
    assert made.cells[1].verdict.corrected == made.cells[1].verdict.p
    assert "after Holm's correction for 1 test:" in made.text
    assert "3 seeds; a verdict needs at least 4 seeds" in made.text  # over both settings, which share three
    few = arms(read_runs([tmp_path]), "aggregator=gma,algorithm=fedadam", "mean")
    assert few.overall.outcome == "preliminary"


def test_a_difference_that_the_correction_takes_away_is_said_to_be_so(tmp_path):
    for place, algorithm in enumerate(("fedavg", "fedadam", "fedyogi")):
        write_wobbly(tmp_path, 0.33 if place else 1.2, algorithm=algorithm)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert [cell.verdict.p < 0.05 for cell in made.cells] == [True, True, True]
    says = {cell.label["algorithm"]: cell.says for cell in made.cells}
    assert says == {"fedadam": "not significant after correction", "fedavg": "gma ahead"} | {
        "fedyogi": "not significant after correction"
    }


def write_wobbly(out, lift, **settings):
    """Four pairs whose differences vary around `lift`, in 40 rounds."""
    for seed, off in enumerate((-0.25, -0.1, 0.1, 0.25)):
        write_run(out, aggregator="mean", seed=seed, rounds=40, **settings)
        write_run(out, aggregator="gma", seed=seed, rounds=40, lift=lift + off, **settings)


def test_the_verdict_is_over_the_settings_that_converged(tmp_path):
    write_duel(tmp_path, rounds=60, lift=2.0, seeds=4)
    write_duel(tmp_path, rounds=20, lift=-30.0, seeds=4)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert {cell.label["rounds"]: cell.convergence.converged for cell in made.cells} == {"20": False, "60": True}
    assert made.overall.mean == pytest.approx(2.0, abs=0.5)
    assert "over the 1 that converged: gma ahead by" in made.text
    short = arms([run for run in read_runs([tmp_path]) if run.planned == 20], "gma", "mean")
    assert short.text.endswith("; not converged: 20 rounds, fewer than 40")


def test_diverged_runs_are_counted_and_the_verdict_is_without_their_pairs(tmp_path):
    write_duel(tmp_path, rounds=60, lift=2.0, seeds=4)
    write_run(tmp_path, seed=4, aggregator="mean", rounds=60)
    write_run(tmp_path, seed=4, aggregator="gma", rounds=60, lift=-60.0)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    (cell,) = made.cells
    assert cell.convergence.diverged == (1, 0)
    assert (cell.verdict.of, cell.settled.of) == (5, 4)
    assert cell.verdict.mean < -5 < 1 < cell.settled.mean
    assert (cell.lost, made.overall) == ((4,), cell.settled)
    assert made.text.startswith("gma ahead by 1.96 points")
    assert "1 of 10 runs diverged (gma 1, mean 0), and their pairs are left out; with them: inconc" in made.text


def test_where_every_pair_diverged_the_verdict_is_over_all(tmp_path):
    for seed in range(4):
        write_run(tmp_path, seed=seed, aggregator="mean", rounds=60)
        write_run(tmp_path, seed=seed, aggregator="gma", rounds=60, lift=-60.0)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert made.cells[0].settled is None
    assert made.overall.mean < -40
    assert "4 of 8 runs diverged" in made.text


def test_where_every_run_diverged_nothing_is_compared(tmp_path):
    for seed in range(4):
        for aggregator in ("mean", "gma"):
            write_run(tmp_path, seed=seed, aggregator=aggregator, rounds=60, falls_at=30)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert made.cells[0].convergence.diverged == (4, 4)
    assert made.text == "all 8 runs of both arms diverged, so there is nothing to compare; use smaller learning rates"


def test_over_several_settings_the_verdict_is_without_diverged_pairs_too(tmp_path):
    write_duel(tmp_path, rounds=60, lift=2.0, seeds=5)
    write_duel(tmp_path, rounds=60, lift=2.0, seeds=4, algorithm="fedadam")
    write_run(tmp_path, seed=4, aggregator="mean", rounds=60, algorithm="fedadam")
    write_run(tmp_path, seed=4, aggregator="gma", rounds=60, lift=-60.0, algorithm="fedadam")
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert (made.overall.of, made.overall.mean) == (4, pytest.approx(2.0, abs=0.5))
    lost = "; 1 of 20 runs diverged (gma 1, mean 0), and the verdict is without their pairs; with them: inconclusive: "
    assert lost in made.text


def test_where_each_seed_lost_a_run_in_some_setting_the_verdict_does_not_claim_to_be_without_them(tmp_path):
    for place, algorithm in enumerate(("fedavg", "fedprox")):
        for seed in range(2):
            write_run(tmp_path, seed=seed, algorithm=algorithm, aggregator="mean", rounds=60)
            lift = -65.0 if place == seed else 1.0
            write_run(tmp_path, seed=seed, algorithm=algorithm, aggregator="gma", rounds=60, lift=lift)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert made.overall.mean < -10
    assert made.text.endswith(
        "; 2 of 8 runs diverged (gma 2, mean 0), and the verdict keeps pairs of theirs, since too few others are left"
    )


def test_a_setting_that_an_arm_lost_in_every_seed_counts_in_the_difference_with_all_pairs(tmp_path):
    write_duel(tmp_path, rounds=60, lift=1.0, seeds=4)
    write_duel(tmp_path, rounds=60, lift=-65.0, seeds=4, algorithm="fedadam")
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert made.overall.mean > 0
    lost = "without their pairs and without the 1 of the settings in which every pair has one; with them: mean ahead by"
    assert lost in made.text


def test_seeds_that_not_all_settings_have_are_said_to_be_missing(tmp_path):
    write_duel(tmp_path, rounds=60, seeds=5)
    write_duel(tmp_path, rounds=60, seeds=1, algorithm="fedadam")
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert "over all settings, by the 1 of up to 5 seeds that all of these have: preliminary: gma ahead by" in made.text


def test_arms_of_different_lengths_are_said_so_and_converge_only_if_the_shorter_one_can(tmp_path):
    for seed in range(4):
        write_run(tmp_path, aggregator="mean", seed=seed, rounds=30)
        write_run(tmp_path, aggregator="gma", seed=seed, rounds=100)
    runs = read_runs([tmp_path])
    for names in (("gma", "mean"), ("mean", "gma")):
        made = arms(runs, *names)
        assert made.cells[0].convergence.text == "not converged: 30 rounds, fewer than 40"
        assert made.text.endswith("; the arms trained for different numbers of rounds")


def test_best_is_taken_over_the_rounds_that_both_arms_evaluated(tmp_path):
    for seed in range(2):
        write_run(tmp_path, seed=seed, aggregator="mean", evaluate_every=1, rounds=40)
        write_run(tmp_path, seed=seed, aggregator="gma", evaluate_every=10, rounds=40, lift=2.0)
    runs = read_runs([tmp_path])
    by_seed = sorted(runs, key=lambda run: run.seed)
    mean, masked = ([run for run in by_seed if run.settings["aggregator"] == name] for name in ("mean", "gma"))
    sparse = [run._replace(rounds=tuple(_without_scores(line, 10) for line in run.rounds)) for run in masked]
    made = compare(sparse, mean, ("gma", "mean"), apart=["aggregator", "evaluate_every"], metric="best")
    shared = [10, 20, 30, 40]
    expected = [
        100
        * (max(curve(a, "test", "accuracy")[r] for r in shared) - max(curve(b, "test", "accuracy")[r] for r in shared))
        for a, b in zip(sparse, mean, strict=True)
    ]
    assert made.cells[0].differences == pytest.approx(expected)
    assert made.cells[0].best.mean == pytest.approx(sum(expected) / 2)


def _without_scores(line, every):
    return line if line["round"] % every == 0 else {name: value for name, value in line.items() if name != "test"}


def test_the_comparisons_of_a_page_are_corrected_together(tmp_path):
    for seed in range(4):
        for name, lift in (("mean", 0.0), ("gma", 1.0), ("and_mask", 0.6), ("median", 0.2)):
            write_run(tmp_path, seed=seed, aggregator=name, lift=lift + 0.1 * seed * (name != "mean"))
    made = against_baseline(read_runs([tmp_path]))
    assert [one.names[0] for one in made] == ["GMA", "the AND-mask", "the median"]
    assert [one.overall.tests for one in made] == [3, 3, 3]
    assert [one.cells[0].verdict for one in made] == [one.overall for one in made]  # the table says what the page says
    assert [one.overall.corrected for one in made] == holm([one.overall.p for one in made])


@pytest.mark.parametrize(
    ("checksum", "said"),
    [
        ("cd" * 32, "; their models are the same"),
        ("ef" * 32, "; their models differ, which this score does not show"),
        (None, ""),
    ],
)
def test_equal_scores_say_whether_the_models_are_equal_too(tmp_path, checksum, said):
    for seed in range(4):
        mean, gma = (write_run(tmp_path, seed=seed, aggregator=name, rounds=60) for name in ("mean", "gma"))
        (gma / "rounds.jsonl").write_bytes((mean / "rounds.jsonl").read_bytes())
        (gma / "done").write_text(json.dumps({"rounds": 60} | ({"sha256": checksum} if checksum else {})))
    (made,) = against_baseline(read_runs([tmp_path]))
    assert made.text.removeprefix("GMA and the mean are equal in 4 of 4 seeds") == said


def test_several_settings_are_corrected_within_their_table_beside_a_rule_with_one(tmp_path):
    for seed in range(4):
        for name, lift in (("mean", 0.0), ("gma", 1.0), ("and_mask", 0.6)):
            write_run(tmp_path, seed=seed, aggregator=name, lift=lift + 0.1 * seed * (name != "mean"))
            if name != "and_mask":
                write_run(tmp_path, seed=seed, aggregator=name, lift=lift + 0.1 * seed, momentum=0.5)
    many, one = against_baseline(read_runs([tmp_path]))
    assert [cell.verdict.tests for cell in many.cells] == [2, 2]
    assert many.overall.tests == 2
    assert one.cells[0].verdict == one.overall


def test_an_average_of_models_is_compared_with_the_mean_and_disturbs_no_other_comparison(tmp_path):
    for seed in range(4):
        write_run(tmp_path, seed=seed, aggregator="mean")
        write_run(tmp_path, seed=seed, aggregator="gma", lift=-1.0 - 0.1 * seed)
        write_run(tmp_path, seed=seed, aggregator="mean", server_average=0.9, lift=2.0 + 0.1 * seed)
    masked, averaged = against_baseline(read_runs([tmp_path]))
    assert (masked.names, averaged.names) == (("GMA", "the mean"), ("the average of models", "the mean"))
    assert (masked.alone, averaged.alone) == (0, 0)
    assert masked.overall.mean == pytest.approx(-1.15, abs=0.3)
    assert averaged.overall.mean == pytest.approx(2.15, abs=0.3)
    assert averaged.cells[0].seeds == (0, 1, 2, 3)
    assert averaged.differ == ()


def test_rules_that_are_evaluated_by_an_average_are_paired_with_such_a_mean(tmp_path):
    for average in (0.0, 0.9):
        held = {"server_average": average} if average else {}
        for seed in range(4):
            write_run(tmp_path, seed=seed, aggregator="mean", lift=2.0 * average, **held)
            write_run(tmp_path, seed=seed, aggregator="gma", lift=1.0, **held)
    masked, averaged = against_baseline(read_runs([tmp_path]))
    assert sorted(cell.verdict.mean for cell in masked.cells) == pytest.approx([-0.8, 1.0], abs=0.3)
    assert averaged.overall.mean == pytest.approx(1.8, abs=0.3)
    assert sorted(cell.where for cell in masked.cells) == ["server average 0", "server average 0.9"]


def test_one_plain_mean_is_the_partner_of_every_tau(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, aggregator="mean", seed=seed)
        for tau in (0.2, 0.6):
            write_run(tmp_path, tau=tau, seed=seed)
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert [(cell.label, cell.seeds) for cell in made.cells] == [({"tau": "0.2"}, (0, 1)), ({"tau": "0.6"}, (0, 1))]


def test_a_setting_that_a_record_leaves_out_is_named_in_every_cell(tmp_path):
    for aggregator in ("mean", "gma"):
        write_run(tmp_path, aggregator=aggregator)
        write_run(tmp_path, aggregator=aggregator, adapters="product")
    made = arms(read_runs([tmp_path]), "gma", "mean")
    assert [cell.where for cell in made.cells] == ["adapters apart", "adapters product"]


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
    [("gm", "no run has 'gm' .*aggregator: gma"), ("taw=0.4", "did you mean 'tau'"), ("tau=0.5", "the runs have 0.4")],
)
def test_an_arm_that_is_not_there_is_refused_with_those_that_are(tmp_path, wanted, sentence):
    write_run(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        select(read_runs([tmp_path]), wanted)


def test_runs_are_chosen_by_the_name_that_a_user_gave_them(tmp_path):
    for rounds, name in ((40, "pilot"), (60, "wide, and long")):
        for seed in range(2):
            write_label(write_run(tmp_path, seed=seed, rounds=rounds), Label(name))
    runs = read_runs([tmp_path])
    assert {run.planned for run in select_arm(runs, "wide, and long")[0]} == {60}
    assert {run.planned for run in select_arm(runs, "name=pilot")[0]} == {40}
    assert {run.planned for run in where(runs, "name=pilot")} == {40}
    made = compare(select_arm(runs, "wide, and long")[0], select_arm(runs, "pilot")[0], ("long", "short"))
    assert [cell.seeds for cell in made.cells] == [(0, 1)]
    with pytest.raises(ConfigError, match="no run has name=pilto; the runs have pilot, wide, and long"):
        where(runs, "name=pilto")
