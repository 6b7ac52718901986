"""A stack of LSTM layers as a wavefront: all cells (layer l, step t) with l + t = d run together, d by d.

A cell (l, t) reads what (l - 1, t) and (l, t - 1) have made, and both have the sum d - 1. So a stack of L layers takes
T + L - 1 batched products in sequence instead of L T, forward and backward. The bottom layer's input products are one
for all steps, and the gradients of weights are large products after the loop.

All gates are kept. B batch, T steps, I input size, H hidden; inside, tensors are (L, T, B, .) or, with a place for
what is before the first step, (L, T + 1, B, .). Padded positions have their gates closed (see reference.py): there h is
0, c is carried through, and so is the gradient of the last h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_ops.core.chunks import add_outer
from econmt_ops.core.dropout import apply_dropout, layer_keep_masks
from econmt_ops.core.gemm import Product, add_rows
from econmt_ops.core.lengths import padding_mask, reverse_rows
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import LSTMState, LSTMWeights
from econmt_ops.dispatch.registration import custom_op
from econmt_ops.lstm.cells import cells as cell_functions
from econmt_ops.lstm.reference import closed_gates
from econmt_ops.lstm.schedule import Schedule

_ARGUMENTS = (
    "Tensor inputs, Tensor[] weights, Tensor[] recurrents, Tensor[] biases, Tensor[] first_h, Tensor[] first_c, "
    "Tensor? lengths, bool residual, float dropout, int seed, bool variational, bool reversed_rows, str schedule"
)


def _diagonal(tensor: Tensor, layers: range, step: int) -> Tensor:
    """The cells (l, step - l + layers.start) of a tensor (L, T, B, .), as a view (n, B, .)."""
    along = tensor.stride(0) - tensor.stride(1)
    shape, strides = tensor.shape[2:], tensor.stride()[2:]
    offset = tensor.storage_offset() + layers.start * tensor.stride(0) + step * tensor.stride(1)
    return tensor.as_strided((len(layers), *shape), (along, *strides), offset)


class _Stack:
    """A call: its tensors, and which cells a diagonal holds."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        inputs, weights, recurrents, biases, first_h, first_c, lengths, *rest = call
        self.residual, self.dropout, seed, variational, reversed_rows, schedule = rest
        self.layers = [LSTMWeights(*parts) for parts in zip(weights, recurrents, biases, strict=True)]
        self.first_h, self.first_c = first_h, first_c
        self.batch, self.steps, _ = inputs.shape
        self.count, self.hidden = len(weights), recurrents[0].shape[1]
        self.inputs = inputs.transpose(0, 1).contiguous()
        self.dtype, self.accumulate = inputs.dtype, accumulate_dtype(inputs.dtype)
        self.lengths = None if lengths is None else lengths.to(inputs.device).clamp(max=self.steps)
        self.padding: Tensor | None = None
        if self.lengths is not None:
            self.padding = padding_mask(self.lengths, self.steps, inputs.device).t().contiguous()
        self.schedule = Schedule.parse(schedule)
        self.run = cell_functions(self.schedule.pointwise)
        self.keep = self._keep_masks(seed, variational, reversed_rows, lengths)
        joined = [torch.cat([layer.input, layer.hidden], 1) for layer in self.layers[1:]]
        # (L - 1, 4H, 2H): what the upper layers multiply [x ; h] with.
        self.joined = torch.stack(joined) if joined else None

    def _keep_masks(
        self, seed: int, variational: bool, reversed_rows: bool, lengths: Tensor | None
    ) -> Tensor | None:
        """(L - 1, T, B, H): what the upper layers read of what the layers below them give."""
        if self.dropout == 0.0 or self.count == 1:
            return None
        device = self.inputs.device
        masks = layer_keep_masks(
            self.count, self.batch, self.steps, self.hidden, self.dropout, seed, variational, device
        )
        found = [mask.expand(self.batch, self.steps, self.hidden) for mask in masks if mask is not None]
        if reversed_rows and not variational:
            found = [reverse_rows(mask, lengths) for mask in found]
        stacked: Tensor = torch.stack([mask.transpose(0, 1) for mask in found])
        return stacked

    def diagonals(self) -> list[tuple[range, int]]:
        """The layers of each diagonal, and the step of the lowest of them."""
        found = []
        for number in range(self.steps + self.count - 1):
            lowest = max(0, number - self.steps + 1)
            found.append((range(lowest, min(self.count - 1, number) + 1), number - lowest))
        return found

    def empty(self, steps: int, size: int, dtype: torch.dtype) -> Tensor:
        """An empty (L, steps, B, size)."""
        made: Tensor = self.inputs.new_empty(self.count, steps, self.batch, size, dtype=dtype)
        return made

    def upper(self, layers: range, step: int) -> tuple[range, int]:
        """The same without the bottom layer."""
        return (range(1, layers.stop), step - 1) if layers.start == 0 else (layers, step)

    def start_gates(self) -> Tensor:
        """Gates (L, T, B, 4H) that hold the bottom layer's share of its inputs, the biases and the closed gates."""
        gates = self.empty(self.steps, 4 * self.hidden, self.dtype)
        bottom = self.layers[0]
        gates[0] = Product(bottom.input, bottom.bias, self.schedule.weights)(self.inputs)
        for layer, part in zip(self.layers[1:], gates[1:], strict=True):
            part[:] = layer.bias
        if self.padding is not None:
            torch.where(self.padding.unsqueeze(2), closed_gates(bottom), gates, out=gates)
        return gates

    def forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The top layer's outputs (T, B, H), gates, cells (L, T + 1, B, H), and reads [x ; h] (L, T + 1, B, 2H)."""
        hidden = self.hidden
        gates = self.start_gates()
        cells = self.empty(self.steps + 1, hidden, self.accumulate)
        reads = self.empty(self.steps + 1, 2 * hidden, self.dtype)
        cells[:, 0], reads[:, 0, :, hidden:] = torch.stack(self.first_c), torch.stack(self.first_h)
        reads[0, :, :, :hidden], reads[:, -1, :, :hidden] = (
            0.0,
            0.0,
        )  # never filled: the bottom layer reads inputs
        outputs = self.inputs.new_empty(self.steps, self.batch, hidden)
        to_bottom = Product(self.layers[0].hidden, None, self.schedule.weights)
        weight = None if self.joined is None else self.joined.transpose(1, 2)
        if weight is not None and self.schedule.weights != "row":
            weight = weight.contiguous()
        for layers, step in self.diagonals():
            total = self.inputs.new_empty(len(layers), self.batch, 4 * hidden)
            uppers, upper_step = self.upper(layers, step)
            if layers.start == 0:
                total[0] = to_bottom(reads[0, step, :, hidden:])
            if uppers:
                assert weight is not None
                part = slice(uppers.start - 1, uppers.stop - 1)
                left = _diagonal(reads, uppers, upper_step)
                torch.bmm(left, weight[part], out=total[len(layers) - len(uppers) :])
            self._finish(layers, step, total, gates, cells, reads, outputs)
        return outputs, gates, cells, reads

    def _finish(
        self,
        layers: range,
        step: int,
        total: Tensor,
        gates: Tensor,
        cells: Tensor,
        reads: Tensor,
        outputs: Tensor,
    ) -> None:
        """The pointwise half of a diagonal, from the products ``total`` (n, B, 4H); fills the other tensors."""
        hidden = self.hidden
        h = total.new_empty(len(layers), self.batch, hidden)
        after = cells.new_empty(h.shape)
        mine = _diagonal(gates, layers, step)
        self.run.forward(
            total.view(-1, 4 * hidden),
            mine.reshape(-1, 4 * hidden),
            _diagonal(cells, layers, step).reshape(-1, hidden),
            h.view(-1, hidden),
            after.view(-1, hidden),
        )
        mine.copy_(total)
        _diagonal(cells, layers, step + 1).copy_(after)
        _diagonal(reads[..., hidden:], layers, step + 1).copy_(h)
        given = h
        if self.residual:
            given = h + _diagonal(reads[..., :hidden], layers, step)  # of the bottom layer these are zeros
        if layers.stop == self.count:
            outputs[step - len(layers) + 1] = given[-1]
        below = range(layers.start, min(layers.stop, self.count - 1))
        if below:
            given = given[: len(below)]
            if self.keep is not None:
                given = apply_dropout(given, _diagonal(self.keep, below, step), self.dropout)
            above = range(below.start + 1, below.stop + 1)
            _diagonal(reads[..., :hidden], above, step).copy_(given)

    def backward(
        self,
        doutputs: Tensor | None,
        dlast_h: Tensor,
        dlast_c: Tensor,
        gates: Tensor,
        cells: Tensor,
        reads: Tensor,
    ) -> list[Tensor]:
        """The gradients of inputs (T, B, I), of the weights, layer by layer, and of the first h and c (L, B, H)."""
        hidden = self.hidden
        dgates = torch.empty_like(gates)
        # The gradient of what each layer gives, filled from the layer above it.
        incoming = self.empty(self.steps, hidden, self.dtype)
        incoming[-1] = 0.0 if doutputs is None else doutputs
        dh, dc = dlast_h.clone(), dlast_c.clone()
        to_bottom = Product(self.layers[0].hidden.t(), None, self.schedule.weights)
        for layers, step in reversed(self.diagonals()):
            part = slice(layers.start, layers.stop)
            given = _diagonal(incoming, layers, step)
            made = dgates.new_empty(len(layers), self.batch, 4 * hidden)
            dc[part] = self.run.backward_of_sums(
                _diagonal(gates, layers, step).reshape(-1, 4 * hidden),
                _diagonal(cells, layers, step).reshape(-1, hidden),
                _diagonal(cells, layers, step + 1).reshape(-1, hidden),
                given.reshape(-1, hidden),
                dh[part].view(-1, hidden),
                dc[part].view(-1, hidden).clone(),
                made.view(-1, 4 * hidden),
            ).view(-1, self.batch, hidden)
            _diagonal(dgates, layers, step).copy_(made)
            if self.padding is None:
                dh[part] = 0.0
            else:
                steps = [step - number for number in range(len(layers))]
                dh[part] *= self.padding[steps].unsqueeze(2)
            if layers.start == 0:
                dh[0] += to_bottom(made[0])
            uppers, upper_step = self.upper(layers, step)
            if uppers:
                assert self.joined is not None
                dreads = torch.bmm(
                    made[len(layers) - len(uppers) :], self.joined[uppers.start - 1 : uppers.stop - 1]
                )
                dh[uppers.start : uppers.stop] += dreads[..., hidden:]
                self._give_down(uppers, upper_step, dreads[..., :hidden], incoming)
        return self._collect(dgates, reads, dh, dc)

    def _give_down(self, layers: range, step: int, dreads: Tensor, incoming: Tensor) -> None:
        """Fills the gradients of what the layers below ``layers`` have given."""
        if self.residual:
            dreads = dreads + _diagonal(incoming, layers, step)
        below = range(layers.start - 1, layers.stop - 1)
        if self.keep is not None:
            dreads = apply_dropout(dreads, _diagonal(self.keep, below, step), self.dropout)
        _diagonal(incoming, below, step).copy_(dreads)

    def _collect(self, dgates: Tensor, reads: Tensor, dh: Tensor, dc: Tensor) -> list[Tensor]:
        hidden, bottom = self.hidden, self.layers[0]
        dinputs = Product(bottom.input.t(), None, self.schedule.weights)(dgates[0])
        if self.padding is not None:
            dinputs.masked_fill_(self.padding.unsqueeze(2), 0.0)
        gradients: list[list[Tensor]] = [[], [], []]
        for number, (layer, given) in enumerate(zip(self.layers, dgates, strict=True)):
            found = [torch.zeros_like(part, dtype=self.accumulate) for part in (layer.input, layer.hidden)]
            read = self.inputs if number == 0 else reads[number, : self.steps, :, :hidden]
            add_outer(found[0], given, read)
            add_outer(found[1], given, reads[number, : self.steps, :, hidden:])
            for kind, gradient in enumerate((*found, add_rows(given))):
                gradients[kind].append(gradient.to(self.dtype))
        return [dinputs, *(gradient for kind in gradients for gradient in kind), dh, dc]


