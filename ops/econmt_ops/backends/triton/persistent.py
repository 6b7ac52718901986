"""Walks of an LSTM layer in one launch: how they are parted into programs, and their launches.

D directions, T steps, B rows, H units; see `persistent_kernels` for what a program does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from econmt_ops.backends.triton import interpreted
from econmt_ops.backends.triton.exchange import COUNTER_STRIDE
from econmt_ops.backends.triton.persistent_kernels import lstm_backward, lstm_forward


class Partition(NamedTuple):
    """How a walk is parted.

    Attributes:
        units, rows: what a program owns.
        warps: of a program.
        chunk: of the sum over units (backward: over gates), how many terms of a part are exchanged and multiplied at once.
        programs: of a launch, at most. More rows than they can serve take launches one after the other.
        split: into how many parts, made as rows of one product, a chunk is cut: newer matrix units want 64 rows.
        rows_first: the rows of the batch, not the units, are the rows of the product.
        ahead: how many chunks are on their way at once.
    """

    units: int
    rows: int
    warps: int
    chunk: int
    programs: int
    split: int = 1
    rows_first: bool = False
    ahead: int = 2

    def chunks(self, terms: int) -> int:
        """Into how many chunks a sum of so many terms is cut."""
        return triton.cdiv(terms, self.chunk * self.split)


def _launches(
    partition: Partition, directions: int, batch: int, hidden: int
) -> Iterator[tuple[int, int, int, int]]:
    """Which part of a walk each launch serves: programs, first direction, first group of rows, groups."""
    parts = triton.cdiv(hidden, partition.units)
    groups = triton.cdiv(batch, partition.rows)
    if parts * groups * directions <= partition.programs:
        yield parts * groups * directions, 0, 0, groups
        return
    at_once = partition.programs // parts
    for direction in range(directions):
        for first in range(0, groups, at_once):
            count = min(at_once, groups - first)
            yield parts * count, direction, first, count


def _walk(
    partition: Partition, directions: int, batch: int, hidden: int, steps: int, back: bool
) -> Iterator[tuple[int, ...]]:
    """The launches with the steps of each: all, or one where programs cannot wait for each other."""
    for programs, *part in _launches(partition, directions, batch, hidden):
        if not interpreted():
            yield programs, 0, steps, *part
            continue
        for step in reversed(range(steps)) if back else range(steps):
            yield programs, step, step + 1, *part


def _constants(
    partition: Partition, terms: int, hidden: int, like: Tensor, backwards: tuple[bool, ...]
) -> dict[str, object]:
    """What both kernels are compiled for, and how they are launched."""
    waits = not interpreted()
    return {
        "D": len(backwards),
        "H": hidden,
        "UNITS": partition.units,
        "ROWS": partition.rows,
        "CHUNK": partition.chunk,
        "CHUNKS": partition.chunks(terms),
        "SPLIT": partition.split,
        "AHEAD": min(partition.ahead, partition.chunks(terms)),
        "ROWS_FIRST": partition.rows_first,
        "BACKWARDS": sum(1 << number for number, each in enumerate(backwards) if each),
        "PRECISION": "tf32" if like.dtype == torch.float32 and waits else "ieee",
        "UP": like.dtype == torch.bfloat16 and not waits,
        "WAIT": waits,
        "num_warps": partition.warps,
        "num_stages": 1,
        **({"launch_cooperative_grid": True} if waits else {}),
    }


def _counters(partition: Partition, directions: int, batch: int, device: torch.device) -> Tensor:
    groups = directions * triton.cdiv(batch, partition.rows)
    return torch.zeros(groups * COUNTER_STRIDE.value, dtype=torch.int32, device=device)


def walk_forward(
    partition: Partition,
    sums: Tensor,
    recurrent: Tensor,
    outputs: Tensor,
    cells: Tensor | None,
    state_h: Tensor,
    state_c: Tensor,
    lengths: Tensor | None,
    backwards: tuple[bool, ...],
    keep_sums: bool,
) -> None:
    """All steps of a layer.

    Args:
        partition: how.
        sums: (D, T, B, 4H), the inputs' share of the gates and, at each walk's first position, that of the h before;
            become the sums with ``keep_sums``.
        recurrent: (D, 4H, H), in the type of the products; h is exchanged in that type too.
        outputs: (T, B, D H) is written.
        cells: (D, T, B, H) float32 is written, c before the step at each position; or None.
        state_h, state_c: (D, B, H), the first state; become the last. c is float32.
        lengths: (B,) on the device; or None.
        backwards: which directions walk backwards.
        keep_sums: see ``sums``.
    """
    directions, steps, batch, width = sums.shape
    ring = recurrent.dtype != outputs.dtype
    exchange = recurrent.new_empty(directions, 2, batch, width // 4) if ring else outputs
    counters = _counters(partition, directions, batch, sums.device)
    for programs, begin, end, *part in _walk(partition, directions, batch, width // 4, steps, back=False):
        lstm_forward[(programs,)](
            sums, recurrent, exchange, outputs, sums if cells is None else cells, state_h, state_c,
            counters if lengths is None else lengths, counters, steps, batch, begin, end, *part,
            HAS_LENGTHS=lengths is not None, RING=ring, KEEP_CELLS=cells is not None, KEEP_SUMS=keep_sums,
            **_constants(partition, width // 4, width // 4, recurrent, backwards),
        )  # fmt: skip


def walk_backward(
    partition: Partition,
    sums: Tensor,
    recurrent: Tensor,
    cells: Tensor,
    doutputs: Tensor,
    dsums: Tensor,
    last_dh: Tensor,
    state_dc: Tensor,
    lengths: Tensor | None,
    backwards: tuple[bool, ...],
) -> None:
    """All steps of a layer, back.

    Args:
        partition: how.
        sums: (D, T, B, 4H), the gates before their nonlinearities.
        recurrent: (D, 4H, H), in the type of the products; gradients of the sums are exchanged in that type too, after
            being scaled if that of ``dsums`` is another.
        cells: (D, T, B, H) float32, c before the step at each position.
        doutputs: (T, B, D H), the last stride 1.
        dsums: (D, T, B, 4H) is written, zero in the padding; may be ``sums``.
        last_dh: (D, B, H), the gradient of the last h.
        state_dc: (D, B, H) float32, the gradient of the last c; becomes that of the first.
        lengths, backwards: as in `walk_forward`.
    """
    directions, steps, batch, width = sums.shape
    ring = recurrent.dtype != dsums.dtype
    exchange = recurrent.new_empty(directions, 2, batch, width) if ring else dsums
    scale = _scale(doutputs, last_dh, state_dc) if ring else state_dc
    counters = _counters(partition, directions, batch, sums.device)
    for programs, begin, end, *part in _walk(partition, directions, batch, width // 4, steps, back=True):
        lstm_backward[(programs,)](
            sums, recurrent, exchange, scale, cells, doutputs, dsums, last_dh, state_dc,
            counters if lengths is None else lengths, counters, steps, batch, begin, end, *part,
            doutputs.stride(0), doutputs.stride(1), HAS_LENGTHS=lengths is not None, RING=ring,
            **_constants(partition, width, width // 4, recurrent, backwards),
        )  # fmt: skip


def _scale(*gradients: Tensor) -> Tensor:
    """The power of two that brings the largest of these gradients to about 64, as one number on the device.

    Float16 then has room for gradients a thousand times as large, and for those down to a ten millionth.
    """
    largest = torch.stack([gradient.abs().amax().float() for gradient in gradients]).amax()
    return torch.exp2(6.0 - torch.log2(largest.clamp(1e-30, 1e30)).ceil())
