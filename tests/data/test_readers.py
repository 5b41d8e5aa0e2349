import contextlib
import io
import json
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from data_files import write_idx, write_idx_set
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedgma.data.files import idx, parquet
from fedgma.data.files import npz as packed
from fedgma.data.files.cifar import find_cifar10, find_cifar100
from fedgma.data.files.leaf import find_leaf
from fedgma.data.files.npy import read_npz
from fedgma.data.files.tinyimagenet import find_tinyimagenet
from fedgma.errors import DataError, IntegrityError

# -- idx ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files_are_read_gzipped_or_not(tmp_path, end):
    write_idx_set(tmp_path / "mnist", [3, 4], [5], end)
    raw = idx.finder((), "mnist")(tmp_path).read()
    assert raw.train.y.tolist() == [3, 4]
    assert raw.test.x[0, 0, 0, 0] == 5


def test_files_of_another_set_under_the_same_names_are_left_alone(tmp_path):
    write_idx_set(tmp_path, range(10), range(10))
    assert idx.finder((1,) * 10, "mnist")(tmp_path) is not None
    assert idx.finder((2,) * 10, "fmnist")(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"\x00\x00\x0d\x01" + struct.pack(">I", 4) + b"1234", "not an idx file of bytes"),
        (
            b"\x00\x00\x08\x03" + struct.pack(">3I", 2**31, 2**31, 2**31),
            "has 16 bytes but announces 9903520314283042199192993792, more than 268435456",
        ),
        (b"\x00\x00\x08\x01" + struct.pack(">I", 5) + b"1234", "truncated: expected 5 more bytes, got 4"),
        (b"\x00\x00\x08\x01" + struct.pack(">I", 3) + b"1234", "holds more than the 3 bytes"),
    ],
)
def test_a_bad_idx_file_is_refused(tmp_path, content, reason):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        idx.read_idx(tmp_path / "a")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_arbitrary_bytes_raise_only_data_errors(tmp_path_factory, content, packed_):
    path = tmp_path_factory.mktemp("fuzz") / ("a.gz" if packed_ else "a")
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        idx.read_idx(path)


