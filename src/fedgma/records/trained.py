"""The trained model of a run: arrays under the names of torch's `state_dict`, and a file that plain torch can load.

net.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedgma.documents import PathLike
from fedgma.errors import ConfigError, DataError, IntegrityError
from fedgma.records.checkpoints import Checkpoint, digest, read_checkpoint, write_atomic, written_to
from fedgma.records.format import Head
from fedgma.records.reader import is_done, read_head, read_object
from fedgma.records.writer import mismatch_in

PARTS = ("params/", "buffers/", "arrays/")  # of a state that belong to the model; `arrays/` is a Flower run's
AVERAGE = "average/"  # of the parameters over rounds, which runs with `server_average` are evaluated by


class Trained(NamedTuple):
    """A model as it was after a round."""

    round: int
    arrays: dict[str, np.ndarray]  # by the names of `state_dict`
    head: Head  # run.json of its run


def model_arrays(state: Mapping[str, np.ndarray], tied: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """The arrays of a state that make up the model, by the names that the model gives them, `tied` ones too.

    With `server_average`, the average is the model that was evaluated, and so it is here.

    >>> model_arrays({"round": np.array(3), "params/fc.weight": np.ones(1), "z/fc.weight": np.ones(1)})
    {'fc.weight': array([1.])}
    """
    arrays = {name.partition("/")[2]: value for name, value in state.items() if name.startswith(PARTS)}
    averages = {name.removeprefix(AVERAGE): value for name, value in state.items() if name.startswith(AVERAGE)}
    arrays |= {name: value.astype(arrays[name].dtype) for name, value in averages.items()}
    return arrays | {name: arrays[str(first)] for name, first in (tied or {}).items() if str(first) in arrays}


def read_model(folder: PathLike) -> Trained:
    """The final model of a finished run, or that of the newest checkpoint of an unfinished one."""
    folder = Path(folder)
    head = read_head(folder)
    point = read_checkpoint(folder / "checkpoints", problem=mismatch_in(folder))
    if point is None:
        raise DataError(_no_model(folder))
    if is_done(folder):
        _check_final(folder, point)
    return Trained(point.round, model_arrays(point.state, _mapping(head.get("tied"))), head)


def write_model(model: Trained, file: PathLike) -> Path:
    """Write a model as a safetensors file, with what is known about it as metadata."""
    from safetensors.numpy import save

    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; give a file, such as {str(path / 'net.safetensors')!r}")
    if path.suffix != ".safetensors":
        fitting = str(path.with_suffix(".safetensors"))
        raise ConfigError(f"models are written as safetensors; give a file such as {fitting!r}, got {str(path)!r}")
    payload = save({name: np.asarray(value, order="C") for name, value in model.arrays.items()}, metadata(model))
    with written_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, payload)
    return path


def metadata(model: Trained) -> dict[str, str]:
    """What the record says about a model, as text: its run, round, classes, data and how they were prepared."""
    head = model.head
    data = _mapping(head.get("data"))
    facts = {
        "format": "pt",  # the names are torch's
        "fedgma": _mapping(head.get("versions")).get("fedgma"),
        "run": head.get("fingerprint"),
        "round": model.round,
        "model": head["settings"].get("model"),
        "dataset": data.get("name", head["settings"].get("dataset")),
        **{name: data.get(name) for name in ("classes", "shape", "normalisation")},
        "settings": head["settings"],
    }
    return {name: _text(value) for name, value in facts.items() if value is not None}


def _mapping(value: Any) -> Mapping[str, Any]:
    """A part of a record that should be a mapping; an empty one if it is something else."""
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _check_final(folder: Path, point: Checkpoint) -> None:
    """Compare a kept model with the checksum that was recorded when its run ended."""
    kept = {name: value for name, value in point.state.items() if name.startswith(PARTS)}
    if any(name.startswith("arrays/") for name in kept):
        kept = model_arrays(kept)  # a Flower run's checksum is over plain names
    if digest(kept) != read_object(folder / "done").get("sha256"):
        raise IntegrityError(f"the model in {folder} is not the one that its run ended with; restore it from a copy")


def _no_model(folder: Path) -> str:
    if is_done(folder):
        again = f"`fedgma rm {folder}` and train it again without --no-state (`fedgma paper run`: with --keep)"
        return f"run {folder.name} kept no model; {again}"
    return f"run {folder.name} has no checkpoint yet; continue it with the command that began it"
