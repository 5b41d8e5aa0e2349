"""`fedgma advise`: a search on validation samples, a test on others, an advice that the test supports."""

import contextlib
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import call
from fedgma.documents import parse_toml
from fedgma.errors import ConfigError
from fedgma.experiments.advise.advice import conclude, settings_file
from fedgma.experiments.advise.halving import Stage
from fedgma.experiments.advise.pictures import pictures_of
from fedgma.experiments.advise.question import AVERAGE_OF_MODELS, TRIED, Question, ask, finalists
from fedgma.experiments.advise.search import Course, Findings, Trainer, search_and_test
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import plan
from fedgma.experiments.settings import Settings, complete
from fedgma.records.reader import Run, read_runs

TINY = {
    "dataset": "mine.npz",
    "model": "logistic",
    "partition": {"name": "iid", "clients": 4},
    "clients_per_round": 2,
    "client_learning_rate": [0.01, 0.1],
    "rounds": 2,
    "evaluate_every": 1,
    "mask_every": 0,
    "client_test_size": 0,
}


class Seen:
    """What a trainer shows."""

    def __init__(self):
        self.stages, self.rounds = [], 0

    def stage(self, words, planned):
        self.stages.append(words)

    def begin(self, members, name):
        pass

    def see(self, played):
        self.rounds += 1


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory):
    """A file with a few samples, in the current folder."""
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    with contextlib.chdir(tmp_path_factory.mktemp("data")):
        np.savez("mine.npz", x=x, y=(x[:, 0] > 0).astype(int))
        yield


def trainer(out, settings=TINY, *, stop=lambda: False):
    materials = Materials("cpu")
    ticks = itertools.count()  # a clock by which a round takes about a second
    question = ask(expand(settings), materials, ["gma"])
    return Trainer(question, materials, out, lambda: float(next(ticks)), Seen(), stop)


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    """A complete search and test, with the trainer that did it."""
    trained = trainer(tmp_path_factory.mktemp("advice"))
    return trained, search_and_test(trained, 4000.0)


def test_the_search_scores_validation_samples_and_the_test_trains_on_all_with_other_seeds(advised):
    trained, found = advised
    searched, tested = read_runs([trained.out / "search"]), read_runs([trained.out / "runs"])
    assert {run.settings["validation"] for run in searched} == {0.2}
    assert {run.settings["validation"] for run in tested} == {0.0}
    assert not {run.seed for run in searched} & {run.seed for run in tested}
    assert {run.settings["partition.seed"] == run.seed for run in (*searched, *tested)} == {True}
    assert {len(runs) for runs in found.tests.values()} == {8}  # seeds: four, and four more since there was time
    assert next(iter(found.tests))[0] == "mean"


def test_every_arm_has_the_same_budget_in_every_stage(advised):
    for stage in (course.stage for course in advised[1].courses):
        pairs = {arm: sum(name == arm for name, _ in stage.candidates) for arm in stage.arms}
        assert set(pairs) == {"mean", "GMA"}
        assert len(set(pairs.values())) == 1


def test_the_same_call_trains_nothing_again_and_finds_the_same(advised):
    trained, found = advised
    again = trainer(trained.out)
    assert conclude(search_and_test(again, 4000.0)) == conclude(found)
    assert again.watch.stages == []


def test_the_settings_file_describes_the_runs_of_the_test(advised):
    trained, found = advised
    text = settings_file(found, conclude(found), trained.materials)
    planned = plan(expand(parse_toml(text)), Materials("cpu"), trained.out / "runs")
    assert len(planned) == 5
    assert [run.fingerprint for run in planned if not run.folder.exists()] == []


def test_the_pictures_show_every_stage_and_every_arm(advised):
    drawn = pictures_of(advised[1], conclude(advised[1]))
    assert set(drawn) == {"search", "rates", "accuracy", "gain"}
    ticks = [tick.get_text() for tick in drawn["search"].axes[0].get_xticklabels()]
    assert ticks == ["2 rounds\n1 seed", "2 rounds\n2 seeds", "2 rounds\n3 seeds"]


def test_a_stopped_search_goes_on_with_the_stages_that_were_planned(tmp_path, advised):
    asked = itertools.count()
    stopped = trainer(tmp_path, stop=lambda: next(asked) > 12)
    assert search_and_test(stopped, 4000.0) is None
    before = json.loads((tmp_path / "plan.json").read_text())["stages"]
    resumed = trainer(tmp_path)
    found = search_and_test(resumed, 4000.0)
    after = json.loads((tmp_path / "plan.json").read_text())["stages"]
    assert 0 < len(before) < len(after)
    assert after[: len(before)] == before
    assert conclude(found).contenders == conclude(advised[1]).contenders


