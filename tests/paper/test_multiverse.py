"""The multiverse: a committed draw, rates searched for every universe, and what the universes say together."""

import pytest
from made_runs import write_run

from fedgma.experiments.materials import Materials
from fedgma.paper import universes
from fedgma.paper.catalogue import experiment
from fedgma.paper.compare import compare
from fedgma.paper.entries import read_entries
from fedgma.paper.figures import draw
from fedgma.paper.multiverse import (
    choices_table,
    most_telling,
    multiverse_of,
    sentences,
    specifications,
    universes_table,
)
from fedgma.paper.plans import Cut, plan_runs
from fedgma.paper.rates import Chosen, read_chosen
from fedgma.paper.results import make_report
from fedgma.paper.search import choose
from fedgma.statistics.additive import fit_additive
from scripts import load_script

FEW = 8
ROUNDS = Cut(rounds=10)


def first(name, number=FEW):
    one = experiment(name)
    return one._replace(parts=one.parts[:number])


def test_the_draw_in_the_package_is_that_of_the_seed():
    drawn = universes.draw()
    assert list(universes.read()) == drawn
    assert len({tuple(universe.values())[1:] for universe in drawn}) == len(drawn) >= 120
    for choice, levels in universes.CHOICES.items():
        assert {universe[choice] for universe in drawn} == set(levels), choice


def test_the_first_universes_do_not_depend_on_how_many_are_drawn():
    assert universes.draw(5) == universes.draw(9)[:5]


def test_search_and_comparison_have_the_same_universes_other_seeds_and_the_same_grid_for_both_arms():
    search, test = experiment("C19"), experiment("C24")
    assert [part.name for part in search.parts] == [part.name for part in test.parts]
    both = [plan_runs(first(name, 4), read_chosen()).runs for name in ("C19", "C24")]
    searched, tested = [{run.seed for _, run in runs} for runs in both]
    assert searched == {100}
    assert len(tested) >= 4
    assert not searched & tested
    for part, runs in {part.name: [run for other, run in both[0] if other == part] for part, _ in both[0]}.items():
        grids = [
            sorted(
                (run.client_learning_rate, run.server_learning_rate)
                for run in runs
                if (run.aggregator == "mean") is plain
            )
            for plain in (True, False)
        ]
        assert grids[0] == grids[1], part
        assert len(grids[0]) == 8
        assert {run.validation for run in runs} == {0.1}


def test_the_arms_of_a_universe_differ_in_the_aggregation_alone():
    for part, settings in [(part, part.settings) for part in experiment("C24").parts]:
        assert settings["aggregator"][0] == "mean", part.name
        assert len(settings["aggregator"]) == 2
        assert settings["partition"]["clients"] in (10, 100)


