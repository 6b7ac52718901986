"""The linear recurrence in Triton kernels: a backend of `econmt_ops.linear_recurrence.scan`.

The kernels of `recurrence_gluon` are faster; those of `recurrence_kernels` take what they do not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.triton import interpreted, recurrence_gluon
from econmt_ops.backends.triton.recurrence_kernels import recurrence_backward, recurrence_forward
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.chunks import rows_of
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.device_limits import limits_of

_LINE = 128
"""Bytes of adjacent units that a program loads per step: a cache line."""

_VALUE = 4
"""Bytes of a register."""

_FULL = 2
"""Warps per multiprocessor, each with a cache line of units, from which threads run all steps of their units."""

_AHEAD, _FAR_AHEAD = 8, 32
"""Steps that a thread prefetches; the second if there are few threads, each of which has to keep more loads in flight:
for 384 warps, 16 steps of float32 are 1.6 MB, and an H200 transfers about 3 MB within the latency of a load. A
kernel with twice as many steps takes four to eight times as long to compile (32: 20 s), so short rows have half of
their steps: the other half follows at once."""

_MANY = 8
"""Warps per multiprocessor from which there are enough threads for the shorter prefetch."""

STEPS = 32
"""Steps of a tile."""

RADIX = 16
"""Tiles of a group, and groups after which a state is published."""


class TileCut:
    """Division of a call into programs.

    Attributes:
        units: units of a program. groups: groups of units, over all rows.
        count: tiles of a row.
        tiled: True if each tile has its own program; otherwise a program runs all steps of its units.
        ahead: steps to prefetch, a power of two that divides a tile.
    """

    def __init__(self, like: Tensor, tiled: bool | None = None) -> None:
        """Divides (B, T, H) into tiles; ``tiled`` None: whatever fills the device better."""
        rows, steps, hidden = like.shape
        self.units = min(_LINE // like.dtype.itemsize, triton.next_power_of_2(max(1, hidden)))
        self.count = triton.cdiv(steps, STEPS)
        self.groups = rows * triton.cdiv(hidden, self.units)
        self.tiled = tiled if tiled is not None else self._fills_better_tiled(like)
        few = like.is_cuda and self.groups < _MANY * limits_of(like.device).multiprocessors
        # One unit per thread: in tiles there are no registers for two, and few warps should not handle two units per
        # thread.
        if self.tiled or few:
            self.units = min(self.units, _LINE // _VALUE)
            self.groups = rows * triton.cdiv(hidden, self.units)
        far = min(_FAR_AHEAD, max(_AHEAD, triton.next_power_of_2(steps) // 2))
        self.ahead = min(far if few and not self.tiled else _AHEAD, STEPS)

    def _fills_better_tiled(self, like: Tensor) -> bool:
        if self.count == 1 or not like.is_cuda:
            return self.count > 1
        return self.groups < _FULL * limits_of(like.device).multiprocessors

    @property
    def grid(self) -> tuple[int]:
        """Launch grid: a program per group of units, or per tile of each group."""
        return (self.groups * (self.count if self.tiled else 1),)

    def exchange(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Allocates the published maps, states and flags of the tiles; see `recurrence_kernels.states_around`."""
        exact = accumulate_dtype(like.dtype)
        if not self.tiled:
            nothing = like.new_empty(0, dtype=exact)
            return nothing, nothing, nothing
        parts = self.count + triton.cdiv(self.count, RADIX)
        tops = triton.cdiv(self.count, RADIX * RADIX)
        return (
            like.new_empty(self.groups, parts, 2, self.units, dtype=exact),
            like.new_empty(self.groups, tops, self.units, dtype=exact),
            like.new_zeros(self.groups * (parts + tops), dtype=torch.int32),
        )

    def constants(self, call: RecurrenceArguments) -> dict[str, Any]:
        """Returns the compile-time arguments."""
        return {
            "BLOCK": STEPS, "COUNT": self.ahead, "UNITS": self.units, "REVERSE": call.reverse,
            "HAS_INITIAL": call.initial is not None, "HAS_LENGTHS": call.lengths is not None, "TILED": self.tiled,
            "RADIX": RADIX, "WAITS": not interpreted(),
            "ACC": tl.float64 if call.decay.dtype == torch.float64 else tl.float32, "num_warps": 1,
        }  # fmt: skip


def forward(call: RecurrenceArguments, tiled: bool | None = None) -> Tensor:
    """Returns the outputs; see `scan.backend_of`.

    Args:
        call: see there.
        tiled: see `TileCut`; if not None, the kernels are those of `recurrence_kernels`.
    """
    decay, inputs, initial, lengths = rows_of(call.decay), rows_of(call.inputs), call.initial, call.lengths
    if tiled is None and recurrence_gluon.serves(decay, inputs):
        return recurrence_gluon.forward(call._replace(decay=decay, inputs=inputs))
    _, steps, hidden = inputs.shape
    cut = TileCut(inputs, tiled)
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    if outputs.numel():
        recurrence_forward[cut.grid](
            decay, inputs, outputs if initial is None else initial.contiguous(),
            outputs if lengths is None else lengths, outputs,
            *cut.exchange(inputs), *decay.stride()[:2], *inputs.stride()[:2], steps, cut.count, hidden,
            **cut.constants(call),
        )  # fmt: skip
    return outputs


def backward(
    call: RecurrenceArguments, doutputs: Tensor, tiled: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of decay, inputs and initial; see `scan.backend_of`, and `forward` for ``tiled``."""
    decay, kept, doutputs = rows_of(call.decay), rows_of(call.inputs), rows_of(doutputs)
    initial, lengths = call.initial, call.lengths
    if tiled is None and recurrence_gluon.serves(decay, kept, doutputs):
        return recurrence_gluon.backward(call._replace(decay=decay, inputs=kept), doutputs)
    rows, steps, hidden = decay.shape
    cut = TileCut(decay, tiled)
    ddecay, dinputs = (torch.empty_like(decay, memory_format=torch.contiguous_format) for _ in range(2))
    dinitial = decay.new_empty(rows, hidden, dtype=accumulate_dtype(decay.dtype))
    if ddecay.numel():
        recurrence_backward[cut.grid](
            decay, kept, doutputs, ddecay if initial is None else initial.contiguous(),
            ddecay if lengths is None else lengths, ddecay, dinputs, dinitial,
            *cut.exchange(decay), *decay.stride()[:2], *kept.stride()[:2], *doutputs.stride()[:2], steps, cut.count,
            hidden, **cut.constants(call),
        )  # fmt: skip
    return ddecay, dinputs, dinitial
