"""The linear recurrence as Gluon kernels that keep many bytes under way, with asynchronous copies to shared memory.

A program is one warp; its threads run the steps of the units of one cache line. The values of a tile of STEPS steps are
copied to shared memory, as a whole and long before they are used.

- With many units a program walks through all tiles of its units, and copies up to STAGES tiles ahead.
- Otherwise (TILED) each tile has a program, of which a multiprocessor holds ten or more. A tile computes its map
  h -> P h + e, publishes it, gets the state before it from earlier tiles, and runs its steps again.

Published maps and states are words of 64 bits, two float32 each, which are written and read as one: a word that is not
EMPTY is complete, so no flag and no fence is needed. A tile waits in two rounds: for the maps of its group of RADIX
tiles; then for the maps of the earlier groups of its RADIX groups, and the state before these. Maps are always joined in
the same order, so results are deterministic. Programs start in the order of their numbers, and wait only for lower ones.

Steps are counted in processing order, as in `recurrence_kernels`. Steps outside a row's length are copied as zeros.
"""

# mypy: disable-error-code=assignment

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.driver import driver

from econmt_ops.backends.triton import interpreted
from econmt_ops.backends.triton.exchange import SPINS as _SPINS
from econmt_ops.backends.triton.launching import multiprocessors

_EMPTY = gl.constexpr(-1)
"""Word that no program publishes: as two float32, NaNs that no product has as its result."""
_IDENTITY = gl.constexpr(0x3F800000)
"""Word of the map h -> 1 h + 0."""
_UNROLL = gl.constexpr(16)
"""Steps that are written out in loops over a tile."""
_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def _copy(
    buffer: tl.tensor, at: tl.tensor, stride: tl.tensor, first: tl.tensor, end: tl.tensor, length: tl.tensor,
    REVERSE: tl.constexpr, STEPS: tl.constexpr, UNITS: tl.constexpr, COPY: tl.constexpr,
) -> None:  # fmt: skip
    """Starts copying STEPS steps from ``first`` on to a buffer (STEPS, UNITS); zeros before step 0 and from ``end`` on.

    ``at`` points to the units of the row's first position.
    """
    step = first + gl.arange(0, STEPS, layout=gl.SliceLayout(1, COPY))
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, COPY))
    position = length - 1 - step if REVERSE else step
    source = gl.expand_dims(position.to(gl.int64) * stride, 1) + gl.expand_dims(unit, 0)
    mask = gl.expand_dims((step >= 0) & (step < end), 1) & (gl.expand_dims(unit, 0) >= 0)
    async_copy.async_copy_global_to_shared(buffer, at + source, mask=mask)


@gluon.jit
def _rows(buffers: tl.tensor) -> tl.tensor:
    """Returns buffers (STAGES, STEPS, UNITS) as rows of UNITS values."""
    STAGES: gl.constexpr = buffers.shape[0]
    STEPS: gl.constexpr = buffers.shape[1]
    return buffers._reinterpret(buffers.dtype, [STAGES * STEPS, buffers.shape[2]], _ROW)


