import json
import re

import numpy as np
import pytest
from PIL import Image

from commands import call
from fedgma.data.federation import federate
from fedgma.data.files import load
from fedgma.data.partitions import dirichlet, iid
from fedgma.data.shifts import Colour
from fedgma.data.skew import class_counts
from fedgma.reports.plots import draw_classes, draw_images, draw_sizes, examples
from fedgma.reports.plots.style import svg


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    """Commands run in a folder of their own, with a cache of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path))


def test_show_writes_three_pictures_and_the_figures(tmp_path):
    code, printed, said = call("data", "show", "fmnist-mini", "--clients", "20", "--out", "out")
    assert code == 0, said
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "classes.png",
        "images.png",
        "sizes.png",
        "skew.json",
    ]
    report = json.loads((tmp_path / "out" / "skew.json").read_text())
    assert report["skew"]["classes_max"] == 2
    assert report["source"]["name"] == "fmnist_mini.npz"
    assert "effective clients      20.0" in printed


def test_show_writes_svg_too(tmp_path):
    request = ["fmnist-mini", "--partition", "dirichlet", "--alpha", "0.1", "--clients", "5"]
    assert call("data", "show", *request, "--format", "svg", "--out", "o")[0] == 0
    assert "<svg" in (tmp_path / "o" / "classes.svg").read_text()


def test_list_says_where_a_set_is():
    code, printed, said = call("data", "list")
    assert code == 0, said
    rows = {line.split()[0]: line for line in printed.splitlines()[1:]}
    assert "in the package" in rows["fmnist-mini"]
    assert "fedgma data get cifar100" in rows["cifar100"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ("data show fmnist-minni", 2, "unknown data set 'fmnist-minni'"),
        ("data show cifar100", 3, "cifar100 was not found"),
        ("data show fmnist-mini --clients 7", 2, "14 shards, which 10 classes cannot share"),
        ("data show fmnist-mini --partition iid --alpha 3", 2, "partition 'iid'"),
        ("data show fmnist-mini --format gif", 2, "unknown picture format"),
        ("data show fmnist-mini --clients 10 --out /dev/null/x", 2, "cannot write to '/dev/null/x'"),
        ("data get fmnist-mini", 2, "cannot be downloaded"),
        ("data show fmnist-mini --folder nowhere --partition natural", 3, "the natural partition needs an owner id"),
    ],
)
def test_an_invalid_request_gives_one_sentence_and_an_exit_code(arguments, code, sentence):
    found, _, said = call(*arguments.split())
    assert found == code
    assert said.startswith("fedgma: ")
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize("clients", [1, 10, 500, 3000])
def test_pictures_stay_small_for_any_number_of_clients(tmp_path, clients):
    labels = np.arange(60_000) % 10
    partition = dirichlet(labels, clients, alpha=0.3)
    draw_classes(class_counts(partition, labels, 10), tuple("0123456789")).savefig(tmp_path / "a.png", dpi=100)
    draw_sizes(partition.sizes).savefig(tmp_path / "b.png", dpi=100)
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width <= 1500
            assert len(np.unique(np.asarray(picture.convert("L")))) > 10  # something is drawn


@pytest.mark.parametrize("clients", [10, 500])
def test_words_of_a_partition_take_the_text_colour_of_the_page(clients):
    labels = np.arange(1000) % 10
    figure = draw_classes(class_counts(iid(labels, clients), labels, 10), tuple("0123456789"), "a title")
    assert [word for word in re.findall(r"<text[^>]*>", svg(figure, "a")) if "currentColor" not in word] == []


def test_two_hundred_classes_still_make_a_picture(tmp_path):
    labels = np.arange(4000) % 200
    figure = draw_classes(class_counts(iid(labels, 10), labels, 200), tuple(f"class {c}" for c in range(200)))
    assert len(figure.axes[0].get_yticklabels()) == 25


def test_the_contact_sheet_has_a_row_for_each_client_and_environment():
    mini = load("fmnist-mini")
    fed = federate(mini, iid(mini.train.y, 5), shift=Colour())
    figure = draw_images(fed, [0, 4])
    assert [axes.get_ylabel() for axes in figure.axes] == ["client 0", "client 4", "test", "test: seen"]


def test_examples_take_the_classes_in_turn():
    labels = np.array([0, 0, 0, 0, 1, 1, 2])
    assert labels[examples(labels, np.arange(7), 5, seed=0)].tolist() == [0, 0, 1, 1, 2]


def test_a_users_data_are_shown_as_a_run_would_divide_them(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(150, 4)), np.arange(150) % 3
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    np.savez(tmp_path / "owned.npz", x=x, y=y, client=np.arange(150) % 4)
    for file, clients, words in (("plain", 12, ()), ("owned", 4, ()), ("owned", 5, ("--partition=iid", "--clients=5"))):
        code, printed, said = call(
            "data", "show", tmp_path / f"{file}.npz", "--json", "--out", tmp_path / "out", *words
        )
        assert (code, said) == (0, "")
        assert json.loads(printed)["skew"]["clients"] == clients
    code, _, said = call("data", "show", tmp_path / "plain.npz", "--partition", "idd", "--out", tmp_path / "out")
    assert code == 2
    assert "did you mean 'iid'?" in said


def test_examples_of_data_without_classes_are_drawn_at_random():
    numbers = np.arange(8.0)[:, None]
    assert sorted(examples(numbers, np.arange(8), 8, seed=0).tolist()) == list(range(8))
