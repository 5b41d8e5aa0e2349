"""What a checkpoint must be to be read, and what writing one leaves behind."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from fedgma.errors import DataError, IntegrityError
from fedgma.records.checkpoints import drop_checkpoints, read_checkpoint, write_checkpoint, written_to
from fedgma.records.format import with_checksum
from fedgma.records.label import Label, write_label

STATE = {"w": np.arange(3.0), "b": np.zeros(1)}


def change_manifest(folder, **changes):
    """Write other values into a manifest, with a checksum that fits them."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    manifest.pop("checksum", None)
    path.write_text(json.dumps(with_checksum(manifest)))


def test_a_checkpoint_under_the_name_of_another_round_is_refused(tmp_path):
    write_checkpoint(tmp_path, 3, STATE)
    shutil.move(tmp_path / "00000003", tmp_path / "00000007")
    with pytest.raises(IntegrityError, match="does not match its manifest"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("order", [["w"], ["w", "b", "c"], "wb", {"w": 0, "b": 1}])
def test_an_order_that_does_not_list_the_entries_is_refused(tmp_path, order):
    write_checkpoint(tmp_path, 3, STATE)
    change_manifest(tmp_path / "00000003", order=order)
    with pytest.raises(IntegrityError, match="other entries than its manifest lists"):
        read_checkpoint(tmp_path)


def test_a_manifest_of_format_one_with_a_wrong_checksum_is_refused(tmp_path):
    write_checkpoint(tmp_path, 3, STATE)
    path = tmp_path / "00000003" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1, "checksum": "0" * 64}))
    with pytest.raises(IntegrityError, match="does not match its checksum"):
        read_checkpoint(tmp_path)


def test_leftovers_of_a_killed_writer_are_deleted(tmp_path):
    for name in (".staged-1", ".gone-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.safetensors").write_bytes(b"half")
    drop_checkpoints(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_written_again_replaces_the_old_one(tmp_path):
    write_checkpoint(tmp_path, 3, STATE)
    write_checkpoint(tmp_path, 3, {"w": np.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["00000003"]
    found = read_checkpoint(tmp_path)
    assert found is not None
    assert found.state["w"].tolist() == [1.0, 1.0]


def test_a_failed_write_names_the_reason_with_or_without_the_system_s_words(tmp_path):
    for error, words in ((OSError(28, "No space left on device"), "No space left on device"), (OSError("odd"), "odd")):
        with pytest.raises(DataError, match=words), written_to(tmp_path):
            raise error


def test_the_digest_of_the_payload_is_checked(tmp_path):
    write_checkpoint(tmp_path, 3, STATE)
    change_manifest(tmp_path / "00000003", files={"state.safetensors": hashlib.sha256(b"other").hexdigest()})
    with pytest.raises(IntegrityError, match="does not match its manifest"):
        read_checkpoint(tmp_path)


def test_a_folder_below_a_file_is_refused_with_the_name_of_the_file(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*runs' is a file; give another folder"):
        write_label(tmp_path / "runs" / "ab12", Label("mine"))
