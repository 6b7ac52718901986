"""The LSTM by partial forward propagation: h is stashed, the gates are made again.

A layer keeps its inputs and outputs, and c once a block of steps (more if the stash level asks). The backward pass
makes a block's gates again by two large products and c by a scan, runs its loop over the steps with only the
gradients of h and c in sequence, and leaves the gradients of weights and inputs to large products after it.

Padded positions have their gates closed (see reference.py): c is carried through, h is 0 and so is every gradient.
B batch, T steps, I input size, H hidden, K steps of a block. Inside, time comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops import steps as step_functions
from econmt_ops.blocks import add_outer, reaches, scan_cells, split_blocks
from econmt_ops.dropout import derive_seed
from econmt_ops.dropout import dropout as drop_units
from econmt_ops.lstm.cells import cells as cell_functions
from econmt_ops.lstm.products import Product, add_rows
from econmt_ops.lstm.reference import STEPWISE, closed_gates, last_outputs, layer_by_torch
from econmt_ops.lstm.schedule import Schedule, default_schedule
from econmt_ops.lstm.wavefront import run_stack
from econmt_ops.masking import padding_mask, reverse_rows, zero_padding
from econmt_ops.precision import accumulate_dtype
from econmt_ops.weights import LSTMState, LSTMWeights

_ARGUMENTS = (
    "Tensor inputs, Tensor[] weights, Tensor[] recurrents, Tensor[] biases, Tensor[] first_h, Tensor[] first_c, "
    "Tensor? lengths"
)
_OPTIONS = "bool[] reverse, str stash, str schedule"
"""One entry of each list a direction: a layer reads forwards, backwards, or both ways into one output."""


class _Direction:
    """One direction of a layer: its tensors in the order in which its walk meets them.

    Attributes:
        inputs: (T, B, I), zero at padded positions. padding: (T, B) or None.
    """

    def __init__(
        self,
        inputs: Tensor,
        weights: LSTMWeights,
        first_h: Tensor,
        first_c: Tensor,
        padding: Tensor | None,
        reverse: bool,
        stash: str,
        schedule: str,
    ) -> None:
        self.batch, self.steps, _ = inputs.shape
        self.hidden = weights.hidden.shape[1]
        self.inputs = inputs.transpose(0, 1)
        self.weights = weights
        self.first_h, self.first_c = first_h, first_c
        self.padding, self.reverse, self.stash = padding, reverse, stash
        self.accumulate = accumulate_dtype(inputs.dtype)
        self.blocks = split_blocks(self.steps, self.batch, self.hidden, self.accumulate)
        self.schedule = Schedule.parse(schedule)
        self.run = cell_functions(self.schedule.pointwise)

    def walk(self, sequence: Tensor, begin: int, end: int) -> Tensor:
        """What the walk meets of a sequence (T, B, .) in its steps begin to end."""
        if not self.reverse:
            return sequence[begin:end]
        return sequence[self.steps - end : self.steps - begin].flip(0)

    def put(self, sequence: Tensor, begin: int, end: int, part: Tensor, add: bool = False) -> None:
        """Puts, or adds, what the walk made in its steps begin to end where it belongs."""
        if self.reverse:
            begin, end, part = self.steps - end, self.steps - begin, part.flip(0)
        if add:
            sequence[begin:end] += part
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
        """The input's share of the gates (K, B, 4H), a new tensor; padded positions have their gates closed."""
        products = self.read_product(inputs)
        if padding is None:
            return products
        return torch.where(padding.unsqueeze(2), closed_gates(self.weights), products)

    @functools.cached_property
    def read_product(self) -> Product:
        """x W^T + b."""
        return Product(self.weights.input, self.weights.bias, self.schedule.weights)

    @functools.cached_property
    def recurrent_product(self) -> Product:
        """h U^T."""
        return Product(self.weights.hidden, None, self.schedule.weights)

    @functools.cached_property
    def to_h(self) -> Product:
        """dz U."""
        return Product(self.weights.hidden.t(), None, self.schedule.weights)

    def previous(self, outputs: Tensor, begin: int, end: int) -> Tensor:
        """h of the step before for the walk's steps begin to end, (K, B, H)."""
        if begin > 0:
            return self.walk(outputs, begin - 1, end - 1)
        return torch.cat([self.first_h.unsqueeze(0), self.walk(outputs, 0, end - 1)], 0)

    def forward(self, outputs: Tensor, cells: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Walks, fills outputs (T, B, H) and cells; returns the last h and c (B, H), and the gates if they are kept.

        The gates (T, B, 4H) are those before their nonlinearities, in the order of the walk.
        """
        h, c = self.first_h, self.first_c
        every_cell = keep and reaches(self.stash, "cells")
        if keep and reaches(self.stash, "gates"):
            inputs, padding = self.read(0, self.steps)
            gates = self.products(inputs, padding)
            return (*self._walk_cells(gates, 0, h, c, outputs, cells), gates)
        # torch's own LSTM is the fastest forward pass, but keeps c in the type of the inputs and tells only the last.
        by_torch = h.dtype not in STEPWISE and not every_cell
        for number, (begin, end) in enumerate(self.blocks):
            if keep and not every_cell:
                cells[number] = c
            inputs, padding = self.read(begin, end)
            if by_torch:
                mask = None if padding is None else padding.t()
                made, h, c = layer_by_torch(inputs.transpose(0, 1), self.weights, h, c, mask)
                self.put(outputs, begin, end, made.transpose(0, 1))
                continue
            kept = cells if every_cell else None
            h, c = self._walk_cells(self.products(inputs, padding), begin, h, c, outputs, kept)
        return h, c, None

    def _walk_cells(
        self, gates: Tensor, begin: int, h: Tensor, c: Tensor, outputs: Tensor, cells: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Walks from step ``begin`` on; ``gates`` (K, B, 4H), the input's share, becomes the sum."""
        spare = (torch.empty_like(c), torch.empty_like(c))
        for step, total in enumerate(gates.unbind(0), start=begin):
            after = spare[step % 2] if cells is None else cells[step]
            recurrent = self.recurrent_product(h)
            h = outputs[self.steps - 1 - step if self.reverse else step]
            self.run.forward(total, recurrent, c, h, after)
            c = after
        return h, c

    def backward(
        self,
        doutputs: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        outputs: Tensor,
        cells: Tensor,
        gates: Tensor | None,
        dinputs: Tensor,
        add: bool,
    ) -> list[Tensor]:
        """Walks back, puts dinputs (T, B, I) or adds to it, and returns the gradients of weights and first state."""
        weights = self.weights
        to_inputs = Product(weights.input.t(), None, self.schedule.weights)
        found = [torch.zeros_like(part, dtype=self.accumulate) for part in weights]
        for number, (begin, end) in reversed(list(enumerate(self.blocks))):
            inputs, padding = self.read(begin, end)
            before = self.previous(outputs, begin, end)
            if gates is None:
                total = self.products(inputs, padding)
                total += self.recurrent_product(before)
                dgates = total
            else:
                total = gates[begin:end]
                dgates = torch.empty_like(total)
            incoming = None if doutputs is None else self.walk(doutputs, begin, end)
            activated = step_functions.activate(total, self.accumulate)
            states = self._states(cells, number, activated)
            dh, dc = self._walk_back(activated, states, incoming, dh, dc, dgates)
            add_outer(found[0], dgates, inputs)
            add_outer(found[1], dgates, before)
            found[2] += add_rows(dgates)
            self.put(dinputs, begin, end, to_inputs(dgates), add)
        return [*found, dh, dc]

    def _states(self, cells: Tensor, number: int, activated: Tensor) -> Sequence[Tensor]:
        """c before a block of steps and after each of them, from what is kept."""
        begin, end = self.blocks[number]
        if not reaches(self.stash, "cells"):
            return scan_cells(activated, cells[number]).unbind(0)
        return (cells[begin - 1] if begin > 0 else self.first_c, *cells[begin:end].unbind(0))

    def _walk_back(
        self,
        activated: Tensor,
        states: Sequence[Tensor],
        incoming: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        dgates: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Walks back through a block whose gates (K, B, 4H) are given, and writes their gradients."""
        nothing = torch.zeros_like(dh)
        for step in reversed(range(len(activated))):
            given = nothing if incoming is None else incoming[step]
            dc = self.run.backward(
                activated[step], states[step], states[step + 1], given, dh, dc, dgates[step]
            )
            dh = self.to_h(dgates[step])
        return dh, dc


def _directions(call: tuple[Any, ...]) -> list[_Direction]:
    inputs, weights, recurrents, biases, first_h, first_c, lengths, reverse, stash, schedule = call
    padding = None
    if lengths is not None:
        padding = padding_mask(lengths, inputs.shape[1], inputs.device).t().contiguous()
    return [
        _Direction(inputs, LSTMWeights(*parts), h, c, padding, backwards, stash, schedule)
        for *parts, h, c, backwards in zip(
            weights, recurrents, biases, first_h, first_c, reverse, strict=True
        )
    ]


def _empty_result(
    inputs: Tensor, hidden: int, directions: int, stash: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, steps, _ = inputs.shape
    accumulate = accumulate_dtype(inputs.dtype)
    blocks = len(split_blocks(steps, batch, hidden, accumulate))
    cells = (steps if reaches(stash, "cells") else blocks) if keep else 0
    gates = steps if keep and reaches(stash, "gates") else 0
    return (
        inputs.new_empty(steps, batch, directions * hidden),
        inputs.new_empty(directions, cells, batch, hidden, dtype=accumulate),
        inputs.new_empty(directions, gates, batch, 4 * hidden),
        inputs.new_empty(directions, batch, hidden),
        inputs.new_empty(directions, batch, hidden, dtype=accumulate),
    )


@torch.library.custom_op(
    "econmt_ops::lstm_layer",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *call, keep = arguments
    directions = _directions(tuple(call))
    result = _empty_result(arguments[0], directions[0].hidden, len(directions), directions[0].stash, keep)
    outputs, cells, gates, last_h, last_c = result
    kept = []
    for number, (direction, part) in enumerate(
        zip(directions, outputs.chunk(len(directions), 2), strict=True)
    ):
        last_h[number], last_c[number], made = direction.forward(part, cells[number], keep)
        kept += [] if made is None else [made]
    return (
        outputs,
        cells,
        torch.stack(kept) if len(kept) > 1 else kept[0].unsqueeze(0) if kept else gates,
        last_h,
        last_c,
    )


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    recurrents = arguments[2]
    return _empty_result(arguments[0], recurrents[0].shape[1], len(recurrents), arguments[8], arguments[10])


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
    gates: Tensor,
    *call: Any,
) -> list[Tensor]:
    directions, dtype = _directions(call), outputs.dtype
    dinputs = torch.empty_like(directions[0].inputs, memory_format=torch.contiguous_format)
    found = []
    for number, direction in enumerate(directions):
        part = slice(number * direction.hidden, (number + 1) * direction.hidden)
        found.append(
            direction.backward(
                None if doutputs is None else doutputs[..., part],
                torch.zeros_like(direction.first_h) if dlast_h is None else dlast_h[number],
                torch.zeros_like(direction.first_c) if dlast_c is None else dlast_c[number],
                outputs[..., part],
                cells[number],
                gates[number] if gates.shape[1] else None,
                dinputs,
                add=number > 0,
            )
        )
    # In the order of the operator's arguments: lists of weights, recurrents, biases and first h, then of first c.
    lists = [[gradients[kind] for gradients in found] for kind in range(5)]
    return [dinputs, *(gradient.to(dtype) for kind in lists[:4] for gradient in kind), *lists[4]]


@_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs, *lists = arguments[6:12]
    dinputs = inputs.new_empty(inputs.shape[1], inputs.shape[0], inputs.shape[2])
    flat = [part for parts in lists for part in parts]
    return [dinputs, *(torch.empty_like(part, memory_format=torch.contiguous_format) for part in flat)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[7:10]
    lists = [part for parts in inputs[1:6] for part in parts]
    ctx.save_for_backward(*output[:3], inputs[0], inputs[6], *lists)


def _differentiate(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
    outputs, cells, gates, inputs, lengths, *flat = ctx.saved_tensors
    count = len(ctx.options[0])
    lists = [flat[begin : begin + count] for begin in range(0, 5 * count, count)]
    gradients = _backward(
        incoming[0], incoming[3], incoming[4], outputs, cells, gates, inputs, *lists, lengths, *ctx.options
    )
    dinputs, *flat = gradients
    lists = [flat[begin : begin + count] for begin in range(0, 5 * count, count)]
    return (dinputs.transpose(0, 1), *lists, *(None for _ in range(5)))


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def run_layer(
    inputs: Tensor,
    weights: Sequence[LSTMWeights],
    first: Sequence[tuple[Tensor, Tensor]],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    stash: str,
    schedule: Schedule,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in D directions: outputs (B, T, D H), h and c (D, B, H) after each walk's last step.

    A row's h passes padding as 0: a reversed direction with lengths must start from zero, and the last h of a
    forward one has to be taken from the outputs.
    """
    lists = [[layer[part] for layer in weights] for part in range(3)]
    lists += [[h for h, _ in first], [c for _, c in first]]
    keep = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (inputs, *(part for parts in lists for part in parts))
    )
    outputs, _, _, last_h, last_c = _forward(
        inputs, *lists, lengths, list(reverse), stash, schedule.text, keep
    )
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
    from_zero: bool = False,
    stash: str = "outputs",
    compiled: bool = False,
    schedule: Schedule | None = None,
) -> tuple[Tensor, LSTMState]:
    """See `econmt_ops.lstm`; all arguments are given, checked and cast. ``from_zero``: all of ``state`` is zero."""
    schedule = schedule or default_schedule(compiled)
    if schedule.order == "wavefront" and len(layers) > 1 and stash == "gates":
        padding = None if lengths is None else padding_mask(lengths, inputs.shape[1], inputs.device)
        inputs = zero_padding(inputs, padding)
        outputs, last_state = run_stack(
            reverse_rows(inputs, lengths) if reverse else inputs,
            layers,
            state,
            lengths,
            residual=residual,
            dropout=dropout,
            seed=dropout_seed,
            variational=variational,
            reversed_rows=reverse,
            schedule=schedule,
        )
        return reverse_rows(outputs, lengths) if reverse else outputs, last_state
    # Rows are turned round only where a first state has to pass the padding before it.
    turn = reverse and lengths is not None and not from_zero
    outputs = reverse_rows(inputs, lengths) if turn else inputs
    last: list[tuple[Tensor, Tensor]] = []
    for number, (layer, (h, c)) in enumerate(zip(layers, state, strict=True)):
        read = outputs
        if number > 0 and dropout > 0.0:
            assert dropout_seed is not None
            # Masks belong to positions, whichever way the stack walks.
            read = reverse_rows(read, lengths) if turn else read
            read = drop_units(read, dropout, derive_seed(dropout_seed, number), variational)
            read = reverse_rows(read, lengths) if turn else read
        walks = [reverse and not turn]
        outputs, last_h, last_c = run_layer(read, [layer], [(h, c)], lengths, walks, stash, schedule)
        forward = lengths is not None and not walks[0]
        last.append(
            (last_outputs(outputs, h, lengths) if forward and lengths is not None else last_h[0], last_c[0])
        )
        if residual and number > 0:
            outputs = outputs + read
    return reverse_rows(outputs, lengths) if turn else outputs, tuple(last)


def bidirectional_lstm(
    inputs: Tensor,
    forward: LSTMWeights,
    backward: LSTMWeights,
    *,
    lengths: Tensor | None,
    stash: str = "outputs",
    compiled: bool = False,
    schedule: Schedule | None = None,
) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """See `econmt_ops.bidirectional_lstm`; all arguments are checked and cast."""
    schedule = schedule or default_schedule(compiled)
    hidden = forward.hidden.shape[1]
    h = inputs.new_zeros(inputs.shape[0], hidden)
    zero = (h, h.to(accumulate_dtype(h.dtype)))
    outputs, last_h, last_c = run_layer(
        inputs, [forward, backward], [zero, zero], lengths, [False, True], stash, schedule
    )
    ahead = last_h[0] if lengths is None else last_outputs(outputs[..., :hidden], h, lengths)
    return outputs, ((ahead, last_c[0]), (last_h[1], last_c[1]))
