"""torch's hints on speed stay off a user's terminal; every other warning still reaches it."""

import warnings

import pytest
import torch
from torch import nn

from fedgma.training import loop
from fedgma.training.choose import choose
from fedgma.training.compile import compiled
from fedgma.training.gradients import lane_gradients
from fedgma.training.hints import without_hints
from fedgma.training.lane_batch import Assignment
from lane_twins import distance, make_lane_batch, start_of
from plain_pools import make_federation


class Renormed(nn.Module):
    """vmap has no rule for `torch.renorm`: it says so, and calls it once a lane."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 10)

    def forward(self, x):
        return self.linear(torch.renorm(x.flatten(1), 2, 0, 1.0))


@pytest.mark.parametrize("trainer", ["lanes", "engine"])
def test_a_module_that_vmap_has_no_rule_for_trains_without_a_word(trainer):
    federation, model = make_federation([9, 3], (1, 4, 4)), Renormed()
    task = Assignment(model, make_lane_batch(federation, range(2)), [federation.train], *start_of(model))
    x, y = torch.ones(2, 3, 1, 4, 4), torch.zeros(2, 3, dtype=torch.int64)
    stacked = {name: value.expand(2, *value.shape[1:]) for name, value in task.start.items()}
    with pytest.warns(UserWarning, match="performance drop"):
        lane_gradients(model)(stacked, {}, x, y, torch.tensor([3, 3]))
    trained = choose(trainer, model, [federation.train])(task)  # warnings are errors here
    assert distance(loop.train(task).updates, trained.updates) < 1e-5


def test_a_compiled_function_keeps_the_hint_on_tf32_to_itself(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def warn(text):
        warnings.warn(text, stacklevel=1)

    call = compiled(warn)
    call("TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider ...")
    with pytest.warns(UserWarning, match="another matter"):
        call("another matter")


def test_outside_hints_are_shown_as_before():
    with without_hints():
        pass
    with pytest.warns(UserWarning, match="performance drop"):
        warnings.warn("There is a performance drop because we have not yet implemented the batching rule", stacklevel=1)
