"""The parsers that read what somebody else wrote, each as a function of bytes, with small valid inputs to begin from.

A parser may return or raise a `FedgmaError`; anything else is a fault. Where a format has checksums, the target puts
the right ones in, so that mutations reach the code behind them.
"""

import gzip
import hashlib
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Parser(NamedTuple):
    """A parser, called with bytes and an empty folder, and inputs that it accepts."""

    parse: Callable[[bytes, Path], object]
    seeds: Callable[[], list[bytes]]


def _file(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# -- data sets ------------------------------------------------------------------------------------


def idx(content: bytes, folder: Path) -> None:
    from fedgma.data.files.idx import read_idx

    read_idx(_file(folder, "a", content))


def idx_gz(content: bytes, folder: Path) -> None:
    from fedgma.data.files.idx import read_idx

    read_idx(_file(folder, "a.gz", content))


def idx_seeds() -> list[bytes]:
    return [struct.pack(">HBB2I", 0, 8, 2, 2, 3) + bytes(6), struct.pack(">HBBI", 0, 8, 1, 4) + bytes([1, 2, 3, 4])]


def npz(content: bytes, folder: Path) -> None:
    from fedgma.data.files import load_npz

    load_npz(_file(folder, "a.npz", content))


def npz_seeds() -> list[bytes]:
    made = []
    for extra in (
        {},
        {"client": np.arange(4), "classes": ["a", "b"]},
        {"x_test": np.zeros((1, 3)), "y_test": np.ones(1, int)},
    ):
        stream = io.BytesIO()
        np.savez(stream, x=np.ones((4, 3)), y=np.array([0, 1, 0, 1]), **extra)
        made.append(stream.getvalue())
    return made


def npy(content: bytes, folder: Path) -> None:
    """The bytes as `x` in an archive whose checksums are right."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.npy", content)
        archive.writestr("y.npy", npy_seeds()[2])
    npz(stream.getvalue(), folder)


def npy_seeds() -> list[bytes]:
    arrays = [
        np.ones((4, 2), np.float32),
        np.zeros((4, 1, 2, 2), np.uint8),
        np.array([0, 1, 0, 1]),
        np.array(["a", "bc"]),
    ]
    made = []
    for array in (*arrays, np.asfortranarray(arrays[0]), np.float64(3)):
        stream = io.BytesIO()
        np.save(stream, array)
        made.append(stream.getvalue())
    return made


def leaf(content: bytes, folder: Path) -> None:
    from fedgma.data.files.leaf import read_leaf

    train, test = _file(folder, "train.json", content), _file(folder, "test.json", leaf_seeds()[0])
    read_leaf([train], [test])


def leaf_seeds() -> list[bytes]:
    picture = [0.0] * 784
    parts = [
        {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [picture], "y": [3]}}},
        {
            "users": ["a", "b"],
            "num_samples": [1, 0],
            "user_data": {"a": {"x": [picture], "y": [61]}, "b": {"x": [], "y": []}},
        },
    ]
    return [json.dumps(part).encode() for part in parts]


def cifar(content: bytes, folder: Path) -> None:
    from fedgma.data.files.cifar import find_cifar100

    _file(folder, "cifar-100-binary.tar.gz", gzip.compress(content, 1))
    found = find_cifar100(folder)
    assert found is not None
    found.read()


def cifar_gz(content: bytes, folder: Path) -> None:
    from fedgma.data.files.cifar import find_cifar100

    _file(folder, "cifar-100-binary.tar.gz", content)
    found = find_cifar100(folder)
    assert found is not None
    found.read()


def cifar_seeds() -> list[bytes]:
    made = []
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
            for name, size in (("train.bin", 3074), ("test.bin", 3074), ("fine_label_names.txt", 20), ("é" * 120, 3)):
                entry = tarfile.TarInfo(name)
                entry.size = size
                archive.addfile(entry, io.BytesIO(b"a" * size))
        made.append(stream.getvalue())
    return made


def tinyimagenet(content: bytes, folder: Path) -> None:
    from fedgma.data.files.tinyimagenet import find_tinyimagenet

    _file(folder, "tiny-imagenet-200.zip", content)
    found = find_tinyimagenet(folder)
    assert found is not None
    found.read()


def tinyimagenet_seeds() -> list[bytes]:
    members = {
        "wnids.txt": b"n01\n",
        "words.txt": b"n01\tgoldfish\n",
        "val/val_annotations.txt": b"v.JPEG\tn01\t0\n",
        "val/images/v.JPEG": image_seeds()[0],
        "train/n01/images/t.JPEG": image_seeds()[0],
    }
    made = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as archive:
            for name, content in members.items():
                archive.writestr(f"tiny-imagenet-200/{name}", content)
        made.append(stream.getvalue())
    return made


def image(content: bytes, folder: Path) -> None:
    from fedgma.data.files.images import decode

    decode(content, "RGB")


def image_seeds() -> list[bytes]:
    from PIL import Image

    made = []
    for form in ("JPEG", "PNG", "WEBP", "BMP"):
        stream = io.BytesIO()
        Image.new("RGB", (64, 64), (9, 99, 199)).save(stream, form)
        made.append(stream.getvalue())
    return made


def parquet(content: bytes, folder: Path) -> None:
    from fedgma.data.files.parquet import read_parquet

    read_parquet([_file(folder, "train.parquet", content)], [], "RGB", 64)


def parquet_seeds() -> list[bytes]:
    import pyarrow
    from pyarrow import parquet as files

    stream = io.BytesIO()
    cells = [{"bytes": image_seeds()[1], "path": None}] * 2
    files.write_table(pyarrow.table({"image": cells, "label": [0, 1], "writer_id": ["a", "b"]}), stream)
    return [stream.getvalue()]


def csv(content: bytes, folder: Path) -> None:
    from fedgma.data.files import load_own

    load_own(_file(folder, "a.csv", content))


def csv_seeds() -> list[bytes]:
    rows = b",height,label,client\n" + b"".join(
        b"%d,%d.5,%s,b%d\n" % (i, i, (b"x", b"y")[i % 2], i % 3) for i in range(9)
    )
    return [rows, rows.replace(b",", b";"), b'a,"b c",species\r\n1,2,x\r\n-3e5,nan,y\r\n']


def table(content: bytes, folder: Path) -> None:
    from fedgma.data.files import load_own

    load_own(_file(folder, "a.parquet", content))


def table_seeds() -> list[bytes]:
    import pyarrow
    from pyarrow import parquet as files

    made = []
    for columns in ({"a": [0.5, 1.5], "user": ["b", "c"]}, {"image": [{"bytes": image_seeds()[1]}] * 2}):
        stream = io.BytesIO()
        files.write_table(pyarrow.table({**columns, "label": ["x", "y"]}), stream)
        made.append(stream.getvalue())
    return made


def cached_arrays() -> dict[str, bytes]:
    x, y = npy_seeds()[1:3]
    return {"train_x": x, "train_y": y, "test_x": x, "test_y": y}


def manifest(content: bytes, folder: Path) -> None:
    from fedgma.data.files.cache import open_cached

    _file(folder, "datasets/mine/manifest.json", content)
    for name, array in cached_arrays().items():
        _file(folder, f"datasets/mine/{name}.npy", array)
    open_cached(folder, "mine")


def manifest_seeds() -> list[bytes]:
    arrays = {name: hashlib.sha256(array).hexdigest() for name, array in cached_arrays().items()}
    value = {
        "version": 1,
        "source": {"kind": "folder", "name": "a", "sha256": ""},
        "origin": {"a": 3},
        "classes": ["a"],
    }
    return [json.dumps({**value, "name": "mine", "notes": [], "arrays": arrays}).encode()]


# -- tallies, runs, settings ----------------------------------------------------------------------


def tally(content: bytes, folder: Path) -> None:
    """The bytes with a checksum that is right."""
    from fedgma.aggregation.wire import from_bytes

    from_bytes(content + hashlib.sha256(content).digest())


def tally_seeds() -> list[bytes]:
    from fedgma.aggregation.tally import Tally
    from fedgma.aggregation.wire import to_bytes

    made = []
    for update in ({"w": np.array([1.0, -1.0])}, {"w": np.ones((2, 2), np.float32), "n": np.array([3])}):
        one = Tally()
        one.add(update, weight=10, client="a")
        made.append(to_bytes(one)[:-32])
    return made


def checkpoint(content: bytes, folder: Path) -> None:
    """The bytes as the arrays of a checkpoint whose manifest is right."""
    from fedgma.records.checkpoints import MANIFEST, STATE, read_checkpoint

    _file(folder, f"00000001/{STATE}", content)
    files = {STATE: hashlib.sha256(content).hexdigest()}
    _file(folder, f"00000001/{MANIFEST}", json.dumps({"format": 1, "round": 1, "files": files}).encode())
    read_checkpoint(folder)


def checkpoint_seeds() -> list[bytes]:
    from safetensors.numpy import save

    return [save({"w": np.ones((2, 3), np.float32), "n": np.array([3])}), save({"a": np.zeros(0)})]


def checkpoint_manifest(content: bytes, folder: Path) -> None:
    from fedgma.records.checkpoints import MANIFEST, STATE, read_checkpoint

    _file(folder, f"00000001/{STATE}", checkpoint_seeds()[0])
    _file(folder, f"00000001/{MANIFEST}", content)
    read_checkpoint(folder)


def checkpoint_manifest_seeds() -> list[bytes]:
    from fedgma.records.checkpoints import STATE

    files = {STATE: hashlib.sha256(checkpoint_seeds()[0]).hexdigest()}
    return [json.dumps({"format": 1, "round": 1, "files": files}).encode()]


def _run(folder: Path, **parts: bytes) -> None:
    from fedgma.records.reader import read_run

    for name, content in {"run.json": run_head_seeds()[0], "rounds.jsonl": run_lines_seeds()[0], **parts}.items():
        _file(folder, name, content)
    read_run(folder)


def run_head(content: bytes, folder: Path) -> None:
    _run(folder, **{"run.json": content})


def run_head_seeds() -> list[bytes]:
    settings = {"rounds": 2, "seed": 0, "aggregator": "gma", "algorithm": "fedavg", "partition": {"name": "iid"}}
    head = {
        "format": 1,
        "fingerprint": "a",
        "settings": settings,
        "data": {"name": "a", "sha256": "b"},
        "parameters": 3,
    }
    return [json.dumps(head).encode()]


def run_lines(content: bytes, folder: Path) -> None:
    _run(folder, **{"rounds.jsonl": content})


def run_lines_seeds() -> list[bytes]:
    lines: list[Any] = [
        {"round": 1, "test": {"accuracy": 0.5}, "refused": []},
        {"round": 2, "mask": {"histogram": [1]}},
    ]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in lines)]


def run_done(content: bytes, folder: Path) -> None:
    _run(folder, done=content)


def run_done_seeds() -> list[bytes]:
    return [b'{"rounds": 2, "sha256": "ab"}']


def settings(content: bytes, folder: Path) -> None:
    from fedgma.experiments.grid import read_grid

    read_grid(_file(folder, "s.toml", content))


def settings_seeds() -> list[bytes]:
    return [
        b'dataset = "fmnist-mini"\nrounds = 7\ntau = [0.2, 0.4]\npartition = { name = "dirichlet", alpha = 0.1 }\n',
        b'algorithm = "fedyogi"\n[partition]\nname = "iid"\nclients = 20\n[shift]\nname = "rotation"\nlow = -3.5\n',
    ]


def rates(content: bytes, folder: Path) -> None:
    from fedgma.paper.rates import read_chosen

    read_chosen(_file(folder, "chosen.toml", content))


def rates_seeds() -> list[bytes]:
    return [b'[rates.mnist.fedavg]\nshared = [0.1, 1.0]\n[shift]\ncoloring = "foreground"\n']


def findings(content: bytes, folder: Path) -> None:
    from fedgma.paper.findings import read_findings

    _file(folder, "findings.json", content)
    read_findings(folder)


def findings_seeds() -> list[bytes]:
    one = {"id": "a/b", "text": "t", "estimate": 0.5, "interval": [0, 1], "verdict": None}
    return [json.dumps({"format": 1, "findings": [one]}).encode()]


PARSERS = {
    name: Parser(parse, seeds)
    for name, parse, seeds in (
        ("idx", idx, idx_seeds),
        ("idx_gz", idx_gz, lambda: [gzip.compress(seed) for seed in idx_seeds()]),
        ("npy", npy, npy_seeds),
        ("npz", npz, npz_seeds),
        ("leaf", leaf, leaf_seeds),
        ("cifar", cifar, cifar_seeds),
        ("cifar_gz", cifar_gz, lambda: [gzip.compress(seed) for seed in cifar_seeds()]),
        ("tinyimagenet", tinyimagenet, tinyimagenet_seeds),
        ("image", image, image_seeds),
        ("parquet", parquet, parquet_seeds),
        ("csv", csv, csv_seeds),
        ("table", table, table_seeds),
        ("manifest", manifest, manifest_seeds),
        ("tally", tally, tally_seeds),
        ("checkpoint", checkpoint, checkpoint_seeds),
        ("checkpoint_manifest", checkpoint_manifest, checkpoint_manifest_seeds),
        ("run_head", run_head, run_head_seeds),
        ("run_lines", run_lines, run_lines_seeds),
        ("run_done", run_done, run_done_seeds),
        ("settings", settings, settings_seeds),
        ("rates", rates, rates_seeds),
        ("findings", findings, findings_seeds),
    )
}
