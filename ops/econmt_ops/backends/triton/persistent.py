"""Launches of the persistent LSTM kernels.

Sizes: D directions, T steps, B rows, H units; see `persistent_kernels` for the work of a program.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from econmt_ops.backends.triton import interpreted
from econmt_ops.backends.triton.exchange import COUNTER_STRIDE
from econmt_ops.backends.triton.launching import Launch, launch_of
from econmt_ops.backends.triton.partition import Partition, launches_of
from econmt_ops.backends.triton.persistent_kernels import lstm_backward, lstm_cells, lstm_forward


def _walk(
    partition: Partition, directions: int, batch: int, hidden: int, steps: int, back: bool, ring: bool
) -> Iterator[tuple[int, ...]]:
    """Yields the launches with their steps: all, or one at a time in the interpreter, where programs cannot wait.

    With a ring, a launch without steps comes first there, in which programs tell each other the largest numbers.
    """
    for programs, *part in launches_of(partition, directions, batch, hidden):
        if not interpreted():
            yield programs, 0, steps, *part
            continue
        if ring:
            edge = steps if back else 0
            yield programs, edge, edge, *part
        for step in reversed(range(steps)) if back else range(steps):
            yield programs, step, step + 1, *part


def _constants(
    partition: Partition,
    batch: int,
    terms: int,
    hidden: int,
    products: torch.dtype,
    backwards: tuple[bool, ...],
) -> dict[str, object]:
    """Returns the compile-time and launch arguments of both kernels."""
    waits = not interpreted()
    return {
        "H": hidden,
        "UNITS": partition.units,
        "ROWS": partition.rows,
        "CHUNK": partition.chunk,
        "CHUNKS": partition.chunks(terms),
        "SPLIT": partition.split,
        "MASKED": partition.masked(batch),
        "ROWS_FIRST": partition.rows_first,
        "BACKWARDS": _mask(backwards),
        "PRECISION": "tf32" if products == torch.float32 and waits else "ieee",
        "UP": products == torch.bfloat16 and not waits,
        "WAIT": waits,
        "num_warps": partition.warps,
        "maxnreg": partition.registers,
        "num_stages": 1,
        **({"launch_cooperative_grid": True} if waits else {}),
    }


@functools.cache
def counters_of(partition: Partition, directions: int, batch: int, hidden: int) -> tuple[int, int]:
    """Returns the number of counters of a walk, an integer each: those of groups of rows, and all of them.

    There is a counter for each direction and group of rows, and one for each team of those.
    """
    groups = directions * partition.groups(batch)
    teams = groups * (partition.parts(hidden) // partition.team if partition.team > 1 else 0)
    return groups * COUNTER_STRIDE.value, (groups + teams) * COUNTER_STRIDE.value


@functools.cache
def walk_launches(
    partition: Partition,
    shape: tuple[int, int, int, int],
    types: tuple[torch.dtype, ...],
    backwards: tuple[bool, ...],
    *,
    back: bool,
    **flags: bool,
) -> tuple[tuple[Launch, ...], tuple[tuple[int, ...], ...]]:
    """Returns the launches of a step of a kernel, and the last arguments of each of a walk's launches.

    Args:
        shape: D, T, B and 4H.
        types: of sums, exchanged values, outputs and last c; backward of sums, exchanged values, and the gradients of
            outputs, last h and last c.
        backwards: for each direction True if it walks backwards.
        flags: the kernel's compile-time arguments that say what there is and what is kept.
    """
    directions, steps, batch, width = shape
    hidden, ring = width // 4, types[1] != types[0]
    flags |= {"RING": ring}
    constants = _constants(partition, batch, width if back else hidden, hidden, types[1], backwards)
    if back:
        # Teams that cannot wait take two launches of a step.
        apart = interpreted() and partition.team > 1
        halves = [(True, False), (False, True)] if apart else [(True, True)]
        launches = tuple(
            launch_of(
                lstm_backward,
                *types,
                TEAM=partition.team,
                MULTIPLIES=multiplies,
                ENDS=ends,
                **flags,
                **constants,
            )
            for multiplies, ends in halves
        )
    else:
        launches = (launch_of(lstm_forward, *types, D=directions, **flags, **constants),)
    span = partition.span(batch)
    parts = _walk(partition, directions, batch, hidden, steps, back, ring)
    return launches, tuple((*part, span) for part in parts)


def walk_cells(
    sums: Tensor,
    first_c: Tensor | None,
    cells: Tensor,
    lengths: Tensor | None,
    backwards: tuple[bool, ...],
    resets: Tensor | None = None,
    last: bool = False,
) -> None:
    """Writes cells (D, T, B, H), c before the step at each position, from sums (D, T, B, 4H) and first_c (D, B, H).

    ``first_c`` None: zeros. ``resets``: (T, B) bool, or None. ``last``: c after the last step, too, of one direction.
    """
    directions, steps, batch, width = sums.shape
    hidden = width // 4
    rows, units = 4, 64
    programs = directions * triton.cdiv(batch, rows) * triton.cdiv(hidden, units)
    lstm_cells[(programs,)](
        sums, cells if first_c is None else first_c, cells, cells if lengths is None else lengths,
        cells if resets is None else resets, steps, batch, H=hidden, ROWS=rows, UNITS=units, AHEAD=8,
        BACKWARDS=_mask(backwards), HAS_FIRST=first_c is not None, HAS_LENGTHS=lengths is not None,
        HAS_RESETS=resets is not None, EXACT=last or sums.dtype == torch.float32, LAST=last, num_warps=4,
    )  # fmt: skip


def scan_cells(gates: Tensor, first: Tensor) -> Tensor:
    """Implements `EagerSteps.scan_cells`. The gates are sums."""
    cells = first.new_empty(len(gates) + 1, *first.shape)
    if first.numel():
        walk_cells(gates.contiguous()[None], first.contiguous()[None], cells[None], None, (False,), last=True)
    return cells


def _mask(backwards: tuple[bool, ...]) -> int:
    """Returns the directions that walk backwards as a bit mask."""
    return sum(1 << number for number, each in enumerate(backwards) if each)
