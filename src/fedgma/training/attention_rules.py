"""Attention of lanes as one fused call: the rules of `vmap` that torch lacks for scaled dot-product attention.

torch's fused attention takes [batch, head, token, width]. In lanes the batch axis holds the samples of all lanes. torch
has such rules for most forward passes and for no backward pass: without one, `vmap` calls the operator once a lane.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

ROWS = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")  # arguments with the batch axis first
BIASES = ("attn_bias", "attn_mask")  # [batch, head, query, key], or fewer axes, or None
OPERATORS = (
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
BATCHED = "FuncTorchBatched"  # torch's name for the place where rules of `vmap` are kept


@functools.cache
def add_attention_rules() -> tuple[str, ...]:
    """Give torch the rules that it lacks, once a process; returns the operators that got one."""
    if _parts_of_torch() is None:
        return ()
    missing = [name for name in OPERATORS if _has_no_rule(f"aten::{name}")]
    for name in missing:
        operator = getattr(torch.ops.aten, name).default
        _library().impl(name, functools.partial(_apply, operator), BATCHED, with_keyset=True)  # type: ignore[no-untyped-call]
    return tuple(missing)


@functools.cache
def _library() -> torch.library.Library:
    """What holds the rules: they are taken back when it is freed, so it is kept."""
    return torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


@functools.cache
def _parts_of_torch() -> tuple[Any, Any] | None:
    """What `torch.library.register_vmap` is made of, which itself takes no operator with a mask as a keyword.

    None in a version of torch without them: then attention is called once a lane.
    """
    try:
        from torch._functorch.autograd_function import custom_function_call_vmap_helper
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    except ImportError:
        return None
    return custom_function_call_vmap_helper, retrieve_current_functorch_interpreter


def _has_no_rule(name: str) -> bool:
    try:
        return not torch._C._dispatch_has_kernel_for_dispatch_key(name, BATCHED)
    except RuntimeError:  # this version of torch has no such operator
        return False


def _apply(operator: Any, keys: Any, *arguments: Any, **options: Any) -> Any:
    """The rule as torch calls it: arguments are unwrapped, results are wrapped again."""
    helper, interpreter = cast(tuple[Any, Any], _parts_of_torch())
    names = [argument.name for argument in operator._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, arguments, strict=False)), **options}

    def rule(info: Any, lane_axes: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        return folded(operator, info.batch_size, dict(zip(given, zip(values, lane_axes, strict=True), strict=True)))

    return helper(interpreter(), rule, operator, *given.values())


def folded(
    operator: Callable[..., Any], lanes: int, given: dict[str, tuple[Any, Any]]
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """Call the operator once for all lanes; `given` holds each argument and its lane axis (None: the same for all).

    Returns the results with the lane axis first, and where that axis is.
    """
    rows = {name: _lanes_first(*given[name], lanes) for name in ROWS if name in given}
    query, key = rows["query"], rows["key"]
    samples = query.shape[1]
    arguments: dict[str, Any] = {name: value.flatten(0, 1) for name, value in rows.items()}
    for name, (value, axis) in given.items():
        if name in BIASES:
            scores = (lanes, samples, query.shape[2], query.shape[3], key.shape[3])
            arguments[name] = None if value is None else _wide(_lanes_first(value, axis, lanes), scores).flatten(0, 1)
        elif name not in rows:  # numbers, and states of generators, which are those of the one call
            arguments[name] = value.select(axis, 0) if isinstance(axis, int) else value
    results = tuple(
        None if value is None else value.unflatten(0, (lanes, samples)) for value in _call(operator, arguments)
    )
    return results, tuple(None if value is None else 0 for value in results)


def _call(operator: Any, arguments: dict[str, Any]) -> Any:
    """Call an operator with its arguments by name, in the order of its schema."""
    schema = operator._schema.arguments
    positions = [arguments[entry.name] for entry in schema if not entry.kwarg_only and entry.name in arguments]
    return operator(*positions, **{e.name: arguments[e.name] for e in schema if e.kwarg_only and e.name in arguments})


def _lanes_first(value: Tensor, axis: int | None, lanes: int) -> Tensor:
    return value.expand(lanes, *value.shape) if axis is None else value.movedim(axis, 0)


def _wide(bias: Tensor, scores: tuple[int, ...]) -> Tensor:
    """A bias [lane, ...] with all axes of the scores."""
    missing = len(scores) - bias.dim()
    return bias.reshape(len(bias), *[1] * missing, *bias.shape[1:]).expand(scores)
