"""The LSTM by partial forward propagation: h is stashed, the gates are made again.

A layer keeps its inputs and outputs, and c once a block of steps (more if the stash level asks). The backward pass
makes a block's gates again by two large products and c by a scan, runs its loop over the steps with only the
gradients of h and c in sequence, and leaves the gradients of weights and inputs to large products after it.

Padded positions have their gates closed (see reference.py): c is carried through, h is 0 and so is every gradient.
B batch, T steps, I input size, H hidden, K steps of a block. Inside, time comes first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops import steps as step_functions
from econmt_ops.blocks import add_outer, add_product, previous, reaches, scan_cells, split_blocks
from econmt_ops.dropout import derive_seed
from econmt_ops.dropout import dropout as drop_units
from econmt_ops.lstm.reference import STEPWISE, closed_gates, last_outputs, layer_by_torch
from econmt_ops.masking import padding_mask, reverse_rows
from econmt_ops.precision import accumulate_dtype
from econmt_ops.weights import LSTMState, LSTMWeights

_ARGUMENTS = (
    "Tensor inputs, Tensor weight, Tensor recurrent, Tensor bias, Tensor first_h, Tensor first_c, "
    "Tensor? lengths"
)
_OPTIONS = "bool reverse, str stash, bool compiled"


class _Layer:
    """One layer's call: its tensors in the order in which the walk meets them.

    Attributes:
        inputs: (T, B, I), zero at padded positions. padding: (T, B) or None.
    """

    def __init__(
        self,
        inputs: Tensor,
        weight: Tensor,
        recurrent: Tensor,
        bias: Tensor,
        first_h: Tensor,
        first_c: Tensor,
        lengths: Tensor | None,
        reverse: bool,
        stash: str,
        compiled: bool,
    ) -> None:
        self.batch, self.steps, _ = inputs.shape
        self.hidden = recurrent.shape[1]
        self.inputs = inputs.transpose(0, 1)
        self.weights = LSTMWeights(weight, recurrent, bias)
        self.first_h, self.first_c = first_h, first_c
        self.reverse, self.stash = reverse, stash
        self.accumulate = accumulate_dtype(inputs.dtype)
        self.padding = (
            None if lengths is None else padding_mask(lengths, self.steps, inputs.device).t().contiguous()
        )
        self.blocks = split_blocks(self.steps, self.batch, self.hidden, self.accumulate)
        self.run = step_functions.steps(compiled)

    def walk(self, sequence: Tensor, begin: int, end: int) -> Tensor:
        """What the walk meets of a sequence (T, B, .) in its steps begin to end."""
        if not self.reverse:
            return sequence[begin:end]
        return sequence[self.steps - end : self.steps - begin].flip(0)

    def write(self, sequence: Tensor, begin: int, end: int, part: Tensor) -> None:
        """Puts what the walk made in its steps begin to end where it belongs."""
        if self.reverse:
            sequence[self.steps - end : self.steps - begin] = part.flip(0)
        else:
            sequence[begin:end] = part

    def read(self, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Inputs (K, B, I) of a block, zero where its padding (K, B) is, and the padding."""
        inputs = self.walk(self.inputs, begin, end).contiguous()
        if self.padding is None:
            return inputs, None
        padding = self.walk(self.padding, begin, end)
        return inputs.masked_fill(padding.unsqueeze(2), 0.0), padding

    def products(self, inputs: Tensor, padding: Tensor | None) -> Tensor:
        """The input's share of the gates (K, B, 4H); padded positions have their gates closed."""
        products = functional.linear(inputs, self.weights.input, self.weights.bias)
        if padding is None:
            return products
        return torch.where(padding.unsqueeze(2), closed_gates(self.weights), products)


