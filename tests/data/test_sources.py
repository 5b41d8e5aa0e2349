import json
import logging
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from data_files import write_idx, write_idx_set

from fedgma.data.files import Dataset, Source, Split, cache, hold_out_writers, load, names
from fedgma.data.files.locate import availability
from fedgma.data.files.registry import SPECS
from fedgma.data.files.writers import drop_repeats, keep_digits
from fedgma.data.shifts import Colour, Rotation
from fedgma.errors import ConfigError, DataError, IntegrityError


def test_a_set_is_read_from_a_folder_first_and_from_the_cache_after(tmp_path, small_mnist):
    small_mnist(tmp_path / "my data ü" / "mnist")
    first, second = (load("mnist", folders=[tmp_path / "my data ü"]) for _ in range(2))
    assert (first.source.kind, first.source.cached) == ("folder", False)
    assert second.source == first.source._replace(cached=True)
    assert np.array_equal(first.train.x, second.train.x)
    assert isinstance(second.train.x, np.memmap)


def test_the_record_of_a_source_names_files_and_no_folder(tmp_path, small_mnist):
    small_mnist(tmp_path / "mnist")
    source = load("mnist", folders=[tmp_path]).source
    assert source.name == "train-images-idx3-ubyte.gz and 3 more"
    assert len(source.sha256) == 64


def test_the_cache_serves_where_the_folder_is_gone(tmp_path, small_mnist):
    small_mnist(tmp_path / "mnist")
    load("mnist", folders=[tmp_path])
    assert load("mnist").source.cached


def test_the_folder_can_come_from_the_environment(tmp_path, small_mnist, monkeypatch):
    small_mnist(tmp_path / "b" / "mnist")
    (tmp_path / "a").mkdir()
    monkeypatch.setenv("FEDGMA_DATA", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert len(load("mnist").train.y) == 20


def test_other_files_replace_the_cached_set(tmp_path, small_mnist):
    small_mnist(tmp_path / "old" / "mnist")
    load("mnist", folders=[tmp_path / "old"])
    small_mnist(tmp_path / "new" / "mnist", end="")
    newer = load("mnist", folders=[tmp_path / "new"])
    assert not newer.source.cached
    assert load("mnist", folders=[tmp_path / "new"]).source.cached


def test_a_wrong_count_is_one_clear_error_and_leaves_the_cache_untouched(tmp_path, small_mnist, own_cache):
    write_idx_set(tmp_path / "mnist", range(10), range(10))
    with pytest.raises(DataError, match=r"mnist \(train\): expected 20 samples .* got 10"):
        load("mnist", folders=[tmp_path])
    assert not own_cache.exists()


def test_labels_out_of_range_are_refused(tmp_path, small_mnist, own_cache):
    small_mnist(tmp_path / "mnist")
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", np.full(20, 11, np.uint8))
    with pytest.raises(DataError, match="labels must be from 0 to 9, got 11 to 11"):
        load("mnist", folders=[tmp_path])
    assert not own_cache.exists()


def test_a_truncated_file_leaves_the_cache_as_it_was(tmp_path, small_mnist, own_cache):
    small_mnist(tmp_path / "a" / "mnist")
    load("mnist", folders=[tmp_path / "a"])
    before = {p.name: p.read_bytes() for p in (own_cache / "datasets" / "mnist").iterdir()}
    small_mnist(tmp_path / "b" / "mnist")
    path = tmp_path / "b" / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match="truncated"):
        load("mnist", folders=[tmp_path / "b"])
    assert {p.name: p.read_bytes() for p in (own_cache / "datasets" / "mnist").iterdir()} == before


def test_a_missing_set_says_what_to_do():
    with pytest.raises(DataError, match=r"cifar100 was not found.*cifar-100-binary.tar.gz.*fedgma data get cifar100"):
        load("cifar100")


