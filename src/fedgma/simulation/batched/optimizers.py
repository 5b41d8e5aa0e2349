"""Server optimisers of many runs at once: [run, entry] tensors and one row of settings for each run.

The formulas are those of `fedgma.aggregation.optimizers`, over columns of settings; moments see the unmasked mean and
the mask multiplies the preconditioned step. The `step` of a user-defined optimiser is called once for each run, on
named arrays as a server would call it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedgma.aggregation.aggregate import Aggregate, rows_to_length
from fedgma.aggregation.optimizers import FORMULAS, MOMENTS, Rates, ServerOptimizer, State, averaging_weights
from fedgma.arrays import to_native
from fedgma.simulation.batched.tallies import Merged
from fedgma.training.stacked import Shapes, unflatten


class Moments(NamedTuple):
    """First and second moments [run, entry], and the states of user-defined optimisers by run."""

    z: Tensor  # rows of optimisers without this moment stay zero
    v: Tensor
    own: tuple[State | None, ...]
    average: Tensor | None = None  # of the models [run, entry]; None: no run keeps one
    models: Tensor | None = None  # float64 [run, 1]: how many models the average amounts to


class Optimizers(NamedTuple):
    """The server optimisers of all runs, on the device: the rows of each kind, and settings as columns [run, 1]."""

    optimizers: tuple[ServerOptimizer, ...]
    kinds: dict[str, Tensor]  # name -> rows, of the built-in optimisers
    own: tuple[int, ...]  # runs with a user-defined optimiser
    rates: Rates
    learning_rate: Tensor
    before: Tensor  # bool: the mask goes before the moments (an ablation)
    any_before: bool
    start: Tensor  # where second moments start
    average: Tensor | None  # float64: weight of the models before; 0 for runs without one, None if there is none
    shapes: Shapes


def lay_out(optimizers: Sequence[ServerOptimizer], shapes: Shapes, device: torch.device) -> Optimizers:
    """Copy the settings to the device once, so that a round copies nothing."""
    known = [optimizer.settings if has_formula(optimizer) else {} for optimizer in optimizers]

    def exact(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    def column(values: list[float]) -> Tensor:
        return exact(values).float()

    def setting(name: str, otherwise: float = 0.0) -> list[float]:
        return [float(settings.get(name, otherwise)) for settings in known]

    rates = Rates(
        keep1=column(setting("beta1")),
        take1=column([1 - beta for beta in setting("beta1")]),
        keep2=column(setting("beta2")),
        take2=column([1 - beta for beta in setting("beta2")]),
        epsilon=column(setting("epsilon", 1.0)),
    )
    averages = [float(optimizer.settings.get("average", 0.0)) for optimizer in optimizers]
    kinds = [optimizer.name if has_formula(optimizer) else "" for optimizer in optimizers]
    rows = {kind: [row for row, name in enumerate(kinds) if name == kind] for kind in sorted({*kinds} - {""})}
    starts = [
        settings["epsilon"] ** 2 if settings and "v" in MOMENTS[optimizer.name] else 0.0
        for optimizer, settings in zip(optimizers, known, strict=True)
    ]
    return Optimizers(
        optimizers=tuple(optimizers),
        kinds={kind: torch.tensor(row, device=device) for kind, row in rows.items()},
        own=tuple(row for row, kind in enumerate(kinds) if not kind),
        rates=rates,
        learning_rate=column(setting("learning_rate")),
        before=torch.tensor([settings.get("mask_position") == "before" for settings in known], device=device)[:, None],
        any_before=any(settings.get("mask_position") == "before" for settings in known),
        start=column(starts),
        average=exact(averages) if any(averages) else None,
        shapes=shapes,
    )


def has_formula(optimizer: ServerOptimizer) -> bool:
    """Whether an optimiser is built in and so has a batched form."""
    return optimizer.name in FORMULAS and optimizer.settings.keys() >= {"learning_rate", "epsilon", "mask_position"}


def kept_moments(optimizer: ServerOptimizer) -> tuple[str, ...]:
    """Which of the moments [run, entry] a run's optimiser uses."""
    average = ("average",) if optimizer.settings.get("average") else ()
    return (*(MOMENTS[optimizer.name] if has_formula(optimizer) else ()), *average)


def init_moments(optimizers: Optimizers, params: Tensor) -> Moments:
    """z_0 = 0 and v_0 = epsilon^2; a user-defined optimiser starts with its own `init`."""
    own: list[State | None] = [None] * len(params)
    for run in optimizers.own:
        own[run] = optimizers.optimizers[run].init(_named(optimizers, params, run))
    moments = Moments(torch.zeros_like(params), optimizers.start.expand_as(params).clone(), tuple(own))
    if optimizers.average is None:
        return moments
    return moments._replace(average=params.clone(), models=torch.zeros_like(optimizers.average))


def evaluated(optimizers: Optimizers, moments: Moments, params: Tensor) -> Tensor:
    """The models to evaluate [run, entry]: the average of those that a run keeps, else the model itself."""
    if optimizers.average is None or moments.average is None:
        return params
    return torch.where(optimizers.average > 0, moments.average, params)


