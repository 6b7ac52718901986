"""Both directions of a layer at once: the n-th steps of both walks as one step, or each on a stream of its own.

All gates are kept. B batch, T steps, H hidden, K steps of a block; (T, 2, B, .) holds both walks, each in its order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from econmt_ops.lstm.direction import Direction, Gradients
from econmt_ops.lstm.schedule import Schedule

_Result = TypeVar("_Result")

_SMALL = 1 << 18
"""Values of a weight up to which on the CPU a batched product of two takes less time than two packed ones."""


def walks_together(schedule: str, stash: str, directions: int, matrices: int) -> bool:
    """Whether the steps of a layer's directions are made at once: of two that keep their gates, with whole matrices.

    Args:
        schedule: as text. stash: the level.
        directions: how many. matrices: the recurrent ones, of which factorised ones are two.
    """
    return (
        Schedule.parse(schedule).directions == "together" and stash == "gates" and directions == matrices == 2
    )


def _pair(directions: Sequence[Direction], turned: bool) -> Callable[[Tensor], Tensor]:
    """The products of h (2, B, H) with U^T, or of dz (2, B, 4H) with U if ``turned``, each direction with its own."""
    weights = [direction.weights.hidden for direction in directions]
    first = weights[0]
    assert isinstance(first, Tensor)
    if first.is_cuda or first.numel() <= _SMALL:
        stacked = torch.stack([weight if turned else weight.t() for weight in weights])  # type: ignore[misc]
        return lambda left: torch.bmm(left, stacked)
    products = [direction.to_h if turned else direction.recurrent_product for direction in directions]
    return lambda left: torch.stack([product(part) for product, part in zip(products, left, strict=True)])


def walk_both(
    directions: Sequence[Direction], outputs: Tensor, cells: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """The forward pass of two directions.

    Args:
        directions: from the first and from the last position on.
        outputs: (T, B, 2H), cells: (T, 2, B, H), gates: (T, 2, B, 4H); all are written.

    Returns:
        The last h and c of each walk, (2, B, H).
    """
    first, steps = directions[0], directions[0].steps
    for number, direction in enumerate(directions):
        gates[:, number] = direction.products(*direction.read(0, steps))
    product = _pair(directions, turned=False)
    made = outputs.new_empty(steps, 2, *first.first_h.shape)
    h = torch.stack([direction.first_h for direction in directions])
    c = torch.stack([direction.first_c for direction in directions])
    for total, following, after in zip(gates, made, cells, strict=True):
        recurrent = product(h)
        first.advance(*(part.flatten(0, 1) for part in (total, recurrent, c, following, after)))
        h, c = following, after
    for number, (direction, part) in enumerate(zip(directions, outputs.chunk(2, 2), strict=True)):
        direction.put(part, 0, steps, made[:, number])
    return h.clone(), c.clone()


def walk_both_back(
    directions: Sequence[Direction],
    doutputs: Tensor | None,
    dh: Tensor,
    dc: Tensor,
    outputs: Tensor,
    cells: Tensor,
    gates: Tensor,
    dinputs: Tensor,
) -> list[tuple[list[Tensor], ...]]:
    """The backward pass of :func:`walk_both`.

    Args:
        directions: as there.
        doutputs: (T, B, 2H), dh, dc: (2, B, H), the gradients of what it gives.
        outputs, cells, gates: what it gave.
        dinputs: (T, B, I), receives the gradient of the inputs.

    Returns:
        What `Direction.backward` returns, of each.
    """
    product, first = _pair(directions, turned=True), directions[0]
    # A block of one walk lies elsewhere in the sequence than that of the other.
    dinputs.zero_()
    found = [Gradients(direction, dinputs, add=True) for direction in directions]
    first_c = torch.stack([direction.first_c for direction in directions])
    nothing = torch.zeros_like(dh)
    backward = first.run.backward_of_sums if first.walks_sums(kept=True) else first.run.backward
    for begin, end in reversed(first.blocks):
        dgates = torch.empty_like(gates[begin:end])
        incoming = [nothing] * (end - begin)
        if doutputs is not None:
            parts = zip(directions, doutputs.chunk(2, 2), strict=True)
            walked = [direction.walk(part, begin, end) for direction, part in parts]
            incoming = list(torch.stack(walked, 1).unbind(0))
        for step in reversed(range(begin, end)):
            before = cells[step - 1] if step > 0 else first_c
            own, made = gates[step], dgates[step - begin]
            read = (own, before, cells[step], incoming[step - begin], dh, dc, made)
            dc = backward(*(part.flatten(0, 1) for part in read)).view_as(dc)
            dh = product(made)
        for number, (direction, part) in enumerate(zip(directions, outputs.chunk(2, 2), strict=True)):
            inputs, _ = direction.read(begin, end)
            found[number].add(begin, end, dgates[:, number], inputs, direction.previous(part, begin, end))
    return [
        (*sums.weights(), [dh[number].clone()], [dc[number].clone()]) for number, sums in enumerate(found)
    ]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def run_all(tasks: Sequence[Callable[[], _Result]], directions: Sequence[Direction]) -> list[_Result]:
    """Runs one task a direction, each after the other, or on a GPU at the same time if the schedule says so.

    Args:
        tasks: give tensors in nested lists and tuples; they must not write to the same tensor.
        directions: theirs.
    """
    device = directions[0].inputs.device
    if len(tasks) != 2 or device.type != "cuda" or directions[0].schedule.directions != "streams":
        return [task() for task in tasks]
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        second = tasks[1]()
    first = tasks[0]()
    main.wait_stream(side)
    for tensor in _tensors(second):
        # Its memory belongs to the other stream, which must not take it back while this one reads it.
        tensor.record_stream(main)
    return [first, second]


def _tensors(results: object) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, list | tuple):
        for part in results:
            yield from _tensors(part)
