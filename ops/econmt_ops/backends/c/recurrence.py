"""The linear recurrence in the C library: a backend of `econmt_ops.linear_recurrence.scan`.

A task is a range of columns of a row, with all of its steps, so that memory is read once. If there are fewer tasks than
threads, blocks of steps run in parallel: a first pass computes each block's map of the state before it, and the second
pass reads the block again while it is in cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from econmt_ops.backends.c import call, rows_of

_LINE = 16
"""Columns of a task are a multiple of this: a cache line of float32."""

_WIDEST = 2048
"""Maximum columns of a task, so that its states stay in the L1 cache."""

_PARTS = 16
"""Maximum blocks of steps that run in parallel."""

_PART_VALUES = 1 << 16
"""Values of such a block in one tensor."""


def _width(rows: int, hidden: int) -> int:
    """Returns the columns of a task: as few tasks as keep all threads busy."""
    threads = torch.get_num_threads()
    parts = 1 if rows % threads == 0 or rows >= 4 * threads else threads
    return min(_WIDEST, max(_LINE, -(-hidden // (parts * _LINE)) * _LINE))


def _has_few_tasks(rows: int, steps: int, hidden: int, block: int) -> bool:
    """Returns True if rows and columns are too few to keep all threads busy, but steps are not."""
    tasks = rows * -(-hidden // _LINE)
    return tasks < torch.get_num_threads() and steps >= 2 * _part_steps(hidden, block)


def _part_steps(hidden: int, block: int) -> int:
    """Returns the steps of a part, a multiple of ``block``."""
    return max(1, _PART_VALUES // (max(1, hidden) * block)) * block


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Returns the stride fields of tensors (B, T, H)."""
    return {
        f"{name}_{kind}": tensor.stride(axis)
        for name, tensor in tensors.items()
        for axis, kind in enumerate(("batch", "step"))
    }


def walk(
    decay: Tensor,
    inputs: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    block: int,
    outputs: Tensor,
    carries: Tensor | None,
    last: Tensor | None,
) -> None:
    """Writes outputs, and carries and the last state (B, H) unless they are None."""
    rows, steps, hidden = decay.shape
    call(
        "recurrence_forward",
        3 * decay.numel(),
        (rows, steps, hidden, decay.dtype == torch.bfloat16, _width(rows, hidden), reverse),
        decay=decay,
        inputs=inputs,
        initial=None if initial is None else initial.contiguous(),
        lengths=lengths,
        outputs=outputs,
        block=block,
        carries=carries,
        last=last,
        **_strides(decay=decay, inputs=inputs, outputs=outputs),
    )


def walk_back(
    decay: Tensor,
    kept: Tensor,
    carries: Tensor | None,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    block: int,
    doutputs: Tensor,
    after: Tensor | None,
    ddecay: Tensor,
    dinputs: Tensor,
) -> Tensor:
    """Writes the gradients of decay and inputs; returns that of initial. ``after``: (B, H), that of the last state."""
    rows, steps, hidden = decay.shape
    dinitial = torch.empty(rows, hidden)
    call(
        "recurrence_backward",
        5 * decay.numel(),
        (rows, steps, hidden, decay.dtype == torch.bfloat16, _width(rows, hidden), reverse),
        decay=decay,
        kept=kept,
        doutputs=doutputs,
        initial=None if initial is None else initial.contiguous(),
        lengths=lengths,
        block=block,
        carries=carries,
        after=after,
        ddecay=ddecay,
        dinputs=dinputs,
        dinitial=dinitial,
        **_strides(decay=decay, kept=kept, doutputs=doutputs, gradients=ddecay),
    )
    return dinitial


