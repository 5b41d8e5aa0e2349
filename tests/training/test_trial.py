"""Users' models: the trial batch says what does not fit, and what can be made to fit is."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedgma.errors import ConfigError
from fedgma.training import lanes, loop
from fedgma.training.batches import batch_order
from fedgma.training.cuda_graphs import Engine
from fedgma.training.gradients import lane_gradients, named_tensors
from fedgma.training.lane_batch import Assignment
from fedgma.training.models import build, parameter_count
from fedgma.training.trial import trains_on_one, try_model
from lane_twins import distance, make_lane_batch, start_of
from plain_pools import DoublePool, make_federation, make_pool

POOL = make_pool(6, (4,), classes=3)


class Made(nn.Module):
    """A module from a function of its layer's output."""

    def __init__(self, forward, inputs=4, outputs=3):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self._forward = forward

    def forward(self, x):
        return self._forward(self.layer(x))


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.requires_grad_(False)


class TwoInputs(nn.Bilinear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, inputs, outputs)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            Made(lambda z: z, inputs=5),
            r"could not be applied to a batch of shape \[2, 4\] \(RuntimeError: mat1 and mat2",
        ),
        (Made(lambda z: z, inputs=5), r"its first layer must take samples of shape \[4\]"),
        (Made(lambda z: z, outputs=2), r"\[2, 3\] for 2 samples, got \[2, 2\]; end it with a layer of 3 outputs"),
        (Made(lambda z: z[:, 0]), r"got \[2\]; end it with"),
        (Made(lambda z: (z, z)), "got a tuple of 2; return the logits alone"),
        (Made(lambda z: {"logits": z}), "got a dict; return the logits alone"),
        (Made(lambda z: (z > 0).long()), r"got torch\.int64; return scores before argmax"),
        (Made(lambda z: z / 0), "must be finite, got a NaN or an infinity; check its initial weights"),
        (Made(lambda z: z.detach()), "could not be differentiated .* without .detach"),
        (nn.Identity(), "has no trainable parameters, so there is nothing to train"),
        (Frozen(), "has no trainable parameters"),
        (TwoInputs(4, 3), r"forward is called with one tensor, the batch; join several inputs in the samples"),
        (nn.Linear(4, 3, dtype=torch.complex64), "must be float32, got complex64; use real numbers"),
        (nn.Linear(4, 3).half(), "must be float32, got float16; call .float"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double()), "must be float32, got float32 and float64"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_a_sentence(model, said):
    with pytest.raises(ConfigError, match=said):
        try_model(model, POOL, "mine.py:Net")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Made(lambda z: z.softmax(1)), "model net seems to put out probabilities, .* remove the softmax"),
        (Made(lambda z: z, outputs=5), "model net has 5 outputs for 3 classes"),
        (Made(lambda z: z), None),
        (Made(lambda z: z.log_softmax(1)), None),
    ],
    ids=["softmax", "more outputs", "logits", "log of softmax"],
)
def test_what_is_doubtful_about_a_models_outputs_is_remarked(model, said):
    remark = try_model(model, POOL, "net")
    assert remark is None if said is None else re.fullmatch(rf"{said}.*", remark)


def test_a_trial_changes_neither_the_model_nor_torchs_generator():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    try_model(model, POOL, "net")
    assert not trains_on_one(model, POOL)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


@pytest.mark.parametrize(
    ("model", "fits"),
    [(nn.Linear(4, 3), True), (nn.BatchNorm1d(4), False), (Made(lambda z: z / z.std(0)), False)],
    ids=["linear", "batch norm", "own deviation"],
)
def test_a_model_that_needs_two_samples_is_known(model, fits):
    assert trains_on_one(model, POOL) is fits


