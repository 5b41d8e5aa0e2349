"""The state of a fleet's runs, and its export as plain arrays: enough to stop and to resume bit-identically."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation.optimizers import AVERAGED, settled
from fedgma.aggregation.optimizers import State as OptimizerState
from fedgma.simulation.batched.carried import Carried
from fedgma.simulation.batched.optimizers import Moments, kept_moments
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.timeline import Timeline
from fedgma.simulation.versions import Version, Versions, exported
from fedgma.training.stacked import Shapes, Stacked, flatten, stack, unflatten


class Layout(Protocol):
    """The part of a fleet that decides the layout of its state."""

    @property
    def specs(self) -> tuple[RunSpec, ...]:
        """The runs."""

    @property
    def shapes(self) -> Shapes:
        """The trainable parameters, in order."""

    @property
    def seen(self) -> Shapes:
        """What rules and server optimisers see of them, which is all of their state."""

    @property
    def device(self) -> torch.device:
        """Where the state is."""


@dataclass(frozen=True, eq=False)
class State:
    """The state of all runs, run axis first; `export` turns it into plain arrays and `restored` reads them back."""

    rounds: np.ndarray  # int64 [run], completed rounds
    params: Tensor  # float32 [run, entry]
    buffers: Stacked
    moments: Moments
    carried: Carried  # arrays of the algorithms
    # per run, the last round whose votes were measured (0: none yet) and which entries passed the threshold then
    looks: tuple[tuple[Tensor, Tensor] | None, ...]
    medians: Tensor | None = None  # float64 [run, round], norms of the last rounds; None where no run bounds them
    rule: Stacked = field(default_factory=dict)  # [run, entry] by name: what rules handed to the next round
    timelines: Mapping[int, Timeline] = field(default_factory=dict)  # of the runs that have a clock
    versions: Versions = field(default_factory=dict)  # earlier models that clients still work on


def export(fleet: Layout, state: State, run: int) -> dict[str, np.ndarray]:
    """One run's state as plain arrays: enough to resume bit-identically, alone or in another fleet."""
    plain = {"round": np.array(state.rounds[run])}
    moments = {part: getattr(state.moments, part) for part in kept_moments(fleet.specs[run].optimizer)}
    handed = {f"rule/{name}": state.rule[name] for name in fleet.specs[run].rule.state}
    for part, flat in {"params": state.params, **moments, **handed}.items():
        named = unflatten(flat[run : run + 1], fleet.shapes if part == "params" else fleet.seen)
        plain |= {f"{part}/{name}": value[0].cpu().numpy().copy() for name, value in named.items()}
    if state.moments.models is not None and "average" in moments:
        plain[f"{AVERAGED}/models"] = state.moments.models[run, 0].cpu().numpy().copy()
    plain |= {f"buffers/{name}": value[run].cpu().numpy().copy() for name, value in state.buffers.items()}
    plain |= {name: value.cpu().numpy().copy() for name, value in _carried_by(fleet, state.carried, run).items()}
    for moment, arrays in (state.moments.own[run] or {}).items():
        plain |= {f"own/{moment}/{name}": torch.as_tensor(value).cpu().numpy().copy() for name, value in arrays.items()}
    if state.medians is not None and fleet.specs[run].norm_factor is not None:
        plain["medians"] = state.medians[run].cpu().numpy().copy()
    if (look := state.looks[run]) is not None and int(look[0]):
        plain |= {"look/round": np.array(int(look[0])), "look/passed": np.packbits(look[1].cpu().numpy())}
    return plain | _clocked(fleet, state, run)


def _clocked(fleet: Layout, state: State, run: int) -> dict[str, np.ndarray]:
    """Where a run's clock stands, and the versions of its model that clients work on, stacked."""
    if run not in state.timelines:
        return {}
    plain = {f"clock/{part}": np.array(value) for part, value in state.timelines[run]._asdict().items()}
    kept = exported(state.versions, run)
    if not kept:
        return plain
    params = unflatten(torch.stack([version.params for version in kept.values()]), fleet.shapes)
    buffers = stack([version.buffers for version in kept.values()])
    plain |= {f"versions/params/{name}": value.cpu().numpy().copy() for name, value in params.items()}
    plain |= {f"versions/buffers/{name}": value.cpu().numpy().copy() for name, value in buffers.items()}
    return {**plain, "versions/rounds": np.array(list(kept), np.int64)}


def _carried_by(fleet: Layout, carried: Carried, run: int) -> dict[str, Tensor]:
    """The arrays that a run's algorithm carries, as views: of the server [entry], of the clients [client, entry]."""
    algorithm = fleet.specs[run].algorithm
    arrays: dict[str, Tensor | None] = {}
    if carried.control is not None and algorithm.on_server:
        arrays["control"] = carried.control[run]
    if algorithm.on_clients:
        arrays["variates"] = carried.variates[run]
    if carried.tilt is not None and algorithm.tilted:
        arrays |= {"tilt": carried.tilt[run], "tilts": carried.tilts[run]}
    return {name: array for name, array in arrays.items() if array is not None}