def test_a_test_without_time_for_more_seeds_is_complete(tmp_path, advised):
    shutil.copytree(advised[0].out, tmp_path / "again")
    book = json.loads((tmp_path / "again" / "plan.json").read_text())
    *earlier, last = book["stages"]
    assert last["final"]
    assert earlier[-1]["final"]
    (tmp_path / "again" / "plan.json").write_text(json.dumps({**book, "stages": [*earlier, {**last, "seeds": []}]}))
    found = search_and_test(trainer(tmp_path / "again"), 4000.0)
    assert {candidate: list(runs) for candidate, runs in found.tests.items()} == {
        (name, tuple(pair)): earlier[-1]["seeds"] for name, *pair in earlier[-1]["candidates"]
    }


def test_a_time_that_is_too_short_says_how_much_is_needed(tmp_path):
    with pytest.raises(ConfigError, match=r"0\.05 min are too short.*give at least --minutes \d+"):
        search_and_test(trainer(tmp_path), 3.0)


def test_the_average_of_models_is_always_tested_where_it_is_tried():
    tried = ask(expand(TINY), Materials("cpu"))
    ranked = (("mean", (0.1, 1.0)), ("GMA", (0.01, 1.0)), ("TIES", (0.1, 1.0)))
    assert finalists(ranked, tried) == (*ranked[:2], (AVERAGE_OF_MODELS, (0.1, 1.0)))
    assert finalists(ranked[:1], tried) == (ranked[0], (AVERAGE_OF_MODELS, (0.1, 1.0)))
    found = (ranked[0], (AVERAGE_OF_MODELS, (0.01, 1.0)), ranked[1])
    assert finalists(found, tried) == found
    assert finalists(ranked, ask(expand(TINY), Materials("cpu"), ["gma"])) == ranked


def test_a_list_of_federations_is_refused():
    with pytest.raises(ConfigError, match=r"one federation, got a list for partition.clients"):
        ask(expand({**TINY, "partition": {"clients": [10, 20]}}), Materials("cpu"))


def test_the_rules_are_the_library_s_without_robust_ones_and_those_of_the_settings():
    question = ask(expand({**TINY, "aggregator": ["median", "gma"], "tau": [0.2, 0.4]}), Materials("cpu"))
    names = list(question.arms)
    assert names[:4] == ["mean", AVERAGE_OF_MODELS, "GMA, tau 0.2", "GMA, tau 0.4"]
    assert "median" in names
    assert len(names) == len(TRIED) + 3
    with pytest.raises(ConfigError, match="unknown rule 'gmaa'"):
        ask(expand(TINY), Materials("cpu"), ["gmaa"])


def test_an_average_of_models_is_tried_unless_the_settings_have_one_or_rules_are_named():
    asked = [
        ask(expand({**TINY, **given}), Materials("cpu"), rules)
        for given, rules in (({}, []), ({"server_average": 0.5}, []), ({}, ["gma"]))
    ]
    assert [AVERAGE_OF_MODELS in question.arms for question in asked] == [True, False, False]
    base, averaged = asked[0].arms["mean"], asked[0].arms[AVERAGE_OF_MODELS]
    assert averaged == base.model_copy(update={"server_average": 0.9})


GIVEN, OTHER = (0.05, 1.0), (0.1, 1.0)


def found(**tests):
    """A search and a test by hand: lists of test accuracies for `mean`, `gma` and `given`, the mean as it was."""
    settings = complete(Settings(aggregator="mean"))
    arms = {"mean": settings, "GMA": settings.model_copy(update={"aggregator": "gma"})}
    keys = {"mean": ("mean", OTHER if "given" in tests else GIVEN), "gma": ("GMA", OTHER), "given": ("mean", GIVEN)}
    runs = {
        keys[name]: {seed: run_of(value) for seed, value in enumerate(values)}
        for name, values in sorted(tests.items(), key=lambda item: list(keys).index(item[0]))
    }
    stage = Stage((("mean", GIVEN), ("mean", OTHER), ("GMA", GIVEN), ("GMA", OTHER)), (100,), 50)
    course = Course(stage, dict.fromkeys(stage.candidates, 50.0))
    return Findings(Question(arms, (GIVEN, OTHER), (0, 1, 2, 3, 4), True), (course,), runs, 200)


def run_of(accuracy):
    return Run(Path(), {}, {"rounds": 200}, ({"round": 200, "test": {"accuracy": accuracy / 100}},), None)


EVEN = np.array([70.0, 71.0, 69.0, 70.5])
NOISE = np.array([0.1, -0.1, 0.2, 0.0])


