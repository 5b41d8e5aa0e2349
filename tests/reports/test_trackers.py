import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest

from fedgma.errors import ConfigError
from fedgma.records.reader import read_runs
from fedgma.reports.trackers import to_mlflow, to_tensorboard, to_wandb
from run_folders import write_run

WRITERS = {
    "tensorboard": to_tensorboard,
    "mlflow": lambda runs, out: to_mlflow(runs, uri=out.as_uri()),
    "wandb": lambda runs, out: to_wandb(runs, out=out, mode="offline"),
}


@pytest.mark.parametrize("package", WRITERS)
def test_a_tracker_that_is_not_installed_is_named(tmp_path, package):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    write_run(tmp_path)
    with pytest.raises(ConfigError, match=f"needs {package}, which is not installed"):
        WRITERS[package](read_runs([tmp_path]), tmp_path / "out")


def test_tensorboard_gets_every_number_of_every_round(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path / "runs", rounds=3)
    (run,) = read_runs([tmp_path / "runs"])
    (folder,) = to_tensorboard([run], tmp_path / "board")
    events = EventAccumulator(str(folder)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("test/accuracy")]
    assert found == [(r["round"], pytest.approx(r["test"]["accuracy"])) for r in run.rounds]


def test_mlflow_gets_settings_and_rounds(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no database package
    from mlflow.tracking import MlflowClient

    write_run(tmp_path / "runs", rounds=3)
    (run,) = read_runs([tmp_path / "runs"])
    uri = (tmp_path / "mlruns").as_uri()
    (name,) = to_mlflow([run], uri=uri)
    client = MlflowClient(tracking_uri=uri)
    found = [(metric.step, metric.value) for metric in client.get_metric_history(name, "test/accuracy")]
    assert found == [(r["round"], r["test"]["accuracy"]) for r in run.rounds]
    assert client.get_run(name).data.params["partition.clients"] == "100"
    assert client.get_run(name).info.status == "FINISHED"


def test_wandb_gets_settings_and_rounds(tmp_path, monkeypatch):
    """A stand-in with the part of the interface that is used; the real package starts a server process."""
    started = []

    def init(**options):
        started.append(SimpleNamespace(options=options, logged=[], finished=False, id="a1"))
        tracked = started[-1]
        tracked.log = lambda numbers, step: tracked.logged.append((step, numbers["test/accuracy"]))
        tracked.finish = lambda: setattr(tracked, "finished", True)
        return tracked

    wandb = ModuleType("wandb")
    wandb.__spec__, wandb.init = ModuleSpec("wandb", None), init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write_run(tmp_path / "runs", rounds=3)
    (run,) = read_runs([tmp_path / "runs"])
    assert to_wandb([run], out=tmp_path, mode="offline") == ["a1"]
    (tracked,) = started
    assert tracked.logged == [(r["round"], r["test"]["accuracy"]) for r in run.rounds]
    assert tracked.finished
    assert tracked.options["config"]["partition.clients"] == 100
    assert (tracked.options["mode"], tracked.options["dir"]) == ("offline", str(tmp_path))
