"""What `fedgma.run` returns: tables, curves, models, a plot, a short text; and the bar in a notebook."""

import operator
import shutil
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import fedgma
from fedgma.data.files import from_arrays
from fedgma.errors import ConfigError, DataError
from fedgma.experiments.outcome import read_outcome
from fedgma.records.trained import read_model
from fedgma.training.models import MODELS

SETTINGS = {
    "partition": {"clients": 4},
    "rounds": 3,
    "seed": [0, 1],
    "client_test_size": 0,
    "evaluate_every": 2,
    "batch_size": 7,
}


class Net(nn.Module):
    """With a buffer that is averaged, a counter, a part that is frozen, tied weights and what no state_dict holds."""

    def __init__(self, shape, classes):
        super().__init__()
        self.norm = nn.BatchNorm1d(shape[0])
        self.frozen = nn.Linear(shape[0], 6).requires_grad_(False)
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, classes)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.last(self.scale * self.second(self.first(torch.relu(self.frozen(self.norm(x))))))


def arrays():
    x = np.random.default_rng(0).normal(size=(120, 5)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(int)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The same runs with folders and without, and those folders."""
    out = tmp_path_factory.mktemp("runs")
    with_folders = fedgma.run(SETTINGS, data=arrays(), model=Net, out=str(out))
    return with_folders, fedgma.run(SETTINGS, data=arrays(), model=Net), out


def test_a_table_has_a_row_for_each_run_and_curves_one_for_each_round(kept, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # not installed
    outcome, _, _ = kept
    rows = outcome.table()
    assert [(row["arm"], row["aggregator"], row["seed"]) for row in rows] == [
        ("mean", "mean", 0),
        ("mean", "mean", 1),
        ("GMA", "gma", 0),
        ("GMA", "gma", 1),
    ]
    scores = outcome.arms[0].scores["last10"]
    assert (rows[0]["last10"] + rows[1]["last10"]) / 2 == pytest.approx(scores.mean)
    lines = outcome.curves()
    assert len(lines) == 4 * 3
    assert lines[1]["test/accuracy"] == outcome.runs[0].rounds[1]["test"]["accuracy"]


def test_the_outcome_of_run_folders_is_that_of_the_runs_that_wrote_them(kept, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # not installed
    outcome, _, out = kept
    earlier = read_outcome(out)
    by_name = operator.itemgetter("run")
    assert sorted(earlier.table(), key=by_name) == sorted(outcome.table(), key=by_name)
    assert (earlier.verdicts, len(earlier.curves())) == (outcome.verdicts, len(outcome.curves()))
    assert {run.seed for run in read_outcome([out], where="seed=1").runs} == {1}
    state = earlier.state_dict("gma", seed=1)
    assert all(torch.equal(value, outcome.state_dict("gma", seed=1)[name]) for name, value in state.items())


def test_a_table_is_a_data_frame_where_pandas_is_installed(kept, monkeypatch):
    frames = types.ModuleType("pandas")
    frames.DataFrame = lambda rows: ("frame", len(rows))
    monkeypatch.setitem(sys.modules, "pandas", frames)
    assert kept[0].table() == ("frame", 4)
    assert kept[0].curves() == ("frame", 12)


def test_the_trained_model_loads_into_plain_torch_with_a_folder_and_without(kept):
    outcome, without, out = kept
    for arm in ("gma", "mean"):
        (run,) = [run for run in outcome.runs if run.settings["aggregator"] == arm and run.seed == 1]
        state = outcome.state_dict(arm, seed=1)
        net = Net((5,), 2)
        net.load_state_dict(state)  # strict: every name, and no other
        assert int(net.norm.num_batches_tracked) > 0
        for name, value in without.state_dict(arm, seed=1).items():
            assert torch.equal(value, state[name])
        for module in (outcome.model(arm, seed=1), without.model(arm, seed=1)):
            assert (type(module), module.training) == (Net, False)
            assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
        final = read_model(out / run.folder.name)
        assert final.round == 3
        test = from_arrays(*arrays()).test
        right = net.eval()(torch.from_numpy(test.x)).argmax(1) == torch.from_numpy(test.y)
        assert float(right.float().mean()) == pytest.approx(run.rounds[-1]["test"]["accuracy"])
    assert not torch.equal(outcome.state_dict("GMA", seed=0)["last.bias"], outcome.state_dict("mean")["last.bias"])


@pytest.mark.parametrize("out", [None, "runs"])
@pytest.mark.parametrize(("model", "beta"), [("logistic", 0.0), (nn.Linear(5, 2), 0.9)])
def test_a_trained_module_predicts_what_its_run_recorded(model, beta, out, tmp_path):
    settings = {**SETTINGS, "seed": 0, "aggregator": "gma", "server_average": beta}
    outcome = fedgma.run(settings, data=arrays(), model=model, out=out and tmp_path / out)
    x, y = map(torch.from_numpy, from_arrays(*arrays()).test[:2])
    loss = nn.functional.cross_entropy(outcome.model()(x), y)
    assert loss.item() == pytest.approx(outcome.runs[0].rounds[-1]["test"]["loss"], rel=1e-5)
    earlier = outcome._replace(networks={})
    if model != "logistic" or out is None:  # a folder says what a built-in model is built from
        with pytest.raises(ConfigError, match=r"is not at hand: .*build it as for the run, .*net\.load_state_dict\("):
            earlier.model()
    else:
        assert torch.equal(read_outcome(tmp_path / out).model()(x), outcome.model()(x))


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_built_in_model_is_built_again_from_its_run_folder(model, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(256, size=(24, 1, 14, 12), dtype=np.uint8), np.arange(24) % 3
    settings = {"model": model, "rounds": 1, "aggregator": "mean", "seed": 0, "partition": {"clients": 2}}
    outcome = fedgma.run({**settings, "local_steps": 1}, data=(x, y), out=tmp_path / "runs")
    earlier, given = read_outcome(tmp_path / "runs"), torch.randn(2, 1, 14, 12)
    module = earlier.model()
    assert not module.training
    assert torch.equal(module(given), outcome.model()(given))


def test_a_built_in_model_of_numbers_is_built_again_from_its_run_folder(tmp_path):
    x = torch.randn(60, 5)
    settings = {"task": "regression", "model": "mlp", "rounds": 1, "aggregator": "mean", "seed": 0}
    outcome = fedgma.run(settings, data=(x.numpy(), x[:, :2].numpy()), out=tmp_path / "runs")
    predicted = read_outcome(tmp_path / "runs").model()(x)
    assert predicted.shape == (60, 2)
    assert torch.equal(predicted, outcome.model()(x))


def test_an_arm_or_seed_that_is_not_there_is_named(kept):
    with pytest.raises(ConfigError, match="name one of: 'mean', 'GMA'"):
        kept[0].state_dict()
    with pytest.raises(ConfigError, match="no run of 'GMA' has seed 7; its seeds are 0, 1"):
        kept[0].state_dict("gma", seed=7)


def test_a_run_that_kept_no_model_says_what_to_do(kept, tmp_path):
    folder = tmp_path / kept[0].runs[0].folder.name
    shutil.copytree(kept[0].runs[0].folder, folder)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(DataError, match=r"kept no model; `fedgma rm .* without --no-state"):
        read_model(folder)


def test_an_outcome_is_shown_in_a_few_lines(kept):
    outcome, _, _ = kept
    shown = repr(outcome)
    assert len(shown) < 1000
    assert shown.splitlines()[0] == "4 runs: 2 arms, 2 seeds; test accuracy in percent"
    assert "last 3 rounds" in shown
    assert outcome.verdicts[0] in shown
    assert "<td>GMA</td>" in outcome._repr_html_()


def test_a_plot_is_a_figure_with_the_paired_difference(kept):
    accuracy, difference = kept[0].plot().axes
    assert [line.get_label() for line in accuracy.lines] == ["mean", "GMA"]
    assert "ahead" in difference.get_ylabel()


class Kernel:
    """IPython inside a notebook, as far as it is asked."""

    def __init__(self):
        self.written, self.figures = [], {}
        self.kernel = object()
        self.display_formatter = types.SimpleNamespace(formatters={"image/png": self})

    def __contains__(self, kind):
        return kind in self.figures

    def for_type(self, kind, writer):
        self.figures[kind] = writer

    def display(self, bundle, *, raw, display_id):
        assert raw
        assert display_id
        self.written.append(bundle)
        return self

    def update(self, bundle, *, raw):
        assert raw
        self.written.append(bundle)


@pytest.fixture
def kernel(monkeypatch):
    shell = Kernel()
    module, shown = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    module.get_ipython, shown.display = (lambda: shell), shell.display
    module.version_info = (9, 0)  # matplotlib asks
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return shell


def test_a_notebook_shows_progress_and_draws_figures(kernel):
    chosen = {**SETTINGS, "model": "logistic", "seed": 0}
    outcome = fedgma.run(chosen, data=arrays())
    assert kernel.written[0]["text/plain"] == "training: 0 of 6 rounds"
    assert kernel.written[-1]["text/plain"].startswith("training: 6 of 6 rounds, mean ")
    assert '<progress value="6" max="6">' in kernel.written[-1]["text/html"]
    figure = outcome.plot()
    assert kernel.figures[type(figure)](figure).startswith(b"\x89PNG")
    kernel.written.clear()
    fedgma.run(chosen, data=arrays(), progress=False)
    assert kernel.written == []