def step(optimizers: Optimizers, merged: Merged, moments: Moments, params: Tensor) -> tuple[Tensor, Moments]:
    """params + learning_rate * mask * step, for all runs; a run without a counted client keeps weights and moments."""
    delta = merged.mean
    if merged.mask is not None and optimizers.any_before:
        delta = torch.where(optimizers.before, _masked(optimizers, merged, delta), delta)
    move, z, v = _by_kind(optimizers, delta, moments)
    if merged.mask is not None:
        masked = _masked(optimizers, merged, move)
        if optimizers.any_before:
            masked = torch.where(optimizers.before, _as_long_as_masked(optimizers, merged, moments, move), masked)
        move = masked
    new = _of_alive(merged, params + optimizers.learning_rate * move, params)
    if z is not moments.z or v is not moments.v:
        moments = moments._replace(z=_of_alive(merged, z, moments.z), v=_of_alive(merged, v, moments.v))
    if optimizers.own:
        new, moments = _own_steps(optimizers, merged, moments, params, new)
    if optimizers.average is not None and moments.average is not None and moments.models is not None:
        models, rest, share = averaging_weights(optimizers.average, moments.models)
        average = _of_alive(merged, rest.float() * moments.average + share.float() * new, moments.average)
        moments = moments._replace(average=average, models=_of_alive(merged, models, moments.models))
    return new, moments


def _of_alive(merged: Merged, new: Tensor, old: Tensor) -> Tensor:
    """The new rows of runs with a counted client, the old rows of others; a GPU is not asked whether there are any."""
    if merged.alive.device.type == "cpu" and bool(merged.alive.all()):
        return new
    return torch.where(merged.alive[:, None], new, old)


def _masked(optimizers: Optimizers, merged: Merged, step: Tensor) -> Tensor:
    """The steps times their masks; those of controls as long as their masked steps, array by array."""
    assert merged.mask is not None
    product = step * merged.mask
    if merged.scaled is not None and merged.length is not None:
        rows = merged.scaled
        product[rows] = _to_length(optimizers, product[rows], step[rows] * merged.length[rows])
    return product


def _as_long_as_masked(optimizers: Optimizers, merged: Merged, moments: Moments, move: Tensor) -> Tensor:
    """Where the mask goes before the moments: the steps, those of controls as long as with the mask of the votes."""
    if merged.scaled is None or merged.length is None:
        return move
    reference, _, _ = _by_kind(optimizers, merged.mean * merged.length, moments)
    move, rows = move.clone(), merged.scaled
    move[rows] = _to_length(optimizers, move[rows], reference[rows])
    return move


def _to_length(optimizers: Optimizers, steps: Tensor, references: Tensor) -> Tensor:
    sizes = [shape.numel() for _, shape in optimizers.shapes]
    arrays = zip(torch.split(steps, sizes, 1), torch.split(references, sizes, 1), strict=True)
    scaled = [rows_to_length(to_native(step), to_native(reference)) for step, reference in arrays]
    return torch.cat([torch.as_tensor(array, device=steps.device) for array in scaled], 1)


def _by_kind(optimizers: Optimizers, delta: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """The step of each run, by the formula of its optimiser."""
    if len(optimizers.kinds) == 1 and not optimizers.own:
        return FORMULAS[next(iter(optimizers.kinds))](delta, moments.z, moments.v, optimizers.rates)
    move, z, v = delta.clone(), moments.z.clone(), moments.v.clone()
    for kind, rows in optimizers.kinds.items():
        rates = Rates(*(value[rows] for value in optimizers.rates))
        part = FORMULAS[kind](delta[rows], moments.z[rows], moments.v[rows], rates)
        for table, piece in zip((move, z, v), part, strict=True):
            table[rows] = piece
    return move, z, v


def _own_steps(
    optimizers: Optimizers, merged: Merged, moments: Moments, params: Tensor, new: Tensor
) -> tuple[Tensor, Moments]:
    """The steps of user-defined optimisers, run by run."""
    states = list(moments.own)
    for run in optimizers.own:
        state = states[run]
        if bool(merged.alive[run]) and state is not None:
            mask = None if merged.mask is None else _named(optimizers, merged.mask, run)
            scaled = merged.scaled is not None and run in merged.scaled.tolist()
            length = _named(optimizers, merged.length, run) if scaled and merged.length is not None else None
            aggregate = Aggregate(_named(optimizers, merged.mean, run), mask, {}, length=length)
            moved, states[run] = optimizers.optimizers[run].step(aggregate, state, _named(optimizers, params, run))
            new[run] = torch.cat([torch.as_tensor(moved[name]).flatten() for name, _ in optimizers.shapes])
    return new, moments._replace(own=tuple(states))


def _named(optimizers: Optimizers, table: Tensor, run: int) -> dict[str, Tensor]:
    return {name: value[0] for name, value in unflatten(table[run : run + 1], optimizers.shapes).items()}