def _empty_result(
    inputs: Tensor, hidden: int, stash: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, steps, _ = inputs.shape
    accumulate = accumulate_dtype(inputs.dtype)
    blocks = len(split_blocks(steps, batch, hidden, accumulate))
    cells = (steps if reaches(stash, "cells") else blocks) if keep else 0
    gates = steps if keep and reaches(stash, "gates") else 0
    return (
        inputs.new_empty(steps, batch, hidden),
        inputs.new_empty(cells, batch, hidden, dtype=accumulate),
        inputs.new_empty(gates, batch, 4 * hidden, dtype=accumulate),
        inputs.new_empty(batch, hidden),
        inputs.new_empty(batch, hidden, dtype=accumulate),
    )


@torch.library.custom_op(
    "econmt_ops::lstm_layer",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    layer, keep = _Layer(*arguments[:-1]), arguments[-1]
    outputs, cells, gates_stash, last_h, last_c = _empty_result(arguments[0], layer.hidden, layer.stash, keep)
    h, c = layer.first_h, layer.first_c
    every_cell = keep and reaches(layer.stash, "cells")
    # torch's own LSTM is the fastest forward pass, but keeps c in the type of the inputs and tells only the last one.
    by_torch = arguments[0].dtype not in STEPWISE and not every_cell
    for number, (begin, end) in enumerate(layer.blocks):
        if keep and not every_cell:
            cells[number] = c
        inputs, padding = layer.read(begin, end)
        if by_torch:
            made, h, c = layer_by_torch(
                inputs.transpose(0, 1), layer.weights, h, c, None if padding is None else padding.t()
            )
            layer.write(outputs, begin, end, made.transpose(0, 1))
            continue
        products = layer.products(inputs, padding)
        for step, product in enumerate(products.unbind(0), start=begin):
            gates = torch.addmm(product, h, layer.weights.hidden.t())
            h, c = layer.run.cell_forward(gates, c)
            layer.write(outputs, step, step + 1, h.unsqueeze(0))
            if every_cell:
                cells[step] = c
            if gates_stash.shape[0]:
                gates_stash[step] = step_functions.activate(gates, layer.accumulate)
    last_h.copy_(h)
    last_c.copy_(c)
    return outputs, cells, gates_stash, last_h, last_c


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _empty_result(arguments[0], arguments[2].shape[1], arguments[8], arguments[10])


@torch.library.custom_op(
    "econmt_ops::lstm_layer_backward",
    mutates_args=(),
    schema="(Tensor? doutputs, Tensor? dlast_h, Tensor? dlast_c, Tensor outputs, Tensor cells, Tensor gates, "
    f"{_ARGUMENTS}, {_OPTIONS}) -> Tensor[]",
)
def _backward(
    doutputs: Tensor | None,
    dlast_h: Tensor | None,
    dlast_c: Tensor | None,
    outputs: Tensor,
    cells: Tensor,
    gates_stash: Tensor,
    *call: Any,
) -> list[Tensor]:
    layer = _Layer(*call)
    weights = layer.weights
    dtype, accumulate = outputs.dtype, layer.accumulate
    dinputs = torch.empty_like(layer.inputs, memory_format=torch.contiguous_format)
    dweight = torch.zeros_like(weights.input, dtype=accumulate)
    drecurrent = torch.zeros_like(weights.hidden, dtype=accumulate)
    dbias = torch.zeros_like(weights.bias, dtype=accumulate)
    zero = torch.zeros_like(layer.first_h)
    dh = zero if dlast_h is None else dlast_h
    dc = zero.to(accumulate) if dlast_c is None else dlast_c
    for number, (begin, end) in reversed(list(enumerate(layer.blocks))):
        inputs, padding = layer.read(begin, end)
        before = previous_walk(layer, outputs, begin, end)
        if gates_stash.shape[0]:
            gates = gates_stash[begin:end]
        else:
            products = add_product(layer.products(inputs, padding), before, weights.hidden)
            gates = step_functions.activate(products, accumulate)
        if reaches(layer.stash, "cells"):
            states = torch.cat([previous(cells, layer.first_c, begin, begin + 1), cells[begin:end]], 0)
        else:
            states = scan_cells(gates, cells[number])
        dz = gates.new_empty(gates.shape, dtype=dtype)
        incoming = None if doutputs is None else layer.walk(doutputs, begin, end)
        for step in reversed(range(end - begin)):
            total = dh if incoming is None else dh + incoming[step]
            dgates, dc = layer.run.cell_backward(
                gates[step], states[step], states[step + 1], total.to(accumulate), dc
            )
            dz[step] = dgates
            dh = torch.mm(dz[step], weights.hidden)
        add_outer(dweight, dz, inputs)
        add_outer(drecurrent, dz, before)
        dbias += dz.sum((0, 1), dtype=accumulate)
        layer.write(dinputs, begin, end, dz @ weights.input)
    results = [dinputs.transpose(0, 1), dweight, drecurrent, dbias, dh]
    return [*(result.to(dtype, copy=True).contiguous() for result in results), dc.clone()]


def previous_walk(layer: _Layer, outputs: Tensor, begin: int, end: int) -> Tensor:
    """h of the step before for the walk's steps begin to end, (K, B, H)."""
    if begin > 0:
        return layer.walk(outputs, begin - 1, end - 1)
    return torch.cat([layer.first_h.unsqueeze(0), layer.walk(outputs, 0, end - 1)], 0)


@_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in arguments[6:12]]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[7:10]
    ctx.save_for_backward(*output[:3], *inputs[:7])


def _differentiate(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
    gradients = _backward(incoming[0], incoming[3], incoming[4], *ctx.saved_tensors, *ctx.options)
    return (*gradients, *(None for _ in range(5)))


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def run_layer(
    inputs: Tensor,
    weights: LSTMWeights,
    h: Tensor,
    c: Tensor,
    lengths: Tensor | None,
    reverse: bool,
    stash: str,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer: outputs (B, T, H), h and c (B, H) after the walk's last step.

    A row's h passes padding as 0, so with ``reverse`` and ``lengths`` the first h must be zero.
    """
    tensors = (inputs, *weights, h, c)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    outputs, _, _, last_h, last_c = _forward(*tensors, lengths, reverse, stash, compiled, keep)
    return outputs.transpose(0, 1), last_h, last_c


def lstm(
    inputs: Tensor,
    layers: tuple[LSTMWeights, ...],
    *,
    state: LSTMState,
    lengths: Tensor | None,
    reverse: bool,
    residual: bool,
    dropout: float,
    dropout_seed: int | None,
    variational: bool,
    stash: str = "outputs",
    compiled: bool = False,
) -> tuple[Tensor, LSTMState]:
    """See `econmt_ops.lstm`; all arguments are given, checked and cast."""
    outputs = reverse_rows(inputs, lengths) if reverse else inputs
    last: list[tuple[Tensor, Tensor]] = []
    for number, (layer, (h, c)) in enumerate(zip(layers, state, strict=True)):
        read = outputs
        if number > 0 and dropout > 0.0:
            assert dropout_seed is not None
            seed = derive_seed(dropout_seed, number)
            # Masks belong to positions, whichever way the stack walks.
            read = reverse_rows(read, lengths) if reverse and not variational else read
            read = drop_units(read, dropout, seed, variational)
            read = reverse_rows(read, lengths) if reverse and not variational else read
        outputs, last_h, last_c = run_layer(read, layer, h, c, lengths, False, stash, compiled)
        last.append((last_h if lengths is None else last_outputs(outputs, h, lengths), last_c))
        if residual and number > 0:
            outputs = outputs + read
    return reverse_rows(outputs, lengths) if reverse else outputs, tuple(last)


def bidirectional_lstm(
    inputs: Tensor,
    forward: LSTMWeights,
    backward: LSTMWeights,
    *,
    lengths: Tensor | None,
    stash: str = "outputs",
    compiled: bool = False,
) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """See `econmt_ops.bidirectional_lstm`; all arguments are checked and cast."""
    h = inputs.new_zeros(inputs.shape[0], forward.hidden.shape[1])
    c = h.to(accumulate_dtype(h.dtype))
    ahead, ahead_h, ahead_c = run_layer(inputs, forward, h, c, lengths, False, stash, compiled)
    back, back_h, back_c = run_layer(inputs, backward, h, c, lengths, True, stash, compiled)
    if lengths is not None:
        ahead_h = last_outputs(ahead, h, lengths)
    return torch.cat([ahead, back], 2), ((ahead_h, ahead_c), (back_h, back_c))
