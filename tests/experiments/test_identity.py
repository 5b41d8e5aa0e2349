"""A run is known by everything that decides its outcome: what has changed is run again, what has not is not."""

import functools
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedgma
from fedgma.data.files import from_arrays
from fedgma.data.pools import input_shape
from fedgma.experiments import play as experiments
from fedgma.experiments.grid import expand
from fedgma.experiments.identity import model_identity
from fedgma.experiments.materials import Materials
from fedgma.records.reader import read_head
from fedgma.training.models import MODELS, build

TINY = {
    "partition": {"name": "iid", "clients": 4},
    "rounds": 1,
    "seed": 0,
    "aggregator": "gma",
    "client_test_size": 0,
    "mask_every": 0,
}
NATURAL = {**TINY, "partition": "natural", "clients_per_round": 2}
WIDTH = 3


def arrays(samples=48, classes=2):
    rng = np.random.default_rng(0)
    y = np.arange(samples) % classes
    return rng.normal(size=(samples, 4)).astype(np.float32) + y[:, None], y


def net(shape, classes, width=3, activation=nn.ReLU):
    return nn.Sequential(nn.Linear(shape[0], width), activation(), nn.Linear(width, classes))


def net_of_global_width(shape, classes):
    return net(shape, classes, WIDTH)


def ready(activation=nn.ReLU, frozen=False, weight=0.0):
    torch.manual_seed(0)
    made = net((4,), 2, activation=activation)
    made[0].weight.requires_grad_(not frozen)
    with torch.no_grad():
        made[2].bias[0] += weight
    return made


class Scaled(nn.Module):
    """Keeps a number that neither its repr nor its weights show."""

    def __init__(self, shape, classes, scale=1.0):
        super().__init__()
        self.linear = nn.Linear(shape[0], classes)
        self.scale = scale

    def forward(self, x):
        return self.linear(x) * self.scale


def runs_after(out, change, settings=TINY, **given):
    """How many run folders there are after the first play, after the same again, and after a change."""
    counts = []
    for more in ({}, {}, change):
        experiments.run(settings, **{"data": arrays(), "model": net, "out": out, **given, **more})
        counts.append(len(list(out.iterdir())))
    return counts


