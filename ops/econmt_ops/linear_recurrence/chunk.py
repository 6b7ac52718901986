"""The linear recurrence with chunks of time in parallel, in PyTorch operators on any device.

A first loop runs all chunks at once from zero and yields the map h -> P h + e of each chunk; the states before the
chunks follow sequentially; a second loop runs each chunk from its state. Nothing is divided by a product of decays, so
decays may be 0, negative or above 1. With chunks of about sqrt(T) steps, the two loops and the states between the
chunks take about sqrt(T) steps each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.linear_recurrence.reference import first_state, standing_still


def _walk(decay: Tensor, inputs: Tensor, h: Tensor, outputs: Tensor | None, reverse: bool) -> Tensor:
    """Runs the recurrence over the steps of (..., L, H) from the state ``h`` (..., H); returns the last state."""
    for t in range(decay.shape[-2])[:: -1 if reverse else 1]:
        h = torch.addcmul(inputs[..., t, :].to(h.dtype), decay[..., t, :].to(h.dtype), h)
        if outputs is not None:
            outputs[..., t, :] = h
    return h


def _states_before(decay: Tensor, inputs: Tensor, start: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Returns the state before each chunk (B, C, H), and the state (B, H) after the last; chunks are (B, C, L, H)."""
    zeros = torch.zeros_like(decay[:, :, 0], dtype=start.dtype)
    ends = _walk(decay, inputs, zeros, None, reverse)
    products = torch.ones_like(zeros)
    for t in range(decay.shape[2]):
        products = products * decay[:, :, t]
    before = torch.empty_like(zeros)
    for chunk in range(decay.shape[1])[:: -1 if reverse else 1]:
        before[:, chunk] = start
        # A product of decays may overflow although the state that it multiplies is zero.
        start = torch.where(start == 0, 0, products[:, chunk] * start) + ends[:, chunk]
    return before, start


def _run(decay: Tensor, inputs: Tensor, start: Tensor, outputs: Tensor, reverse: bool, size: int) -> None:
    """Writes the states (B, T, H) to ``outputs``, by chunks of ``size`` steps, from ``start`` (B, H)."""
    steps = decay.shape[1]
    count = steps // size if steps >= 2 * size else 0
    end = count * size
    shape = len(decay), count, size, decay.shape[2]
    chunks = [each[:, :end].view(shape) for each in (decay, inputs, outputs)]
    rest = [each[:, end:] for each in (decay, inputs, outputs)]
    if reverse:
        start = _walk(rest[0], rest[1], start, rest[2], reverse)
    if count:
        before, start = _states_before(chunks[0], chunks[1], start, reverse)
        _walk(chunks[0], chunks[1], before, chunks[2], reverse)
    if not reverse:
        _walk(rest[0], rest[1], start, rest[2], reverse)


def _chunk_size(call: RecurrenceArguments) -> int:
    """Returns the number of steps of a chunk."""
    return max(16, math.isqrt(call.decay.shape[1]))


def forward(call: RecurrenceArguments) -> Tensor:
    """Returns the outputs; see `scan.backend_of`."""
    padding = padding_mask(call.lengths, call.inputs.shape[1], call.inputs.device)
    decay, inputs = standing_still(call.decay, call.inputs, padding)
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    _run(decay, inputs, first_state(inputs, call.initial), outputs, call.reverse, _chunk_size(call))
    return zero_padding(outputs, padding)


def backward(call: RecurrenceArguments, doutputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of decay, inputs and initial; see `scan.backend_of`."""
    padding = padding_mask(call.lengths, call.decay.shape[1], call.decay.device)
    reverse = call.reverse
    decay, outputs = standing_still(call.decay, call.inputs, padding)
    doutputs = zero_padding(doutputs, padding)
    start = first_state(doutputs, call.initial)
    if padding is not None:  # a reversed row has its initial state at padded positions
        outputs = outputs.where(~padding.unsqueeze(2), start.to(outputs.dtype).unsqueeze(1))
    deltas = torch.empty_like(decay, dtype=start.dtype, memory_format=torch.contiguous_format)
    # delta_t = dh_t + a_{t+1} delta_{t+1}: the same recurrence in the other direction, with the decays shifted by one.
    first, rest, before = (0, slice(1, None), slice(0, -1)) if reverse else (-1, slice(0, -1), slice(1, None))
    deltas[:, first] = doutputs[:, first]
    if decay.shape[1] > 1:
        parts = decay[:, before], doutputs[:, rest], deltas[:, first], deltas[:, rest]
        _run(*parts, not reverse, _chunk_size(call))
    last = -1 if reverse else 0
    dinitial = decay[:, last] * deltas[:, last]
    ddecay = torch.empty_like(decay, memory_format=torch.contiguous_format)
    ddecay[:, last] = deltas[:, last] * start
    ddecay[:, before] = deltas[:, before] * outputs[:, rest]
    return zero_padding(ddecay, padding), zero_padding(deltas.to(decay.dtype), padding), dinitial
