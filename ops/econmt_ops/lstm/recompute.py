"""The LSTM by partial forward propagation: h is stashed, the gates are made again.

A layer keeps its inputs and outputs, and c once a block of steps (more if the stash level asks). The backward pass
makes a block's gates again by two large products and c by a scan, runs its loop over the steps with only the
gradients of h and c in sequence, and leaves the gradients of weights and inputs to large products after it.

Padded positions have their gates closed (see reference.py): c is carried through, h is 0 and so is every gradient.
B batch, T steps, I input size, H hidden, K steps of a block. Inside, time comes first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.core.chunks import reaches, split_blocks
from econmt_ops.core.dropout import derive_seed
from econmt_ops.core.dropout import dropout as drop_units
from econmt_ops.core.lengths import padding_mask, reverse_rows, zero_padding
from econmt_ops.core.low_rank import layers_of_tensors, tensors_of_matrices
from econmt_ops.core.precision import accumulate_dtype, explicit_casts
from econmt_ops.core.repeated import Inputs, Repeated, expanded, values_of
from econmt_ops.core.weights import AnyLSTMWeights, LSTMState, LSTMWeights
from econmt_ops.dispatch.registration import custom_op
from econmt_ops.dispatch.traits import Traits
from econmt_ops.lstm.direction import Direction
from econmt_ops.lstm.reference import last_outputs
from econmt_ops.lstm.schedule import Schedule, default_schedule
from econmt_ops.lstm.together import run_all, walk_both, walk_both_back, walks_together
from econmt_ops.lstm.wavefront import run_stack

TRAITS = Traits(recomputes=True, takes_stash=True, casts=True)

_ARGUMENTS = (
    "Tensor inputs, Tensor[] weights, Tensor[] recurrents, Tensor[] biases, Tensor[] first_h, Tensor[] first_c, "
    "Tensor? lengths, Tensor? places"
)
_OPTIONS = "bool[] reverse, str stash, str schedule"
"""With places (B, T) the inputs are distinct rows (N, I). Weights may be of another type than the inputs, in which
all is computed; their gradients have theirs.

