"""Metrics of a whole split: equal to their literal form, and the same wherever a model is evaluated."""

from dataclasses import replace
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_tasks import scores
from torch import nn
from torch.nn import functional as F

import fedgma
from fedgma.data.files import from_arrays
from fedgma.errors import ConfigError
from fedgma.experiments.settings.task import TASKS
from fedgma.simulation.fleet import play
from fedgma.training.evaluation import scored, split_figures
from fedgma.training.metrics import auc, balanced_accuracy, macro_f1
from fedgma.training.models import build
from fedgma.training.own_task import as_task
from fedgma.training.task import columns_of, whole_number
from fedgma.training.tasks import CLASSIFICATION, IMBALANCED
from plain_pools import make_federation
from run_specs import make_spec
from thread_ranks import on_ranks

SETTINGS = {
    "model": "logistic",
    "partition": {"clients": 4, "name": "iid"},
    "rounds": 2,
    "evaluate_every": 1,
    "clients_per_round": 2,
    "client_test_size": 20,
    "seed": 0,
    "aggregator": "mean",
}


def literal_area(of_class, of_others):
    """The share of pairs in order, a tie for one half; None without pairs."""
    wins = [Fraction(1 if a > b else 0) if a != b else Fraction(1, 2) for a in of_class for b in of_others]
    return sum(wins) / len(wins) if wins else None


def literal_auc(scores, y):
    """The mean over classes of `literal_area`; `scores` [sample, class]."""
    split = [([s[c] for s, t in zip(scores, y, strict=True) if t == c], c) for c in range(len(scores[0]))]
    others = [[s[c] for s, t in zip(scores, y, strict=True) if t != c] for c in range(len(scores[0]))]
    areas = [literal_area(own, rest) for (own, _), rest in zip(split, others, strict=True)]
    known = [float(area) for area in areas if area is not None]
    return sum(known) / len(known) if known else float("nan")


def literal_counts(said, y, classes):
    """Of each class: samples that have it and are said to, that are said to, that have it."""
    pairs = list(zip(said, y, strict=True))
    return [
        (sum(s == t == c for s, t in pairs), sum(s == c for s, _ in pairs), sum(t == c for _, t in pairs))
        for c in range(classes)
    ]


TIED = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 1)), min_size=1, max_size=30)


@given(TIED)
def test_the_area_of_two_classes_is_exact_with_any_ties(rows):
    logits, y = [row[:2] for row in rows], [row[2] for row in rows]
    found = auc(torch.tensor(logits, dtype=torch.float32), torch.tensor(y)).item()
    margins = [b - a for a, b in logits]
    area = literal_area(
        [m for m, t in zip(margins, y, strict=True) if t], [m for m, t in zip(margins, y, strict=True) if not t]
    )
    assert np.isnan(found) if area is None else found == float(area)


@given(st.integers(0, 2**32 - 1), st.integers(3, 5), st.integers(1, 40))
def test_the_area_of_several_classes_is_the_mean_of_each_against_the_others(seed, classes, samples):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(samples, classes, generator=generator)
    y = torch.randint(classes, (samples,), generator=generator)
    chances = logits.double().log_softmax(1).tolist()
    assert auc(logits, y).item() == pytest.approx(literal_auc(chances, y.tolist()), rel=1e-12, nan_ok=True)


@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 40))
def test_balanced_accuracy_and_f1_are_means_over_classes(seed, classes, samples):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, classes, generator=generator)
    y = torch.randint(classes, (samples,), generator=generator)
    counts = literal_counts(logits.argmax(1).tolist(), y.tolist(), classes)
    recalls = [both / there for both, _, there in counts if there]
    ones = [2 * both / (said + there) for both, said, there in counts if said + there]
    assert balanced_accuracy(logits, y).item() == pytest.approx(np.mean(recalls), rel=1e-12)
    assert macro_f1(logits, y).item() == pytest.approx(np.mean(ones), rel=1e-12)