def _empty_result(
    inputs: Tensor, count: int, hidden: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, steps, _ = inputs.shape
    accumulate = accumulate_dtype(inputs.dtype)
    kept, layers = (steps, count) if keep else (-1, 0)
    return (
        inputs.new_empty(steps, batch, hidden),
        inputs.new_empty(layers, max(kept, 0), batch, 4 * hidden),
        inputs.new_empty(layers, kept + 1, batch, hidden, dtype=accumulate),
        inputs.new_empty(layers, kept + 1, batch, 2 * hidden),
        inputs.new_empty(count, batch, hidden),
        inputs.new_empty(count, batch, hidden, dtype=accumulate),
    )


@custom_op(
    "econmt_ops::lstm_stack",
    schema=f"({_ARGUMENTS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *call, keep = arguments
    stack = _Stack(tuple(call))
    outputs, gates, cells, reads = stack.forward()
    h = reads[..., stack.hidden :]
    if stack.lengths is None:
        last_h = h[:, -1].clone()
    else:
        last_h = h[:, stack.lengths, torch.arange(stack.batch, device=h.device)]
    last_c = cells[:, -1].clone()
    if not keep:
        _, gates, cells, reads, _, _ = _empty_result(arguments[0], stack.count, stack.hidden, keep)
    return outputs, gates, cells, reads, last_h, last_c


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    recurrents = arguments[2]
    return _empty_result(arguments[0], len(recurrents), recurrents[0].shape[1], arguments[-1])


@custom_op(
    "econmt_ops::lstm_stack_backward",
    schema="(Tensor? doutputs, Tensor? dlast_h, Tensor? dlast_c, Tensor gates, Tensor cells, Tensor reads, "
    f"{_ARGUMENTS}) -> Tensor[]",
)
def _backward(
    doutputs: Tensor | None,
    dlast_h: Tensor | None,
    dlast_c: Tensor | None,
    gates: Tensor,
    cells: Tensor,
    reads: Tensor,
    *call: Any,
) -> list[Tensor]:
    stack = _Stack(call)
    first_h, first_c = torch.stack(stack.first_h), torch.stack(stack.first_c)
    return stack.backward(
        doutputs,
        torch.zeros_like(first_h) if dlast_h is None else dlast_h,
        torch.zeros_like(first_c) if dlast_c is None else dlast_c,
        gates,
        cells,
        reads,
    )


@_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs, weights, recurrents, biases, first_h, first_c = arguments[6:12]
    batch, steps, size = inputs.shape
    flat = [part for parts in (weights, recurrents, biases) for part in parts]
    return [
        inputs.new_empty(steps, batch, size),
        *(torch.empty_like(part, memory_format=torch.contiguous_format) for part in flat),
        *(parts[0].new_empty(len(parts), *parts[0].shape) for parts in (first_h, first_c)),
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[7:13]
    ctx.count = len(inputs[1])
    lists = [part for parts in inputs[1:6] for part in parts]
    ctx.save_for_backward(*output[1:4], inputs[0], inputs[6], *lists)


def _differentiate(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
    gates, cells, reads, inputs, lengths, *flat = ctx.saved_tensors
    count = ctx.count
    lists = [flat[begin : begin + count] for begin in range(0, 5 * count, count)]
    dinputs, *flat, dh, dc = _backward(
        incoming[0], incoming[4], incoming[5], gates, cells, reads, inputs, *lists, lengths, *ctx.options
    )
    lists = [flat[begin : begin + count] for begin in range(0, 3 * count, count)]
    return (dinputs.transpose(0, 1), *lists, list(dh), list(dc), *(None for _ in range(8)))


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def run_stack(
    inputs: Tensor,
    layers: tuple[LSTMWeights, ...],
    state: LSTMState,
    lengths: Tensor | None,
    *,
    residual: bool,
    dropout: float,
    seed: int | None,
    variational: bool,
    reversed_rows: bool,
    schedule: Schedule,
) -> tuple[Tensor, LSTMState]:
    """Runs a stack from each row's first to its last step.

    Args:
        inputs: (B, T, I), zero at padded positions.
        layers: bottom first.
        state: (h, c) of every layer.
        lengths: (B,), or None.
        residual, dropout, seed, variational: as in `econmt_ops.lstm`.
        reversed_rows: whether the rows have been turned round; dropout masks belong to positions before that.
        schedule: how the pointwise work is done.

    Returns:
        outputs (B, T, H), and the state after each row's last step.
    """
    lists = [[layer[part] for layer in layers] for part in range(3)]
    lists += [[h for h, _ in state], [c for _, c in state]]
    keep = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (inputs, *(part for parts in lists for part in parts))
    )
    outputs, _, _, _, last_h, last_c = _forward(
        inputs, *lists, lengths, residual, dropout, seed or 0, variational, reversed_rows, schedule.text, keep
    )
    return outputs.transpose(0, 1), tuple(zip(last_h, last_c, strict=True))
