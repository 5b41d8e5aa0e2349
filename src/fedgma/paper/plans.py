"""Plan the runs of an experiment: expand its parts, fill in learning rates, and apply the user's limits."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fedgma.data.files.locate import availability
from fedgma.errors import ConfigError
from fedgma.experiments.grid import Grid, every_name, expand
from fedgma.experiments.settings import Settings, record
from fedgma.paper.catalogue import Experiment, Part, merged, seeds_of
from fedgma.paper.rates import Chosen, rated
from fedgma.records.format import fingerprint
from fedgma.records.reader import flat
from fedgma.statistics.labels import plain, sortable

# training samples, and samples per writer if every writer is a client
SIZES = {
    "mnist": 60_000,
    "mnist-writers": 60_000,
    "fmnist": 60_000,
    "fmnist-mini": 10_000,
    "fedcmnist": 60_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "tinyimagenet": 100_000,
    "femnist": 38_541,
}
A_WRITER = 105


class Cut(NamedTuple):
    """Limits on an experiment: the most rounds, the most seeds, and a filter of cells."""

    rounds: int | None = None
    seeds: int | None = None
    cells: str = ""  # "dataset=mnist|fmnist,partition.clients=100"
    quick: bool = False  # embedded images in place of the data sets, as a check that it works


WHOLE = Cut()


@dataclass(frozen=True)
class Plan:
    """The runs of an experiment, with the part that each belongs to."""

    runs: tuple[tuple[Part, Settings], ...]
    unrated: tuple[str, ...]  # data set and algorithm without chosen rates
    unsearched: tuple[str, ...] = ()  # those of them that have to be searched first

    @cached_property
    def named(self) -> Mapping[str, Settings]:
        """Every run once, by the fingerprint of its settings."""
        once: dict[str, Settings] = {}
        for _, settings in self.runs:
            once.setdefault(fingerprint(record(settings)), settings)
        return once

    @property
    def grid(self) -> Grid:
        """The runs as a sweep, each once; seeds are not among the settings that tell runs apart."""
        return Grid(tuple(self.named.values()), ("dataset", "algorithm", "aggregator", "seed"))


def plan_runs(experiment: Experiment, chosen: Chosen, cut: Cut = WHOLE) -> Plan:
    """Every run of an experiment with the chosen rates, within the limits of `cut`."""
    wanted = parse_cells(cut.cells)
    runs: list[tuple[Part, Settings]] = []
    unrated: dict[str, bool] = {}
    for part in experiment.parts:
        for settings in _expanded(part, experiment, chosen, cut):
            if wanted and not _fits(dict(flat(record(settings))), wanted):
                continue
            run, has_rates = rated(settings, part, chosen)
            runs.append((part, run))
            if not has_rates:
                unrated[f"{run.dataset} {run.algorithm}"] = part.searched
    return Plan(tuple(runs), tuple(unrated), tuple(name for name, needed in unrated.items() if needed))


def check_cells(experiment: Experiment, chosen: Chosen, cut: Cut) -> None:
    """Refuse `cut.cells` that no run of an experiment fits, with the values that it has."""
    if not cut.cells or plan_runs(experiment, chosen, cut).runs:
        return
    every = [dict(flat(record(run))) for _, run in plan_runs(experiment, chosen, cut._replace(cells="")).runs]
    held = {name: {plain(run.get(name)): None for run in every} for name in parse_cells(cut.cells)}
    known = "; ".join(f"{name} {', '.join(sorted(values, key=sortable))}" for name, values in held.items())
    quick = "; --quick puts embedded images in place of its data sets" if cut.quick else ""
    raise ConfigError(f"no cell of {experiment.id} fits --cells {cut.cells!r}; it has {known}{quick}")


def _expanded(part: Part, experiment: Experiment, chosen: Chosen, cut: Cut) -> Iterator[Settings]:
    """The runs of a part; a coloured data set gets the shift that was chosen for it."""
    given = {
        **part.settings,
        "seed": _seeds(experiment, cut.seeds or experiment.seeds),
    }
    if cut.rounds is not None:
        given["rounds"] = cut.rounds
    if cut.quick:
        given = _embedded(given)
    datasets = given.get("dataset", "fmnist-mini")
    for dataset in datasets if isinstance(datasets, list) else [datasets]:
        shift = chosen.shift.get(dataset)
        shifted = given if shift is None else merged({"shift": dict(shift)}, given)
        yield from expand({**shifted, "dataset": dataset}).runs


def _seeds(experiment: Experiment, number: int) -> list[int]:
    own = seeds_of(experiment)
    if number > len(own):
        raise ConfigError(
            f"{experiment.id} has at most {len(own)} seeds, got {number}: those from {own.stop} on are of the "
            "experiment that repeats it with new seeds"
        )
    return list(own[:number])


def _embedded(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings on embedded images; these have no writers, so a partition by writer becomes random."""
    part = given.get("partition", {})
    names = part.get("name", "label_skew")
    kinds = ["iid" if name == "natural" else name for name in (names if isinstance(names, list) else [names])]
    partition = {**part, "name": list(dict.fromkeys(kinds)), "clients": part.get("clients", 400)}
    shift = {"shift": {"name": "colour"}} if given.get("dataset") == "fedcmnist" else {}
    return {**given, "dataset": "fmnist-mini", "partition": partition, **shift}


def parse_cells(text: str) -> dict[str, tuple[str, ...]]:
    """Parse `dataset=mnist|fmnist,clients=100` into full names and accepted values.

    >>> parse_cells("dataset=mnist|fmnist,clients=100")
    {'dataset': ('mnist', 'fmnist'), 'partition.clients': ('100',)}
    """
    wanted = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, sign, values = (side.strip() for side in word.partition("="))
        full = [known for known in every_name() if known == name or known.endswith(f".{name}")]
        full = [name] if name in full else full
        if not sign or not values or len(full) != 1:
            near = f"; did you mean {' or '.join(full)}?" if full else ""
            raise ConfigError(f"--cells expects setting=value pairs such as dataset=mnist|fmnist, got {word!r}{near}")
        wanted[full[0]] = tuple(value.strip() for value in values.split("|"))
    return wanted


def _fits(settings: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]) -> bool:
    return all(any(same(settings.get(name), text) for text in texts) for name, texts in wanted.items())


def same(value: Any, text: str) -> bool:
    """Whether a setting equals a text; numbers are compared as numbers.

    >>> same(1.0, "1"), same("iid", "iid"), same(None, "1")
    (True, True, False)
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) == float(text)
        except ValueError:
            return False
    return str(value) == text


def samples(settings: Settings) -> int:
    """About how many samples a run trains on, over all its rounds and clients."""
    return settings.rounds * samples_a_round(dict(flat(settings.model_dump())))


def samples_a_round(settings: Mapping[str, Any]) -> int:
    """About how many samples a run with these settings, by dotted name, trains on in a round.

    >>> samples_a_round({"dataset": "mnist", "partition.clients": 100, "clients_per_round": 10, "local_epochs": 3})
    18000
    """
    size, clients = SIZES.get(settings["dataset"], SIZES["mnist"]), settings["partition.clients"]
    held = A_WRITER if clients is None else size / clients
    trained = held * (settings.get("local_epochs") or 1)
    if (steps := settings.get("local_steps")) is not None:
        trained = min(trained, steps * settings["batch_size"])
    return round((settings.get("clients_per_round") or 10) * trained)


def absent_data(datasets: Iterable[str]) -> list[str]:
    """The data sets that are not on this machine."""
    here = {dataset.name for dataset in availability() if dataset.here}
    return [name for name in dict.fromkeys(datasets) if name not in here]
