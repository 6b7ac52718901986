"""The linear recurrence by kernels: a backend of `econmt_ops.linear_recurrence.scan`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.triton import interpreted
from econmt_ops.backends.triton.recurrence_kernels import recurrence_backward, recurrence_forward
from econmt_ops.core.chunks import rows_of
from econmt_ops.core.precision import accumulate_dtype

_LINE = 128
"""Bytes of a tile's row: what the units of a step have next to each other in memory."""

_FULL = 8
"""Programs a multiprocessor from which on each walks through all tiles of its units."""

_VALUES_A_WARP = 512
"""Of a tile: 16 of each tensor in a thread."""


@functools.cache
def multiprocessors(index: int) -> int:
    """Those of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


RADIX = 32
"""Tiles of a group, of which the last one publishes the state after it."""


class Tiles:
    """How a call is cut.

    Attributes:
        units: of a tile. count: tiles of a row. groups: of units, over all rows.
        together: whether the tiles of a row have a program each.
    """

    def __init__(self, like: Tensor, block: int, together: bool | None = None) -> None:
        """``like``: (B, T, H). ``block``: the steps of a tile. ``together``: None: as the device is filled best."""
        rows, steps, hidden = like.shape
        self.steps = block
        self.units = min(_LINE // like.dtype.itemsize, triton.next_power_of_2(max(1, hidden)))
        self.count = triton.cdiv(steps, block)
        self.groups = rows * triton.cdiv(hidden, self.units)
        self.together = together if together is not None else self._fills_better_together(like)

    def _fills_better_together(self, like: Tensor) -> bool:
        if self.count == 1 or like.device.type != "cuda":
            return self.count > 1
        return self.groups < _FULL * multiprocessors(like.device.index or 0)

    @property
    def grid(self) -> tuple[int]:
        """As many programs as there are groups, or tiles of all groups."""
        return (self.groups * (self.count if self.together else 1),)

    def exchange(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What tiles publish, and its flags; see `recurrence_kernels.state_before`."""
        exact = accumulate_dtype(like.dtype)
        if not self.together:
            nothing = like.new_empty(0, dtype=exact)
            return nothing, nothing, nothing
        supers = triton.cdiv(self.count, RADIX)
        parts = like.new_empty(self.groups, self.count, 2, self.units, dtype=exact)
        states = like.new_empty(self.groups, supers, self.units, dtype=exact)
        return parts, states, like.new_zeros(self.groups * (self.count + supers), dtype=torch.int32)

    def constants(
        self, like: Tensor, reverse: bool, initial: Tensor | None, lengths: Tensor | None
    ) -> dict[str, Any]:
        """The compile-time arguments that both kernels have."""
        exact = tl.float64 if like.dtype == torch.float64 else tl.float32
        warps = max(1, min(16, self.steps * self.units // _VALUES_A_WARP))
        return {
            "STEPS": self.steps, "UNITS": self.units, "REVERSE": reverse, "HAS_INITIAL": initial is not None,
            "HAS_LENGTHS": lengths is not None, "TOGETHER": self.together, "WAITS": not interpreted(),
            "ACC": exact, "RADIX": RADIX, "num_warps": warps,
        }  # fmt: skip


def forward(
    decay: Tensor,
    inputs: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    block: int,
    keep: bool,
    together: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The outputs, and the states before the tiles in the order of the walk; see `scan.Backend`.

    Args:
        decay, inputs, initial, lengths, reverse, block, keep: see there.
        together: whether the tiles of a row have a program each; None: as the device is filled best.
    """
    decay, inputs = rows_of(decay), rows_of(inputs)
    rows, steps, hidden = inputs.shape
    tiles = Tiles(inputs, block, together)
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    carries = (
        inputs.new_empty(rows, tiles.count, hidden, dtype=accumulate_dtype(inputs.dtype)) if keep else None
    )
    if outputs.numel():
        parts, states, flags = tiles.exchange(inputs)
        recurrence_forward[tiles.grid](
            decay, inputs, outputs if initial is None else initial.contiguous(),
            outputs if lengths is None else lengths, outputs, outputs if carries is None else carries,
            parts, states, flags, *decay.stride()[:2],
            *inputs.stride()[:2], steps, tiles.count, hidden, KEEPS=keep,
            **tiles.constants(inputs, reverse, initial, lengths),
        )  # fmt: skip
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
    together: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of decay, inputs and initial; see `scan.Backend`, and `forward` for ``together``."""
    decay, kept, doutputs = rows_of(decay), rows_of(kept), rows_of(doutputs)
    rows, steps, hidden = decay.shape
    tiles = Tiles(decay, block, together)
    ddecay, dinputs = (torch.empty_like(decay, memory_format=torch.contiguous_format) for _ in range(2))
    dinitial = decay.new_empty(rows, hidden, dtype=accumulate_dtype(decay.dtype))
    if ddecay.numel():
        parts, states, flags = tiles.exchange(decay)
        recurrence_backward[tiles.grid](
            decay, kept, doutputs, ddecay if initial is None else initial.contiguous(),
            ddecay if lengths is None else lengths, ddecay if carries is None else carries, ddecay, dinputs, dinitial,
            parts, states, flags, *decay.stride()[:2], *kept.stride()[:2], *doutputs.stride()[:2], steps, tiles.count,
            hidden, AGAIN=carries is not None, **tiles.constants(decay, reverse, initial, lengths),
        )  # fmt: skip
    return ddecay, dinputs, dinitial
