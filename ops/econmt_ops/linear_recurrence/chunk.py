"""The linear recurrence in chunks of time side by side, in PyTorch on any device.

A walk through all chunks at a time finds what each makes of the state before it, h -> P h + e; the states before the
chunks follow one from the other; and a second walk begins each chunk from its own. Nothing is divided by a product of
decays, so that they may be 0, negative or above 1. With chunks of about sqrt(T) steps both walks and the carries take
about sqrt(T) steps each.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.traits import Traits
from econmt_ops.linear_recurrence import scan
from econmt_ops.linear_recurrence.reference import standing_still

TRAITS = Traits(recomputes=True, costs=scan.COSTS)

linear_recurrence = functools.partial(scan.linear_recurrence, backend="chunk")


def _order(count: int, reverse: bool) -> range:
    return range(count - 1, -1, -1) if reverse else range(count)


def _walk(decay: Tensor, inputs: Tensor, h: Tensor, outputs: Tensor | None, reverse: bool) -> Tensor:
    """Walks through the steps of (..., L, H) from the state ``h`` (..., H); returns the last state."""
    for t in _order(decay.shape[-2], reverse):
        h = torch.addcmul(inputs[..., t, :].to(h.dtype), decay[..., t, :].to(h.dtype), h)
        if outputs is not None:
            outputs[..., t, :] = h
    return h


def _chunks(tensor: Tensor, count: int, size: int) -> Tensor:
    """The first chunks of (B, T, H), a view (B, C, L, H)."""
    return tensor[:, : count * size].view(tensor.shape[0], count, size, tensor.shape[2])


def _states_before(decay: Tensor, inputs: Tensor, start: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """The states (B, C, H) with which a walk enters the chunks of (B, C, L, H), and the state (B, H) after them."""
    zeros = torch.zeros_like(decay[:, :, 0], dtype=start.dtype)
    ends = _walk(decay, inputs, zeros, None, reverse)
    products = torch.ones_like(zeros)
    for t in range(decay.shape[2]):
        products = products * decay[:, :, t]
    before = torch.empty_like(zeros)
    for chunk in _order(decay.shape[1], reverse):
        before[:, chunk] = start
        # A product may leave the range of its type where the state that it would multiply is none.
        start = torch.where(start == 0, 0, products[:, chunk] * start) + ends[:, chunk]
    return before, start


def run(
    decay: Tensor, inputs: Tensor, start: Tensor, outputs: Tensor, reverse: bool, block: int
) -> tuple[Tensor, Tensor]:
    """Writes the states (B, T, H) to ``outputs``; ``start`` (B, H) in the accumulate type.

    Returns:
        The states (B, T / block rounded up, H) with which the walk enters the blocks, and that after its last step.
    """
    steps = decay.shape[1]
    full = steps // block if steps >= 2 * block else 0
    rest = slice(full * block, steps)
    carries = start.new_empty(start.shape[0], -(-steps // block), start.shape[1])

    def walk_rest(h: Tensor) -> Tensor:
        for chunk in _order(-(-(steps - rest.start) // block), reverse):
            part = slice(rest.start + chunk * block, min(rest.start + (chunk + 1) * block, steps))
            carries[:, full + chunk] = h
            h = _walk(decay[:, part], inputs[:, part], h, outputs[:, part], reverse)
        return h

    if reverse:
        start = walk_rest(start)
    if full:
        cut = [_chunks(each, full, block) for each in (decay, inputs, outputs)]
        before, start = _states_before(cut[0], cut[1], start, reverse)
        carries[:, :full] = before
        _walk(cut[0], cut[1], before, cut[2], reverse)
    return carries, start if reverse else walk_rest(start)


def _start(inputs: Tensor, initial: Tensor | None) -> Tensor:
    """The state before the first step."""
    if initial is not None:
        return initial
    return inputs.new_zeros(inputs.shape[0], inputs.shape[2], dtype=accumulate_dtype(inputs.dtype))


def _padding(like: Tensor, lengths: Tensor | None) -> Tensor | None:
    return None if lengths is None else padding_mask(lengths, like.shape[1], like.device)


def forward(
    decay: Tensor,
    inputs: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    block: int,
    keep: bool,  # noqa: ARG001 - the states are there either way
) -> tuple[Tensor, Tensor]:
    """The outputs, and the states with which the walk enters the blocks; see `scan.Backend`."""
    padding = _padding(inputs, lengths)
    decay, inputs = standing_still(decay, inputs, padding)
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    carries, _ = run(decay, inputs, _start(inputs, initial), outputs, reverse, block)
    return zero_padding(outputs, padding), carries


def backward(
    decay: Tensor,
    kept: Tensor,
    carries: Tensor | None,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    block: int,
    doutputs: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of decay, inputs and initial; see `scan.Backend`."""
    padding = _padding(decay, lengths)
    decay, kept = standing_still(decay, kept, padding)
    doutputs = zero_padding(doutputs, padding)
    start = _start(doutputs, initial)
    outputs = kept if carries is None else _again(decay, kept, carries, reverse, block)
    if padding is not None:  # behind its last step a reversed row has the state it began with
        outputs = outputs.where(~padding.unsqueeze(2), start.to(outputs.dtype).unsqueeze(1))
    deltas = torch.empty_like(decay, dtype=start.dtype, memory_format=torch.contiguous_format)
    # delta_t = dh_t + a_{t+1} delta_{t+1}: the same recurrence the other way, each decay one place further.
    first, others, before = (
        (0, slice(1, None), slice(0, -1)) if reverse else (-1, slice(0, -1), slice(1, None))
    )
    deltas[:, first] = doutputs[:, first]
    if decay.shape[1] > 1:
        parts = decay[:, before], doutputs[:, others], deltas[:, first], deltas[:, others]
        run(*parts, not reverse, block)
    last = -1 if reverse else 0
    dinitial = decay[:, last] * deltas[:, last]
    ddecay = torch.empty_like(decay, memory_format=torch.contiguous_format)
    ddecay[:, last] = deltas[:, last] * start
    ddecay[:, before] = deltas[:, before] * outputs[:, others]
    return zero_padding(ddecay, padding), zero_padding(deltas.to(decay.dtype), padding), dinitial


def _again(decay: Tensor, inputs: Tensor, carries: Tensor, reverse: bool, block: int) -> Tensor:
    """The outputs once more, from the states with which the walk entered the blocks."""
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    full = inputs.shape[1] // block
    if full:
        cut = [_chunks(each, full, block) for each in (decay, inputs, outputs)]
        _walk(cut[0], cut[1], carries[:, :full], cut[2], reverse)
    if full < carries.shape[1]:
        rest = slice(full * block, None)
        _walk(decay[:, rest], inputs[:, rest], carries[:, full], outputs[:, rest], reverse)
    return outputs
