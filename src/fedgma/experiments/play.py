"""Plays settings: runs that can share a fleet do, every round is recorded, a stopped run goes on where it was.

    for played in fedgma.rounds({"rounds": 20}):                   # in a notebook, nothing is written
        print(played.run.settings.aggregator, played.line["round"], played.line.get("test"))
    outcome = fedgma.run("settings.toml", out="runs")              # run folders, resumed if they are there

`data` and `model` take the user's own arrays and module in place of names.
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.errors import ConfigError, Diverged, IntegrityError, NotEnoughClients
from fedgma.experiments.lines import as_planned, describe_run, line_of
from fedgma.experiments.materials import Data, Materials
from fedgma.experiments.plan import Config, Planned, grid_of, missing, pack, plan
from fedgma.records.checkpoints import Checkpoint, checkpoint_rounds, read_checkpoint
from fedgma.records.format import FORMAT, Done, Head, Line, Record
from fedgma.records.reader import Run, curve, finished, flat, read_lines
from fedgma.records.writer import RunFolder
from fedgma.simulation import fleet as fleets
from fedgma.simulation.device_round import Round
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import State, export
from fedgma.statistics.arms import Row, rows
from fedgma.statistics.comparisons import Comparison, against_baseline
from fedgma.training.models import Model, parameter_count

CHECKPOINT_SECONDS = 10.0
SMALL = 1_000_000  # parameters of a model whose steps are too short for threads to meet at
LOG = logging.getLogger(__name__)


class Played(NamedTuple):
    """A round of a run, as it was recorded."""

    run: Planned
    line: Line


class Outcome(NamedTuple):
    """Everything that came out: runs with their rounds, arms over seeds, the others against the plain mean."""

    runs: tuple[Run, ...]
    arms: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]  # of `last10`, cell by cell
    notes: tuple[str, ...] = ()  # what could not be known of the runs


def play_fleet(
    members: Sequence[Planned],
    materials: Materials,
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    keep_state: bool = True,
    wait: float = 0.5,
    stop: Callable[[], bool] = lambda: False,
    ahead: bool | None = None,
) -> Iterator[Played]:
    """Play the runs of one fleet to their ends, or until `stop`; what has a folder is recorded and resumed.

    `wait` is how many seconds another writer of a folder is given to let go; without `keep_state`, finished runs take
    less room and cannot be extended. With `ahead`, which is the default on a GPU, a round is begun before the one
    before it is read and written, so that host and device work at the same time.
    """
    with contextlib.ExitStack() as opened:
        specs = [materials.spec(run.settings) for run in members]
        if materials.precision != "fp32" and materials.device.type == "cpu":
            raise ConfigError(f"precision {materials.precision!r} is for a GPU; on a CPU everything is 'fp32'")
        fleet = fleets.assemble(specs, precision=materials.precision)
        parameters = parameter_count(fleet.model)
        opened.enter_context(_few_threads(fleet.device.type == "cpu" and parameters < SMALL))
        folders = [_open(run, materials, parameters, wait, opened) for run in members]
        extend([(run, spec, held) for run, spec, held in zip(members, specs, folders, strict=True) if held is not None])
        found = [None if folder is None else folder.resume() for folder in folders]
        state = _resume(fleet, found)
        for run, folder in enumerate(folders):
            if state.rounds[run] >= specs[run].rounds:  # killed between its last checkpoint and its mark
                _finish(folder, fleet, state, run, keep_state)
        yield from _play_on(
            members,
            fleet,
            folders,
            state,
            checkpoint_seconds=checkpoint_seconds,
            keep_state=keep_state,
            stop=stop,
            ahead=fleet.device.type == "cuda" if ahead is None else ahead,
        )


def _play_on(
    members: Sequence[Planned],
    fleet: fleets.Fleet,
    folders: Sequence[RunFolder | None],
    state: State,
    *,
    checkpoint_seconds: float,
    keep_state: bool,
    stop: Callable[[], bool],
    ahead: bool,
) -> Iterator[Played]:
    """Rounds from `state` on.

    Where a state is written down, no later round has begun (one changes SCAFFOLD's variates in place) and every line
    up to it stands in its file.
    """
    waiting: list[Round] = []  # begun, and not written yet
    saved, began, on = time.monotonic(), 0.0, True
    while on:
        on = any(state.rounds[run] < spec.rounds for run, spec in enumerate(fleet.specs)) and not stop()
        ended = False
        if on:
            began = began if waiting else time.perf_counter()
            state, played = fleets.play_round(fleet, state)
            waiting.append(played.sent())
            ended = any(state.rounds[run] == fleet.specs[run].rounds for run in played.sampled)
        due = not on or time.monotonic() - saved >= checkpoint_seconds
        while len(waiting) > (1 if ahead and not (due or ended) else 0):
            records = waiting.pop(0).records
            now = time.perf_counter()
            seconds, began = (now - began) / len(records), now
            for entry in records:
                line = line_of(entry, seconds)
                if (folder := folders[entry.run]) is not None:
                    folder.append(line)
                if entry.round == fleet.specs[entry.run].rounds:
                    _finish(folder, fleet, state, entry.run, keep_state)
                yield Played(members[entry.run], line)
        if due:
            _save(folders, fleet, state)
            saved = time.monotonic()


def extend(fresh: Sequence[tuple[Planned, RunSpec, RunFolder]]) -> None:
    """Let runs that have not begun go on from finished ones beside them that differ in fewer rounds alone."""
    fresh = [one for one in fresh if not checkpoint_rounds(one[2].path / "checkpoints")]
    ends: dict[str, dict[int, Path]] = {}
    for out in {folder.path.parent for _, _, folder in fresh}:
        for head, path in finished(out):
            if isinstance(length := head["settings"].get("rounds"), int):
                ends.setdefault(head.get("lineage", ""), {})[length] = path
    for run, spec, folder in fresh:
        shorter = max((r for r in ends.get(run.lineage, {}) if r < spec.rounds), default=None)
        if shorter is not None:
            _begin_from(folder, ends[run.lineage][shorter], shorter, spec)


def _begin_from(folder: RunFolder, shorter: Path, rounds: int, spec: RunSpec) -> None:
    try:
        point = read_checkpoint(shorter / "checkpoints", lambda round: round == rounds)
    except IntegrityError as error:
        LOG.warning("%s is not extended: %s", shorter, error)
        return
    lines = read_lines(shorter)
    if point is not None and len(lines) == rounds:  # its last state may not have been kept
        folder.begin_from(shorter, point, [as_planned(line, spec) for line in lines])


def rounds(
    config: Config = None,
    *,
    data: Data | None = None,
    model: Model | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    precision: str = "fp32",
    version: str | None = None,
) -> Iterator[Played]:
    """Play every run of a configuration, round by round; with `out`, into run folders, doing only what is missing.

    Runs are known by their settings and by the content of their data and model; `version` tells apart what is not seen
    there.
    """
    planned, materials = _planned(config, out, device, data=data, model=model, precision=precision, version=version)
    for members in pack(missing(planned), materials):
        yield from play_fleet(members, materials)


def run(
    config: Config = None,
    *,
    data: Data | None = None,
    model: Model | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    precision: str = "fp32",
    version: str | None = None,
) -> Outcome:
    """Play every run of a configuration and say what came out; arguments are those of `rounds`."""
    planned, materials = _planned(config, out, device, data=data, model=model, precision=precision, version=version)
    lines: dict[str, list[Record]] = {}
    for members in pack(missing(planned), materials):
        for played in play_fleet(members, materials):
            lines.setdefault(played.run.fingerprint, []).append(played.line)
    return conclude(planned, lines)


def _planned(
    config: Config, out: str | os.PathLike[str] | None, device: str, **own: Any
) -> tuple[list[Planned], Materials]:
    """The runs of a configuration, and what they are made of; `own` is that of `Materials`."""
    grid = grid_of(config)
    materials = Materials(device, folder=grid.folder, **own)
    return plan(grid, materials, None if out is None else Path(out)), materials


def conclude(planned: Sequence[Planned], lines: Mapping[str, list[Record]] | None = None) -> Outcome:
    """Scores and verdicts of runs: from their folders, or from `lines` where a run has none."""
    runs = [
        as_run(run, read_lines(run.folder) if run.folder is not None else (lines or {}).get(run.fingerprint, []))
        for run in planned
    ]
    _check_ends([dict(run.rounds[-1]) for run in runs if run.rounds])
    scored = [run for run in runs if curve(run, "test", "accuracy")]
    notes = dict.fromkeys(note for run in planned for note in run.notes)
    return Outcome(tuple(runs), tuple(rows(scored)), tuple(against_baseline(scored)), tuple(notes))


def as_run(run: Planned, lines: Sequence[Record] = ()) -> Run:
    """A run as reports see it."""
    head = _named(run)
    done = Done(rounds=len(lines), sha256="") if len(lines) == run.settings.rounds else None
    return Run(run.folder or Path(run.fingerprint), head, dict(flat(run.recorded)), tuple(lines), done)


def _named(run: Planned) -> Head:
    """What a record says of a run before it has begun."""
    head = Head(format=FORMAT, fingerprint=run.fingerprint, lineage=run.lineage, settings=run.recorded)
    head["identity"] = run.identity
    if run.notes:
        head["notes"] = list(run.notes)
    return head


def _check_ends(last: Sequence[Record]) -> None:
    """Refuse to give a verdict where every run had come to nothing by its last round."""
    advice = "lower client_learning_rate or set gradient_clip"
    if last and all(line["counted"] == 0 for line in last):
        refused = sum(len(line["refused"]) for line in last)
        none = f"no client's update could be averaged in the last round of any run ({refused} were not finite)"
        raise NotEnoughClients(f"{none}; {advice}")
    losses = [line["train"]["loss"] for line in last]
    if losses and all(loss is None or not math.isfinite(loss) for loss in losses):
        raise Diverged(f"no run kept a finite loss to its end; {advice}")


def _open(
    run: Planned, materials: Materials, parameters: int, wait: float, opened: contextlib.ExitStack
) -> RunFolder | None:
    if run.folder is None:
        return None
    clients = materials.federation(run.settings).clients
    head = {
        **_named(run),
        **describe_run(materials.dataset(run.settings), clients, materials.device),
        "precision": materials.precision,
        "parameters": parameters,
    }
    return opened.enter_context(RunFolder(run.folder, head, wait=wait))


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


def _resume(fleet: fleets.Fleet, found: Sequence[Checkpoint | None]) -> State:
    """The state to go on from: that of the checkpoints, and the first one for runs that have none."""
    fresh = fleets.start(fleet)
    if all(point is None for point in found):
        return fresh
    states = [export(fleet, fresh, run) if point is None else point.state for run, point in enumerate(found)]
    try:
        return fleets.restore(fleet, states)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"a checkpoint does not fit the model ({error}); was the model's code changed?") from None


def _save(folders: Sequence[RunFolder | None], fleet: fleets.Fleet, state: State) -> None:
    """A checkpoint of every run that is under way."""
    for run, folder in enumerate(folders):
        if folder is not None and 0 < state.rounds[run] < fleet.specs[run].rounds:
            folder.checkpoint(int(state.rounds[run]), export(fleet, state, run))


def _finish(folder: RunFolder | None, fleet: fleets.Fleet, state: State, run: int, keep: bool) -> None:
    if folder is not None:
        round, arrays = int(state.rounds[run]), export(fleet, state, run)
        if keep and folder.saved != round:
            folder.checkpoint(round, arrays)
        model = {name: value for name, value in arrays.items() if name.startswith(("params/", "buffers/"))}
        folder.finish(round, model, keep=keep)
