"""Export run folders to TensorBoard, MLflow and Weights & Biases. The packages are optional and imported on use."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedgma.documents import PathLike
from fedgma.errors import ConfigError
from fedgma.records.format import Record
from fedgma.records.reader import Run
from fedgma.statistics.labels import plain


def scalars(record: Record, before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of one round by path; lists are left out.

    >>> list(scalars({"round": 3, "test": {"accuracy": 0.5}, "refused": []}))
    [('test/accuracy', 0.5)]
    """
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "round":
            yield f"{before}{name}", float(value)


def to_tensorboard(runs: Sequence[Run], out: PathLike) -> list[Path]:
    """Write event files, one folder per run, for `tensorboard --logdir OUT`."""
    _needs("tensorboard", "pip install tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    folders = []
    for run in runs:
        folders.append(Path(out) / run.folder.name)
        writer: Any = SummaryWriter(str(folders[-1]))
        writer.add_text("settings", "\n".join(f"    {name}: {plain(value)}" for name, value in run.settings.items()))
        for record in run.rounds:
            for name, value in scalars(record):
                writer.add_scalar(name, value, int(record["round"]))
        writer.close()
    return folders


def to_mlflow(runs: Sequence[Run], *, experiment: str = "fedgma", uri: str | None = None) -> list[str]:
    """Log settings and rounds, one MLflow run per run folder; return their ids. Unfinished runs stay open."""
    _needs("mlflow", "pip install mlflow-skinny")
    from mlflow.entities import Metric, Param  # type: ignore[import-not-found, unused-ignore]
    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    client = MlflowClient(tracking_uri=uri)
    existing = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if existing is None else existing.experiment_id
    run_ids = []
    for run in runs:
        name = client.create_run(experiment_id, run_name=run.folder.name).info.run_id
        metrics = [Metric(key, value, 0, int(r["round"])) for r in run.rounds for key, value in scalars(r)]
        client.log_batch(name, params=[Param(key, plain(value)) for key, value in run.settings.items()])
        for start in range(0, len(metrics), 1000):  # the largest batch that MLflow accepts
            client.log_batch(name, metrics=metrics[start : start + 1000])
        if run.finished:
            client.set_terminated(name)
        run_ids.append(str(name))
    return run_ids


def to_wandb(
    runs: Sequence[Run], *, project: str = "fedgma", out: PathLike | None = None, mode: str | None = None
) -> list[str]:
    """Log settings and rounds, one W&B run per run folder; return their ids.

    W&B sends runs to its server. `mode="offline"` only writes them below `out`, for `wandb sync` later.
    """
    _needs("wandb", "pip install wandb")
    import wandb  # type: ignore[import-not-found, unused-ignore]

    run_ids = []
    for run in runs:
        folder = None if out is None else str(out)
        tracked: Any = wandb.init(
            project=project, name=run.folder.name, config=dict(run.settings), dir=folder, mode=mode, reinit="create_new"
        )
        for record in run.rounds:
            tracked.log(dict(scalars(record)), step=int(record["round"]))
        tracked.finish()
        run_ids.append(str(tracked.id))
    return run_ids


def _needs(package: str, how: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"the export needs {package}, which is not installed; install it with `{how}`")
