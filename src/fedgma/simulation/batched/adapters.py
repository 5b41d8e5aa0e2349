"""The space in which rules work, for many runs at once: products of adapters in place of pairs [run, entry].

The functions are those of `aggregation.adapters`, over stacks. Runs of a fleet share the space. Without one, everything
is passed on as it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation.adapters import Pair, Products, check_pairs, product, product_update, replaced
from fedgma.errors import ConfigError
from fedgma.simulation.algorithms import Algorithm
from fedgma.simulation.spec import RunSpec
from fedgma.training.stacked import Shapes, Stacked, flatten, ship, unflatten


class Space(NamedTuple):
    """The pairs of a model, and names and shapes of what rules see in place of them."""

    products: Products
    pairs: dict[str, Pair]
    shapes: Shapes  # of the trainable parameters
    seen: Shapes


def lay_out(specs: Sequence[RunSpec], shapes: Shapes) -> Space | None:
    """The space of these runs; None if their rules work on the parameters themselves."""
    products = specs[0].adapters
    if products is None:
        return None
    if not isinstance(products, Products):
        raise ConfigError(f"a fleet has no form for the space {type(products).__name__}; use `server_round`")
    if any(spec.algorithm.keeps != Algorithm().keeps or spec.algorithm.lookahead for spec in specs):
        raise ConfigError(
            "products of adapters have no form for algorithms that carry arrays from round to round; "
            "use fedavg, fedprox, fedsam or an adaptive server, or average the adapters apart"
        )
    if any(spec.optimizer.settings.get("average") for spec in specs):
        raise ConfigError("an average of products is not a pair of adapters; set server_average to 0")
    sizes = dict(shapes)
    pairs = products.pairs(sizes)
    check_pairs({name: (tuple(sizes[b]), tuple(sizes[a])) for name, (b, a) in pairs.items()})
    matrices = {n: torch.Size((sizes[b][0], sizes[a].numel() // sizes[a][0])) for n, (b, a) in pairs.items()}
    return Space(products, pairs, shapes, tuple(replaced(sizes, pairs, matrices).items()))


def lift(space: Space | None, params: Tensor) -> Tensor:
    """What rules see of the models [run, entry]."""
    if space is None:
        return params
    named = unflatten(params, space.shapes)
    return flatten(replaced(named, space.pairs, {n: product(*_wide(named, p)).float() for n, p in space.pairs.items()}))


def lift_updates(space: Space | None, params: Tensor, run: np.ndarray, updates: Tensor) -> Tensor:
    """What rules see of the updates [lane, entry] of lanes of these runs [lane]."""
    if space is None:
        return updates
    start, moved = unflatten(params[ship(run, params.device)], space.shapes), unflatten(updates, space.shapes)
    matrices = {n: product_update(_wide(start, p), _wide(moved, p)).float() for n, p in space.pairs.items()}
    return flatten(replaced(moved, space.pairs, matrices))


def lower(space: Space | None, after: Tensor, before: Tensor, params: Tensor) -> Tensor:
    """The next models, from what rules see of them after and before the step, run by run."""
    if space is None:
        return after
    rows = []
    for run in range(len(params)):
        new, old = (_row(table, run, space.seen) for table in (after, before))
        lowered = space.products.lower(new, old, _row(params, run, space.shapes))
        rows.append(torch.cat([torch.as_tensor(lowered[name]).flatten() for name, _ in space.shapes]))
    return torch.stack(rows)


def _wide(named: Stacked, pair: Pair) -> tuple[Tensor, Tensor]:
    """B and A of every run or lane as float64 matrices."""
    b, a = (named[name].double().flatten(2) for name in pair)
    return b, a


def _row(table: Tensor, run: int, shapes: Shapes) -> dict[str, Tensor]:
    return {name: value[0] for name, value in unflatten(table[run : run + 1], shapes).items()}
