"""LoRA's pairs (A, B) aggregated as their products: what a client's adapters add to the model is B A, not A and B.

Clients that train A and B send both. The mean of B times the mean of A is not the mean of the products: the two differ
by the covariance of B and A over clients, which is of second order in their updates where all start from one pair, but
not small after many local steps. `in_products` wraps a rule so that updates, votes, masks and moments are those of the
products. After the server's step a truncated singular value decomposition gives the best pair of the same rank
(Bai and others, Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources, 2024).

A rule sees no parameters, and a client's product needs those of the server. So the server multiplies: it enters the
space of products with its model and every update, takes its step there, and leaves it with the next model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedgma.aggregation.gate import Refused, check_schema, read_mapping, read_schema
from fedgma.aggregation.own import AnyRule, as_rule
from fedgma.aggregation.rule import Rule
from fedgma.arrays import Array, Params, cast, convert, is_torch, move_to, placement, spec, to_native, to_user
from fedgma.errors import ConfigError

MARKS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}  # how peft names the two matrices of a pair
Pair = tuple[str, str]  # names of B and of A


def in_products(rule: AnyRule, pairs: Mapping[str, Pair] | None = None) -> Rule:
    """The same rule over the products B A of LoRA's adapters; other parameters are aggregated as they are.

    Pairs are found by peft's names, `lora_A` and `lora_B`; others are given as {product: (name of B, name of A)}. The
    rule needs the server's parameters: use it with `server_round`, on Flower, or in a run as `adapters = "product"`.
    """
    rule = as_rule(rule)
    if rule.space is not None:
        raise ConfigError(f"{rule.name} works on products already")
    known = None if pairs is None else tuple((name, *pair) for name, pair in pairs.items())
    return replace(rule, name=f"product_{rule.name}", space=Products(known))


@dataclass(frozen=True)
class Products:
    """The space in which pairs of adapters are one array each, their product."""

    known: tuple[tuple[str, str, str], ...] | None = None  # product, B, A; None: found by their names

    def pairs(self, names: Iterable[str]) -> dict[str, Pair]:
        """The pairs among these names, by the name of their product.

        >>> Products().pairs(["head", "query.lora_A.weight", "query.lora_B.weight", "key.lora_B.weight"])
        {'query.lora_BA.weight': ('query.lora_B.weight', 'query.lora_A.weight')}
        """
        present = list(names)
        if self.known is None:
            pairs = {}
            for name in present:
                for first, second in MARKS.items():
                    if first in name and (other := name.replace(first, second)) in present:
                        pairs[name.replace(first, f"{second}A")] = (other, name)
        else:
            pairs = {name: (b, a) for name, b, a in self.known}
        missing = sorted({name for pair in pairs.values() for name in pair} - set(present))
        if not pairs or missing:
            what = f"no {missing[0]!r}" if missing else "no pair of names with 'lora_A' and 'lora_B'"
            raise ConfigError(f"products of adapters: the parameters have {what}; got {', '.join(present[:4])}, ...")
        return pairs

    def lift(self, params: Params) -> dict[str, Array]:
        """The model with each pair replaced by its product, as a matrix.

        >>> Products().lift({"lora_A": np.array([[1.0, 2.0]]), "lora_B": np.array([[3.0], [0.0]])})
        {'lora_BA': array([[3., 6.],
               [0., 0.]])}
        """
        pairs = self.pairs(params)
        check_pairs({name: (spec(params[b]).shape, spec(params[a]).shape) for name, (b, a) in pairs.items()})
        arrays = {}
        for name, pair in pairs.items():
            matrix = product(*_wide(params, pair))
            arrays[name] = _user(matrix, params[pair[0]], tuple(matrix.shape))
        return replaced(params, pairs, arrays)

    def lift_update(self, update: Params | Refused, params: Params, *, cast: bool = False) -> Params | Refused:
        """A client's update of the products, or why there is none; `cast` accepts other floating types."""
        if isinstance(update, Refused):
            return update
        pairs = self.pairs(params)
        try:
            entries = read_mapping(update)
            check_schema(read_schema(entries), read_schema(params), cast)
        except Refused as refused:
            return refused
        arrays = {}
        for name, pair in pairs.items():
            start = _wide(params, pair)
            moved = [move_to(array, start[0]) for array in _wide(entries, pair)]
            matrix = product_update(start, moved)
            arrays[name] = _user(matrix, params[pair[0]], tuple(matrix.shape))
        return replaced(entries, pairs, arrays)

    def lower(self, after: Params, before: Params, params: Params) -> dict[str, Array]:
        """The next model with pairs again; a product that the step left as it was keeps its pair."""
        pairs = self.pairs(params)
        lowered = dict(params)
        for name, array in after.items():
            if name not in pairs:
                lowered[name] = array
            elif bool((array != before[name]).any()):
                b, a = pairs[name]
                values = factors(cast(to_native(array), "float64"), _wide(params, pairs[name])[1])
                for key, value in zip((b, a), values, strict=True):
                    lowered[key] = _user(value, params[key], spec(params[key]).shape)
        return lowered


