"""D8 and D9: archives that would write elsewhere or unpack to more than they are."""

import gzip
import io
import struct
import tarfile
import zipfile

import numpy as np
import pytest

from fedgma.data.files.cifar import find_cifar100
from fedgma.data.files.idx import read_idx
from fedgma.data.files.npy import read_npz
from fedgma.data.files.own.arrays import load_npz
from fedgma.data.files.reader import SMALL, VARIABLE
from fedgma.data.files.tinyimagenet import find_tinyimagenet
from fedgma.errors import ConfigError, DataError
from peak_memory import peak
from rows import row

MB = 1 << 20


@pytest.fixture(autouse=True)
def no_limit_of_the_user(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def refused(action, said):
    with pytest.raises(DataError, match=said):
        action()


def tar_of(path, *entries):
    """An archive of (name, type, link target, content) under CIFAR's name."""
    with tarfile.open(path / "cifar-100-binary.tar.gz", "w:gz") as archive:
        for name, kind, target, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size, entry.mode = kind, target, len(content), 0o4777
            archive.addfile(entry, io.BytesIO(content))


NAMES = ["../../escape", "/tmp/fedgma-escape", "a/../../escape", "train.bin", "..", "C:\\escape", "a\\..\\b"]
KINDS = [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]


@row(
    "D8",
    "a tar archive with `..`, absolute names, links, devices or setuid files",
    happens="members are read as streams and nothing is extracted, so no name or link can lead anywhere",
    seen="which files the archive lacks; exit code 3",
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_d8_no_archive_writes_or_leads_anywhere(tmp_path, name, kind):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_bytes(bytes(3074))
    first = ("train.bin", tarfile.SYMTYPE, "../secret", b"")  # and a second step through the link
    tar_of(
        inside, first, (name, kind, "../secret", b"x" * (kind == tarfile.REGTYPE)), ("test.bin", kind, "train.bin", b"")
    )
    before = sorted(tmp_path.rglob("*"))
    refused(find_cifar100(inside).read, "does not contain|whole number of 3074-byte records")
    assert sorted(tmp_path.rglob("*")) == before


@row("D8")
def test_d8_a_long_extended_header_is_skipped_and_not_read(tmp_path):
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in ("train.bin", "test.bin"):
            entry = tarfile.TarInfo(name)
            entry.size, entry.pax_headers = 3074, {"comment": "x" * (8 * MB)}
            archive.addfile(entry, io.BytesIO(bytes(3074)))
    assert peak(lambda: find_cifar100(tmp_path).read()) < 8 * MB
    assert len(find_cifar100(tmp_path).read().train.y) == 1


@row(
    "D9",
    "a small file that unpacks to gigabytes, or announces them",
    happens="what it announces is checked first: 256 MiB, or 100 times its size; nothing beyond is read",
    seen="both sizes and the name of the variable that sets another limit; exit code 3",
)
def test_d9_an_idx_file_of_9_mb_does_not_take_4_gb(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 1 << 31)) + bytes(9 * MB))  # its size is what counts
    said = r"a.gz has \d+ bytes but announces 2147483648, more than 943\d+; if the file is right, set FEDGMA_MAX_BYTES"
    assert peak(lambda: refused(lambda: read_idx(path), said)) < 4 * MB


def npz_of_zeros(path, size):
    """An .npz whose array of zeros is a thousand times its size."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w") as stream,
    ):
        stream.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
        for start in range(0, size, MB):
            stream.write(bytes(min(MB, size - start)))


@row("D9")
def test_d9_a_small_npz_does_not_end_in_a_memory_error(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgma.data.files.reader.SMALL", 16 * MB)  # so that the test is short
    npz_of_zeros(tmp_path / "a.npz", 40 * MB)
    said = r"announces 419431.., more than 18\d{6};"
    assert peak(lambda: refused(lambda: load_npz(tmp_path / "a.npz"), said)) < 4 * MB
    monkeypatch.setenv(VARIABLE, str(64 * MB))
    assert read_npz(tmp_path / "a.npz")["x"].shape == (40 * MB,)


@row("D9")
def test_d9_the_limit_is_generous_and_can_be_set(tmp_path, monkeypatch):
    assert SMALL == 1 << 28
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 28, 28), np.uint8), y=np.arange(1000) % 2)
    assert len(load_npz(tmp_path / "a.npz").train.y) == 800
    monkeypatch.setenv(VARIABLE, "1000")
    refused(lambda: load_npz(tmp_path / "a.npz"), "more than 1000; if the file is right, set FEDGMA_MAX_BYTES")
    monkeypatch.setenv(VARIABLE, "lots")
    with pytest.raises(ConfigError, match="FEDGMA_MAX_BYTES must be a number of bytes, got 'lots'"):
        load_npz(tmp_path / "a.npz")


@row("D9")
def test_d9_a_tar_bomb_is_left_where_it_passes_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgma.data.files.reader.SMALL", 16 * MB)
    tar_of(tmp_path, ("zeros", tarfile.REGTYPE, "", bytes(40 * MB)), ("train.bin", tarfile.REGTYPE, "", b""))
    said = "unpacks to more than 16777216 bytes"
    assert peak(lambda: refused(find_cifar100(tmp_path).read, said)) < 8 * MB


@row("D9")
def test_d9_a_zip_bomb_of_images_is_refused_by_the_sizes_it_lists(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgma.data.files.reader.SMALL", 4 * MB)
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(40):
            archive.writestr(f"tiny-imagenet-200/train/n01/images/{number}.JPEG", bytes(MB - 1))
    said = "announces 41943000, more than"
    assert peak(lambda: refused(find_tinyimagenet(tmp_path).read, said)) < 4 * MB


@row("D9")
@pytest.mark.parametrize("name", ["../../escape", "/tmp/fedgma-escape", "tiny-imagenet-200/../../escape"])
def test_d9_a_zip_slip_writes_nothing(tmp_path, name):
    inside = tmp_path / "inside"
    inside.mkdir()
    with zipfile.ZipFile(inside / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr(name, b"x")
    refused(find_tinyimagenet(inside).read, "wnids.txt is missing")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inside", "tiny-imagenet-200.zip"]


@row("D9")
def test_d9_a_member_with_a_false_size_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(100))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    at = content.index(b"PK\x01\x02") + 24  # the size in the central directory
    content[at : at + 4] = struct.pack("<I", 928 + 80)
    (tmp_path / "a.npz").write_bytes(content)
    refused(lambda: read_npz(tmp_path / "a.npz"), "announces 800 bytes of data but holds")