def best_pair(momentum, algorithm, plain):
    """The pair at which an arm is best: neither the first of the grid nor the last."""
    server = next(rates for name, rates in universes.SERVER_RATES.items() if name.lower() == algorithm)
    client = universes.CLIENT_RATES[momentum]
    return (client[1], server[1]) if plain else (client[2], server[0])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs in which masked averaging is two points behind on shards; the arms are best at different pairs of rates."""
    out = tmp_path_factory.mktemp("runs")
    search = first("C19")
    for _, run in plan_runs(search, Chosen(), ROUNDS).runs:
        plain = run.aggregator == "mean"
        good = (run.client_learning_rate, run.server_learning_rate) == best_pair(
            f"{run.momentum:g}", run.algorithm, plain
        )
        write_run(out / "search", run, 80.0 if good else 70.0, splits=("validation",))
    entries, _ = read_entries([out / "search"])
    rates = choose(compare(search, entries, Chosen(), ROUNDS), by_setting=True)
    test = first("C24")
    chosen = Chosen(rates)
    for _, run in plan_runs(test, chosen, ROUNDS).runs:
        shards = run.partition.mode == "shards" and run.partition.name == "label_skew"
        level = 80.0 if run.aggregator == "mean" else 78.0 if shards else 80.0 + 0.01 * run.seed
        write_run(out / "test", run, level, noise=0.01)
    return rates, compare(test, read_entries([out / "test"])[0], chosen, ROUNDS)


def test_every_arm_gets_the_best_pair_of_its_own_universe(made):
    rates, _ = made
    assert len(rates) == 3 * FEW
    assert {where.partition(", ")[2] for where, _, _ in rates} == {f"universe {n:03d}" for n in range(1, FEW + 1)}
    for universe in universes.read()[:FEW]:
        where = f"{universe['data'].lower()}, {universes.name_of(universe)}"
        expected = [best_pair(universe["momentum"], universe["server"].lower(), plain) for plain in (True, False)]
        own = {rule: pair for (place, _, rule), pair in rates.items() if place == where and rule != "shared"}
        assert [own.pop("mean"), *own.values()] == expected


def test_shares_sentences_and_the_choice_that_decides(made):
    found = multiverse_of(made[1])
    assert found is not None
    shards = sum(universe["partition"] == "shards" for universe in universes.read()[:FEW])
    assert found.shares.of == FEW
    assert found.shares.corrected[1] == shards
    assert found.shares.alone[1] >= shards
    said = sentences(found)
    assert said[0] == f"{FEW} of {len(universes.read())} drawn universes were run in both arms, with 6 seeds"
    assert f"and {shards} behind" in said[1]
    assert found.overall.mean == pytest.approx(sum(v.mean for *_, v in found.cells) / FEW)


def test_tables_and_the_curve_have_every_universe(made):
    found = multiverse_of(made[1])
    table = universes_table(found)
    assert len(table.rows) == FEW == len(specifications(found))
    assert all(len(row) == len(table.header) for row in table.rows)
    report = make_report(made[1])
    assert "universes" in [one.name for one in report.tables]
    (picture,) = draw(made[1])
    assert picture.name == "specifications-multiverse"


def test_the_choices_have_one_line_a_level_and_one_test_each(made):
    found = multiverse_of(made[1])
    drawn = universes.read()
    behind = [-2.0 * (one["partition"] == "shards") + 0.01 * (int(one["number"]) % 3) for one in drawn]
    rows = [{"partition": one["partition"], "tau": one["tau"]} for one in drawn]
    model = fit_additive(rows, behind)
    found = found._replace(model=model, by_rank=model)
    table = choices_table(found)
    assert [row[:2] for row in table.rows][-3:] == [("tau", "0.2"), ("tau", "0.4"), ("tau", "0.8")]
    assert sum(row[-1] is not None for row in table.rows) == 2
    assert sentences(found)[-1].endswith("partition (p < 0.0001)")
    (telling,) = most_telling(found)
    assert "partition shards -2 (" in telling
    assert "tau" not in telling
    assert most_telling(found._replace(by_rank=None)) == []


def test_few_universes_have_no_model_and_none_no_multiverse(made):
    comparison = made[1]
    few = multiverse_of(comparison)
    assert few is not None
    assert few.model is None
    assert choices_table(few) is None
    assert multiverse_of(comparison._replace(compared=comparison.compared[:1])) is None


@pytest.mark.slow
def test_a_universe_is_searched_and_compared_once_wherever_its_runs_are(tmp_path):
    tool = load_script("tools/run_parts.py")
    small = {"local work": "5 steps", "batch": "10", "a round": "5"}
    place = next(i for i, one in enumerate(universes.read()) if {**one, **small} == one)
    how = tool.Options(tmp_path / "here", Cut(rounds=1, seeds=1, quick=True), "cpu", "fp32", 0.0, ())
    materials, name = Materials("cpu"), universes.name_of(universes.read()[place])
    assert tool.play_part(place, how, materials, []).startswith(f"{name}: 16 + 2 runs in")
    assert tool.play_part(place, how, materials, []).startswith(f"{name}: 0 + 0 runs in")
    chosen = read_chosen(tmp_path / "here" / name.replace(" ", "-") / tool.CHOSEN)
    assert {where for where, *_ in chosen.rates} == {f"fmnist-mini, {name}"}
    elsewhere = how._replace(out=tmp_path / "there")
    earlier = read_entries([tmp_path / "here"])[0]
    assert tool.play_part(place, elsewhere, materials, earlier).startswith(f"{name}: 0 + 0 runs in")
