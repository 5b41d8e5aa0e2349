"""A user's code named `file.py:name`: torch's compiler imports the module of a model by its name."""

import importlib
import sys

import pytest

from fedgma.experiments.own.files import load_code


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    """The modules of these tests are taken away again."""
    monkeypatch.setitem(sys.modules, "fedgma_own_some_net", None)


def load(folder, answer):
    folder.mkdir(exist_ok=True)
    (folder / "some_net.py").write_text(f"def net(shape, classes):\n    return {answer}\n")
    return load_code(folder / "some_net.py", "net", setting="model", arguments="shape, classes")


def test_the_module_of_a_file_can_be_imported_in_its_newest_version(tmp_path):
    for answer in (1, 2):
        net = load(tmp_path, answer)
        assert net((), 2) == answer
        assert importlib.import_module(net.__module__).net is net


def test_a_file_of_the_same_name_elsewhere_does_not_take_its_place(tmp_path):
    first, second = load(tmp_path / "one", 1), load(tmp_path / "other", 2)
    assert (first((), 2), second((), 2)) == (1, 2)
    assert importlib.import_module(first.__module__).net is first
