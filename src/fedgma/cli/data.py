"""`fedgma data`: list the data sets, download one, show how a partition splits it, prepare a table."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgma.cli.prepare import prepare
from fedgma.cli.runs import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedgma.data.files import Dataset
    from fedgma.data.partitions import Labels, Partition

app = typer.Typer(no_args_is_help=True, help="Data sets: list, get, show; prepare a table.")
app.command()(prepare)

Folder = Annotated[list[Path] | None, typer.Option("--folder", help="Folder with data files (default: $FEDGMA_DATA).")]


@app.command("list")
def list_sets(folder: Folder = None, as_json: Json = False) -> None:
    """List every data set and where this machine has it."""
    from fedgma.cli.tables import say_table
    from fedgma.data.files.locate import availability
    from fedgma.reports.tables import Table

    rows = tuple((dataset.name, dataset.about, dataset.where) for dataset in availability(folder))
    say_table(Table("data", "", ("name", "what", "here"), rows), as_json=as_json)


@app.command()
def get(name: Annotated[str, typer.Argument(help="A data set, e.g. cifar10.")]) -> None:
    """Download a data set into the cache, check it and decode it."""
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from fedgma.data.files import load
    from fedgma.data.files.cache import cache_folder
    from fedgma.data.files.download import download
    from fedgma.data.files.locate import base_name

    bars, tasks = Progress(*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()), dict[str, Any]()

    def progress(file: str, done: int, total: int) -> None:
        bars.start()  # with the first file: a bar without one would leave an empty line
        if file not in tasks:
            tasks[file] = bars.add_task(file)
        bars.update(tasks[file], completed=done, total=total or None)

    try:
        download(base_name(name), cache_folder(), progress=progress)
    finally:
        bars.stop()
    data = load(name)
    typer.echo(f"{name}: {len(data.train.y)} training and {len(data.test.y)} test samples, from {data.source.name}")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A data set, or the path of your own.")],
    partition: Annotated[
        str | None,
        typer.Option(
            help="iid, label_skew, dirichlet, client_dirichlet, quantity, natural (default: as `fedgma run` chooses)."
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of clients (default: 100 if the data suffice; for natural, the owners).")
    ] = None,
    classes_per_client: Annotated[int | None, typer.Option(help="For label_skew: classes of each client.")] = None,
    mode: Annotated[str | None, typer.Option(help="For label_skew: exact or shards.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="For both dirichlet: concentration; small is strong skew.")
    ] = None,
    beta: Annotated[float | None, typer.Option(help="For quantity: concentration; small is strong skew.")] = None,
    min_size: Annotated[int | None, typer.Option(help="For dirichlet and quantity: least samples of a client.")] = None,
    held_out: Annotated[int | None, typer.Option(help="For natural: owners kept for testing.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the pictures and figures.")] = Path("data-show"),
    file_format: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Draw the classes, sizes and sample images of the clients, and print measures of the skew."""
    from fedgma.errors import ConfigError

    if file_format not in ("png", "svg"):
        raise ConfigError(f"unknown picture format {file_format!r}; known: png, svg")
    given = {
        "classes_per_client": classes_per_client,
        "mode": mode,
        "alpha": alpha,
        "beta": beta,
        "min_size": min_size,
        "held_out": held_out,
    }
    settings = {key: value for key, value in given.items() if value is not None}
    try:
        figures = _show(name, partition, clients, settings, seed=seed, out=out, file_format=file_format, folder=folder)
    except OSError as error:
        raise ConfigError(f"cannot write to {str(out)!r}: {error.strerror or error}") from None
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _print_figures(figures)


def _show(
    name: str,
    partition: str | None,
    clients: int | None,
    settings: dict[str, Any],
    *,
    seed: int,
    out: Path,
    file_format: str,
    folder: list[Path] | None,
) -> dict[str, Any]:
    """Write the pictures and skew.json; return the content of skew.json and the names of the files."""
    from fedgma.data.files import load
    from fedgma.data.skew import measure
    from fedgma.data.splits import divide

    data = load(name, folders=folder, target="any")
    partition, clients, settings = _chosen(data, name, partition, clients, settings)
    parts = divide(data, partition, clients, seed=seed, **settings)
    kinds, names = _kinds(data)
    skew = measure(parts, kinds, len(names))
    title = ", ".join([data.name, partition, *(f"{k} {v}" for k, v in settings.items()), f"{skew.clients} clients"])
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for kind, figure in _draw(data, parts, title, seed).items():
        files.append(str(out / f"{kind}.{file_format}"))
        figure.savefig(files[-1], dpi=110)
    request = {"data": data.name, "partition": partition, "seed": seed, **settings}
    source, notes = data.source._asdict(), [*data.notes, *parts.notes]
    report = {"request": request, "source": source, "notes": notes, "skew": skew._asdict()}
    (out / "skew.json").write_text(json.dumps(report, indent=1))
    return {**report, "files": [*files, str(out / "skew.json")]}


def _chosen(
    data: "Dataset", name: str, partition: str | None, clients: int | None, settings: dict[str, Any]
) -> tuple[str, int | None, dict[str, Any]]:
    """The partition with what is open filled in, for a user's data as `fedgma run` does it."""
    from fedgma.data.files import names

    if name in names():
        partition = partition or "label_skew"
        return partition, 100 if clients is None and partition != "natural" else clients, settings
    from fedgma.experiments.grid import check
    from fedgma.experiments.own.defaults import fit_partition
    from fedgma.experiments.settings.partition import completed, details

    named = {key: value for key, value in {"name": partition, "clients": clients}.items() if value is not None}
    part = completed(check({"partition": {**named, **settings}}).partition, seed=0, classes=2, own=True)
    part, _ = fit_partition(part, data)
    skewed = details(part) if part.name == "label_skew" else {}
    return str(part.name), part.clients, {**settings, **skewed}


def _draw(data: "Dataset", parts: "Partition", title: str, seed: int) -> dict[str, "Figure"]:
    """The pictures by name. The imports take seconds, so all checks of the input come before them."""
    from fedgma.data.federation import federate
    from fedgma.data.skew import class_counts
    from fedgma.reports import plots

    kinds, names = _kinds(data)
    drawn = {
        "classes": plots.draw_classes(class_counts(parts, kinds, len(names)), names, title),
        "sizes": plots.draw_sizes(parts.sizes, title),
    }
    if data.train.x.ndim == 4:
        few = sorted({0, len(parts.clients) // 2, len(parts.clients) - 1})
        drawn["images"] = plots.draw_images(federate(data, parts, seed=seed), few)
    return drawn


def _kinds(data: "Dataset") -> "tuple[Labels, tuple[str, ...]]":
    """What tells samples apart, and its names: the class; without classes the owner, or nothing."""
    import numpy as np

    if data.target == "class":
        return data.train.y, data.classes
    owners = np.zeros(len(data.train.y), np.int64) if data.train.client is None else data.train.client
    known, number = np.unique(owners, return_inverse=True)
    return number, tuple(f"owner {owner}" for owner in known) if data.train.client is not None else ("samples",)


def _print_figures(figures: dict[str, Any]) -> None:
    for key, value in figures["skew"].items():
        typer.echo(f"{key.replace('_', ' '):22s} {round(value, 4)}")
    for note in figures["notes"]:
        typer.echo(f"note: {note}")
    typer.echo("written: " + ", ".join(figures["files"]))
