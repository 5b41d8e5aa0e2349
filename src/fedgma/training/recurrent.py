"""Recurrent layers written out as products, because cuDNN's `nn.RNN`, `nn.GRU` and `nn.LSTM` cannot be vectorised.

A step of all lanes is one batched product and a few elementwise operations. The results are those of torch's layers up
to rounding; the names of the parameters are the same.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, ...]  # hidden state, and for an LSTM the cell
Cell = Callable[[Tensor, Tensor, State], State]  # gates of the input, gates of the hidden state, state -> state


def written_out(model: nn.Module) -> nn.Module:
    """The model, or a copy of it whose recurrent layers are written out, for `functional_call`."""
    if not any(isinstance(part, nn.RNNBase) for part in model.modules()):
        return model
    twin = copy.deepcopy(model)
    for part in twin.modules():
        if isinstance(part, nn.RNNBase):
            part.forward = functools.partial(run_layers, part)
    return twin


def run_layers(layer: nn.RNNBase, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """What a recurrent layer returns for a sequence: its outputs, and the last state."""
    if not isinstance(x, Tensor):
        raise TypeError("packed sequences cannot be written out; pad them")
    alone, pair = x.dim() == 2, isinstance(layer, nn.LSTM)
    x = x.unsqueeze(0 if layer.batch_first else 1) if alone else x
    x = x.transpose(0, 1) if layer.batch_first else x  # [step, sample, feature]
    before = _first_state(layer, x) if state is None else tuple(state if pair else [state])
    before = tuple(part.unsqueeze(1) if part.dim() == 2 else part for part in before)
    directions, after = 2 if layer.bidirectional else 1, []
    for depth in range(layer.num_layers):
        both = []
        for direction in range(directions):
            begin = tuple(part[depth * directions + direction] for part in before)
            outputs, last = _run(layer, f"_l{depth}{'_reverse' if direction else ''}", x, begin, bool(direction))
            both.append(outputs)
            after.append(last)
        x = torch.cat(both, -1)
        if layer.dropout and depth + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout, layer.training)
    ends = [torch.stack(parts) for parts in zip(*after, strict=True)]
    x = x.transpose(0, 1) if layer.batch_first else x
    if alone:
        x, ends = x.squeeze(0 if layer.batch_first else 1), [end.squeeze(1) for end in ends]
    return x, tuple(ends) if pair else ends[0]


def _run(layer: nn.RNNBase, suffix: str, x: Tensor, state: State, backwards: bool) -> tuple[Tensor, State]:
    """One layer in one direction over a sequence [step, sample, feature]."""
    inside, hidden = (_weights(layer, kind, suffix) for kind in ("ih", "hh"))
    shorten = getattr(layer, f"weight_hr{suffix}", None) if getattr(layer, "proj_size", 0) else None
    cell, outputs = _cell(layer), []
    steps = F.linear(x, *inside).unbind(0)  # unbind, since the gradient of a selected step is as large as the sequence
    for gates in reversed(steps) if backwards else steps:
        state = cell(gates, F.linear(state[0], *hidden), state)
        if shorten is not None:
            state = (F.linear(state[0], shorten), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _weights(layer: nn.RNNBase, kind: str, suffix: str) -> tuple[Tensor, Tensor | None]:
    return getattr(layer, f"weight_{kind}{suffix}"), getattr(layer, f"bias_{kind}{suffix}") if layer.bias else None


def _first_state(layer: nn.RNNBase, x: Tensor) -> State:
    rows, samples = layer.num_layers * (2 if layer.bidirectional else 1), x.shape[1]
    shown = getattr(layer, "proj_size", 0) or layer.hidden_size
    sizes = (shown, layer.hidden_size) if isinstance(layer, nn.LSTM) else (shown,)
    return tuple(x.new_zeros(rows, samples, size) for size in sizes)


def _cell(layer: nn.RNNBase) -> Cell:
    if isinstance(layer, nn.GRU):
        return _gru
    if isinstance(layer, nn.LSTM):
        return _lstm
    bend = torch.relu if layer.mode == "RNN_RELU" else torch.tanh
    return lambda gates, recurrent, state: (bend(gates + recurrent),)


def _gru(gates: Tensor, recurrent: Tensor, state: State) -> State:
    (own_reset, own_update, own_new), (reset, update, new) = gates.chunk(3, -1), recurrent.chunk(3, -1)
    keep = torch.sigmoid(own_update + update)
    proposed = torch.tanh(own_new + torch.sigmoid(own_reset + reset) * new)
    return (proposed + keep * (state[0] - proposed),)


def _lstm(gates: Tensor, recurrent: Tensor, state: State) -> State:
    enter, forget, new, leave = (gates + recurrent).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell
