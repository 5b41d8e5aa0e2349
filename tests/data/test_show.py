import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedgma as fedgma_package
from fedgma.data.federation import federate
from fedgma.data.files import load
from fedgma.data.partitions import dirichlet, iid
from fedgma.data.shifts import Colour
from fedgma.data.skew import class_counts
from fedgma.reports.plots import draw_classes, draw_images, draw_sizes, examples


def fedgma(*arguments, cwd, **environment):
    command = [sys.executable, "-c", "from fedgma.cli import main; main()", *arguments]
    package = Path(fedgma_package.__file__).parents[1]
    env = {**os.environ, **environment, "COLUMNS": "200", "PYTHONPATH": str(package)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_show_writes_three_pictures_and_the_figures(tmp_path):
    done = fedgma("data", "show", "fmnist-mini", "--clients", "20", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "classes.png",
        "images.png",
        "sizes.png",
        "skew.json",
    ]
    report = json.loads((tmp_path / "out" / "skew.json").read_text())
    assert report["skew"]["classes_max"] == 2
    assert report["source"]["name"] == "fmnist_mini.npz"
    assert "effective clients      20.0" in done.stdout


def test_show_writes_svg_too(tmp_path):
    request = ["fmnist-mini", "--partition", "dirichlet", "--alpha", "0.1", "--clients", "5"]
    assert fedgma("data", "show", *request, "--format", "svg", "--out", "o", cwd=tmp_path).returncode == 0
    assert "<svg" in (tmp_path / "o" / "classes.svg").read_text()


def test_list_says_where_a_set_is(tmp_path):
    done = fedgma("data", "list", cwd=tmp_path, FEDGMA_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
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
def test_an_invalid_request_gives_one_sentence_and_an_exit_code(tmp_path, arguments, code, sentence):
    done = fedgma(*arguments.split(), cwd=tmp_path, FEDGMA_CACHE=str(tmp_path))
    assert done.returncode == code
    assert done.stderr.startswith("fedgma: ")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


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