def test_a_truncated_gzip_is_refused(tmp_path):
    write_idx(tmp_path / "a.gz", np.arange(200, dtype=np.uint8))
    whole = (tmp_path / "a.gz").read_bytes()
    (tmp_path / "a.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="damaged or truncated"):
        idx.read_idx(tmp_path / "a.gz")


# -- CIFAR --------------------------------------------------------------------------------------


def records(labels, label_bytes=1):
    """CIFAR records whose pixels all equal the label; a coarse label of 7 goes before where there are two."""
    return b"".join(bytes([7] * (label_bytes - 1) + [label]) + bytes([label]) * 3072 for label in labels)


def tar_of(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def cifar100_members(folder="cifar-100-binary/"):
    names = "\n".join(f"class{c}" for c in range(100)).encode()
    return {
        f"{folder}train.bin": records([0, 99, 5], 2),
        f"{folder}test.bin": records([42], 2),
        f"{folder}fine_label_names.txt": names,
    }


def test_cifar100_is_read_from_its_binary_archive_by_its_fine_labels(tmp_path):
    tar_of(tmp_path / "cifar-100-binary.tar.gz", cifar100_members())
    raw = find_cifar100(tmp_path).read()
    assert raw.train.y.tolist() == [0, 99, 5]
    assert raw.train.x.shape == (3, 3, 32, 32)
    assert (raw.test.x == 42).all()
    assert raw.classes[42] == "class42"


def test_cifar10_is_read_from_a_folder_of_batches_in_their_order(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for i in range(1, 6):
        (folder / f"data_batch_{i}.bin").write_bytes(records([i, i]))
    (folder / "test_batch.bin").write_bytes(records([9]))
    raw = find_cifar10(tmp_path).read()
    assert raw.train.y.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert raw.test.y.tolist() == [9]


def test_the_channels_of_a_cifar_image_are_red_green_blue(tmp_path):
    content = bytes([0]) + bytes([10]) * 1024 + bytes([20]) * 1024 + bytes([30]) * 1024
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        (tmp_path / name).write_bytes(content)
    assert find_cifar10(tmp_path).read().train.x[0, :, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py"])
def test_the_pickled_cifar_is_refused_with_the_name_of_the_binary_one(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(DataError, match=r"pickles.*never read.*cifar-10-binary\.tar\.gz"):
        find_cifar10(tmp_path)


def test_an_archive_with_unsafe_names_and_links_writes_nothing(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    path = inside / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, target in (
            ("../../escape", tarfile.REGTYPE, ""),
            ("/tmp/absolute-escape", tarfile.REGTYPE, ""),
            ("train.bin", tarfile.SYMTYPE, "/etc/passwd"),
            ("test.bin", tarfile.LNKTYPE, "../../escape"),
            ("device", tarfile.CHRTYPE, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
    with pytest.raises(DataError, match=r"does not contain test\.bin, train\.bin"):
        find_cifar100(inside).read()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["cifar-100-binary.tar.gz", "inside"]


def test_a_truncated_archive_and_a_truncated_record_are_refused(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    members = cifar100_members()
    tar_of(path, members)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged or truncated"):
        find_cifar100(tmp_path).read()
    tar_of(path, {**members, "cifar-100-binary/train.bin": records([1], 2)[:-1]})
    with pytest.raises(DataError, match="a whole number of 3074-byte records, got 3073 bytes"):
        find_cifar100(tmp_path).read()


def test_a_member_that_is_too_large_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgma.data.files.cifar.LARGEST", 5000)
    tar_of(tmp_path / "cifar-100-binary.tar.gz", cifar100_members())
    with pytest.raises(DataError, match="at most 5000 bytes"):
        find_cifar100(tmp_path).read()


# -- TinyImageNet -------------------------------------------------------------------------------


def picture(level, size=64, mode="RGB", form="JPEG"):
    buffer = io.BytesIO()
    Image.new(mode, (size, size), level if mode == "L" else (level, 0, 0)).save(buffer, form)
    return buffer.getvalue()


def tiny_members():
    members = {
        "wnids.txt": b"n02\nn01\n",
        "words.txt": b"n01\tgoldfish\nn02\ttable, desk\nn03\tunused\n",
        "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n",
        "val/images/val_0.JPEG": picture(200),
        "val/images/val_1.JPEG": picture(20, mode="L"),
        "test/images/test_0.JPEG": picture(0),
    }
    for wnid, level in (("n01", 50), ("n02", 150)):
        members |= {f"train/{wnid}/images/{wnid}_{i}.JPEG": picture(level) for i in range(3)}
        members[f"train/{wnid}/{wnid}_boxes.txt"] = b""
    return members


def write_tiny(folder, kind, members):
    if kind == "zip":
        with zipfile.ZipFile(folder / "tiny-imagenet-200.zip", "w") as archive:
            for name, content in members.items():
                archive.writestr(f"tiny-imagenet-200/{name}", content)
        return
    for name, content in members.items():
        path = folder / "tiny-imagenet-200" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_tinyimagenet_is_read_from_zip_or_folder_with_labels_in_sorted_order(tmp_path, kind):
    write_tiny(tmp_path, kind, tiny_members())
    raw = find_tinyimagenet(tmp_path).read()
    assert raw.classes == ("goldfish", "table, desk")
    assert raw.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert raw.test.y.tolist() == [1, 0]
    assert raw.train.x.shape == (6, 3, 64, 64)
    assert abs(int(raw.train.x[0, 0, 0, 0]) - 50) <= 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"val/images/val_0.JPEG": picture(1, size=32)}, r"expected an image of size \(64, 64\)"),
        ({"val/images/val_0.JPEG": b"not a picture"}, "cannot be decoded"),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn99\t0\t0\t1\t1\n"}, "classes that wnids.txt does not list"),
        ({"val/val_annotations.txt": b"val_9.JPEG\tn01\t0\t0\t1\t1\n"}, "val_9.JPEG is missing"),
        ({"val/images/val_0.JPEG": bytes(2 << 20)}, "missing or larger"),
    ],
)
def test_an_invalid_tinyimagenet_is_refused(tmp_path, change, reason):
    write_tiny(tmp_path, "zip", {**tiny_members(), **change})
    with pytest.raises(DataError, match=reason):
        find_tinyimagenet(tmp_path).read()


def test_a_truncated_zip_is_refused(tmp_path):
    write_tiny(tmp_path, "zip", tiny_members())
    path = tmp_path / "tiny-imagenet-200.zip"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match="damaged or truncated"):
        find_tinyimagenet(tmp_path).read()


# -- LEAF ---------------------------------------------------------------------------------------


def leaf_part(folder, **writers):
    data = {
        name: {"x": [[grey / 255] * 784 for grey in levels], "y": labels} for name, (levels, labels) in writers.items()
    }
    counts = [len(labels) for _, labels in writers.values()]
    folder.mkdir(parents=True, exist_ok=True)
    content = {"users": list(writers), "num_samples": counts, "user_data": data}
    (folder / "all_data_0_niid_0_keep_0.json").write_text(json.dumps(content))
    return folder / "all_data_0_niid_0_keep_0.json"


def test_leaf_files_give_images_labels_and_writers(tmp_path):
    leaf_part(tmp_path / "femnist" / "train", f02=([255, 128], [10, 61]), f01=([0], [3]))
    leaf_part(tmp_path / "femnist" / "test", f03=([1], [5]), f02=([254], [10]))
    raw = find_leaf(tmp_path).read()
    assert raw.train.y.tolist() == [10, 61, 3]
    assert raw.train.x[:, 0, 0, 0].tolist() == [255, 128, 0]
    assert raw.train.client.tolist() == [1, 1, 0]
    assert raw.test.client.tolist() == [2, 1]
    assert (raw.classes[10], raw.classes[61]) == ("A", "z")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"users": ["a"]', "not valid JSON, or truncated"),
        ('{"users": ["a"]}', "must hold LEAF's"),
        ("[" * 100_000, "not valid JSON"),
        ('{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [], "y": []}}}', "must have 2 samples"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1, 2]], "y": [0]}}}', "must hold LEAF's"),
    ],
)
def test_a_bad_leaf_file_is_refused(tmp_path, content, reason):
    leaf_part(tmp_path / "femnist" / "test", b=([1], [5]))
    leaf_part(tmp_path / "femnist" / "train", a=([1], [5])).write_text(content)
    with pytest.raises(DataError, match=reason):
        find_leaf(tmp_path).read()


