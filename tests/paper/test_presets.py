"""The rows of Tables 2 and 3 whose data are hard to come by: they run on small files in the right format."""

import io

import numpy as np
import pytest
from PIL import Image

from fedgma.data.files.cifar import find_cifar100
from fedgma.data.files.registry import SPECS, FileFormat
from fedgma.data.files.tinyimagenet import find_tinyimagenet
from fedgma.experiments.grid import Grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import plan
from fedgma.experiments.play import play_fleet
from fedgma.paper.catalogue import experiment
from fedgma.paper.fleets import pack_alike, playable
from fedgma.paper.plans import Cut, plan_runs
from fedgma.paper.rates import Chosen


def cifar100(folder):
    """One training and one test picture a class, in CIFAR-100's binary format."""
    (folder / "cifar-100-binary").mkdir(parents=True)
    rows = [bytes([label // 5, label]) + np.full(3072, label, np.uint8).tobytes() for label in range(100)]
    for part in ("train", "test"):
        (folder / "cifar-100-binary" / f"{part}.bin").write_bytes(b"".join(rows))
    (folder / "cifar-100-binary" / "fine_label_names.txt").write_text("".join(f"c{label}\n" for label in range(100)))


def tinyimagenet(folder):
    """One training and one validation picture a class, in TinyImageNet's folders."""
    root, ids = folder / "tiny-imagenet-200", [f"n{label:08d}" for label in range(200)]
    (root / "val" / "images").mkdir(parents=True)
    for label, wnid in enumerate(ids):
        out = io.BytesIO()
        Image.new("RGB", (64, 64), (label, 255 - label, 7)).save(out, "JPEG")
        (root / "train" / wnid / "images").mkdir(parents=True)
        (root / "train" / wnid / "images" / f"{wnid}_0.JPEG").write_bytes(out.getvalue())
        (root / "val" / "images" / f"val_{label}.JPEG").write_bytes(out.getvalue())
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in ids))
    (root / "words.txt").write_text("".join(f"{wnid}\tthing\n" for wnid in ids))
    lines = [f"val_{label}.JPEG\t{wnid}\t0\t0\t1\t1\n" for label, wnid in enumerate(ids)]
    (root / "val" / "val_annotations.txt").write_text("".join(lines))


@pytest.mark.parametrize(
    ("name", "write", "find", "classes", "each"),
    [("cifar100", cifar100, find_cifar100, 100, 10), ("tinyimagenet", tinyimagenet, find_tinyimagenet, 200, 20)],
)
def test_a_preset_runs_as_soon_as_its_data_are_there(tmp_path, monkeypatch, name, write, find, classes, each):
    write(tmp_path / "data")
    monkeypatch.setenv("FEDGMA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SPECS, name, SPECS[name]._replace(formats=(FileFormat(find, (1,) * classes, (1,) * classes),)))
    cut = Cut(rounds=1, seeds=1, cells=f"dataset={name},partition.name=label_skew,clients=10,algorithm=fedyogi")
    runs = plan_runs(experiment("E1"), Chosen(), cut).grid.runs
    assert [(run.model, run.batch_size, run.partition.classes_per_client) for run in runs] == [
        ("resnet18-gn", 64, each)
    ] * 2
    materials = Materials("cpu")
    assert [len(client) for client in materials.federation(runs[0]).clients] == [each] * 10
    # the network itself takes minutes here; a small one in its place shows that everything around it works
    small = tuple(run.model_copy(update={"model": "logistic"}) for run in runs)
    (fleet,) = pack_alike(plan(Grid(small, ()), materials, tmp_path / "runs"), materials)
    lines = [played.line for played in play_fleet(fleet, materials)]
    assert [line["counted"] for line in lines] == [10, 10]
    assert all("accuracy" in line["test"] for line in lines)


def test_cells_that_the_data_are_too_few_for_are_left_out_and_named(tmp_path, monkeypatch):
    cifar100(tmp_path / "data")
    monkeypatch.setenv("FEDGMA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path / "cache"))
    formats = (FileFormat(find_cifar100, (1,) * 100, (1,) * 100),)
    monkeypatch.setitem(SPECS, "cifar100", SPECS["cifar100"]._replace(formats=formats))
    cut = Cut(seeds=1, cells="dataset=cifar100,algorithm=fedavg,partition.name=label_skew,clients=10|500")
    materials = Materials("cpu")
    runs = plan(plan_runs(experiment("E1"), Chosen(), cut).grid, materials, None)
    kept, (reason,) = playable(runs, materials)
    assert {run.settings.partition.clients for run in kept} == {10}
    assert reason.startswith("2 runs of cifar100 are left out: ")
