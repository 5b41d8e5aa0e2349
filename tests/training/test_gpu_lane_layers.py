"""On a GPU: attention and recurrent layers of lanes, compiled and captured, against the loop."""

import pytest
import torch
from torch import nn

from fedgma.training import loop
from fedgma.training.choose import choose
from fedgma.training.cuda_graphs import float32_precision
from fedgma.training.evaluation import run_forward
from fedgma.training.lane_batch import Assignment
from gpu_steps import ALL_BUT_HINTS, assert_compiled_and_captured
from lane_twins import distance, make_lane_batch, start_of
from plain_pools import make_federation

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(*ALL_BUT_HINTS)]


class Model(nn.Module):
    """One layer of torch's over steps, and a head."""

    def __init__(self, kind):
        super().__init__()
        layers = {
            "encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
            "gru": lambda: nn.GRU(16, 16, batch_first=True),
            "lstm": lambda: nn.LSTM(16, 16, num_layers=2, batch_first=True),
        }
        self.layer, self.out = layers[kind](), nn.Linear(16, 10)

    def forward(self, x):
        found = self.layer(x)
        return self.out((found[0] if isinstance(found, tuple) else found).mean(1))


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-3), ("bf16", 0.2)])
@pytest.mark.parametrize("kind", ["encoder", "gru", "lstm"])
def test_lanes_of_these_layers_equal_the_loop(kind, precision, bound, caplog):
    torch.manual_seed(0)
    federation, model = make_federation([8, 8, 8], (6, 16)), Model(kind).cuda()
    pools = [federation.train.to("cuda")]
    task = Assignment(model, make_lane_batch(federation, range(3)), pools, *start_of(model))
    with float32_precision("fp32"):
        expected = loop.train(task)
    actual = choose("engine", model, pools, precision=precision)(task)
    assert distance(expected.updates, actual.updates) < bound
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize("kind", ["encoder", "gru", "lstm"])
def test_runs_of_these_models_are_evaluated_together(kind):
    torch.manual_seed(0)
    model, x = Model(kind).cuda().eval(), torch.randn(5, 6, 16, device="cuda")
    params = {name: torch.stack([value.detach(), value.detach() + 0.1]) for name, value in model.named_parameters()}
    forward = run_forward(model)
    with torch.no_grad(), float32_precision("fp32"):
        alone = [forward({name: value[[run]] for name, value in params.items()}, {}, x)[0] for run in range(2)]
        torch.testing.assert_close(forward(params, {}, x), torch.stack(alone), rtol=1e-4, atol=1e-4)
