"""Prepares a fleet: checks that its runs can train together, and makes all that is the same in every round."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from fedgma.data.augmentations import augment_pool
from fedgma.data.pools import Pool, input_shape
from fedgma.seeds import seed
from fedgma.simulation import timeline
from fedgma.simulation.batched import adapters, attacks, carried, norm_bounds, optimizers, rules, tallies, votes
from fedgma.simulation.rates import beyond_kernels, run_rates
from fedgma.simulation.sampling import steps_of_a_round
from fedgma.simulation.scored_pools import client_tests, shared_tests
from fedgma.simulation.server_part import ServerPart, can_replay, is_plain
from fedgma.simulation.setup import Fleet
from fedgma.simulation.spec import RunSpec, check_together, fit_batches
from fedgma.training import memory
from fedgma.training.choose import choose, choose_scorer, early_form, lanes_of_a_chunk, warm_up
from fedgma.training.compile import rounds_before_compiling
from fedgma.training.gradients import named_tensors
from fedgma.training.models import build
from fedgma.training.ranks import ALONE, Ranks
from fedgma.training.same_pools import distinct
from fedgma.training.stacked import Shapes
from fedgma.training.task import Columns, columns_of


def assemble(
    specs: Sequence[RunSpec],
    *,
    trainer: str = "auto",
    precision: str = "fp32",
    budget: int | None = None,
    chunk: int | None = None,
    form: bool = True,
    compile_after: int | None = None,
    ranks: Ranks = ALONE,
) -> Fleet:
    """Check that the runs can share a fleet, and prepare all that is the same in every round.

    `trainer`, `precision` and `form` are those of `training.choose.choose`. `budget` is the memory for lanes in bytes,
    by default a share of the device's. `chunk` is the number of lanes trained at a time; it replaces the budget.
    `compile_after` is the number of rounds before steps are compiled; by default it follows from the number of steps.
    `ranks` are the processes over which lanes are shared out.
    """
    check_together(specs)
    specs = fit_batches(specs)
    pools, pool = distinct([spec.federation.train for spec in specs], apart=("client_of",))
    pools = tuple(augment_pool(train_pool, specs[0].augment) for train_pool in pools)
    sample, task, device = pools[0], specs[0].task, pools[0].y.device
    model = build(specs[0].model, input_shape(sample), sample.classes, seed(specs[0].seed, "init")).to(device)
    shapes = tuple((name, value.shape) for name, value in named_tensors(model)[0].items())
    space = adapters.lay_out(specs, shapes)
    columns = columns_of(task, model, sample)
    lanes = sum(spec.clients_per_round for spec in specs)
    way: dict[str, Any] = {"precision": precision, "form": form}
    warm_up(trainer, model, sample, lanes, specs[0].batch_size, task=task, then=tallies.rehearse, **way)
    limits: dict[str, Any] = {"budget": budget, "chunk": chunk, "compile_after": compile_after, "ranks": ranks}
    return Fleet(
        specs=specs,
        model=model,
        shapes=shapes,
        frozen=_frozen(model),
        space=space,
        seen=shapes if space is None else space.seen,
        task=task,
        columns=columns,
        precision=precision,
        pools=pools,
        pool=pool,
        rates=run_rates(specs),
        tests=shared_tests(specs),
        client_tests=tuple(client_tests(spec, device) for spec in specs),
        device=device,
        ranks=ranks,
        **_training(specs, model, pools, trainer, **way, **limits),
        **_server(specs, model, shapes, space, columns),
    )


def _training(
    specs: tuple[RunSpec, ...],
    model: nn.Module,
    pools: tuple[Pool, ...],
    trainer: str,
    *,
    precision: str,
    form: bool,
    budget: int | None,
    chunk: int | None,
    compile_after: int | None,
    ranks: Ranks,
) -> dict[str, Any]:
    """How lanes are trained and runs evaluated, and how many of them at a time."""
    first, sample = specs[0], pools[0]
    moments = 2 if first.client_optimizer == "adamw" else 1
    more = max(spec.algorithm.arrays_of_a_lane for spec in specs)
    cost = memory.measure(model, sample, first.batch_size, budget=budget, task=first.task, kept=moments + more)
    options: dict[str, Any] = {"precision": precision, "form": form, "task": first.task, "lane_bytes": cost.bytes}
    rest: dict[str, Any] = {"smoothing": first.label_smoothing, "beyond_kernels": beyond_kernels(specs)}
    train = choose(trainer, model, pools, **options, **rest)
    early = early_form(train)
    if compile_after is None:
        steps, lanes = steps_of_a_round(specs, chunk or cost.lanes)
        compile_after = 0 if early is None else rounds_before_compiling(steps, lanes * cost.activations)
    scorer = partial(choose_scorer, trainer, model, sample, task=first.task)
    return {
        "train": train,
        "early": early or train,
        "score": scorer(form=form),
        "early_score": scorer(form=form and len(specs) > 1, compile=False),
        "compile_after": compile_after,
        "chunk": chunk or max(1, lanes_of_a_chunk(train, cost.lanes) // ranks.beside),
        "eval_batch": max(1, cost.samples // (ranks.beside * len(specs))),
    }


def _server(
    specs: tuple[RunSpec, ...], model: nn.Module, shapes: Shapes, space: adapters.Space | None, columns: Columns
) -> dict[str, Any]:
    """What follows training in a round: rules, optimisers and all that some runs have besides."""
    seen, device = shapes if space is None else space.seen, specs[0].federation.train.y.device
    most, task = max(spec.clients_per_round for spec in specs), specs[0].task
    stepping = optimizers.lay_out([spec.optimizer for spec in specs], seen, device)
    ruling = rules.lay_out([spec.rule for spec in specs], most, seen, device)
    bounds = norm_bounds.lay_out([spec.norm_factor for spec in specs], seen, device)
    attackers, algorithms = attacks.lay_out(specs), carried.lay_out(specs, shapes, device)
    clocks, server = timeline.lay_out(specs), None
    nothing = all(part is None for part in (space, bounds, attackers, algorithms, *clocks))
    if nothing and is_plain(ruling, stepping):
        held = [name for name in named_tensors(model)[1] if name not in _frozen(model)]
        server = ServerPart(ruling, stepping, task, columns, held, replay=can_replay(task, device))
    return {
        "optimizers": stepping,
        "rules": ruling,
        "bounds": bounds,
        "attackers": attackers,
        "algorithms": algorithms,
        "clocks": clocks,
        "layers": votes.lay_out(seen, device),
        "server": server,
    }


def _frozen(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, value in model.named_parameters() if not value.requires_grad)
