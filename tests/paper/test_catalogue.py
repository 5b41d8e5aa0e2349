"""The paper's experiments as files: what they plan, what is printed beside them, what is refused."""

from collections import Counter

import pytest

from fedgma.errors import ConfigError, DataError
from fedgma.experiments.settings import record
from fedgma.paper import catalogue
from fedgma.paper.catalogue import experiment
from fedgma.paper.cells import cells_of
from fedgma.paper.claims import ANALYSIS, is_about
from fedgma.paper.figures import FIGURES
from fedgma.paper.kinds import KINDS
from fedgma.paper.plans import Cut, absent_data, parse_cells, plan_runs, samples
from fedgma.paper.printed import matches, printed_rows
from fedgma.paper.rates import Chosen, read_chosen, written
from fedgma.records.format import fingerprint
from fedgma.records.reader import flat

ALL = list(catalogue.catalogue())
RUNS = {
    **{"E1": 960, "E2": 416, "E3": 64, "E4": 144, "E5": 16, "E6": 8, "E7": 0, "E8": 160, "E9": 128, "E10": 32},
    **{"E11": 48, "E12": 12, "E13": 40, "E14": 200, "E15": 4160, "E16": 0, "E17": 0, "E18": 0},
}


def names(plan):
    return {fingerprint(record(settings)) for settings in plan.grid.runs}


def test_every_experiment_of_the_paper_has_a_file():
    assert ALL[:18] == [f"E{number}" for number in range(1, 19)]
    assert ALL[18:36] == [f"C{number}" for number in range(1, 19)]


@pytest.mark.parametrize("name", RUNS)
def test_an_experiment_plans_as_many_runs_as_its_table_has_numbers_and_seeds(name):
    assert len(plan_runs(experiment(name), Chosen()).grid.runs) == RUNS[name]


def test_the_main_table_has_ninety_six_cells_on_mnist_and_fmnist():
    plan = plan_runs(experiment("E1"), Chosen(), Cut(cells="dataset=mnist|fmnist"))
    assert len(plan.grid.runs) == 96 * 4


@pytest.mark.parametrize("name", [name for name in ALL if name[0] == "E" and experiment(name).parts])
def test_every_printed_number_belongs_to_exactly_one_cell(name):
    one = experiment(name)
    cells = cells_of(one, Chosen())
    for row in printed_rows(one):
        sides = [(cell.part, side) for cell in cells for side in (cell.plain, cell.masked) if side is not None]
        once = {(part.name, str(side)) for part, side in sides for s in one.splits if matches(row, side, part, s)}
        assert len(once) == 1, row
    for cell in cells if one.printed else []:
        sides = ("plain", "masked") if cell.part.printed else ()
        assert all(("test", side) in cell.printed for side in sides), cell.label


@pytest.mark.parametrize("name", ALL)
def test_claims_and_figures_are_of_known_kinds(name):
    one = experiment(name)
    assert {claim.kind for claim in one.claims} <= {*KINDS, ANALYSIS}
    assert set(one.figures) <= set(FIGURES)
    runs = [run for _, run in plan_runs(one, Chosen(), Cut(seeds=1)).runs]
    known = {key for run in runs for key in dict(flat(record(run)))} | {"rates"}
    for claim in one.claims:
        assert set(claim.where) <= known, claim
        assert not claim.axis or claim.axis in known


@pytest.mark.parametrize("name", ["E1", "E2", "E5", "E8", "E9", "C1"])
def test_every_claim_is_about_some_cell(name):
    from fedgma.paper.compare import compare

    made = compare(experiment(name), [], Chosen())
    for claim in made.experiment.claims:
        cells = compare(experiment(name)._replace(splits=(claim.split,)), [], Chosen()).compared
        assert any(is_about(claim, one) for one in cells), claim.text


def test_experiments_share_runs_with_each_other():
    main, more = (names(plan_runs(experiment(name), Chosen())) for name in ("E1", "E2"))
    assert names(plan_runs(experiment("E3"), Chosen())) <= main | more
    controls = experiment("C1")
    searched = [
        part for part in controls.parts if part.rates == "shared" and "client_learning_rate" not in part.settings
    ]
    shared = controls._replace(parts=tuple(searched))
    assert names(plan_runs(shared, Chosen(), Cut(cells="aggregator=mean|gma"))) <= main | more


def test_an_unknown_experiment_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown experiment 'E19'; known: E1, E2"):
        experiment("E19")


def test_an_experiment_is_known_by_the_table_or_figure_that_it_is_printed_in():
    assert [experiment(name).id for name in ("Table 2", "table 5", "figure 3D")] == ["E1", "E7", "E4"]
    with pytest.raises(ConfigError, match=r"Figure 3 is in E4 \(figure 3d\), E6 \(figure 3a\), E10 "):
        experiment("Figure 3")
    with pytest.raises(ConfigError, match="section 5 is in E5 and E15"):
        experiment("section 5")


def test_chosen_rates_go_to_the_runs_of_their_data_set_and_algorithm():
    chosen = Chosen({("mnist", "fedavg", "shared"): (0.1, 1.5)})
    plan = plan_runs(experiment("E1"), chosen, Cut(cells="dataset=mnist,algorithm=fedavg|fedadam", seeds=1))
    rates = Counter((r.algorithm, r.client_learning_rate, r.server_learning_rate) for _, r in plan.runs)
    assert rates == {("fedavg", 0.1, 1.5): 12, ("fedadam", 0.05, 0.01): 12}
    assert plan.unrated == ("mnist fedadam",)


def test_rates_that_an_experiment_gives_itself_are_kept():
    chosen = Chosen({("mnist", "fedavg", "shared"): (0.1, 1.5)})
    assert {run.client_learning_rate for _, run in plan_runs(experiment("E5"), chosen).runs} == {0.01}


