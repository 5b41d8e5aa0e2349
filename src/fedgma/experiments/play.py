"""Trains the runs of settings: in fleets where possible, every round is recorded, stopped runs are resumed.

    for played in fedgma.rounds({"rounds": 20}):                   # round by round; writes no files
        print(played.run.settings.aggregator, played.line["round"], played.line.get("test"))
    outcome = fedgma.run("settings.toml", out="runs")              # writes run folders, resumes existing ones

`data`, `model` and `aggregator` take your own arrays, module and rule in place of names.
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.aggregation.own import AnyRule
from fedgma.data.partitions import Divider
from fedgma.errors import ConfigError, DataError, Diverged, NotEnoughClients
from fedgma.experiments.lines import as_planned, describe_run, line_of
from fedgma.experiments.materials import Data, Materials
from fedgma.experiments.notebook import NotebookBar, notebook
from fedgma.experiments.outcome import Network, Outcome, outcome_of
from fedgma.experiments.own.named import own_name
from fedgma.experiments.own.tasks import task_name
from fedgma.experiments.plan import Config, Planned, as_run, grid_of, head_of, plan
from fedgma.experiments.progress import Progress, arm_names
from fedgma.experiments.ranks.agreement import fleets_of, share_checkpoints, share_lines
from fedgma.experiments.ranks.places import Place, find_place
from fedgma.experiments.ranks.rendezvous import joined
from fedgma.records.checkpoints import Checkpoint, State, checkpoint_rounds, digest, read_checkpoint
from fedgma.records.format import Line, Record
from fedgma.records.reader import Run, finished, is_done, read_object, read_rounds
from fedgma.records.trained import model_arrays
from fedgma.records.writer import RunFolder, mismatch_in
from fedgma.seeds import seed as derived_seed
from fedgma.simulation import fleet as fleets
from fedgma.simulation.device_round import Round
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import State as FleetState
from fedgma.simulation.state import export
from fedgma.training.gradients import tied_names
from fedgma.training.memory import in_one_sentence
from fedgma.training.models import Model, parameter_count
from fedgma.training.ranks import ALONE, Ranks
from fedgma.training.threads.trainer import SMALL, one_thread

CHECKPOINT_SECONDS = 10.0
LOG = logging.getLogger(__name__)


class Played(NamedTuple):
    """A completed round of a run, and the line that records it."""

    run: Planned
    line: Line
    model: State | None = None  # after the last round of a run without a folder, by the names of `state_dict`


def play_fleet(
    members: Sequence[Planned],
    materials: Materials,
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    keep_state: bool = True,
    wait: float = 0.5,
    stop: Callable[[], bool] = lambda: False,
    ahead: bool | None = None,
    ranks: Ranks = ALONE,
) -> Iterator[Played]:
    """Train the runs of one fleet to their last round, or until `stop`; runs with a folder are recorded and resumed.

    `wait` is the number of seconds to wait for another process that writes to a folder. Without `keep_state`, finished
    runs take less disk space and cannot be extended. With `ahead`, the default on a GPU, a round starts before the
    previous one is read and written, so that host and device work at the same time. With several `ranks`, each of them
    calls this function with the same runs; the first one writes, and `stop` gives all of them the same answers.
    """
    with in_one_sentence(materials.device), contextlib.ExitStack() as opened:
        specs = [materials.spec(run.settings) for run in members]
        if materials.precision != "fp32" and materials.device.type == "cpu":
            raise ConfigError(f"precision {materials.precision!r} is for a GPU; on a CPU everything is 'fp32'")
        fleet = fleets.assemble(specs, precision=materials.precision, ranks=ranks)
        parameters = parameter_count(fleet.model)
        if fleet.device.type == "cpu" and parameters < SMALL:
            opened.enter_context(one_thread())
        facts = {"parameters": parameters, **({"tied": tied} if (tied := tied_names(fleet.model)) else {})}
        if fleet.compile_after:
            facts["compiled_after"] = fleet.compile_after
        folders = [_open(run, materials, facts, wait, opened) if ranks.first else None for run in members]
        extend([(run, spec, path) for run, spec, path in zip(members, specs, folders, strict=True) if path is not None])
        checkpoints = [None if folder is None else folder.resume() for folder in folders]
        state = _resume(fleet, share_checkpoints(ranks, checkpoints))
        for run, folder in enumerate(folders):
            if state.rounds[run] >= specs[run].rounds:  # killed after its last checkpoint, before it was marked as done
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
    state: FleetState,
    *,
    checkpoint_seconds: float,
    keep_state: bool,
    stop: Callable[[], bool],
    ahead: bool,
) -> Iterator[Played]:
    """Train and record the rounds after `state`.

    When a state is saved, no later round has started (a round changes the clients' arrays in place) and every line up
    to it is in its file.
    """
    waiting: list[Round] = []  # started, not recorded yet
    saved, began, on = time.monotonic(), 0.0, True
    while on:
        on = any(state.rounds[run] < spec.rounds for run, spec in enumerate(fleet.specs)) and not stop()
        ended = False
        if on:
            began = began if waiting else time.perf_counter()
            state, played = fleets.play_round(fleet, state)
            waiting.append(played.sent())
            ended = any(state.rounds[run] == fleet.specs[run].rounds for run in played.sampled)
        due = not on or stop() or time.monotonic() - saved >= checkpoint_seconds
        while len(waiting) > (1 if ahead and not (due or ended) else 0):
            records = waiting.pop(0).records
            now = time.perf_counter()
            seconds, began = (now - began) / len(records), now
            for entry in records:
                line = line_of(entry, seconds, fleet.task)
                if (folder := folders[entry.run]) is not None:
                    folder.append(line)
                model = None
                if entry.round == fleet.specs[entry.run].rounds:
                    model = _finish(folder, fleet, state, entry.run, keep_state)
                yield Played(members[entry.run], line, model)
        if due:
            _save(folders, fleet, state)
            saved = time.monotonic()


def extend(fresh: Sequence[tuple[Planned, RunSpec, RunFolder]]) -> None:
    """Start new runs from finished ones in the same folder that differ only in having fewer rounds."""
    fresh = [entry for entry in fresh if not checkpoint_rounds(entry[2].path / "checkpoints")]
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
        point = read_checkpoint(shorter / "checkpoints", lambda round: round == rounds, mismatch_in(shorter))
        lines = read_rounds(shorter)
    except DataError as error:
        LOG.warning("%s is not extended: %s", shorter, error)
        return
    if point is not None and len(lines) == rounds:  # None if its final state was not kept
        folder.begin_from(shorter, point, [as_planned(line, spec) for line in lines])


def rounds(
    config: Config = None,
    *,
    data: Data | None = None,
    model: Model | None = None,
    task: object = None,
    aggregator: AnyRule | None = None,
    partition: Divider | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    precision: str = "fp32",
    version: str | None = None,
    on: str = "here",
) -> Iterator[Played]:
    """Train every run of a configuration and yield each round; with `out`, write run folders and skip finished runs.

    `data` is (x, y), (x, y, client), a mapping of arrays or a table. `task` is what the model learns: a name such as
    "regression", or a class or object of your own (docs/tasks.md). `partition` is a function of (labels, clients,
    generator) that returns the sample indices of each client. `aggregator` is your own rule (docs/rules.md): runs with
    it are added to those of the configuration, by default to runs of the plain mean. Runs are identified by their
    settings and by the content of their data, model, task and rule. Give a `version`, and change it with your code,
    where that content cannot be fingerprinted. With `on="torchrun"`, in a script that torchrun or Slurm's srun starts
    several times, the clients of each round are shared out over these processes, and the first one writes.
    """
    own = {"data": data, "model": model, "task": task, "aggregator": aggregator, "partition": partition}
    with joined(_place(on), device) as (ranks, device):
        planned, materials = _planned(config, out, device, **own, precision=precision, version=version)
        for members in fleets_of(planned, materials, ranks):
            yield from play_fleet(members, materials, ranks=ranks)


def run(
    config: Config = None,
    *,
    data: Data | None = None,
    model: Model | None = None,
    task: object = None,
    aggregator: AnyRule | None = None,
    partition: Divider | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    precision: str = "fp32",
    version: str | None = None,
    on: str = "here",
    progress: bool = True,
) -> Outcome:
    """Train every run of a configuration and return the results; arguments are those of `rounds`.

    In a Jupyter notebook a line shows the progress, unless `progress` is false.
    """
    own = {"data": data, "model": model, "task": task, "aggregator": aggregator, "partition": partition}
    with joined(_place(on), device) as (ranks, device):
        planned, materials = _planned(config, out, device, **own, precision=precision, version=version)
        packed = fleets_of(planned, materials, ranks)
        seen = Progress(arm_names(planned))
        seen.begin([run for members in packed for run in members], "training")
        bar = NotebookBar(seen) if progress and packed and notebook() is not None else None
        lines: dict[str, list[Record]] = {}
        models: dict[str, State] = {}
        for played in (played for members in packed for played in play_fleet(members, materials, ranks=ranks)):
            lines.setdefault(played.run.fingerprint, []).append(played.line)
            if played.model is not None:
                models[played.run.fingerprint] = played.model
            seen.see(played.run, played.line)
            if bar is not None:
                bar.update()
        outcome = conclude(*share_lines(ranks, planned, lines), models)
        return outcome._replace(networks=_networks(planned, materials))


def _place(on: str) -> Place | None:
    """Which of several processes this is; None for the only one."""
    if on not in ("here", "torchrun"):
        raise ConfigError(
            f"on: expected 'here' or 'torchrun', got {on!r}; sweeps run on Ray by `fedgma sweep --on ray`"
        )
    if on == "here":
        return None
    if (place := find_place(os.environ)) is None:
        raise ConfigError(
            "on='torchrun' needs a script that torchrun or srun starts, e.g. `torchrun --nproc-per-node 4 script.py`; "
            "for runs of a settings file, `fedgma run FILE --on torchrun --ranks 4` starts the processes itself"
        )
    return place


def _networks(planned: Sequence[Planned], materials: Materials) -> dict[str, Network]:
    """What the modules of runs are built from, by fingerprint."""
    return {
        run.fingerprint: Network(
            materials.network(run.settings),
            materials.input_shape(run.settings),
            len(materials.dataset(run.settings).classes),
            derived_seed(run.settings.seed, "init"),
        )
        for run in planned
    }


def _planned(
    config: Config, out: str | os.PathLike[str] | None, device: str, **options: Any
) -> tuple[list[Planned], Materials]:
    """The runs of a configuration and their materials; options are those of `Materials`."""
    rule = options.get("aggregator")
    name, given = None if rule is None else own_name(rule), options["data"] is not None
    grid = grid_of(config, name, task=task_name(options.get("task")), own=given)
    materials = Materials(device, folder=grid.folder, **options)
    return plan(grid, materials, None if out is None else Path(out)), materials


def conclude(
    planned: Sequence[Planned],
    lines: Mapping[str, list[Record]] | None = None,
    models: Mapping[str, State] | None = None,
) -> Outcome:
    """Scores and verdicts of runs: from their folders, or from `lines` and `models` for runs without a folder."""
    runs = [_ended(run, lines or {}, models or {}) for run in planned]
    _check_answers([line for run in runs for line in run.rounds])
    _check_ends([dict(run.rounds[-1]) for run in runs if run.rounds])
    return outcome_of(runs, tuple(dict.fromkeys(note for run in planned for note in run.notes)), models)


def _ended(run: Planned, lines: Mapping[str, list[Record]], models: Mapping[str, State]) -> Run:
    """A run with its rounds and the checksum of its model."""
    if run.folder is not None:
        end = read_object(run.folder / "done") if is_done(run.folder) else {}
        return as_run(run, read_rounds(run.folder), str(end.get("sha256", "")))
    model = models.get(run.fingerprint)
    return as_run(run, lines.get(run.fingerprint, []), "" if model is None else digest(model))


def _check_answers(lines: Sequence[Mapping[str, Any]]) -> None:
    """Warn if no client answered in time in any round of any run: all arms are the initial model then."""
    if lines and all("clock" in line and not line["counted"] and not line["refused"] for line in lines):
        LOG.warning(
            "no client answered in time in any of %d rounds, so no model was trained; raise clock.deadline, or lower "
            "clock.dropout, clock.away or the seconds that clients take",
            len(lines),
        )


def _check_ends(last: Sequence[Record]) -> None:
    """Raise an error instead of a verdict if every run had failed by its last round."""
    advice = "lower client_learning_rate or set gradient_clip"
    last = [line for line in last if line["counted"] or line["refused"] or "clock" not in line]  # not: all too late
    if last and all(line["counted"] == 0 for line in last):
        refused = sum(len(line["refused"]) for line in last)
        none = f"no client's update could be averaged in the last round of any run ({refused} were refused)"
        raise NotEnoughClients(f"{none}; {advice}")
    losses = [line["train"]["loss"] for line in last]
    if losses and all(loss is None or not math.isfinite(loss) for loss in losses):
        raise Diverged(f"no run had a finite loss in its last round; {advice}")


def _open(
    run: Planned, materials: Materials, facts: Mapping[str, Any], wait: float, opened: contextlib.ExitStack
) -> RunFolder | None:
    if run.folder is None:
        return None
    head = {
        **head_of(run),
        **describe_run(materials.dataset(run.settings), materials.federation(run.settings), materials.device),
        "precision": materials.precision,
        **facts,
    }
    return opened.enter_context(RunFolder(run.folder, head, wait=wait))


def _resume(fleet: fleets.Fleet, checkpoints: Sequence[Checkpoint | None]) -> FleetState:
    """The state to resume from: that of the checkpoints, and the initial one for runs without a checkpoint."""
    fresh = fleets.start(fleet)
    if all(point is None for point in checkpoints):
        return fresh
    states = [export(fleet, fresh, run) if point is None else point.state for run, point in enumerate(checkpoints)]
    try:
        return fleets.restore(fleet, states)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"a checkpoint does not fit the model ({error}); was the model's code changed?") from None


def _save(folders: Sequence[RunFolder | None], fleet: fleets.Fleet, state: FleetState) -> None:
    """Write a checkpoint of every run that has started and not finished."""
    for run, folder in enumerate(folders):
        round = int(state.rounds[run])
        if folder is not None and 0 < round < fleet.specs[run].rounds and round != folder.saved:
            folder.checkpoint(round, export(fleet, state, run))


def _finish(folder: RunFolder | None, fleet: fleets.Fleet, state: FleetState, run: int, keep: bool) -> State | None:
    """Mark a run as done in its folder; without a folder, return its model."""
    round, arrays = int(state.rounds[run]), export(fleet, state, run)
    if folder is None:
        return model_arrays(arrays, tied_names(fleet.model))
    if keep and folder.saved != round:
        folder.checkpoint(round, arrays)
    model = {name: value for name, value in arrays.items() if name.startswith(("params/", "buffers/"))}
    folder.finish(round, model, keep=keep)
    return None
