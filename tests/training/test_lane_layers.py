"""Layers that torch alone cannot vectorise: attention of all lanes is one call, recurrent layers are written out."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fedgma.training import loop
from fedgma.training.attention_rules import OPERATORS, add_attention_rules
from fedgma.training.choose import choose
from fedgma.training.evaluation import run_forward
from fedgma.training.gradients import lane_gradients, why_not_lanes
from fedgma.training.lane_batch import Assignment
from fedgma.training.recurrent import run_layers, written_out
from lane_twins import distance, make_lane_batch, start_of
from plain_pools import make_federation

SHAPE = (6, 4)  # steps or tokens, and their width
aten = torch.ops.aten


class Attends(nn.Module):
    """Attention over tokens, with a mask, a causal one, or none; the mask may depend on the samples."""

    def __init__(self, how="free"):
        super().__init__()
        self.how, self.inside, self.out = how, nn.Linear(4, 12), nn.Linear(4, 10)

    def forward(self, x):
        q, k, v = self.inside(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)
        mask = {"mask": torch.ones(6, 6).tril() > 0, "own": (x.mean(2) > -9)[:, None, None, :]}.get(self.how)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.how == "causal")
        return self.out(found.transpose(1, 2).flatten(2).mean(1))


class Reads(nn.Module):
    """A recurrent layer over steps."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(4, 5, **options)
        self.out = nn.LazyLinear(10)
        self.out(self.layer(torch.zeros(2, *SHAPE))[0][:, -1])

    def forward(self, x):
        return self.out(self.layer(x)[0][:, -1])


class Calls(TorchDispatchMode):
    """Counts the calls of an operator."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.names.append(operator._schema.name.removeprefix("aten::"))
        return operator(*arguments, **(options or {}))


def task_of(model, sizes=(8, 3, 7)):
    federation = make_federation(list(sizes), SHAPE)
    return Assignment(model, make_lane_batch(federation, range(len(sizes))), [federation.train], *start_of(model))


@pytest.mark.parametrize("how", ["free", "causal", "mask", "own"])
def test_attention_in_lanes_equals_the_loop(how):
    torch.manual_seed(0)
    task = task_of(Attends(how))
    found = choose("lanes", task.model, task.pools)(task)
    assert distance(loop.train(task).updates, found.updates) < 1e-4


def test_attention_of_all_lanes_is_one_call_forward_and_one_backward():
    torch.manual_seed(0)
    model = Attends("causal")
    stacked = {name: torch.stack([value.detach()] * 3) for name, value in model.named_parameters()}
    x, y, count = torch.randn(3, 2, *SHAPE), torch.zeros(3, 2, dtype=torch.int64), torch.full((3,), 2)
    with Calls() as calls:
        lane_gradients(model)(stacked, {}, x, y, count)  # warnings are errors: torch gives no hint of a slow path
    used = [name for name in calls.names if "scaled_dot_product" in name]
    assert used in (
        ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"],
        [],  # this processor has no fused kernel: products and a softmax
    )


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_the_rules_for_a_gpu_give_every_lane_its_gradients(kind):
    add_attention_rules()
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    with FakeTensorMode():  # shapes alone: the operators need a GPU
        rows = torch.empty(3, 2, 4, 8, 16, device="cuda", dtype=torch.float16)
        sums = torch.empty(3, 2, 4, 8, device="cuda")
        state = torch.empty((), dtype=torch.int64)
        rest = {
            "flash": (state, state, 8, 8, 0.0, False, state, state),
            "efficient": (state, state, 0.0, [True, True, True, False]),
            "cudnn": (state, state, None, state, state, 8, 8, 0.0, False),
        }[kind]

        def call(gradient, query, key, value, out, logsumexp):
            bias = (None,) if kind == "efficient" else ()
            return backward(gradient, query, key, value, *bias, out, logsumexp, *rest)[:3]

        found = vmap(call)(rows, rows, rows, rows, rows, sums)
    assert [value.shape for value in found] == [rows.shape] * 3


def test_rules_that_torch_has_are_left_alone():
    assert set(add_attention_rules()) <= set(OPERATORS)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{OPERATORS[0]}", "FuncTorchBatched")


LAYERS = [
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"num_layers": 2, "batch_first": True}),
    (nn.LSTM, {"bidirectional": True, "bias": False}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_a_recurrent_layer_written_out_gives_its_outputs_and_states(kind, options):
    torch.manual_seed(0)
    layer = kind(4, 5, **options).double()
    for x in (torch.randn(6, 3, 4).double(), torch.randn(6, 4).double()):
        expected, state = layer(x)
        for given in (None, state):
            expected, last = layer(x, given)
            actual, end = run_layers(layer, x, given)
            torch.testing.assert_close((actual, end), (expected, last), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_short_output_of_an_lstm_is_written_out():
    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 5, proj_size=3).double(), torch.randn(6, 2, 4).double()
    torch.testing.assert_close(run_layers(layer, x), layer(x), rtol=1e-12, atol=1e-12)


def test_dropout_between_layers_is_that_of_training():
    torch.manual_seed(0)
    layer, x = nn.GRU(4, 5, num_layers=2, dropout=0.5), torch.randn(6, 2, 4)
    assert not torch.equal(run_layers(layer, x)[0], run_layers(layer, x)[0])
    layer.eval()
    torch.testing.assert_close(run_layers(layer, x), layer(x))


@pytest.mark.parametrize(("kind", "options"), [(nn.GRU, {"batch_first": True}), (nn.LSTM, {"batch_first": True})])
def test_a_recurrent_model_trains_in_lanes_as_in_the_loop(kind, options):
    torch.manual_seed(0)
    task = task_of(Reads(kind, **options))
    assert why_not_lanes(task.model, task.pools[0]) is None
    found = choose("lanes", task.model, task.pools)(task)
    assert distance(loop.train(task).updates, found.updates) < 1e-4


def test_runs_of_a_recurrent_model_are_evaluated_together():
    torch.manual_seed(0)
    model, x = Reads(nn.GRU, num_layers=2, dropout=0.5, batch_first=True).eval(), torch.randn(3, *SHAPE)
    params = {name: torch.stack([value.detach(), value.detach() + 0.1]) for name, value in model.named_parameters()}
    expected = run_forward(model)(params, {}, x)
    twin = written_out(model)
    actual = vmap(lambda own: functional_call(twin, own, (x,)))(params)
    torch.testing.assert_close(actual, expected)


def test_only_a_model_with_recurrent_layers_is_copied():
    plain, reads = nn.Linear(2, 2), Reads(nn.GRU, batch_first=True)
    assert written_out(plain) is plain
    assert written_out(reads) is not reads
    assert "forward" not in vars(reads.layer)


def test_packed_sequences_stay_with_the_loop():
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, 4), torch.zeros(2, 4)])
    with pytest.raises(TypeError, match="packed sequences"):
        run_layers(nn.GRU(4, 5), packed)