One entry of each list a direction: a layer reads forwards, backwards, or both ways into one output. Of factorised
matrices there are two entries a direction, the left and the right factor."""


def _directions(call: tuple[Any, ...]) -> list[Direction]:
    inputs, weights, recurrents, biases, first_h, first_c, lengths, places, reverse, stash, schedule = call
    padding = None
    if lengths is not None:
        steps = (inputs if places is None else places).shape[1]
        padding = padding_mask(lengths, steps, inputs.device).t().contiguous()
    return [
        Direction(inputs, layer, h, c, padding, places, backwards, stash, schedule)
        for layer, h, c, backwards in zip(
            layers_of_tensors(weights, recurrents, biases), first_h, first_c, reverse, strict=True
        )
    ]


def _empty_result(call: tuple[Any, ...], together: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs, _, _, biases, _, _, _, places, _, stash, _, keep = call
    directions, hidden = len(biases), biases[0].shape[0] // 4
    batch, steps = inputs.shape[:2] if places is None else places.shape
    accumulate = accumulate_dtype(inputs.dtype)
    blocks = len(split_blocks(steps, batch, hidden, accumulate))
    cells = (steps if reaches(stash, "cells") else blocks) if keep else 0
    gates = steps if keep and reaches(stash, "gates") else 0
    # What both directions write in one step lies together.
    kept = [(count, directions) if together else (directions, count) for count in (cells, gates)]
    return (
        inputs.new_empty(steps, batch, directions * hidden),
        inputs.new_empty(*kept[0], batch, hidden, dtype=accumulate),
        inputs.new_empty(*kept[1], batch, 4 * hidden),
        inputs.new_empty(directions, batch, hidden),
        inputs.new_empty(directions, batch, hidden, dtype=accumulate),
    )


def _goes_together(call: tuple[Any, ...]) -> bool:
    _, _, recurrents, biases, *_, stash, schedule = call[:11]
    return walks_together(schedule, stash, len(biases), len(recurrents))


@custom_op(
    "econmt_ops::lstm_layer",
    schema=f"({_ARGUMENTS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *call, keep = arguments
    directions = _directions(tuple(call))
    together = keep and _goes_together(arguments)
    result = _empty_result(arguments, together)
    outputs, cells, gates, last_h, last_c = result
    if together:
        return outputs, cells, gates, *walk_both(directions, outputs, cells, gates)
    parts = zip(directions, outputs.chunk(len(directions), 2), cells, strict=True)
    tasks = [functools.partial(each.forward, part, own, keep) for each, part, own in parts]
    kept = []
    for number, (h, c, made) in enumerate(run_all(tasks, directions)):
        last_h[number], last_c[number] = h, c
        kept += [] if made is None else [made]
    if kept:
        gates = torch.stack(kept) if len(kept) > 1 else kept[0].unsqueeze(0)
    return outputs, cells, gates, last_h, last_c


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _empty_result(arguments, arguments[-1] and _goes_together(arguments))


@custom_op(
    "econmt_ops::lstm_layer_backward",
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
    directions = _directions(call)
    dinputs = torch.empty_like(directions[0].inputs, memory_format=torch.contiguous_format)
    dh = torch.zeros_like(torch.stack(call[4])) if dlast_h is None else dlast_h
    dc = torch.zeros_like(torch.stack(call[5])) if dlast_c is None else dlast_c
    if _goes_together(call):
        found = walk_both_back(directions, doutputs, dh, dc, outputs, cells, gates, dinputs)
    else:
        found = _walk_back(directions, doutputs, dh, dc, outputs, cells, gates, dinputs)
    # In the order of the operator's arguments: lists of weights, recurrents, biases and first h, then of first c.
    lists = [[part for gradients in found for part in gradients[kind]] for kind in range(5)]
    arguments = [part for parts in call[1:6] for part in parts]
    gradients = [gradient for kind in lists for gradient in kind]
    made = zip(gradients, arguments, strict=True)
    return [dinputs, *(gradient.to(argument.dtype) for gradient, argument in made)]


def _walk_back(
    directions: Sequence[Direction],
    doutputs: Tensor | None,
    dh: Tensor,
    dc: Tensor,
    outputs: Tensor,
    cells: Tensor,
    gates: Tensor,
    dinputs: Tensor,
) -> list[tuple[list[Tensor], ...]]:
    """The backward passes of all directions; dh, dc: (D, B, H), dinputs: (T, B, I) is written."""
    streams = directions[0].schedule.directions == "streams"
    tasks, others = [], []
    for number, direction in enumerate(directions):
        part = slice(number * direction.hidden, (number + 1) * direction.hidden)
        # Directions that may run at the same time must not add to one tensor.
        own = torch.empty_like(dinputs) if streams and number else dinputs
        others += [own] if streams and number else []
        task = functools.partial(
            direction.backward,
            None if doutputs is None else doutputs[..., part],
            dh[number],
            dc[number],
            outputs[..., part],
            cells[number],
            gates[number] if gates.shape[1] else None,
            own,
            add=number > 0 and not streams,
        )
        tasks.append(task)
    found = run_all(tasks, directions)
    for own in others:
        dinputs += own
    return found


@_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs, *lists = arguments[6:12]
    by_time = inputs if arguments[13] is not None else inputs.transpose(0, 1)
    dinputs = torch.empty_like(by_time, memory_format=torch.contiguous_format)
    flat = [part for parts in lists for part in parts]
    return [dinputs, *(torch.empty_like(part, memory_format=torch.contiguous_format) for part in flat)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[8:11]
    ctx.sizes = [len(parts) for parts in inputs[1:6]]
    lists = [part for parts in inputs[1:6] for part in parts]
    ctx.save_for_backward(*output[:3], inputs[0], *inputs[6:8], *lists)


def _differentiate(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
    outputs, cells, gates, inputs, lengths, places, *flat = ctx.saved_tensors
    lists = _split(flat, ctx.sizes)
    with explicit_casts(outputs):
        dinputs, *flat = _backward(
            incoming[0],
            incoming[3],
            incoming[4],
            outputs,
            cells,
            gates,
            inputs,
            *lists,
            lengths,
            places,
            *ctx.options,
        )
    dinputs = dinputs.transpose(0, 1) if places is None else dinputs
    return (dinputs, *_split(flat, ctx.sizes), *(None for _ in range(6)))


def _split(flat: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Lists of these sizes, one after the other."""
    left = iter(flat)
    return [list(itertools.islice(left, size)) for size in sizes]


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def run_layer(
    inputs: Inputs,
    weights: Sequence[AnyLSTMWeights],
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
    lists = [
        tensors_of_matrices([layer.input for layer in weights]),
        tensors_of_matrices([layer.hidden for layer in weights]),
        [layer.bias for layer in weights],
    ]
    lists += [[h for h, _ in first], [c for _, c in first]]
    keep = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (values_of(inputs), *(part for parts in lists for part in parts))
    )
    places = inputs.places if isinstance(inputs, Repeated) else None
    outputs, _, _, last_h, last_c = _forward(
        values_of(inputs), *lists, lengths, places, list(reverse), stash, schedule.text, keep
    )
    return outputs.transpose(0, 1), last_h, last_c