def test_a_constructor_may_take_no_arguments():
    class Net(nn.Linear):
        def __init__(self, width=4):
            super().__init__(width, 3)

    assert build(Net, (4,), 3, seed=0).weight.shape == (3, 4)
    assert build(lambda *given: nn.Linear(*given[0], given[1]), (4,), 3, seed=0).weight.shape == (3, 4)
    with pytest.raises(ConfigError, match=r"needs_more\(shape, classes\) .* it takes \(a, b, c\)"):
        build(needs_more, (4,), 3, seed=0)


def needs_more(a, b, c):
    return nn.Linear(4, 3)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("ready", [False, True])
def test_lazy_layers_get_their_size_from_the_data_and_their_weights_from_the_seed(ready):
    def make(shape=None, classes=None):
        norm = nn.Identity() if ready else nn.LazyBatchNorm1d()
        return nn.Sequential(nn.LazyLinear(5), norm, nn.ReLU(), nn.LazyLinear(3))

    model = make() if ready else make
    first, again, other = (build(model, (4,), 3, seed=s) for s in (0, 0, 1))
    assert first[0].weight.shape == (5, 4)
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)
    assert ready or not first[1].running_mean.any()  # the samples that gave the sizes leave no statistics
    assert first.training
    try_model(first, POOL, "net")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_module_that_torch_cannot_copy_is_refused_with_the_fix():
    with pytest.raises(ConfigError, match=r"could not be copied .*; pass a function that makes it"):
        build(nn.Sequential(nn.LazyBatchNorm1d()), (4,), 3, seed=0)


class Tied(nn.Module):
    """An autoencoder-like network whose two inner layers and two buffers are one tensor each."""

    def __init__(self):
        super().__init__()
        self.embed, self.back, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.back.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("again", self.scale)

    def forward(self, x):
        return self.out(torch.tanh(self.back(torch.tanh(self.embed(x)))) * self.again)


def test_a_tied_weight_is_held_once():
    params, rest = named_tensors(Tied())
    assert list(params) == ["embed.weight", "embed.bias", "out.weight", "out.bias"]
    assert list(rest) == ["scale"]
    assert parameter_count(Tied()) == sum(value.numel() for value in params.values())


def test_tied_weights_train_alike_in_loop_lanes_and_engine_and_as_plain_torch_does():
    torch.manual_seed(0)
    model, federation = Tied().double(), make_federation([5, 3], (4,), classes=3)
    pool, (start, buffers) = DoublePool(*vars(federation.train).values()), start_of(model)
    task = Assignment(model, make_lane_batch(federation, range(2)), [pool], start, buffers)
    first, second = loop.train(task), lanes.train(task)
    three = Engine(lane_gradients(model), compile=False)(task)
    assert distance(first.updates, second.updates) < 1e-9
    assert distance(first.updates, three.updates) < 1e-9
    for client in range(2):
        plain = plainly_trained(model, pool, federation.clients[client], client)
        found = {name: start[name][0] + value[client] for name, value in first.updates.items()}
        assert distance(named_tensors(plain)[0], found) < 1e-9


def plainly_trained(model, pool, samples, client):
    """A client's epoch, written out."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(np.float32(0.05)), momentum=float(np.float32(0.9)))
    index, counts = batch_order(samples, seed=0, round=1, client=client, epochs=1, batch=4)
    for batch, count in zip(index, counts, strict=True):
        x, y = pool.batch(torch.from_numpy(batch[:count]), torch.tensor(client))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("size", "kept"), [(9, [4, 4]), (10, [4, 4, 2]), (8, [4, 4]), (1, [])])
def test_a_last_batch_below_the_least_size_is_left_out_of_every_epoch(size, kept):
    index, counts = batch_order(np.arange(size), seed=0, round=1, client=0, epochs=2, batch=4, least=2)
    assert counts.tolist() == kept * 2
    plain, _ = batch_order(np.arange(size), seed=0, round=1, client=0, epochs=2, batch=4)
    for epoch in range(2):
        mine, all_of_them = index.reshape(2, -1, 4)[epoch], plain.reshape(2, -1, 4)[epoch]
        assert np.array_equal(mine, all_of_them[: len(kept)])