def test_confident_logits_are_told_apart_and_a_diverged_model_has_no_area():
    y = torch.tensor([0, 1, 1])
    sure = torch.tensor([[0.0, 90.0], [0.0, 91.0], [0.0, 92.0]])  # their probabilities are 1 in float64
    assert auc(sure, y).item() == 1.0
    assert auc(torch.full((3, 2), torch.nan), y).isnan()
    assert auc(torch.full((3, 3), torch.inf), y).isnan()


def test_a_sample_more_or_less_of_one_class_alone_has_no_area():
    assert auc(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)).isnan()


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    return from_arrays(x, (x[:, 0] + x[:, 1] + rng.normal(size=200) > 1.5).astype(int))


def test_an_imbalanced_run_trains_as_a_classification_and_has_the_scores_of_its_model(data):
    plain, run = (fedgma.run({**SETTINGS, "task": task}, data=data) for task in ("classification", "imbalanced"))
    assert plain.runs[0].done["sha256"] == run.runs[0].done["sha256"]
    line, before = run.runs[0].rounds[-1], plain.runs[0].rounds[-1]
    assert line["train"] == before["train"]  # nothing of whole splits
    assert {name: line["test"][name] for name in before["test"]} == before["test"]
    state = run.state_dict()
    logits = F.linear(torch.from_numpy(data.test.x), state["linear.weight"], state["linear.bias"])
    y = torch.from_numpy(data.test.y)
    for name, metric in (("auc", auc), ("balanced_accuracy", balanced_accuracy), ("macro_f1", macro_f1)):
        assert line["test"][name] == pytest.approx(metric(logits, y).item(), rel=1e-6)
    assert run.comparisons == ()
    assert "test AUC" in repr(run)


@pytest.mark.parametrize(("shape", "model"), [((1, 28, 28), "logistic"), ((5,), "mlp")])
@pytest.mark.parametrize("trainer", ["auto", "loop", "lanes"])
def test_every_trainer_scores_whole_splits_beside_the_same_accuracy(trainer, shape, model):
    federation = make_federation([9, 7, 12], shape)
    settings = {"model": model, "rounds": 1, "clients_per_round": 2, "client_learning_rate": 0.1, "evaluate_every": 1}
    (plain,), (whole,) = (
        [played.records for played in play([make_spec(federation, task=task, **settings)], trainer=trainer)]
        for task in (CLASSIFICATION, IMBALANCED)
    )
    before, found = plain[0].scores["test"], whole[0].scores["test"]
    assert before == {name: found[name] for name in before}
    assert plain[0].train == whole[0].train
    assert [*found] == ["loss", "accuracy", "auc", "balanced_accuracy", "macro_f1"]
    assert 0 < found["auc"] < 1


def test_the_cpu_kernels_score_whole_splits_too():
    settings = {"model": "logistic", "rounds": 1, "evaluate_every": 1, "seed": 0, "aggregator": "mean"}
    plain, whole = (fedgma.run({**settings, "task": task}).runs[0].rounds[0] for task in TASKS[:2])
    assert plain["test"] == {name: whole["test"][name] for name in plain["test"]}
    assert whole["test"]["balanced_accuracy"] == pytest.approx(plain["test"]["accuracy"], rel=1e-6)  # equal classes


def test_ranks_and_fleets_score_as_one_run_alone():
    federation = make_federation([9, 7, 12], (5,))
    made = build("mlp", (5,), 10, seed=0)  # not in the threads of ranks: torch's generator is global
    settings = {"model": made, "rounds": 1, "clients_per_round": 2, "client_learning_rate": 0.1, "task": IMBALANCED}
    specs = [make_spec(federation, seed=seed, **settings) for seed in (0, 1)]

    def last(specs, **options):
        *_, played = play(specs, **options)
        return [record.scores for record in played.records]

    alone = [last([spec])[0] for spec in specs]
    assert last(specs) == alone
    assert on_ranks(2, lambda ranks: last(specs, ranks=ranks)) == [alone, alone]