@gluon.jit
def _values(rows: tl.tensor, first: tl.tensor, LINE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Returns _UNROLL rows (UNITS,) in float32, loaded before any is used."""
    values = ()
    for k in gl.static_range(_UNROLL):
        values = values + (rows.index(first + k).load(LINE).to(gl.float32),)
    return values


@gluon.jit
def _store(
    at: tl.tensor, stride: tl.tensor, value: tl.tensor, step: tl.tensor, length: tl.tensor, steps: tl.tensor,
    REVERSE: tl.constexpr,
) -> None:  # fmt: skip
    """Stores the units of a step, zeros beyond the row's length."""
    value = gl.where(step < length, value, 0.0)
    position = gl.where(step < length, length - 1 - step, step) if REVERSE else step
    gl.store(at + position.to(gl.int64) * stride, value.to(at.dtype.element_ty), mask=step < steps)


@gluon.jit
def _join(p: tl.tensor, e: tl.tensor, q: tl.tensor, f: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Composes two maps, the earlier first: h -> q (p h + e) + f; if e is 0, q e is 0 even for an infinite q."""
    return p * q, gl.where(e == 0, f, q * e + f)


@gluon.jit
def _after(p: tl.tensor, e: tl.tensor, state: tl.tensor) -> tl.tensor:
    """Returns p state + e; if the state is 0, p state is 0 even for an infinite p."""
    return gl.where(state == 0, e, p * state + e)


@gluon.jit
def _publish(at: tl.tensor, p: tl.tensor, e: tl.tensor) -> None:
    """Stores a map or, with p = 0, a state (UNITS,) where later programs can read it."""
    low, high = p.to(gl.uint32, bitcast=True).to(gl.uint64), e.to(gl.uint32, bitcast=True).to(gl.uint64)
    gl.store(at, (low | (high << 32)).to(gl.int64, bitcast=True))


@gluon.jit
def _earlier(
    at: tl.tensor, count: tl.tensor, state_at: tl.tensor, from_state: tl.tensor, start: tl.tensor,
    UNITS: tl.constexpr, RADIX: tl.constexpr, LINE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Waits for ``count`` maps from ``at`` on, below RADIX; returns their composition and the state before them.

    The state is read from ``state_at`` if ``from_state``, otherwise it is ``start``. After a timeout it is NaN.
    """
    p, e = gl.full([UNITS], 1.0, gl.float32, layout=LINE), gl.full([UNITS], 0.0, gl.float32, layout=LINE)
    state = start
    polls = 0
    missing = 1
    while (missing > 0) & (polls < _SPINS):
        word = gl.load(state_at, mask=from_state, other=0, volatile=True)
        absent = (word == _EMPTY).to(gl.int32)
        state = gl.where(from_state, (word >> 32).to(gl.int32).to(gl.float32, bitcast=True), start)
        p, e = gl.full([UNITS], 1.0, gl.float32, layout=LINE), gl.full([UNITS], 0.0, gl.float32, layout=LINE)
        for k in gl.static_range(RADIX - 1):
            word = gl.load(at + k * UNITS, mask=k < count, other=_IDENTITY, volatile=True)
            absent |= (word == _EMPTY).to(gl.int32)
            q = word.to(gl.int32).to(gl.float32, bitcast=True)
            p, e = _join(p, e, q, (word >> 32).to(gl.int32).to(gl.float32, bitcast=True))
        missing = gl.max(absent, 0)
        polls += 1
    if missing > 0:
        state += float("nan")
        e += float("nan")
    return p, e, state


@gluon.jit
def _state_before(
    p: tl.tensor, e: tl.tensor, start: tl.tensor, number: tl.tensor, tiles: tl.tensor, words: tl.tensor,
    UNITS: tl.constexpr, RADIX: tl.constexpr, LINE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns the state (UNITS,) before a tile.

    Args:
        p, e: (UNITS,), the map of the tile.
        start: (UNITS,), the state before the first tile.
        number, tiles: number of the tile in the order of the walk, and of all tiles.
        words: pointers (UNITS,) to the first word of these units; maps of tiles, of groups, states after RADIX groups.
    """
    group, rank = number // RADIX, number % RADIX
    top, group_rank = group // RADIX, group % RADIX
    of_groups = words + tiles * UNITS
    of_states = of_groups + gl.cdiv(tiles, RADIX) * UNITS
    if rank < RADIX - 1:
        _publish(words + number * UNITS, p, e)
    p_tiles, e_tiles, _ = _earlier(
        words + group * RADIX * UNITS, rank, of_states, rank < 0, start, UNITS, RADIX, LINE
    )
    p_with, e_with = _join(p_tiles, e_tiles, p, e)
    if (rank == RADIX - 1) & (group_rank < RADIX - 1):
        _publish(of_groups + group * UNITS, p_with, e_with)
    p_groups, e_groups, start = _earlier(
        of_groups + top * RADIX * UNITS, group_rank, of_states + (top - 1) * UNITS, top > 0, start, UNITS, RADIX, LINE
    )  # fmt: skip
    state = _after(p_groups, e_groups, start)
    if (rank == RADIX - 1) & (group_rank == RADIX - 1):
        _publish(
            of_states + top * UNITS,
            gl.full([UNITS], 0.0, gl.float32, layout=LINE),
            _after(p_with, e_with, state),
        )
    return _after(p_tiles, e_tiles, state)


@gluon.jit
def _map_of(
    a: tl.tensor, b: tl.tensor, slot: tl.tensor, BACK: tl.constexpr, STEPS: tl.constexpr, UNITS: tl.constexpr,
    LINE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Returns the map (P, e) of the rows of a tile, which begins at row ``slot``; with BACK from the last to the first."""
    p, e = gl.full([UNITS], 1.0, gl.float32, layout=LINE), gl.full([UNITS], 0.0, gl.float32, layout=LINE)
    for base in range(0, STEPS, _UNROLL):
        first = slot + (STEPS - _UNROLL - base if BACK else base)
        decays, inputs = _values(a, first, LINE), _values(b, first, LINE)
        for k in gl.static_range(_UNROLL):
            decay = decays[_UNROLL - 1 - k if BACK else k]
            p, e = p * decay, decay * e + inputs[_UNROLL - 1 - k if BACK else k]
    return p, e


@gluon.jit
def _units(
    hidden: tl.tensor, tiles: tl.tensor, UNITS: tl.constexpr, TILED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the program's row, its first unit, the number of its units among all and that of its first tile."""
    programs = gl.num_programs(0) // tiles if TILED else gl.num_programs(0)
    units, number = gl.program_id(0) % programs, gl.program_id(0) // programs
    lines = hidden // UNITS
    return (units // lines).to(gl.int64), units % lines * UNITS, units.to(gl.int64), number


@gluon.jit
def _words_of(
    words: tl.tensor,
    units: tl.tensor,
    tiles: tl.tensor,
    unit: tl.tensor,
    UNITS: tl.constexpr,
    RADIX: tl.constexpr,
) -> tl.tensor:
    """Returns pointers (UNITS,) to the first words of a program's units."""
    count = tiles + gl.cdiv(tiles, RADIX) + gl.cdiv(tiles, RADIX * RADIX)
    return words + units * count * UNITS + unit


@gluon.jit(do_not_specialize=["steps", "tiles"])
def scan_forward(
    decay: tl.tensor, inputs: tl.tensor, initial: tl.tensor, lengths: tl.tensor, outputs: tl.tensor, words: tl.tensor,
    decay_batch: tl.tensor, decay_step: tl.tensor, inputs_batch: tl.tensor, inputs_step: tl.tensor, hidden: tl.tensor,
    steps: tl.tensor, tiles: tl.tensor,
    STEPS: tl.constexpr, STAGES: tl.constexpr, UNITS: tl.constexpr, TILED: tl.constexpr, RADIX: tl.constexpr,
    REVERSE: tl.constexpr, COPY: tl.constexpr, LINE: tl.constexpr,
) -> None:  # fmt: skip
    """Computes outputs (B, T, H); ``initial`` and ``lengths`` may be None."""
    steps, tiles = steps.to(gl.int32), tiles.to(gl.int32)
    row, column, units, number = _units(hidden, tiles, UNITS, TILED)
    unit = gl.arange(0, UNITS, layout=LINE)
    length = steps
    if lengths is not None:
        length = gl.load(lengths + row).to(gl.int32)
    a_at, b_at = decay + row * decay_batch + column, inputs + row * inputs_batch + column
    made_at = outputs + row * steps * hidden + column + unit
    state = gl.full([UNITS], 0.0, gl.float32, layout=LINE)
    a = gl.allocate_shared_memory(decay.dtype.element_ty, [STAGES, STEPS, UNITS], _ROWS)
    b = gl.allocate_shared_memory(inputs.dtype.element_ty, [STAGES, STEPS, UNITS], _ROWS)
    for early in gl.static_range(STAGES - 1):
        _copy(a.index(early), a_at, decay_step, early * STEPS, length, length, REVERSE, STEPS, UNITS, COPY)
        _copy(b.index(early), b_at, inputs_step, early * STEPS, length, length, REVERSE, STEPS, UNITS, COPY)
        async_copy.commit_group()
    if initial is not None:
        state = gl.load(initial + row * hidden + column + unit)
    for turn in range(0, 1 if TILED else tiles):
        first, stage = (number + turn + STAGES - 1) * STEPS, (turn + STAGES - 1) % STAGES
        _copy(a.index(stage), a_at, decay_step, first, length, length, REVERSE, STEPS, UNITS, COPY)
        _copy(b.index(stage), b_at, inputs_step, first, length, length, REVERSE, STEPS, UNITS, COPY)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        first, slot = (number + turn) * STEPS, turn % STAGES * STEPS
        a_rows, b_rows = _rows(a), _rows(b)
        if TILED:
            p, e = _map_of(a_rows, b_rows, slot, False, STEPS, UNITS, LINE)
            at = _words_of(words, units, tiles, unit, UNITS, RADIX)
            state = _state_before(p, e, state, number, tiles, at, UNITS, RADIX, LINE)
        for base in range(0, STEPS, _UNROLL):
            decays, added = _values(a_rows, slot + base, LINE), _values(b_rows, slot + base, LINE)
            for k in gl.static_range(_UNROLL):
                state = decays[k] * state + added[k]
                _store(made_at, hidden, state, first + base + k, length, steps, REVERSE)


@gluon.jit
def _go_back(
    a: tl.tensor, d: tl.tensor, h: tl.tensor, slot: tl.tensor, delta: tl.tensor, begin: tl.tensor, first: tl.tensor,
    ddecay_at: tl.tensor, dinputs_at: tl.tensor, hidden: tl.tensor, length: tl.tensor, steps: tl.tensor,
    REVERSE: tl.constexpr, STEPS: tl.constexpr, LINE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Writes the gradients of a tile's steps, last step first; returns the gradient of the first step's input.

    a: rows of the decays of the following steps; d: of the outputs' gradients; h: of the outputs before the steps,
    of which ``begin`` is the one before step 0.
    """
    for turn in range(0, STEPS, _UNROLL):
        base = STEPS - _UNROLL - turn
        decays, incoming = _values(a, slot + base, LINE), _values(d, slot + base, LINE)
        states = _values(h, slot + base, LINE)
        for k in gl.static_range(_UNROLL - 1, -1, -1):
            step = first + base + k
            delta = decays[k] * delta + incoming[k]
            before = gl.where(step == 0, begin, states[k]) if k == 0 else states[k]
            _store(dinputs_at, hidden, delta, step, length, steps, REVERSE)
            _store(ddecay_at, hidden, delta * before, step, length, steps, REVERSE)
    return delta


@gluon.jit
def _copy_back(
    a: tl.tensor, d: tl.tensor, h: tl.tensor, a_at: tl.tensor, d_at: tl.tensor, h_at: tl.tensor, a_step: tl.tensor,
    d_step: tl.tensor, h_step: tl.tensor, first: tl.tensor, length: tl.tensor,
    REVERSE: tl.constexpr, STEPS: tl.constexpr, UNITS: tl.constexpr, COPY: tl.constexpr,
) -> None:  # fmt: skip
    """Starts copying what the gradients of a tile need: see `_go_back`."""
    _copy(a, a_at, a_step, first + 1, length, length, REVERSE, STEPS, UNITS, COPY)
    _copy(d, d_at, d_step, first, length, length, REVERSE, STEPS, UNITS, COPY)
    _copy(h, h_at, h_step, first - 1, length - 1, length, REVERSE, STEPS, UNITS, COPY)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["steps", "tiles"])
def scan_backward(
    decay: tl.tensor, outputs: tl.tensor, doutputs: tl.tensor, initial: tl.tensor, lengths: tl.tensor,
    ddecay: tl.tensor, dinputs: tl.tensor, dinitial: tl.tensor, words: tl.tensor,
    decay_batch: tl.tensor, decay_step: tl.tensor, outputs_batch: tl.tensor, outputs_step: tl.tensor,
    doutputs_batch: tl.tensor, doutputs_step: tl.tensor, hidden: tl.tensor, steps: tl.tensor, tiles: tl.tensor,
    STEPS: tl.constexpr, STAGES: tl.constexpr, UNITS: tl.constexpr, TILED: tl.constexpr, RADIX: tl.constexpr,
    REVERSE: tl.constexpr, COPY: tl.constexpr, LINE: tl.constexpr,
) -> None:  # fmt: skip
    """Computes the gradients: delta_i = dh_i + a_{i+1} delta_{i+1}, from the last step to the first."""
    steps, tiles = steps.to(gl.int32), tiles.to(gl.int32)
    row, column, units, number = _units(hidden, tiles, UNITS, TILED)
    unit = gl.arange(0, UNITS, layout=LINE)
    length = steps
    if lengths is not None:
        length = gl.load(lengths + row).to(gl.int32)
    a_at, d_at = decay + row * decay_batch + column, doutputs + row * doutputs_batch + column
    h_at = outputs + row * outputs_batch + column
    made = row * steps * hidden + column + unit
    delta = gl.full([UNITS], 0.0, gl.float32, layout=LINE)
    begin = delta
    a = gl.allocate_shared_memory(decay.dtype.element_ty, [STAGES, STEPS, UNITS], _ROWS)
    d = gl.allocate_shared_memory(decay.dtype.element_ty, [STAGES, STEPS, UNITS], _ROWS)
    h = gl.allocate_shared_memory(decay.dtype.element_ty, [STAGES, STEPS, UNITS], _ROWS)
    last = tiles - 1 - number
    for early in gl.static_range(STAGES - 1):
        _copy_back(
            a.index(early), d.index(early), h.index(early), a_at, d_at, h_at, decay_step, doutputs_step, outputs_step,
            (last - early) * STEPS, length, REVERSE, STEPS, UNITS, COPY,
        )  # fmt: skip
    if initial is not None:
        begin = gl.load(initial + row * hidden + column + unit).to(decay.dtype.element_ty).to(gl.float32)
    for turn in range(0, 1 if TILED else tiles):
        first, stage = (last - turn - STAGES + 1) * STEPS, (turn + STAGES - 1) % STAGES
        _copy_back(
            a.index(stage), d.index(stage), h.index(stage), a_at, d_at, h_at, decay_step, doutputs_step, outputs_step,
            first, length, REVERSE, STEPS, UNITS, COPY,
        )  # fmt: skip
        async_copy.wait_group(STAGES - 1)
        a_rows, d_rows, h_rows, slot = _rows(a), _rows(d), _rows(h), turn % STAGES * STEPS
        if TILED:
            p, e = _map_of(a_rows, d_rows, slot, True, STEPS, UNITS, LINE)
            at = _words_of(words, units, tiles, unit, UNITS, RADIX)
            delta = _state_before(p, e, delta, number, tiles, at, UNITS, RADIX, LINE)
        delta = _go_back(
            a_rows, d_rows, h_rows, slot, delta, begin, (last - turn) * STEPS, ddecay + made, dinputs + made, hidden,
            length, steps, REVERSE, STEPS, LINE,
        )  # fmt: skip
    if (last == 0) | (not TILED):
        position = (length - 1 if REVERSE else 0) * decay_step
        at_start = gl.load(a_at + position.to(gl.int64) + unit, mask=length > 0, other=0.0).to(gl.float32)
        gl.store(dinitial + row * hidden + column + unit, gl.where(length > 0, at_start * delta, 0.0))


_LINE = 128
"""Bytes of adjacent units that a program copies per step: a cache line."""

_FULL = 2
"""Programs per multiprocessor from which they walk through all tiles of their units."""

_AHEAD = 8
"""Tiles, at most, of which a program that walks copies the values ahead."""

_WALK_STEPS, _TILE_STEPS = 32, 64
"""Steps of a tile, without and with a program for each tile."""

_SHARED = {80: 164, 87: 164, 90: 228, 100: 228, 103: 228}
"""KB of shared memory of a multiprocessor, by compute capability; others have 100."""

RADIX = 16
"""Tiles of a group, and groups after which a state is published."""


class TilePlan(NamedTuple):
    """Division of a call into programs.

    Attributes:
        units: units of a program. groups: groups of units, over all rows.
        steps: steps of a tile. tiles: tiles of a row. tiled: True if each tile has a program.
        stages: tiles in shared memory.
    """

    units: int
    groups: int
    steps: int
    tiles: int
    tiled: bool
    stages: int

    @property
    def programs(self) -> int:
        """Size of the launch grid."""
        return self.groups * (self.tiles if self.tiled else 1)

    def words(self, like: Tensor) -> Tensor | None:
        """Allocates the words that the tiles publish; see `_state_before`."""
        if not self.tiled:
            return None
        count = self.tiles + -(-self.tiles // RADIX) + -(-self.tiles // RADIX**2)
        return torch.full(
            (self.groups, count, self.units), _EMPTY.value, dtype=torch.int64, device=like.device
        )

    def constants(self, like: Tensor, reverse: bool) -> dict[str, Any]:
        """Returns the compile-time arguments."""
        at_once = 16 // like.dtype.itemsize
        lanes = self.units // at_once
        return {
            "STEPS": self.steps, "STAGES": self.stages, "UNITS": self.units, "TILED": self.tiled, "RADIX": RADIX,
            "REVERSE": reverse, "COPY": gl.BlockedLayout([1, at_once], [32 // lanes, lanes], [1, 1], [1, 0]),
            "LINE": gl.BlockedLayout([self.units // 32], [32], [1], [0]), "num_warps": 1,
        }  # fmt: skip


def serves(*tensors: Tensor) -> bool:
    """Returns True if the kernels support these tensors (B, T, H), of one type, whose units are adjacent."""
    like = tensors[0]
    units = _LINE // like.dtype.itemsize
    return (
        not interpreted()
        and like.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and like.shape[2] % units == 0
        and all(not any(stride % 16 for stride in each.stride()[:2]) for each in tensors)
        and all(each.data_ptr() % 16 == 0 for each in tensors)
    )


def plan(like: Tensor, tensors: int, tiled: bool | None) -> TilePlan:
    """Divides (B, T, H) into programs.

    Args:
        like: (B, T, H), one of the ``tensors`` that are copied to shared memory.
        tiled: True if each tile has a program; None: what fills the device better.
    """
    processors = multiprocessors(like.device.index or 0) if like.is_cuda else 1
    rows, steps, hidden = like.shape
    units = _LINE // like.dtype.itemsize
    groups = rows * hidden // units
    if tiled is None:
        tiled = groups < _FULL * processors and steps > _TILE_STEPS
    if tiled:
        return TilePlan(units, groups, _TILE_STEPS, -(-steps // _TILE_STEPS), True, 1)
    tiles = -(-steps // _WALK_STEPS)
    shared = _SHARED.get(driver.active.get_current_target().arch, 100) << 10
    each = min(shared // max(1, min(3, -(-groups // processors))), shared - 2048) - 1024
    stages = max(1, min(_AHEAD, tiles, each // (tensors * _WALK_STEPS * _LINE)))
    return TilePlan(units, groups, _WALK_STEPS, tiles, False, stages)


def forward(
    decay: Tensor,
    inputs: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    tiled: bool | None,
) -> Tensor:
    """Returns the outputs; see `recurrence.forward`."""
    cut = plan(inputs, 2, tiled)
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    scan_forward[(cut.programs,)](
        decay, inputs, None if initial is None else initial.contiguous(), lengths, outputs, cut.words(inputs),
        *decay.stride()[:2], *inputs.stride()[:2], inputs.shape[2], inputs.shape[1], cut.tiles,
        **cut.constants(inputs, reverse),
    )  # fmt: skip
    return outputs


def backward(
    decay: Tensor,
    outputs: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    doutputs: Tensor,
    tiled: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of decay, inputs and initial; see `recurrence.backward`."""
    cut = plan(decay, 3, tiled)
    ddecay, dinputs = (torch.empty_like(decay, memory_format=torch.contiguous_format) for _ in range(2))
    dinitial = decay.new_empty(decay.shape[0], decay.shape[2], dtype=torch.float32)
    scan_backward[(cut.programs,)](
        decay, outputs, doutputs, None if initial is None else initial.contiguous(), lengths, ddecay, dinputs, dinitial,
        cut.words(decay), *decay.stride()[:2], *outputs.stride()[:2], *doutputs.stride()[:2], decay.shape[2],
        decay.shape[1], cut.tiles, **cut.constants(decay, reverse),
    )  # fmt: skip
    return ddecay, dinputs, dinitial
