"""Planning: a configuration becomes named runs with their folders, and runs become fleets."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.aggregation.kernels.plain import FURTHER
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import BASELINE
from fedgma.data.pools import input_shape
from fedgma.errors import ConfigError
from fedgma.experiments.grid import Grid, expand, from_python, read_file
from fedgma.experiments.materials import Materials
from fedgma.experiments.own.tasks import metric_facts
from fedgma.experiments.settings import Settings, complete, record
from fedgma.records.format import FORMAT, Done, Head, Identity, MetricFacts, Record, fingerprint, lineage
from fedgma.records.reader import Run, flat, is_done
from fedgma.simulation.algorithms import ALGORITHMS
from fedgma.simulation.spec import SHARED
from fedgma.training.models import build, parameter_count

BYTES_AN_ENTRY = 64  # of a run's state and sums, while its fleet trains
LOG = logging.getLogger(__name__)

Config = str | os.PathLike[str] | Mapping[str, Any] | Settings | Grid | None


class Planned(NamedTuple):
    """A run of a plan, trained or not yet."""

    settings: Settings
    recorded: dict[str, Any]
    identity: Identity
    fingerprint: str  # of its recorded settings and its identity
    folder: Path | None
    lineage: str = ""  # fingerprint without the number of rounds
    notes: tuple[str, ...] = ()  # warnings on its identity
    metrics: tuple[MetricFacts, ...] = ()  # of its task; empty for a classification


def grid_of(config: Config, rule: str | None = None, *, task: str | None = None, own: bool = False) -> Grid:
    """The runs of a settings file or a mapping; of the defaults if None is given. `own`: the user passes the data.

    With `rule`, the name of a rule that was passed in Python, a single run takes it; the runs of a file or a mapping
    are repeated with it beside the aggregators that are named there, by default the mean. `task` replaces theirs.
    """
    changed: dict[str, Any] = {} if task is None else {"task": task}
    if isinstance(config, Settings):
        settings = complete(config.model_copy(update=changed), own=own)
        return Grid((settings if rule is None else settings.model_copy(update={"aggregator": rule}),), ())
    if isinstance(config, Grid):
        return config if rule is None else config._replace(runs=_with_rule(config.runs, rule))
    if not (config is None or isinstance(config, Mapping | str | os.PathLike)):
        raise ConfigError(
            f"expected the path of a settings file, or settings such as {{'rounds': 20}}, got {type(config).__name__}"
        )
    file = None if config is None or isinstance(config, Mapping) else Path(config)
    of_file = {} if file is None else read_file(file)
    given = from_python(config) if isinstance(config, Mapping) else of_file
    if rule is not None:
        named = given.get("aggregator", [BASELINE])
        changed["aggregator"] = [*(named if isinstance(named, list) else [named]), rule]
    return expand({**given, **changed}, own=own)._replace(folder=None if file is None else file.resolve().parent)


def _with_rule(runs: Sequence[Settings], rule: str) -> tuple[Settings, ...]:
    """The runs, and each of them with another rule, once."""
    return (*runs, *dict.fromkeys(run.model_copy(update={"aggregator": rule}) for run in runs))


def plan(grid: Grid, materials: Materials, out: Path | None) -> list[Planned]:
    """The runs of a grid with their names and folders; the folders may not exist yet."""
    adopted = dict.fromkeys(materials.adopt(settings) for settings in grid.runs)  # two may become one
    planned = [_planned(settings, materials, out) for settings in adopted]
    for note in dict.fromkeys(note for run in planned for note in run.notes):
        LOG.warning("%s", note)
    return planned


def _planned(settings: Settings, materials: Materials, out: Path | None) -> Planned:
    recorded, identity = record(settings), materials.identity(settings)
    name = fingerprint(recorded, identity)
    return Planned(
        settings=settings,
        recorded=recorded,
        identity=identity,
        fingerprint=name,
        folder=None if out is None else out / name,
        lineage=lineage(recorded, identity),
        notes=tuple(materials.notes(settings)),
        metrics=metric_facts(materials.task(settings)),
    )


def as_run(run: Planned, lines: Sequence[Record] = (), sha256: str = "") -> Run:
    """A planned run as the reader would return it, for reports; `sha256`: the checksum of its model, if known."""
    done = Done(rounds=len(lines), sha256=sha256) if len(lines) == run.settings.rounds else None
    return Run(run.folder or Path(run.fingerprint), head_of(run), dict(flat(run.recorded)), tuple(lines), done)


def head_of(run: Planned) -> Head:
    """The part of a run's head that is known before it starts."""
    head = Head(format=FORMAT, fingerprint=run.fingerprint, lineage=run.lineage, settings=run.recorded)
    head["identity"] = run.identity
    if run.metrics:
        head["metrics"] = list(run.metrics)
    if run.notes:
        head["notes"] = list(run.notes)
    return head


def missing(runs: Sequence[Planned]) -> list[Planned]:
    """The runs that are not done yet."""
    return [run for run in runs if run.folder is None or not is_done(run.folder)]


def alike(runs: Sequence[Planned]) -> list[list[Planned]]:
    """Runs grouped by what a fleet must share: data set, shift and the settings in `SHARED`."""
    together: dict[tuple[Any, ...], list[Planned]] = {}
    for run in runs:
        chosen = run.settings
        text = (chosen.sequence_length, chosen.sequence_unit)
        key = (chosen.dataset, text, chosen.shift.name, *(getattr(chosen, name) for name in SHARED))
        together.setdefault(key, []).append(run)
    return list(together.values())


def pack(runs: Sequence[Planned], materials: Materials) -> list[list[Planned]]:
    """Runs grouped into fleets, each as large as memory allows."""
    packed = []
    for members in alike(runs):
        most = _runs_that_fit(members, materials)
        packed += [members[first : first + most] for first in range(0, len(members), most)]
    return packed


def _runs_that_fit(members: Sequence[Planned], materials: Materials) -> int:
    """How many of these runs fit into one fleet: they may take about half of the device's free memory."""
    import torch

    first = materials.spec(members[0].settings)
    entries = entries_of(members[0].settings, materials)
    arrays = max(ALGORITHMS[m.settings.algorithm].read(m.settings).arrays_of_a_client for m in members)
    variates = len(first.federation.clients) * 4 * arrays
    on_gpu = materials.device.type == "cuda"
    free = torch.cuda.mem_get_info(materials.device)[0] if on_gpu else _free_memory()
    of_rules = max(_bytes_of_rule(materials.rule(m.settings)) for m in members)
    return max(1, int(free // 2 // (entries * (BYTES_AN_ENTRY + variates + of_rules))))


def _bytes_of_rule(rule: Rule) -> int:
    """Bytes an entry that a rule's further sums, its state and the temporaries of its function take."""
    sums = 8 * sum(len(FURTHER[group]) for group in rule.further)
    return 0 if not rule.further and not rule.state else 2 * (sums + 4 * len(rule.state))


def entries_of(settings: Settings, materials: Materials) -> int:
    """The number of trainable entries of a run's model; for products of adapters, no more than all of its entries."""
    spec = materials.spec(settings)
    pool = spec.federation.train
    model = build(spec.model, input_shape(pool), pool.classes, 0)
    return parameter_count(model) if spec.adapters is None else sum(value.numel() for value in model.parameters())


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not known on every system
        return 4 * 2**30
