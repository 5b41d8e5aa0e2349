import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedgma.training.choose import form_scorer, written_form
from fedgma.training.evaluation import client_means, evaluate, run_forward, sample_scores, scorer
from fedgma.training.models import build
from fedgma.training.tasks import CLASSIFICATION, IMBALANCED
from lane_twins import start_of
from plain_pools import make_pool


class Seen:
    """A pool that shows each sample in the environment of its client."""

    def __init__(self, pool, client_of):
        self.x, self.y, self.classes, self.client_of = pool.x, pool.y, pool.classes, client_of

    def batch(self, index, client):
        return self.x[index] + client[:, None], self.y[index]


def two_runs(name, shape):
    models = [build(name, shape, 10, seed=s).eval() for s in (0, 1)]
    starts = [start_of(model) for model in models]
    params, buffers = ({n: torch.cat([s[part][n] for s in starts]) for n in starts[0][part]} for part in (0, 1))
    return models, params, buffers


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("cnn", (3, 12, 12)), ("resnet18-bn", (3, 8, 8))])
def test_runs_are_scored_as_each_model_alone(name, shape):
    models, params, buffers = two_runs(name, shape)
    pool = make_pool(11, shape)
    found = evaluate(scorer(run_forward(models[0])), params, buffers, pool, batch=4)
    x, y = pool.batch(torch.arange(11), torch.zeros(11, dtype=torch.int64))
    for run, model in enumerate(models):
        logits = model(x).detach()
        assert found.loss[run].item() == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-4)
        assert found.accuracy[run].item() == pytest.approx((logits.argmax(1) == y).float().mean().item())


WRITTEN = [
    ("lenet", (1, 28, 28)),
    ("cnn", (3, 12, 12)),
    ("logistic", (5,)),
    ("resnet18-gn", (3, 16, 16)),
    ("resnet18-bn", (3, 16, 16)),
    ("resnet18-gn-imagenet", (3, 32, 32)),
]


@pytest.mark.parametrize(("name", "shape"), WRITTEN)
def test_the_written_forward_pass_gives_the_same_scores(name, shape):
    models, params, buffers = two_runs(name, shape)
    draw = torch.Generator().manual_seed(3)
    buffers = {n: v + 0.2 * torch.rand(v.shape, generator=draw) if "running" in n else v for n, v in buffers.items()}
    pool = make_pool(6, shape)
    for task, columns in ((CLASSIFICATION, 1), (IMBALANCED, 1 + pool.classes)):
        both = scorer(run_forward(models[0]), task), form_scorer(written_form(models[0]), task)
        found, written = (sample_scores(score, params, buffers, pool) for score in both)
        assert found[1].shape[2] == columns  # with the logits, where whole splits are scored
        for first, second in zip(found, written, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("samples", "batch", "shapes"), [(11, 4, {4}), (12, 5, {4}), (3, 5, {3}), (13, 12, {7})])
def test_batches_are_all_of_one_size_and_no_sample_counts_twice(samples, batch, shapes):
    seen = set()

    def score(params, buffers, pool, index):
        seen.add(len(index))
        return index[None].float(), index[None] % 2 == 0

    losses, hits = sample_scores(score, {}, {}, make_pool(samples, (3,)), batch=batch)
    assert seen == shapes
    assert losses[0].tolist() == list(range(samples))
    assert hits[0].tolist() == [sample % 2 == 0 for sample in range(samples)]


def test_samples_are_seen_in_the_environment_of_their_client():
    pool = make_pool(4, (3,), classes=2)
    model = nn.Linear(3, 2)
    params, _ = start_of(model)
    shown = Seen(pool, torch.tensor([0, 5, 0, 5]))
    loss, _ = sample_scores(scorer(run_forward(model)), params, {}, shown)
    wanted = F.cross_entropy(model(pool.x + shown.client_of[:, None]), pool.y, reduction="none")
    torch.testing.assert_close(loss[0], wanted.detach())


def test_a_client_is_scored_on_its_own_samples():
    hits, table = torch.tensor([[True], [False], [True], [True]]), torch.tensor([[0, 1, -1], [2, 3, 0]])
    assert client_means(torch.arange(4.0), hits, table)[1].flatten().tolist() == [0.5, 1.0]
    assert client_means(torch.arange(4.0), hits, table)[0].tolist() == pytest.approx([0.5, 5 / 3])