def as_numpy(outputs, targets):
    """A user's metric: numpy in, a float out; not defined for one class."""
    return float("nan") if len(set(targets.tolist())) < 2 else float(auc(outputs, targets))


class Fraud:
    better: ClassVar = {"area": "higher", "accuracy": "higher"}
    whole: ClassVar = {"area": as_numpy}
    target = "class"

    def loss(self, output, target):
        return F.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).float()}


def test_a_users_metric_of_whole_splits_is_scored_for_every_run_and_client(data):
    settings = {**SETTINGS, "seed": [0, 1]}
    own = fedgma.run(settings, data=data, task=Fraud)
    known = fedgma.run({**settings, "task": "imbalanced"}, data=data)
    for seed in (0, 1):
        (alone,) = fedgma.run({**settings, "seed": seed}, data=data, task=Fraud).runs
        line, expected = own.runs[seed].rounds[-1], known.runs[seed].rounds[-1]
        assert line["test"] == alone.rounds[-1]["test"]
        assert line["clients"] == alone.rounds[-1]["clients"]
        assert line["test"]["area"] == pytest.approx(expected["test"]["auc"], rel=1e-6)
        assert line["clients"] == pytest.approx(expected["clients"], rel=1e-6)
        assert [*line["test"]] == ["loss", "accuracy", "area"]
        assert "area" not in line["train"]
    assert own.runs[0].settings["task"] == "own:Fraud"


def test_outputs_of_any_shape_come_in_one_row_for_each_sample():
    seen = []
    task = as_task(type("Rows", (Fraud,), {"whole": {"area": lambda o, t: seen.append(o.shape) or 0.0}}), "Rows")
    logits = torch.zeros(4, 3, 2)
    pool = type("Fixed", (), {"y": torch.zeros(4), "batch": lambda self, index, client: (logits[index], index)})()
    task = replace(task, loss=lambda o, t: o.mean((1, 2)), metrics=lambda o, t: {"accuracy": o[:, 0, 0]})
    columns = columns_of(task, nn.Identity(), pool)
    loss, measured = scored(task, logits, torch.zeros(4))
    assert split_figures(task, columns, loss[None], measured[None], torch.zeros(4)).tolist() == [[0, 0, 0]]
    assert seen == [(2, 6), (4, 6)]  # the trial, and the split
    assert (task.names, task.first) == (("loss", "accuracy", "area"), 2)
    assert (IMBALANCED.names[IMBALANCED.first], CLASSIFICATION.first) == ("auc", 1)


WRONG = {
    "`whole` names 'other', which `better` does not": {"whole": {"other": as_numpy}},
    "`whole` must be a mapping from metrics to functions": {"whole": as_numpy},
    "metric 'area' failed on 2 samples .ZeroDivisionError: .*return nan where": {"whole": {"area": lambda o, t: 1 / 0}},
    "metric 'area' in `whole` to return one number, got a tensor of shape .2.": {
        "whole": {"area": lambda o, t: [1, 2]}
    },
    "'accuracy' in `metrics` or in `whole`, got both": {"whole": {"area": as_numpy, "accuracy": as_numpy}},
    "to say of each metric": {"whole": {}},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_metric_that_does_not_have_its_form_is_refused_with_a_sentence(words):
    with pytest.raises(ConfigError, match=words):
        scores(as_task(type("Wrong", (Fraud,), WRONG[words]), "Wrong"), None, torch.zeros(2, 2), torch.tensor([0, 1]))


def test_a_metric_that_fails_later_names_the_number_of_samples():
    task = as_task(type("Late", (Fraud,), {"whole": {"area": lambda o, t: [1.0][len(o) - 2]}}), "Late")
    with pytest.raises(ConfigError, match=r"failed on 3 samples .IndexError"):
        whole_number(task, "area", torch.zeros(3, 2), torch.zeros(3))