def lstm(
    inputs: Inputs,
    layers: tuple[AnyLSTMWeights, ...],
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
    """See `econmt_ops.lstm`; all arguments are given, checked and, but for the weights, cast.

    ``from_zero``: all of ``state`` is zero.

    Factorised layers run one after the other, whatever the schedule's order: a wavefront is batched products of whole
    matrices, and what it spreads the cost of, many small products, is what factors make cheap.
    """
    schedule = schedule or default_schedule(compiled)
    whole = tuple(layer for layer in layers if isinstance(layer, LSTMWeights))
    if schedule.order == "wavefront" and len(whole) == len(layers) > 1 and stash == "gates":
        inputs = expanded(inputs)
        padding = None if lengths is None else padding_mask(lengths, inputs.shape[1], inputs.device)
        inputs = zero_padding(inputs, padding)
        outputs, last_state = run_stack(
            reverse_rows(inputs, lengths) if reverse else inputs,
            tuple(LSTMWeights(*(part.to(inputs.dtype) for part in layer)) for layer in whole),
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
    read: Inputs = reverse_rows(expanded(inputs), lengths) if turn else inputs
    last: list[tuple[Tensor, Tensor]] = []
    for number, (layer, (h, c)) in enumerate(zip(layers, state, strict=True)):
        if number > 0 and dropout > 0.0:
            assert dropout_seed is not None
            assert isinstance(read, Tensor)
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
            assert isinstance(read, Tensor)
            outputs = outputs + read
        read = outputs
    return reverse_rows(outputs, lengths) if turn else outputs, tuple(last)


def bidirectional_lstm(
    inputs: Inputs,
    forward: AnyLSTMWeights,
    backward: AnyLSTMWeights,
    *,
    lengths: Tensor | None,
    stash: str = "outputs",
    compiled: bool = False,
    schedule: Schedule | None = None,
) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """See `econmt_ops.bidirectional_lstm`; all arguments are checked and, but for the weights, cast."""
    schedule = schedule or default_schedule(compiled)
    hidden = forward.hidden.shape[1]
    batch = len(inputs.places) if isinstance(inputs, Repeated) else len(inputs)
    h = values_of(inputs).new_zeros(batch, hidden)
    zero = (h, h.to(accumulate_dtype(h.dtype)))
    outputs, last_h, last_c = run_layer(
        inputs, [forward, backward], [zero, zero], lengths, [False, True], stash, schedule
    )
    ahead = last_h[0] if lengths is None else last_outputs(outputs[..., :hidden], h, lengths)
    return outputs, ((ahead, last_c[0]), (last_h[1], last_c[1]))