owners = np.arange(48) % 6
CHANGES = {
    "arguments of a partial": (
        {"model": functools.partial(net, activation=nn.ReLU)},
        {"model": functools.partial(net, activation=nn.Tanh)},
    ),
    "a number behind a partial that no weight shows": (
        {"model": functools.partial(Scaled, scale=1.0)},
        {"model": functools.partial(Scaled, scale=2.0)},
    ),
    "the activation of a ready module": ({"model": ready()}, {"model": ready(nn.Tanh)}),
    "the frozen layers of a ready module": ({"model": ready()}, {"model": ready(frozen=True)}),
    "a weight of a ready module": ({"model": ready()}, {"model": ready(weight=0.5)}),
    "a number that a ready module keeps": ({"model": Scaled((4,), 2)}, {"model": Scaled((4,), 2, 2.0)}),
    "data": ({}, {"data": (arrays()[0] + 1, arrays()[1])}),
    "the shape of the same data": (
        {
            "data": (arrays()[0].reshape(48, 4, 1), arrays()[1]),
            "model": lambda s, c: nn.Sequential(nn.Flatten(), net((4,), c)),
        },
        {"data": (arrays()[0].reshape(48, 2, 2), arrays()[1])},
    ),
    "the version that the user gives": ({"version": "1"}, {"version": "2"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_run_again_and_what_has_not_is_not(tmp_path, what):
    before, after = CHANGES[what]
    torch.manual_seed(1)
    assert runs_after(tmp_path, after, **before) == [1, 1, 2]


def test_other_client_ids_are_other_runs(tmp_path):
    first, second = (from_arrays(*arrays(), client=client) for client in (owners, owners[::-1] // 2))
    assert runs_after(tmp_path, {"data": second}, NATURAL, data=first) == [1, 1, 2]
    heads = [read_head(folder) for folder in tmp_path.iterdir()]
    assert len({head["identity"]["data"] for head in heads}) == 1
    assert len({head["identity"]["clients"] for head in heads}) == 2


def test_a_global_that_a_factory_reads_is_part_of_it(tmp_path, monkeypatch):
    experiments.run(TINY, data=arrays(), model=net_of_global_width, out=tmp_path)
    experiments.run(TINY, data=arrays(), model=net_of_global_width, out=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setitem(globals(), "WIDTH", 5)
    experiments.run(TINY, data=arrays(), model=net_of_global_width, out=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


MODEL = """
import torch
from torch import nn
{imported}

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.linear = nn.Linear(shape[0], classes)

    def forward(self, x):
        return {used}(self.linear(x))
"""
WAYS = {
    "from import": ("from helper import act", "act"),
    "module": ("import helper", "helper.act"),
    "of a helper of a helper": ("import near", "near.pass_on"),
}


def write(folder, text, name="helper.py"):
    (folder / name).write_text(textwrap.dedent(text))


@pytest.mark.parametrize("way", WAYS)
def test_a_helper_that_the_models_file_imports_is_part_of_it(tmp_path, way):
    imported, used = WAYS[way]
    write(tmp_path, MODEL.format(imported=imported, used=used), "m.py")
    write(tmp_path, "import helper\ndef pass_on(x):\n    return helper.act(x)\n", "near.py")
    write(tmp_path, "import torch\ndef act(x):\n    return torch.relu(x)\n")
    out, settings = tmp_path / "runs", {**TINY, "model": f"{tmp_path / 'm.py'}:Net"}
    experiments.run(settings, data=arrays(), out=out)
    write(tmp_path, "# a comment\nimport torch\n\ndef act(x):\n    return torch.relu(x)\n")
    experiments.run(settings, data=arrays(), out=out)
    assert len(list(out.iterdir())) == 1
    write(tmp_path, "import torch\ndef act(x):\n    return torch.tanh(x)\n")
    experiments.run(settings, data=arrays(), out=out)
    assert len(list(out.iterdir())) == 2
    assert not list(tmp_path.rglob("*.pyc"))
    assert "helper" not in sys.modules


def test_a_model_file_runs_its_helpers_as_they_are_now_and_leaves_those_of_others_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, "SIZE = 3\n")
    held = importlib.import_module("helper")
    monkeypatch.setattr(held, "SIZE", 99)
    write(
        tmp_path,
        "from torch import nn\nimport helper\ndef Net(shape, classes):\n    return nn.Linear(4, helper.SIZE)\n",
        "m.py",
    )
    (settings,) = expand({**TINY, "model": f"{tmp_path / 'm.py'}:Net"}).runs
    assert Materials("cpu").network(settings)((4,), 2).out_features == 3
    assert sys.modules.pop("helper") is held


def test_an_edited_function_counts_once_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = "from torch import nn\ndef Net(shape, classes):\n    return nn.Sequential(nn.Linear(4, 2), nn.{}())\n"
    write(tmp_path, text.format("ReLU"), "edited.py")
    module = importlib.import_module("edited")
    before = model_identity(module.Net, (4,), 2)
    write(tmp_path, text.format("Tanh"), "edited.py")
    assert model_identity(module.Net, (4,), 2) == before  # what runs is still the old one
    importlib.reload(module)
    assert model_identity(module.Net, (4,), 2) != before
    sys.modules.pop("edited")


def test_an_identity_outlives_the_process_and_the_training(tmp_path):
    model = functools.partial(Scaled, scale=3.0)
    before = model_identity(model, (4,), 2)
    experiments.run(TINY, data=arrays(), model=model)
    assert model_identity(functools.partial(Scaled, scale=3.0), (4,), 2) == before
    assert before.unknown == ()


def test_a_method_that_is_wrapped_by_an_installed_package_is_looked_into():
    def made(constant):
        class Net(nn.Linear):
            @torch.enable_grad()
            def forward(self, x):
                return super().forward(x) * constant

        return Net

    first, second, again = (model_identity(lambda s, c, k=k: made(k)(4, c), (4,), 2) for k in (1.0, 2.0, 1.0))
    assert first == again
    assert first != second


def test_recurrent_layers_which_refer_to_their_weights_are_looked_into():
    def model(shape, classes):
        return nn.GRU(shape[0], classes)

    assert model_identity(model, (4,), 2).unknown == ()


GENERATOR = torch.Generator()


def unseen(shape, classes):
    made = nn.Linear(shape[0], classes)
    made.weight.data.normal_(generator=GENERATOR.manual_seed(3))
    return made


def test_code_that_cannot_be_looked_into_is_said_unless_a_version_names_it(tmp_path, caplog):
    outcome = experiments.run(TINY, data=arrays(), model=unseen, out=tmp_path)
    (note,) = outcome.notes
    assert "model own:unseen could not be fingerprinted (it uses torch._C.Generator)" in note
    assert "version=" in note
    assert note in caplog.text
    assert [read_head(folder)["notes"] for folder in tmp_path.iterdir()] == [[note]]
    assert experiments.run(TINY, data=arrays(), model=unseen, version="2").notes == ()


def test_weights_that_the_seed_does_not_decide_are_said_and_make_no_new_runs(tmp_path):
    rng = np.random.default_rng(0)

    def restless(shape, classes):
        made = nn.Linear(shape[0], classes)
        made.weight.data += float(rng.normal())
        return made

    experiments.run(TINY, data=arrays(), model=restless, out=tmp_path)
    outcome = experiments.run(TINY, data=arrays(), model=restless, out=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert "first weights" in outcome.notes[0]


def test_the_identity_of_a_run_stands_in_its_record(tmp_path):
    experiments.run({**TINY, "model": "logistic"}, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    head = read_head(folder)
    assert head["format"] == 3
    assert head["identity"] == {
        "data": head["data"]["sha256"],
        "model": "logistic, 7850 parameters",
        "precision": "fp32",
    }


@pytest.mark.parametrize("shift", ["none", "colour", "rotation"])
def test_a_model_is_looked_at_on_inputs_of_the_shape_that_it_will_see(shift):
    (settings,) = expand({**TINY, "shift": {"name": shift}}).runs
    materials = Materials("cpu")
    assert materials.input_shape(settings) == input_shape(materials.federation(settings).train)


PROBE = """
import sys, functools
sys.path.insert(0, sys.argv[1])
import probed
from fedgma.experiments.identity import model_identity
print(model_identity(functools.partial(probed.Net, names={"b", "a"}), (4,), 2))
"""
PROBED = """
import enum, dataclasses, torch
from torch import nn

class Kind(enum.Enum):
    SMALL = 1

@dataclasses.dataclass
class Plan:
    widths: list
    kinds: frozenset = frozenset({"x", "yy", "zzz"})
    kind: Kind = Kind.SMALL

PLAN = Plan([3, 4])

class Net(nn.Module):
    def __init__(self, shape, classes, names=()):
        super().__init__()
        self.plan = PLAN
        self.names = names
        self.layers = nn.ModuleDict({name: nn.Linear(shape[0], classes) for name in sorted(names)})
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        if self.plan.kind in {Kind.SMALL} and "x" in {"x", "y", "z"}:
            return sum(layer(x) for layer in self.layers.values()) * self.scale
"""


def test_every_process_finds_the_same_identity(tmp_path, monkeypatch, capsys):
    (tmp_path / "probed.py").write_text(PROBED)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(PROBE, {})
    here = capsys.readouterr().out
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # that of this process is another one
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(fedgma.__file__).parents[1])}
    command = [sys.executable, "-c", PROBE, str(tmp_path)]
    there = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert here == there
    assert "unknown=()" in there


SHAPES = {"lenet": (1, 28, 28), "logistic": (1, 28, 28)}
# mean and mean size of what each built-in model answers; where one changes, so must its identity (`built_in`)
ANSWERS = {
    "cnn": [0.0145991, 0.107081],
    "lenet": [0.0119271, 0.0511856],
    "logistic": [0.0730445, 0.212202],
    "mlp": [-0.0607238, 0.141325],
    "resnet18-bn": [0.00302452, 0.0144878],
    "resnet18-gn": [-0.336514, 0.561687],
    "resnet18-gn-imagenet": [-0.119092, 0.855151],
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_built_in_model_computes_what_its_name_stands_for(name):
    shape = SHAPES.get(name, (3, 32, 32))
    model = build(name, shape, 10, seed=0).eval()
    x = torch.linspace(-1, 1, 2 * int(np.prod(shape))).reshape(2, *shape)
    with torch.no_grad():
        y = model(x)
    assert [float(y.mean()), float(y.abs().mean())] == pytest.approx(ANSWERS[name], rel=1e-3, abs=1e-4)