def test_a_damaged_cache_is_replaced_from_its_source_or_else_refused(tmp_path, small_mnist, own_cache):
    small_mnist(tmp_path / "mnist")
    load("mnist", folders=[tmp_path])
    file = own_cache / "datasets" / "mnist" / "train_x.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(IntegrityError, match=r"cached mnist is damaged \(train_x.npy has sha256"):
        load("mnist")
    assert not load("mnist", folders=[tmp_path]).source.cached
    assert load("mnist").source.cached


@pytest.mark.parametrize("manifest", ["", "[]", "{", '{"version": 1}', '{"version": 1, "arrays": 3}'])
def test_an_invalid_manifest_is_refused_or_ignored(tmp_path, small_mnist, own_cache, manifest):
    small_mnist(tmp_path / "mnist")
    load("mnist", folders=[tmp_path])
    (own_cache / "datasets" / "mnist" / "manifest.json").write_text(manifest)
    assert len(load("mnist", folders=[tmp_path]).train.y) == 20


def test_a_cache_that_cannot_be_written_is_not_needed(tmp_path, small_mnist, caplog):
    small_mnist(tmp_path / "mnist")
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        data = load("mnist", folders=[tmp_path], cache=tmp_path / "file")
    assert len(data.train.y) == 20
    assert "not cached" in caplog.text


def test_the_cache_holds_plain_arrays_and_a_manifest(tmp_path, small_mnist, own_cache):
    small_mnist(tmp_path / "mnist")
    load("mnist", folders=[tmp_path])
    folder = own_cache / "datasets" / "mnist"
    assert sorted(p.name for p in folder.parent.iterdir()) == ["mnist"]  # nothing staged is left behind
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.json",
        "test_x.npy",
        "test_y.npy",
        "train_x.npy",
        "train_y.npy",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["samples"] == {"train": 20, "test": 10}
    assert str(tmp_path) not in json.dumps(manifest)


def test_eight_processes_may_fill_one_cache_at_once(tmp_path):
    write_idx_set(tmp_path / "mnist", [*range(10)] * 200, range(10))
    code = textwrap.dedent(
        """
        import sys
        from fedgma.data.files import idx, load
        from fedgma.data.files.registry import SPECS, FileFormat
        file_format = FileFormat(idx.finder((1,) * 10, "mnist"), (200,) * 10, (1,) * 10)
        SPECS["mnist"] = SPECS["mnist"]._replace(formats=(file_format,))
        for _ in range(5):
            data = load("mnist", folders=[sys.argv[1]])
            assert (data.train.x[:, 0, 0, 0] == data.train.y).all()
        """
    )
    start = [sys.executable, "-c", code, str(tmp_path)]
    racing = [subprocess.Popen(start, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    assert [process.communicate()[1] for process in racing] == [""] * 8
    assert [p.name for p in (tmp_path / "cache" / "datasets").iterdir()] == ["mnist"]


@pytest.mark.parametrize("folder", ["~/not/here", "a\0b", "x" * 300, "/proc/1/root", ""])
def test_an_unreadable_data_folder_is_refused(folder):
    if folder == "":
        folder = "nowhere at all"
    with pytest.raises(DataError, match="does not exist or cannot be read"):
        load("mnist", folders=[folder])


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown data set 'mnits'; known: cifar10, cifar100, fedcmnist"):
        load("mnits")


def test_every_set_of_the_paper_has_a_name():
    paper = {"mnist", "fmnist", "cifar10", "cifar100", "tinyimagenet", "femnist", "femnist-62", "mnist-writers"}
    assert paper | {"fedcmnist", "fedrotmnist", "fmnist-mini"} <= set(names())


def test_coloured_and_rotated_mnist_are_mnist_with_a_shift(tmp_path, small_mnist):
    small_mnist(tmp_path / "mnist")
    assert load("fedcmnist", folders=[tmp_path]).shift == Colour()
    assert load("fedrotmnist", folders=[tmp_path]).shift == Rotation()


def test_the_list_of_sets_includes_sets_with_refused_files(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    here = {one.name: one.where for one in availability([tmp_path])}
    assert "pickles" in here["cifar10"]
    assert here["mnist"] == "fedgma data get mnist"


def test_every_download_has_an_address_and_a_checksum():
    remotes = [remote for spec in SPECS.values() for remote in spec.remote]
    assert len(remotes) == 11
    assert all(len(remote.checksum) == 36 and remote.urls for remote in remotes)


def test_the_users_cache_folder_is_the_default(monkeypatch):
    monkeypatch.delenv("FEDGMA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert str(cache.cache_folder()) == "/somewhere/fedgma"


# -- writers ------------------------------------------------------------------------------------


def written(writers_train, writers_test, classes=12) -> Dataset:
    """One picture a sample, all different; labels go round the classes."""
    splits = []
    for start, writers in ((0, writers_train), (1000, writers_test)):
        number = np.arange(start, start + len(writers), dtype=np.uint32)
        x = number.view(np.uint8).reshape(-1, 1, 2, 2)
        splits.append(Split(x, number.astype(np.int64) % classes, np.asarray(writers, np.int64)))
    return Dataset("w", *splits, tuple(map(str, range(classes))), Source("arrays", "w", ""))


def test_all_samples_of_held_out_writers_are_in_the_test_set():
    data = hold_out_writers(written([0, 0, 1, 1, 2, 2], [0, 1, 2, 3]), 2, seed=0)
    training, testing = set(data.train.client.tolist()), set(data.test.client.tolist())
    assert len(training) == 2
    assert not training & testing
    assert training | testing == {0, 1, 2, 3}
    assert len(data.test.y) == 4  # three of the held-out writer, one of the writer who only has a test part
    assert set(data.more_tests["same_writers"].client.tolist()) == training


def test_writers_without_training_samples_are_the_test_writers_by_default():
    data = hold_out_writers(written([0, 1, 2], [0, 1, 7]))
    assert set(data.test.client.tolist()) == {7}


def test_a_share_of_the_writers_is_held_out_where_all_have_training_samples():
    data = hold_out_writers(written(np.repeat(np.arange(71), 2), np.arange(71)))
    assert len(np.unique(data.train.client)) == 60  # 3000 of 3550
    assert "60 training writers, 11 held out" in data.notes


def test_too_many_training_writers_are_refused():
    with pytest.raises(ConfigError, match="expected 1 to 2 training writers, got 5"):
        hold_out_writers(written([0, 1], [0]), 5)


def test_a_set_without_writers_is_refused():
    with pytest.raises(DataError, match="a writer for each sample, but this one has no writers"):
        hold_out_writers(load("fmnist-mini"))


def test_digits_are_the_first_ten_classes():
    data = keep_digits(written([0] * 24, [0] * 12))
    assert len(data.train.y) == 20
    assert data.train.y.max() == 9
    assert len(data.classes) == 10


def test_repeated_images_of_a_writer_are_dropped():
    data = written([0, 0, 1], [0, 1])
    data.train.x[1] = data.train.x[0]
    data.train.x[2] = data.train.x[0]  # another writer may have the same picture
    data.test.x[1] = data.train.x[0]
    clean = drop_repeats(data)
    assert clean.train.client.tolist() == [0, 1]
    assert clean.test.client.tolist() == [0]
    assert clean.notes == ("dropped 1 training and 1 test pictures that their writer's data holds twice",)