def _states_before(
    decay: Tensor, inputs: Tensor, state: Tensor, backwards: bool, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns the states (P, H) before consecutive parts of (P, L, H), and the state (H,) after the last."""
    parts, steps, hidden = decay.shape
    products, ends, before = (torch.empty(parts, hidden) for _ in range(3))
    call(
        "recurrence_summary",
        2 * decay.numel(),
        (parts, steps, hidden, decay.dtype == torch.bfloat16, _width(parts, hidden), backwards, gradient),
        decay=decay,
        inputs=inputs,
        products=products,
        ends=ends,
        **_strides(decay=decay, inputs=inputs),
    )
    for part in range(parts - 1, -1, -1) if backwards else range(parts):
        before[part] = state
        # A product of decays may overflow although the state that it multiplies is zero.
        state = torch.where(state == 0, 0, products[part] * state) + ends[part]
    return before, state


def _cuts(steps: int, size: int, reverse: bool, back: bool) -> Iterator[tuple[slice, int]]:
    """Yields the positions of each group of parts of a row, in the order of the walk, and the number of parts.

    Args:
        steps: steps of the row. size: steps of a part.
        reverse: True if the walk begins at the end.
        back: True for the opposite order.
    """
    cuts = []
    begin = 0
    while begin < steps:
        parts = min(_PARTS, (steps - begin) // size)
        end = min(begin + max(1, parts) * size, steps)
        cuts.append((slice(steps - end, steps - begin) if reverse else slice(begin, end), max(1, parts)))
        begin = end
    yield from reversed(cuts) if back else cuts


def _row_lengths(lengths: Tensor | None, rows: int, steps: int) -> list[int]:
    return [steps] * rows if lengths is None else lengths.tolist()


def _parts(tensor: Tensor, where: slice, parts: int) -> Tensor:
    """Returns the positions ``where`` of (T, H) as (P, L, H)."""
    positions = tensor[where]
    return positions.view(parts, len(positions) // parts, positions.shape[1])


def _carries_of(carries: Tensor, where: slice, parts: int, block: int, reverse: bool, steps: int) -> Tensor:
    """Returns the carries (P, L / block, H) of parts, given a row's (N, H), which are in the order of the walk."""
    first, last = (steps - where.stop, steps - where.start) if reverse else (where.start, where.stop)
    row_carries = carries[first // block : -(-last // block)]
    part_carries = row_carries.view(parts, len(row_carries) // parts, row_carries.shape[1])
    return part_carries.flip(0) if reverse and parts > 1 else part_carries


def forward(
    decay: Tensor,
    inputs: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    block: int,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the outputs, and the states before every block of a row's own steps in the order of its walk."""
    decay, inputs = rows_of(decay), rows_of(inputs)
    lengths = None if lengths is None else lengths.contiguous()
    rows, steps, hidden = decay.shape
    outputs = torch.empty(rows, steps, hidden, dtype=decay.dtype)
    carries = torch.empty(rows, -(-steps // block), hidden) if keep else None
    if not _has_few_tasks(rows, steps, hidden, block):
        walk(decay, inputs, initial, lengths, reverse, block, outputs, carries, None)
        return outputs, carries
    for row, length in enumerate(_row_lengths(lengths, rows, steps)):
        state = torch.zeros(hidden) if initial is None else initial[row]
        for where, parts in _cuts(length, _part_steps(hidden, block), reverse, False):
            slices = [_parts(each[row], where, parts) for each in (decay, inputs, outputs)]
            part_carries = torch.empty(parts, -(-slices[0].shape[1] // block), hidden) if keep else None
            before, last = (
                _states_before(slices[0], slices[1], state, reverse, False)
                if parts > 1
                else (state[None], state)
            )
            ends = torch.empty(parts, hidden)
            walk(slices[0], slices[1], before, None, reverse, block, slices[2], part_carries, ends)
            state = ends[0] if parts == 1 else last
            if carries is not None and part_carries is not None:
                ordered = (part_carries.flip(0) if reverse else part_carries).flatten(0, 1)
                first = (length - where.stop if reverse else where.start) // block
                carries[row, first : first + len(ordered)] = ordered
        outputs[row, length:] = 0
    return outputs, carries


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
    """Returns the gradients of decay, inputs and initial; see `econmt_ops.linear_recurrence.scan.Backend.backward`."""
    decay, kept, doutputs = rows_of(decay), rows_of(kept), rows_of(doutputs)
    lengths = None if lengths is None else lengths.contiguous()
    rows, steps, hidden = decay.shape
    ddecay, dinputs = (torch.empty(rows, steps, hidden, dtype=decay.dtype) for _ in range(2))
    if not _has_few_tasks(rows, steps, hidden, block):
        arguments = decay, kept, carries, initial, lengths, reverse, block, doutputs, None, ddecay, dinputs
        return ddecay, dinputs, walk_back(*arguments)
    dinitial = torch.empty(rows, hidden)
    for row, length in enumerate(_row_lengths(lengths, rows, steps)):
        gradient = torch.zeros(hidden)
        for where, parts in _cuts(length, _part_steps(hidden, block), reverse, True):
            tensors = decay, kept, doutputs, ddecay, dinputs
            a, k, incoming, da, db = (_parts(each[row], where, parts) for each in tensors)
            after = gradient[None]
            if parts > 1:
                after, _ = _states_before(a, incoming, gradient, not reverse, True)
            part_carries = (
                None if carries is None else _carries_of(carries[row], where, parts, block, reverse, length)
            )
            first = _first_states(
                kept[row], None if initial is None else initial[row], where, parts, reverse, length
            )
            gradients = walk_back(
                a,
                k,
                part_carries,
                first if carries is None else None,
                None,
                reverse,
                block,
                incoming,
                after.contiguous(),
                da,
                db,
            )
            gradient = gradients[-1 if reverse else 0]
        ddecay[row, length:] = 0
        dinputs[row, length:] = 0
        dinitial[row] = gradient
    return ddecay, dinputs, dinitial


def _first_states(
    outputs: Tensor, initial: Tensor | None, where: slice, parts: int, reverse: bool, steps: int
) -> Tensor:
    """Returns the states (P, H) before the parts at ``where``, given a row's outputs (T, H)."""
    size = (where.stop - where.start) // parts
    states = torch.zeros(parts, outputs.shape[1])
    for part in range(parts):
        begin = where.start + part * size
        before = begin + size if reverse else begin - 1
        if 0 <= before < steps:
            states[part] = outputs[before]
        elif initial is not None:
            states[part] = initial
    return states
