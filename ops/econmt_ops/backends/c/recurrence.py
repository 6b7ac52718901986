"""The linear recurrence in the C library: a backend of `econmt_ops.linear_recurrence.scan`.

A task is a range of columns of a row, with all of its steps, so that memory is read once. If there are fewer tasks than
threads, blocks of steps run in parallel: a first pass computes each block's map of the state before it, and the second
pass reads the block again while it is in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends.c import call
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.shapes import Shapes

_STATE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""Type and device of states, whatever PyTorch's defaults are."""

_LINE = 16
"""Columns of a task are a multiple of this: a cache line of float32."""

_WIDEST = 2048
"""Maximum columns of a task, so that its states stay in the L1 cache."""

_PARTS = 16
"""Maximum blocks of steps that run in parallel."""

_PART_VALUES = 1 << 16
"""Values of such a block in one tensor."""

_PART_STEPS = 64
"""Steps of such a block are a multiple of this."""


def _width(rows: int, hidden: int) -> int:
    """Returns the columns of a task: as few tasks as keep all threads busy."""
    threads = torch.get_num_threads()
    parts = 1 if rows % threads == 0 or rows >= 4 * threads else threads
    return min(_WIDEST, max(_LINE, -(-hidden // (parts * _LINE)) * _LINE))


def _has_few_tasks(rows: int, steps: int, hidden: int) -> bool:
    """Returns True if rows and columns are too few to keep all threads busy, but steps are not."""
    tasks = rows * -(-hidden // _LINE)
    return tasks < torch.get_num_threads() and steps >= 2 * _part_steps(hidden)


def _part_steps(hidden: int) -> int:
    """Returns the steps of a part."""
    return max(1, _PART_VALUES // (max(1, hidden) * _PART_STEPS)) * _PART_STEPS


def _sizes(decay: Tensor, reverse: bool) -> dict[str, int]:
    """Returns the fields that the structures of all passes have."""
    rows, steps, hidden = decay.shape
    width = _width(rows, hidden)
    return {"rows": rows, "positions": steps, "hidden": hidden, "width": width, "backwards": reverse}


def walk(step: RecurrenceArguments, outputs: Tensor, last: Tensor | None) -> None:
    """Writes outputs, and the last state (B, H) unless it is None."""
    call(
        "recurrence_forward",
        3 * step.decay.numel(),
        **_sizes(step.decay, step.reverse),
        decay=step.decay,
        inputs=step.inputs,
        initial=step.initial,
        lengths=step.lengths,
        outputs=outputs,
        last=last,
    )


def walk_back(
    step: RecurrenceArguments, doutputs: Tensor, after: Tensor | None, ddecay: Tensor, dinputs: Tensor
) -> Tensor:
    """Writes the gradients of decay and inputs; returns that of initial. ``after``: (B, H), that of the last state."""
    dinitial = torch.empty(len(step.decay), step.decay.shape[2], **_STATE)
    call(
        "recurrence_backward",
        5 * step.decay.numel(),
        **_sizes(step.decay, step.reverse),
        decay=step.decay,
        kept=step.inputs,
        doutputs=doutputs,
        initial=step.initial,
        lengths=step.lengths,
        after=after,
        ddecay=ddecay,
        dinputs=dinputs,
        gradients_batch=ddecay.stride(0),
        gradients_step=ddecay.stride(1),
        dinitial=dinitial,
    )
    return dinitial


def _states_before(
    decay: Tensor, inputs: Tensor, state: Tensor, backwards: bool, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns the states (P, H) before consecutive parts of (P, L, H), and the state (H,) after the last."""
    parts, _, hidden = decay.shape
    products, ends, before = (torch.empty(parts, hidden, **_STATE) for _ in range(3))
    call(
        "recurrence_summary",
        2 * decay.numel(),
        **_sizes(decay, backwards),
        gradient=gradient,
        decay=decay,
        inputs=inputs,
        products=products,
        ends=ends,
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


def forward(step: RecurrenceArguments) -> Tensor:
    """Returns the outputs; see `econmt_ops.linear_recurrence.scan.backend_of`."""
    rows, steps, hidden = step.decay.shape
    if step.lengths is not None:
        # torch.compile leaves the check of the op out, and the kernel writes by them.
        Shapes("linear_recurrence").bounded("lengths", step.lengths, 0, steps)
    reverse = step.reverse
    outputs = torch.empty_like(step.decay, memory_format=torch.contiguous_format)
    if not _has_few_tasks(rows, steps, hidden):
        walk(step, outputs, None)
        return outputs
    for row, length in enumerate(_row_lengths(step.lengths, rows, steps)):
        state = torch.zeros(hidden, **_STATE) if step.initial is None else step.initial[row]
        for where, parts in _cuts(length, _part_steps(hidden), reverse, False):
            decay, inputs, part_outputs = (
                _parts(each[row], where, parts) for each in (step.decay, step.inputs, outputs)
            )
            before, last = state[None], state
            if parts > 1:
                before, last = _states_before(decay, inputs, state, reverse, False)
            ends = torch.empty(parts, hidden, **_STATE)
            walk(step._replace(decay=decay, inputs=inputs, initial=before, lengths=None), part_outputs, ends)
            state = ends[0] if parts == 1 else last
        outputs[row, length:] = 0
    return outputs


def backward(step: RecurrenceArguments, doutputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of decay, inputs and initial; see `econmt_ops.linear_recurrence.scan.backend_of`."""
    rows, steps, hidden = step.decay.shape
    ddecay, dinputs = (torch.empty_like(step.decay, memory_format=torch.contiguous_format) for _ in range(2))
    if not _has_few_tasks(rows, steps, hidden):
        return ddecay, dinputs, walk_back(step, doutputs, None, ddecay, dinputs)
    dinitial, reverse = torch.empty(rows, hidden, **_STATE), step.reverse
    for row, length in enumerate(_row_lengths(step.lengths, rows, steps)):
        gradient = torch.zeros(hidden, **_STATE)
        initial = None if step.initial is None else step.initial[row]
        for where, parts in _cuts(length, _part_steps(hidden), reverse, True):
            tensors = step.decay, step.inputs, doutputs, ddecay, dinputs
            a, k, incoming, da, db = (_parts(each[row], where, parts) for each in tensors)
            after = gradient[None]
            if parts > 1:
                after, _ = _states_before(a, incoming, gradient, not reverse, True)
            first = _first_states(step.inputs[row], initial, where, parts, reverse, length)
            part = step._replace(decay=a, inputs=k, initial=first, lengths=None)
            gradients = walk_back(part, incoming, after.contiguous(), da, db)
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
    states = torch.zeros(parts, outputs.shape[1], **_STATE)
    for part in range(parts):
        begin = where.start + part * size
        before = begin + size if reverse else begin - 1
        if 0 <= before < steps:
            states[part] = outputs[before]
        elif initial is not None:
            states[part] = initial
    return states