# -- the hub's parquet ---------------------------------------------------------------------------


def parquet_part(path, column, levels, **columns):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer

    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": picture(level, 28, "L", "PNG"), "path": None} for level in levels]
    writer.write_table(arrow.table({column: cells, **columns}), path)


def test_parquet_files_give_images_and_labels(tmp_path):
    parquet_part(tmp_path / "mnist" / "train-00000-of-00002.parquet", "image", [1, 2], label=[5, 6])
    parquet_part(tmp_path / "mnist" / "train-00001-of-00002.parquet", "image", [3], label=[7])
    parquet_part(tmp_path / "mnist" / "test-00000-of-00001.parquet", "image", [4], label=[8])
    raw = parquet.finder("L", 28, "mnist")(tmp_path).read()
    assert raw.train.y.tolist() == [5, 6, 7]
    assert raw.train.x[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert raw.test.y.tolist() == [8]


def test_parquet_files_with_writers_and_no_test_part_give_an_empty_test_split(tmp_path):
    parquet_part(tmp_path / "femnist" / "train-0.parquet", "image", [1, 2], character=[5, 6], writer_id=["f2", "f1"])
    raw = parquet.finder("L", 28, "femnist")(tmp_path).read()
    assert raw.train.client.tolist() == [1, 0]
    assert raw.test.x.shape == (0, 1, 28, 28)


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = tmp_path / "mnist" / "train-0.parquet"
    parquet_part(path, "image", [1], label=[5])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="not a parquet file, or is damaged"):
        parquet.finder("L", 28, "mnist")(tmp_path).read()


def test_a_parquet_file_without_labels_says_what_it_has(tmp_path):
    parquet_part(tmp_path / "mnist" / "train-0.parquet", "image", [1])
    with pytest.raises(DataError, match=r"one of the columns label.*got image"):
        parquet.finder("L", 28, "mnist")(tmp_path).read()


# -- packed ---------------------------------------------------------------------------------------


def test_a_tile_holds_a_hundred_images_row_by_row():
    levels = np.arange(100, dtype=np.uint8)
    grid = levels.reshape(10, 10).repeat(28, 0).repeat(28, 1)
    buffer = io.BytesIO()
    Image.fromarray(grid).save(buffer, "WEBP", lossless=True)
    content = np.frombuffer(buffer.getvalue(), np.uint8)
    arrays = {"train_webp": content, "train_offsets": np.array([0, len(content)])}
    x = packed.untile(arrays, "train", 97, 28, "L", "file")
    assert x.shape == (97, 1, 28, 28)
    assert (x == levels[:97, None, None, None]).all()
    with pytest.raises(DataError, match="an image for each of 101 labels, got 1 tiles"):
        packed.untile(arrays, "train", 101, 28, "L", "file")


def test_a_packed_file_that_is_not_the_known_one_is_refused(tmp_path):
    from fedgma.data.files.reader import check_sha256

    np.savez(tmp_path / "mnist.npz", x=np.zeros(3))
    with pytest.raises(IntegrityError, match="expected sha256 ceb57726"):
        check_sha256(packed.finder("mnist.npz", "mnist")(tmp_path))


def test_an_npz_that_would_need_unpickling_is_refused_and_runs_nothing(tmp_path):
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return canary.touch, ()

    np.savez(tmp_path / "bomb.npz", x=np.array([Bomb()], object), y=np.zeros(1, int))
    with pytest.raises(DataError, match=r"bomb.npz: x must hold numbers or texts.*object arrays are never read"):
        read_npz(tmp_path / "bomb.npz")
    assert not canary.exists()