def restored(fleet: Layout, fresh: State, states: Sequence[dict[str, np.ndarray]]) -> State:
    """The state of a fleet from exported states; `fresh` is its initial state."""
    rows = partial(_restored_rows, fleet, states)
    buffers = {
        n: torch.from_numpy(np.stack([s[f"buffers/{n}"] for s in states])).to(fleet.device) for n in fresh.buffers
    }
    medians = fresh.medians
    for run, plain in enumerate(states):
        if medians is not None and "medians" in plain:
            medians[run] = torch.from_numpy(plain["medians"]).to(fleet.device)
        for name, array in _carried_by(fleet, fresh.carried, run).items():  # zeros until here
            array.copy_(torch.from_numpy(plain[name]))
    return State(
        rounds=np.array([int(s["round"]) for s in states], np.int64),
        params=rows("params", fresh.params),
        buffers=buffers,
        moments=Moments(
            rows("z", fresh.moments.z),
            rows("v", fresh.moments.v),
            tuple(
                _restored_own(fleet, plain, fresh_own)
                for plain, fresh_own in zip(states, fresh.moments.own, strict=True)
            ),
            None if fresh.moments.average is None else rows("average", fresh.moments.average),
            _restored_models(fleet, fresh.moments.models, states),
        ),
        carried=fresh.carried,
        looks=tuple(_restored_look(fleet, plain, fresh.moments.z.shape[1]) for plain in states),
        medians=medians,
        rule={name: rows(f"rule/{name}", given) for name, given in fresh.rule.items()},
        timelines={run: _restored_timeline(states[run]) for run in fresh.timelines},
        versions={
            (run, round): version
            for run in fresh.timelines
            for round, version in _restored_versions(fleet, states[run], buffers).items()
        },
    )


def _restored_rows(fleet: Layout, states: Sequence[dict[str, np.ndarray]], part: str, given: Tensor) -> Tensor:
    """The exported rows; a run without this part keeps its initial row."""
    table = given.clone()
    for run, plain in enumerate(states):
        spec = fleet.specs[run]
        if part in ("params", *kept_moments(spec.optimizer), *(f"rule/{name}" for name in spec.rule.state)):
            shapes = fleet.shapes if part == "params" else fleet.seen
            named = {name: torch.from_numpy(plain[f"{part}/{name}"])[None] for name, _ in shapes}
            table[run] = flatten(named)[0].to(fleet.device)
    return table


def _restored_models(fleet: Layout, fresh: Tensor | None, states: Sequence[dict[str, np.ndarray]]) -> Tensor | None:
    """How many models each run's average amounts to; states of before it was recorded are taken to be long runs."""
    if fresh is None:
        return None
    betas = [float(spec.optimizer.settings.get("average", 0.0)) for spec in fleet.specs]
    models = [float(s.get(f"{AVERAGED}/models", settled(beta))) for s, beta in zip(states, betas, strict=True)]
    return torch.tensor(models, dtype=torch.float64, device=fleet.device)[:, None]


def _restored_timeline(plain: dict[str, np.ndarray]) -> Timeline:
    time, *parts = (plain[f"clock/{part}"] for part in Timeline._fields)
    return Timeline(float(time), *parts)


def _restored_versions(fleet: Layout, plain: dict[str, np.ndarray], buffers: Stacked) -> dict[int, Version]:
    def rows(part: str, names: Iterable[str]) -> Stacked:
        return {name: torch.from_numpy(plain[f"versions/{part}/{name}"]).to(fleet.device) for name in names}

    if "versions/rounds" not in plain:
        return {}
    params = flatten(rows("params", [name for name, _ in fleet.shapes]))
    held = rows("buffers", buffers)
    return {
        round: Version(params[row], {name: value[row] for name, value in held.items()})
        for row, round in enumerate(plain["versions/rounds"].tolist())
    }


def _restored_own(fleet: Layout, plain: dict[str, np.ndarray], fresh: OptimizerState | None) -> OptimizerState | None:
    """The state of a user's own optimiser, as exported."""
    if fresh is None:
        return None
    return {
        moment: {name: torch.from_numpy(plain[f"own/{moment}/{name}"]).to(fleet.device) for name in arrays}
        for moment, arrays in fresh.items()
    }


def _restored_look(fleet: Layout, plain: dict[str, np.ndarray], entries: int) -> tuple[Tensor, Tensor] | None:
    if "look/passed" not in plain:
        return None
    passed = np.unpackbits(plain["look/passed"], count=entries).astype(bool)
    round = torch.tensor(int(plain["look/round"]), device=fleet.device)
    return round, torch.from_numpy(passed).to(fleet.device)
