"""A task is the same in every trainer, in batches of any size, and equals its textbook formula."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedgma.data.files.own.targets import PADDING
from fedgma.errors import ConfigError
from fedgma.training import lanes, loop
from fedgma.training.choose import choose
from fedgma.training.cuda_graphs import Engine
from fedgma.training.evaluation import client_means, run_forward, sample_scores, scorer
from fedgma.training.gradients import lane_gradients
from fedgma.training.lane_batch import Assignment
from fedgma.training.own_task import as_task
from fedgma.training.task import Columns, columns_of, figures, measures, sample_means
from fedgma.training.tasks import CLASSIFICATION, MULTI_LABEL, NEXT_TOKEN, REGRESSION
from lane_twins import distance, make_lane_batch, start_of
from task_cases import TASKS, case

RAGGED = [9, 4, 1]  # with batches of four, some end in padding


def scores(task, model, output, y):
    """What is recorded of a batch, by name."""
    pool = type("Fixed", (), {"y": y, "batch": lambda self, index, client: (output[index], y[index])})()
    columns = columns_of(task, nn.Identity(), pool)
    loss, found = task.loss(output, y).reshape(len(y)), measures(task, output, y)
    return dict(zip(task.names, figures(task, columns, *sample_means(task, loss, found, y)).tolist(), strict=True))


@pytest.mark.parametrize("name", TASKS)
def test_loop_lanes_and_engine_train_the_same(name):
    federation, model, task = case(name, RAGGED)
    assignment = Assignment(model, make_lane_batch(federation, range(3)), [federation.train], *start_of(model))
    columns = columns_of(task, model, federation.train)
    gradients = lane_gradients(model, task=task)
    expected = loop.train(assignment, task=task)
    others = [
        lanes.train(assignment, gradients=gradients, measures=columns.number),
        Engine(gradients, compile=False, measures=columns.number)(assignment),
    ]
    assert expected.flat.abs().max() > 1e-3
    for actual in others:
        assert distance(expected.updates, actual.updates) < 1e-5
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(actual.measures.double(), expected.measures.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TASKS)
def test_the_size_of_evaluation_batches_does_not_matter(name):
    federation, model, task = case(name, [8])
    params, _ = start_of(model)
    score = scorer(run_forward(model), task)
    one, two = (sample_scores(score, params, {}, federation.test, batch=size) for size in (60, 7))
    for first, second in zip(one, two, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)  # sums of float32, in another order


def test_regression_has_the_textbook_scores():
    rng = np.random.default_rng(0)
    y, output = 300 + rng.normal(size=(50, 2)) * [1, 20], 300 + rng.normal(size=(50, 2))
    found = scores(REGRESSION, None, *(torch.from_numpy(a.astype(np.float32)) for a in (output, y)))
    errors = output - y
    assert found["mse"] == pytest.approx(np.mean(errors**2), rel=1e-4) == found["loss"]
    assert found["mae"] == pytest.approx(np.mean(abs(errors)), rel=1e-4)
    r2 = 1 - (errors**2).mean(0) / y.var(0)  # of each output; scikit-learn takes the plain mean too
    assert found["r2"] == pytest.approx(r2.mean(), rel=1e-3)


def test_a_constant_target_has_a_defined_r2():
    y = torch.full((4, 1), 2.0)
    assert scores(REGRESSION, None, y.clone(), y)["r2"] == 1.0
    assert scores(REGRESSION, None, y + 1, y)["r2"] == 0.0


def test_multi_label_has_the_textbook_scores():
    logits = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])
    y = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    found = scores(MULTI_LABEL, None, logits, y)
    assert found["f1"] == pytest.approx(2 * 2 / (3 + 3))  # two hits, three predicted, three true
    assert (found["accuracy"], found["exact"]) == (pytest.approx(4 / 6), 0.0)
    assert found["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, y).item())
    assert scores(MULTI_LABEL, None, -torch.ones(2, 2), torch.zeros(2, 2))["f1"] == 0.0


def test_padding_counts_for_nothing_in_next_token_prediction():
    rng = torch.Generator().manual_seed(0)
    logits, y = torch.randn(3, 4, 5, generator=rng), torch.randint(5, (3, 4), generator=rng)
    y[0, 1:], y[2, :] = PADDING, PADDING  # one token is left of the first sample, none of the last
    actual = scores(NEXT_TOKEN, None, logits, y)
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PADDING)
    assert actual["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert actual["perplexity"] == pytest.approx(expected.exp().item(), rel=1e-5)
    real = y != PADDING
    assert actual["accuracy"] == pytest.approx((logits.argmax(-1) == y)[real].float().mean().item(), rel=1e-5)


def test_a_sample_of_padding_alone_does_not_move_the_model():
    federation, model, task = case("next_token", [4])
    federation.train.y[federation.clients[0]] = PADDING
    assignment = Assignment(model, make_lane_batch(federation, [0]), [federation.train], *start_of(model))
    assert loop.train(assignment, task=task).flat.abs().max() == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 100))
def test_clients_are_scored_as_if_alone(owners, seed):
    rng, owner = np.random.default_rng(seed), np.array(owners)
    loss, found = torch.from_numpy(rng.random(len(owner))), torch.from_numpy(rng.random((len(owner), 2)))
    weight = torch.from_numpy(rng.integers(1, 5, len(owner)).astype(float))
    samples = [np.flatnonzero(owner == client) for client in range(4)]
    table = torch.tensor([[*part, *[-1] * (len(owner) - len(part))] for part in samples])
    means, columns = client_means(loss, found, table, weight)
    for client, part in enumerate(samples):
        if len(part):
            assert means[client] == pytest.approx(np.average(loss[part], weights=weight[part]))
            np.testing.assert_allclose(columns[client], np.average(found[part], axis=0, weights=weight[part]))
        else:
            assert means[client].isnan()


def test_hand_written_parts_serve_classification_alone():
    federation, model, task = case("regression", [4])
    assert (
        choose("auto", model, [federation.train], task=task)(
            Assignment(model, make_lane_batch(federation, [0]), [federation.train], *start_of(model))
        )
        .flat.isfinite()
        .all()
    )
    with pytest.raises(ConfigError, match="no CPU kernel for the task regression"):
        choose("kernels", model, [federation.train], task=task)


class Within:
    better: ClassVar = {"within": "higher"}
    units: ClassVar = {"within": "%"}
    target = "float"

    def loss(self, output, target):
        return (output - target).abs().mean(1)

    def metrics(self, output, target):
        return {"within": ((output - target).abs() < 0.5).float().mean(1)}


def test_a_users_class_is_a_task():
    task = as_task(Within, "Within")
    y = torch.zeros(2, 2)
    assert scores(task, None, torch.tensor([[0.0, 1.0], [0.2, 0.3]]), y) == pytest.approx(
        {"loss": 0.375, "within": 0.75}
    )
    assert task.names == ("loss", "within")
    assert not task.lower
    assert as_task(task, "again") is task


class Balanced:
    """Accuracy with every class counted alike: no mean over samples, and a summary that reduces all that it gets."""

    better: ClassVar = {"balanced": "higher"}

    def loss(self, output, target):
        return F.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        of_class = F.one_hot(target, output.shape[-1]).float()
        return {"hits": (output.argmax(-1) == target).float()[:, None] * of_class, "all": of_class}

    def summary(self, means):
        held = means["all"] > 0
        return {"balanced": (means["hits"][held] / means["all"][held]).mean().item()}


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_a_users_summary_sees_one_run_at_a_time(leading):
    task, generator = as_task(Balanced, "Balanced"), torch.Generator().manual_seed(0)
    loss = torch.rand(leading, generator=generator)
    means = torch.rand((*leading, 4), generator=generator)
    found = figures(task, Columns(("hits", "all"), (2, 2)), loss, means)
    assert found.shape == (*leading, 2)
    torch.testing.assert_close(found[..., 0], loss)
    torch.testing.assert_close(found[..., 1], (means[..., :2] / means[..., 2:]).mean(-1))


WRONG = {
    r"summary failed on means loss .*within .*ValueError: no": {
        "summary": lambda self, means: (_ for _ in ()).throw(ValueError("no"))
    },
    r"summary to return one number for each metric, got 'within' of shape .3.": {
        "summary": lambda self, means: {"within": torch.zeros(3)}
    },
    "better.*higher.*lower": {"better": {"within": "more"}},
    "better = ..within.: .lower.. to say of each metric whether.*got none": {"better": {}, "units": {}},
    "name 'loss' is taken": {"better": {"loss": "lower"}, "units": {}},
    "`units` names 'other'": {"units": {"other": "m"}},
    "unknown target 'text'": {"target": "text"},
    "one number for each sample, got a tensor of shape .2, 2. for two samples": {
        "loss": lambda self, o, t: (o - t).abs()
    },
    "loss failed on an output of shape .2, 2. and a target of shape .2, 2. .ValueError: no": {
        "loss": lambda self, o, t: (_ for _ in ()).throw(ValueError("no"))
    },
    "mapping from names to tensors, got a tensor": {"metrics": lambda self, o, t: o},
    "'within' to have one number for each sample, got a tensor of shape .. for two": {
        "metrics": lambda self, o, t: {"within": o.mean()}
    },
    "of metric 'within', got several": {"metrics": lambda self, o, t: {"within": o}},
    "expected a class with a function loss": {"loss": None},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_task_that_does_not_have_its_form_is_refused_with_a_sentence(words):
    kind = type("Wrong", (Within,), WRONG[words])
    with pytest.raises(ConfigError, match=words):
        scores(as_task(kind, "Wrong"), None, torch.zeros(2, 2), torch.zeros(2, 2))


def test_classification_has_the_cross_entropy_of_torch_and_the_share_of_hits():
    logits, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 1, 0])
    found = scores(CLASSIFICATION, None, logits, y)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, y).item())