def test_a_rule_that_is_ahead_is_advised_with_its_gain():
    advice = conclude(found(mean=EVEN, gma=EVEN + 2 + NOISE))
    assert advice.headline == "Use GMA (client rate 0.1, server rate 1)"
    assert "Expected gain over the plain mean at its own best rates" in advice.reasons[0]
    assert advice.gain.outcome == "first ahead"
    assert advice.chosen == ("GMA", OTHER)


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ({"gma": EVEN - 2 + NOISE}, "no finalist is ahead"),
        ({"gma": EVEN + 20 * NOISE}, "the most promising is GMA"),
        ({"gma": EVEN + 2 + NOISE, "given": EVEN + 3 + NOISE}, "GMA is ahead of the plain mean at its best rates, but"),
    ],
    ids=["behind", "inconclusive", "below the mean at the given rates"],
)
def test_the_plain_mean_is_kept_unless_a_rule_is_ahead_of_it_at_any_rates(tests, reason):
    advice = conclude(found(mean=EVEN, **tests))
    assert advice.headline == "Keep the plain mean (client rate 0.05, server rate 1), as in your settings"
    assert reason in advice.reasons[0]
    assert (advice.chosen, advice.gain) == (("mean", GIVEN), None)


def test_other_rates_for_the_mean_are_advised_only_if_they_are_ahead():
    better = conclude(found(mean=EVEN, gma=EVEN - 1, given=EVEN - 3 + NOISE))
    assert better.headline == "Keep the plain mean (client rate 0.1, server rate 1), in place of your rates"
    assert better.chosen == ("mean", OTHER)
    assert conclude(found(mean=EVEN, gma=EVEN - 1, given=EVEN + 20 * NOISE)).chosen == ("mean", GIVEN)


def test_runs_of_the_test_that_diverged_are_counted_by_arm():
    lost = conclude(found(mean=EVEN, gma=np.array([72.0, 10.0, 71.0, 72.5])))
    said = "1 of 8 runs of the test diverged: GMA (client rate 0.1, server rate 1) 1; choose lower rates for these arms"
    assert said in lost.notes
    assert not any("diverged" in note for note in conclude(found(mean=EVEN, gma=EVEN)).notes)


def test_a_test_whose_arms_still_rise_says_so():
    def run(end):
        rounds = [{"round": r, "test": {"accuracy": 0.5 + end * r / 20_000}} for r in range(10, 201, 10)]
        return Run(Path(), {}, {"rounds": 200}, tuple(rounds), None)

    early = "the arms had not converged after 200 rounds; longer training may change their order"
    made = found(mean=EVEN, gma=EVEN)
    for end, said in ((0, False), (20, True)):
        tests = {candidate: dict.fromkeys(runs, run(end)) for candidate, runs in made.tests.items()}
        assert (early in conclude(made._replace(tests=tests)).notes) is said


def test_what_there_was_no_time_for_is_said():
    short = found(mean=EVEN, gma=EVEN)._replace(rounds=40)
    assert "the test had 40 of 200 rounds; longer training may change the order of the arms" in conclude(short).notes
    assert "there was time for 1 of 3 stages of the search" in conclude(short).notes
    three = short.courses[0].stage._replace(candidates=(("mean", GIVEN), ("GMA", GIVEN), ("TIES", GIVEN)))
    narrow = short._replace(courses=(short.courses[0]._replace(stage=three),))
    assert "there was time to test one rule: GMA" in conclude(narrow).notes
    assert "there was time to test one rule: GMA" not in conclude(short).notes
    stopped = conclude(short._replace(tests={}))
    assert stopped.reasons == ("The time was over before the test was complete; the same command goes on with it",)


def test_the_command_writes_settings_and_pictures_and_prints_json(tmp_path):
    (tmp_path / "tiny.toml").write_text('dataset = "mine.npz"\nclient_learning_rate = [0.01, 0.1]\npartition = "iid"\n')
    words = [tmp_path / "tiny.toml", "rounds=1", "partition.clients=4", "clients_per_round=2", "model=logistic"]
    out = tmp_path / "a"
    code, printed, said = call("advise", *words, "--rules", "gma", "--minutes", 60, "--json", "--out", out)
    assert code == 0, said
    shown = json.loads(printed)
    assert shown["settings"] == str(out / "advice.toml")
    assert {arm["name"] for arm in shown["arms"]} >= {"the mean", "GMA"}
    assert shown["advice"] in (out / "advice.toml").read_text()
    assert {path.stem for path in (out / "pictures").glob("*.png")} == {
        "search",
        "rates",
        "accuracy",
        "gain",
    }
