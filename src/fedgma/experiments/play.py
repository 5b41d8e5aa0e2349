"""Plays settings: runs that can share a fleet do, every round is recorded, a stopped run goes on where it was.

    for played in fedgma.rounds({"rounds": 20}):                   # in a notebook, nothing is written
        print(played.run.settings.aggregator, played.line["round"], played.line.get("test"))
    outcome = fedgma.run("settings.toml", out="runs")              # run folders, resumed if they are there

`data` and `model` take the user's own arrays and module in place of names.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgma import fleet as fleets
from fedgma.errors import ConfigError, Diverged
from fedgma.experiments import outcomes
from fedgma.experiments.checkpoints import Checkpoint
from fedgma.experiments.config import Settings, complete, fingerprint, record
from fedgma.experiments.grids import Grid, expand, read_grid
from fedgma.experiments.lines import describe_run, line_of
from fedgma.experiments.materials import Data, Materials
from fedgma.experiments.records import Line, RunFolder, is_done, read_lines
from fedgma.models import Model, build, parameter_count

CHECKPOINT_SECONDS = 10.0
SMALL = 1_000_000  # parameters of a model whose steps are too short for threads to meet at
BYTES_AN_ENTRY = 64  # of a run's state and sums, while its fleet plays

Config = str | os.PathLike[str] | Mapping[str, Any] | Settings | Grid | None


class Planned(NamedTuple):
    """A run that is to be played, or was."""

    settings: Settings
    recorded: dict[str, Any]
    fingerprint: str
    folder: Path | None


class Played(NamedTuple):
    """A round of a run, as it was recorded."""

    run: Planned
    line: Line


class Outcome(NamedTuple):
    """Everything that came out: runs with their lines, arms over seeds, paired verdicts."""

    runs: tuple[tuple[Planned, list[Line]], ...]
    arms: tuple[outcomes.Arm, ...]
    comparisons: tuple[outcomes.Comparison, ...]


def grid_of(config: Config) -> Grid:
    """The runs that a settings file, a mapping, or nothing at all stands for."""
    if isinstance(config, Grid):
        return config
    if isinstance(config, Settings):
        return Grid((complete(config),), ())
    if isinstance(config, Mapping):
        return expand(config)
    return read_grid(None if config is None else Path(config))


def plan(grid: Grid, materials: Materials, out: Path | None) -> list[Planned]:
    """Name every run of a grid, and the folder it has or will have."""
    planned = []
    for settings in grid.runs:
        adopted = materials.adopt(settings)
        recorded = record(adopted)
        name = fingerprint(recorded, materials.contents(adopted))
        planned.append(Planned(adopted, recorded, name, None if out is None else out / name))
    return planned


def missing(runs: Sequence[Planned]) -> list[Planned]:
    """Those that are not done yet."""
    return [run for run in runs if run.folder is None or not is_done(run.folder)]


def pack(runs: Sequence[Planned], materials: Materials) -> list[list[Planned]]:
    """Runs in fleets: those that share data set, shift, model and batch size, as many as fit into memory."""
    together: dict[tuple[Any, ...], list[Planned]] = {}
    for run in runs:
        chosen = run.settings
        key = (chosen.dataset, chosen.shift.name, chosen.model, chosen.batch_size)
        together.setdefault(key, []).append(run)
    packed = []
    for members in together.values():
        most = _runs_that_fit(members, materials)
        packed += [members[first : first + most] for first in range(0, len(members), most)]
    return packed


def play_fleet(
    members: Sequence[Planned],
    materials: Materials,
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Played]:
    """Play the runs of one fleet to their ends, or until `stop`; what has a folder is recorded and resumed."""
    with contextlib.ExitStack() as opened:
        specs = [materials.spec(run.settings) for run in members]
        if materials.precision != "fp32" and materials.device.type == "cpu":
            raise ConfigError(f"precision {materials.precision!r} is for a GPU; on a CPU everything is 'fp32'")
        fleet = fleets.assemble(specs, precision=materials.precision)
        parameters = parameter_count(fleet.model)
        opened.enter_context(_few_threads(fleet.device.type == "cpu" and parameters < SMALL))
        folders = [_open(run, materials, parameters, opened) for run in members]
        found = [None if folder is None else folder.resume() for folder in folders]
        state = _resume(fleet, found)
        saved = time.monotonic()
        for run, folder in enumerate(folders):
            if state.rounds[run] >= specs[run].rounds:  # killed between its last checkpoint and its mark
                _finish(folder, fleet, state, run)
        while any(state.rounds[run] < spec.rounds for run, spec in enumerate(specs)):
            if stop():
                _save(folders, fleet, state)
                return
            began = time.perf_counter()
            state, played = fleets.play_round(fleet, state)
            records = played.records
            seconds = (time.perf_counter() - began) / len(records)
            for entry in records:
                line = line_of(entry, seconds)
                if (folder := folders[entry.run]) is not None:
                    folder.append(line)
                if entry.round == specs[entry.run].rounds:
                    _finish(folders[entry.run], fleet, state, entry.run)
                yield Played(members[entry.run], line)
            if time.monotonic() - saved >= checkpoint_seconds:
                _save(folders, fleet, state)
                saved = time.monotonic()


def rounds(
    config: Config = None,
    *,
    data: Data | None = None,
    model: Model | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
) -> Iterator[Played]:
    """Play every run of a configuration, round by round; with `out`, into run folders, doing only what is missing."""
    grid = grid_of(config)
    materials = Materials(device, folder=grid.folder, data=data, model=model)
    planned = plan(grid, materials, None if out is None else Path(out))
    for members in pack(missing(planned), materials):
        yield from play_fleet(members, materials)


def run(
    config: Config = None,
    *,
    data: Data | None = None,
    model: Model | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
) -> Outcome:
    """Play every run of a configuration and say what came out."""
    grid = grid_of(config)
    materials = Materials(device, folder=grid.folder, data=data, model=model)
    planned = plan(grid, materials, None if out is None else Path(out))
    lines: dict[str, list[Line]] = {}
    for members in pack(missing(planned), materials):
        for played in play_fleet(members, materials):
            lines.setdefault(played.run.fingerprint, []).append(played.line)
    return conclude(planned, grid.axes, lines)


def conclude(planned: Sequence[Planned], axes: Sequence[str], lines: Mapping[str, list[Line]] | None = None) -> Outcome:
    """Summaries and verdicts of runs: from their folders, or from `lines` where a run has none."""
    held = [
        (run, read_lines(run.folder) if run.folder is not None else (lines or {}).get(run.fingerprint, []))
        for run in planned
    ]
    summaries = [(run.recorded, outcomes.summarise(found)) for run, found in held if found]
    arms = outcomes.gather([(settings, one) for settings, one in summaries if one is not None], axes)
    if held and all(found and _is_lost(found[-1]) for _, found in held):
        raise Diverged("no run kept a finite update to its end; lower client_learning_rate or set gradient_clip")
    return Outcome(tuple(held), tuple(arms), tuple(outcomes.compare(arms)))


def _is_lost(line: Line) -> bool:
    """Whether a run had come to nothing finite in this round."""
    loss = line["train"]["loss"]
    return line["counted"] == 0 or loss is None or not math.isfinite(loss)


def _open(run: Planned, materials: Materials, parameters: int, opened: contextlib.ExitStack) -> RunFolder | None:
    if run.folder is None:
        return None
    head = describe_run(run.fingerprint, run.recorded, materials.dataset(run.settings), materials.device)
    more = {"precision": materials.precision, "parameters": parameters}
    return opened.enter_context(RunFolder(run.folder, {**head, **more}))


@contextlib.contextmanager
def _few_threads(small: bool) -> Iterator[None]:
    """One thread in torch for small models: as fast, the same bits on any machine, and no waiting on a busy one.

    Threads that meet at every small sum wait for the one that is not running: minutes instead of seconds where other
    programs run. The CPU kernels have threads of their own, which take whole clients.
    """
    import torch

    before = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _resume(fleet: fleets.Fleet, found: Sequence[Checkpoint | None]) -> fleets.State:
    """The state to go on from: that of the checkpoints, and the first one for runs that have none."""
    fresh = fleets.start(fleet)
    if all(point is None for point in found):
        return fresh
    states = [fleets.export(fleet, fresh, run) if point is None else point.state for run, point in enumerate(found)]
    try:
        return fleets.restore(fleet, states)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"a checkpoint does not fit the model ({error}); was the model's code changed?") from None


def _save(folders: Sequence[RunFolder | None], fleet: fleets.Fleet, state: fleets.State) -> None:
    """A checkpoint of every run that is under way."""
    for run, folder in enumerate(folders):
        if folder is not None and 0 < state.rounds[run] < fleet.specs[run].rounds:
            folder.checkpoint(int(state.rounds[run]), fleets.export(fleet, state, run))


def _finish(folder: RunFolder | None, fleet: fleets.Fleet, state: fleets.State, run: int) -> None:
    if folder is not None:
        arrays = fleets.export(fleet, state, run)
        kept = {name: value for name, value in arrays.items() if name.startswith(("params/", "buffers/"))}
        folder.finish(int(state.rounds[run]), kept)


def _runs_that_fit(members: Sequence[Planned], materials: Materials) -> int:
    """How many runs of these one fleet may hold: about half of the device's free memory."""
    import torch

    first = materials.spec(members[0].settings)
    pool = first.federation.train
    none = torch.zeros(1, dtype=torch.int64, device=pool.y.device)
    entries = parameter_count(build(first.model, tuple(pool.batch(none, none)[0].shape[1:]), pool.classes, 0))
    variates = max(len(first.federation.clients) * 4 if m.settings.algorithm == "scaffold" else 0 for m in members)
    on_gpu = materials.device.type == "cuda"
    free = torch.cuda.mem_get_info(materials.device)[0] if on_gpu else _free_memory()
    return max(1, int(free // 2 // (entries * (BYTES_AN_ENTRY + variates))))


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system says
        return 4 * 2**30