def check_pairs(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raise unless each B and A, given by their shapes, can be multiplied: B [out, rank] and A [rank, ...]."""
    for name, (b, a) in shapes.items():
        if len(b) < 2 or len(a) < 2 or b[1] != a[0] or any(size != 1 for size in b[2:]):
            raise ConfigError(f"{name}: expected B [out, rank] and A [rank, in], got B {list(b)} and A {list(a)}")


def replaced(entries: Params, pairs: Mapping[str, Pair], arrays: Params) -> dict[str, Any]:
    """The entries of a model in the space of products: products first, then what belongs to no pair."""
    inside = {name for pair in pairs.values() for name in pair}
    return {**arrays, **{name: value for name, value in entries.items() if name not in inside}}


def product(b: Array, a: Array) -> Array:
    """B A for float64 matrices [..., out, rank] and [..., rank, in].

    It is summed rank by rank and not by a library's matrix product, so that one pair and a stack of pairs, numpy and
    torch, and all machines give the same bits.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # the gate refuses what is not finite
        total = b[..., :, :1] * a[..., :1, :]
        for rank in range(1, a.shape[-2]):
            total = total + b[..., :, rank : rank + 1] * a[..., rank : rank + 1, :]
    return total


def product_update(start: tuple[Array, Array], moved: Iterable[Array]) -> Array:
    """(B + dB) (A + dA) - B A, as dB (A + dA) + B dA: nothing cancels, so signs are right for small updates too."""
    (b, a), (db, da) = start, moved
    with np.errstate(over="ignore", invalid="ignore"):
        return product(db, a + da) + product(b, da)


def factors(matrix: Array, a: Array) -> tuple[Array, Array]:
    """The best B and A of this rank for a matrix, by singular values; rows of A are as long as those of the `a` before.

    Only B carries the size of the product, as where LoRA starts. So a direction that the product lacks gets a row of A
    and zeros in B, which can be trained; zeros in both could not.
    """
    rank = a.shape[-2]
    u, s, v = _svd(matrix.reshape(len(matrix), -1))
    kept = min(rank, len(s))
    length = float((a * a).sum() / rank) ** 0.5 or 1.0
    rows = v[:kept]
    b, next_a = a.new_zeros((len(u), rank)) if is_torch(a) else np.zeros((len(u), rank)), a * 0
    signs = _signs(rows)
    b[:, :kept], next_a[:kept] = u[:, :kept] * (s[:kept] * signs / length), rows * (signs * length)[:, None]
    return b, next_a


def _signs(rows: Array) -> Array:
    """+1 or -1 for each row, by its largest entry: libraries choose the signs of singular vectors differently."""
    largest = abs(rows).argmax(1)
    picked = rows[range(len(rows)), largest]
    return (picked >= 0) * 2.0 - 1.0


def _svd(matrix: Array) -> tuple[Array, Array, Array]:
    if not is_torch(matrix):
        return np.linalg.svd(matrix, full_matrices=False)
    import torch

    return tuple(torch.linalg.svd(matrix, full_matrices=False))


def _wide(params: Params, pair: Pair) -> tuple[Array, Array]:
    """B and A as float64 matrices; a convolution's A is a matrix of its flat kernels."""
    b, a = (cast(to_native(params[name]), "float64") for name in pair)
    return b.reshape(b.shape[0], -1), a.reshape(a.shape[0], -1)


def _user(array: Array, like: Array, shape: tuple[int, ...]) -> Array:
    """A float64 result in the library and number type of a user's array."""
    return to_user(convert(array, spec(like).dtype), spec(like)._replace(shape=shape), placement(like))