def test_arms_may_have_their_own_rates():
    pairs = {"shared": (0.01, 1.0), "mean": (0.05, 1.0), "gma": (0.1, 2.0)}
    chosen = Chosen({("mnist", "fedavg", rule): pair for rule, pair in pairs.items()})
    plan = plan_runs(experiment("C1"), chosen, Cut(cells="dataset=mnist,algorithm=fedavg,clients=100", seeds=1))
    rates = {(part.rates, run.aggregator): run.client_learning_rate for part, run in plan.runs}
    assert rates == {
        **{("shared", arm): 0.01 for arm in ("mean", "gma", "damped_mean", "shuffled_mask")},
        **{("own", "mean"): 0.05, ("own", "gma"): 0.1},
    }


def test_every_experiment_with_rates_of_its_own_settings_names_the_search_for_them():
    for one in map(experiment, ALL):
        own = any(part.searched for part in one.parts) and one.splits != ("validation",)
        assert bool(one.search) == own, one.id
        assert not own or experiment(one.search).splits == ("validation",)


def test_rates_are_searched_for_a_setting_and_an_algorithm_takes_those_of_its_kin():
    where = "cifar10, label_skew, 100, crop_flip"
    chosen = Chosen({(where, "fedavg", "mean"): (0.1, 1.0), (where, "fedavg", "gma"): (0.03, 1.0)})
    cut = Cut(cells="clients=100,partition.name=label_skew,algorithm=fedprox|fedadam", seeds=1)
    plan = plan_runs(experiment("C12"), chosen, cut)
    rates = {(run.algorithm, run.aggregator): run.client_learning_rate for _, run in plan.runs}
    fedprox = {"mean": 0.1, "gma": 0.03, "damped_mean": 0.03, "shuffled_mask": 0.03}
    assert {arm: rates["fedprox", arm] for arm in fedprox} == fedprox
    assert plan.unsearched == ("cifar10 fedadam",)


def test_colours_are_those_that_were_chosen():
    chosen = Chosen(shift={"fedcmnist": {"jitter": 0.3, "test_coloring": "random"}})
    shifts = {(run.shift.jitter, run.shift.test_coloring) for _, run in plan_runs(experiment("E6"), chosen).runs}
    assert shifts == {(0.3, "random")}
    assert len({run.shift.jitter for _, run in plan_runs(experiment("C2"), chosen).runs}) == 2


def test_what_was_chosen_is_read_as_it_was_written(tmp_path):
    rates = {("mnist", "fedavg", "shared"): (0.05, 1.0), ("mnist", "fedavg", "gma"): (0.1, 1.0)}
    shift = {"fedcmnist": {"jitter": 0.3, "test_coloring": "random"}}
    (tmp_path / "chosen.toml").write_text(written(rates, shift))
    assert read_chosen(tmp_path / "chosen.toml") == Chosen(rates, shift)
    assert isinstance(read_chosen(), Chosen)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rates = 3", "rates should be"),
        ("[rates.mnist.fedavg]\nshared = 3", "rates should be"),
        ("[rates.mnist.fedavg]\nshared = [0.1, -1.0]", "server_learning_rate"),
        ("[rates.mnits.fedavg]\nshared = [0.1, 1.0]", "unknown data set 'mnits'"),
        ("rates = [", "is not TOML"),
    ],
)
def test_wrong_rates_are_refused(tmp_path, text, reason):
    (tmp_path / "rates.toml").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_chosen(tmp_path / "rates.toml")


def test_rates_that_are_not_there_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the chosen rates"):
        read_chosen(tmp_path / "none.toml")


@pytest.mark.parametrize("words", ["dataset", "dataset=", "tua=1", "name=iid", "seed"])
def test_cells_that_name_no_setting_are_refused(words):
    with pytest.raises(ConfigError, match="--cells expects setting=value pairs"):
        parse_cells(words)


def test_rounds_and_seeds_can_be_cut():
    plan = plan_runs(experiment("E13"), Chosen(), Cut(rounds=3, seeds=2, cells="local_epochs=1|20"))
    assert {(run.rounds, run.seed, run.local_epochs) for _, run in plan.runs} == {
        (3, seed, epochs) for seed in (0, 1) for epochs in (1, 20)
    }


@pytest.mark.parametrize("name", ["E1", "E2", "E6", "E8", "E15", "C2"])
def test_everything_can_be_tried_on_the_embedded_images(name):
    plan = plan_runs(experiment(name), Chosen(), Cut(rounds=1, seeds=1, quick=True))
    assert {run.dataset for _, run in plan.runs} == {"fmnist-mini"}
    assert not any(run.partition.name == "natural" for _, run in plan.runs)


def test_samples_are_rounds_times_clients_times_their_data():
    (run,) = plan_runs(experiment("E12"), Chosen(), Cut(seeds=1, cells="aggregator=mean")).grid.runs
    assert samples(run) == 1000 * 10 * 600


def test_absent_data_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path))
    monkeypatch.delenv("FEDGMA_DATA", raising=False)
    assert absent_data(["cifar100", "fmnist-mini", "cifar100"]) == ["cifar100"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('title = "t"\nsource = "s"\nstatistic = "median"', "statistic should be one of best, last10"),
        ('title = "t"\nsource = "s"\nstatistic = "best"\nclams = []', "unknown clams in a experiment"),
        ('title = "t"\nsource = "s"\nstatistic = "best"\n[[parts]]\nname = "p"\nrates = "mine"', "rates of a part"),
    ],
)
def test_a_file_with_a_slip_is_refused(text, reason):
    with pytest.raises(DataError, match=reason):
        catalogue._experiment("e99.toml", text)
