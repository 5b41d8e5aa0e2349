"""The model of a run folder: of any kind of run, finished or not."""

import numpy as np
import pytest

from fedgma.errors import DataError, IntegrityError
from fedgma.records.trained import Trained, metadata, read_model, write_model
from fedgma.records.writer import RunFolder

HEAD = {"settings": {"rounds": 2, "model": "net"}, "parameters": 3, "fingerprint": "ab" * 8}


def write(path, state, *, final=None, rounds=2):
    with RunFolder(path, HEAD) as folder:
        folder.resume()
        for round in range(1, rounds + 1):
            folder.append({"round": round})
        folder.checkpoint(rounds, state)
        if final is not None:
            folder.finish(rounds, final, keep=True)


def test_the_model_of_a_flower_run_is_read_too(tmp_path):
    weights = np.arange(3.0)
    write(tmp_path, {"arrays/w": weights, "state/z/w": weights, "medians": weights}, final={"w": weights})
    model = read_model(str(tmp_path))
    assert (model.round, list(model.arrays)) == (2, ["w"])


def test_an_unfinished_run_has_the_model_of_its_newest_checkpoint(tmp_path):
    write(tmp_path, {"params/a.w": np.ones(2), "buffers/n": np.array(4), "z/a.w": np.ones(2)}, rounds=1)
    model = read_model(tmp_path)
    assert (model.round, model.arrays["n"].item()) == (1, 4)
    assert list(model.arrays) == ["a.w", "n"]


def test_a_run_that_has_not_been_saved_yet_says_so(tmp_path):
    with RunFolder(tmp_path, HEAD) as folder:
        folder.resume()
    with pytest.raises(DataError, match="has no checkpoint yet"):
        read_model(tmp_path)


def test_a_model_of_another_checksum_is_refused(tmp_path):
    write(tmp_path, {"params/w": np.ones(2)}, final={"params/w": np.zeros(2)})
    with pytest.raises(IntegrityError, match="not the one that its run ended with"):
        read_model(tmp_path)


def test_metadata_are_texts_and_hold_how_images_were_normalised(tmp_path):
    from safetensors import safe_open

    facts = {"name": "mine", "classes": ["a", "b"], "normalisation": {"mean": [0.5], "std": [0.25]}}
    model = Trained(2, {"w": np.ones(2, np.float32)}, {"format": 3, **HEAD, "data": facts})
    with safe_open(write_model(model, str(tmp_path / "deep" / "m.safetensors")), "np") as file:
        said = file.metadata()
    assert said == metadata(model)
    assert said["normalisation"] == '{"mean": [0.5], "std": [0.25]}'
    assert (said["format"], said["dataset"], said["classes"]) == ("pt", "mine", '["a", "b"]')


def test_a_record_that_holds_anything_is_no_traceback(tmp_path):
    head = {**HEAD, "tied": {"b": ["w"], "c": "w"}, "data": 3, "versions": "new"}
    with RunFolder(tmp_path, head) as folder:
        folder.resume()
        folder.append({"round": 1})
        folder.checkpoint(1, {"params/w": np.ones(2)})
    model = read_model(tmp_path)
    assert list(model.arrays) == ["w", "c"]
    assert metadata(model)["model"] == "net"
