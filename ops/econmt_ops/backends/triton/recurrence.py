"""The linear recurrence on a GPU, a backend of `econmt_ops.linear_recurrence.scan`.

Its Gluon kernels keep many bytes under way, with asynchronous copies to shared memory.

A program handles a tile of WARPS x SPAN steps of the units of one cache line, of which it copies all values to shared
memory at once. Each warp runs SPAN steps: first for the map h -> P h + e of its steps; then, given the state before the
tile, for the outputs. A multiprocessor holds several programs, whose copies fill the time in which others wait.

If a row has several tiles, a tile publishes its map and gets the state before it from earlier tiles. Maps and states
are words of 64 bits, two float32 each, which are written and read as one: a word that is not EMPTY is complete, so that
no flag and no fence is needed. RADIX tiles are a group, whose last tile publishes the map of the group; RADIX groups
are a block, whose last tile publishes the state after it. A tile waits for the earlier tiles of its group, the earlier
groups of its block and the state before the block. Maps are always joined in the same order, so results are
deterministic. Programs start in the order of their numbers, and wait only for lower ones.

Steps are counted in processing order, the order of the walk: step i of a row of n steps is at position i, or n - 1 - i
with REVERSE. Steps outside a row's length are copied as zeros.
Layouts: COPY for tiles (steps, UNITS) as they are copied; GRID for (WARPS, UNITS), a row a warp; LINE for (UNITS,),
which every warp holds.
"""

# mypy: disable-error-code=assignment

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from econmt_ops.backends.triton.exchange import SPINS as _SPINS
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.chunks import rows_of
from econmt_ops.dispatch.device_limits import limits_of

_EMPTY = gl.constexpr(-1)
"""Word that no program publishes: as two float32, NaNs that no product has as its result."""
_IDENTITY = gl.constexpr(0x3F800000)
"""Word of the map h -> 1 h + 0."""
_UNROLL = gl.constexpr(8)
"""Steps that are written out in loops over a warp's steps."""
_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
# Triton 3.9 renamed these two.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)


@gluon.jit
def _copy(
    at, stride, room, first, end, length, REVERSE: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
    UNITS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Starts copying a tile's steps from ``first`` on; zeros before step 0, from ``end`` on, and beyond ``room`` units.

    ``at`` points to the units of the row's first position.

    Returns:
        Shared memory (SPAN, WARPS, UNITS): step k of each warp.
    """
    buffer = gl.allocate_shared_memory(at.dtype.element_ty, [SPAN * WARPS, UNITS], _ROWS)
    number = gl.arange(0, SPAN * WARPS, layout=gl.SliceLayout(1, COPY))
    step = first + number % WARPS * SPAN + number // WARPS
    unit = gl.expand_dims(gl.arange(0, UNITS, layout=gl.SliceLayout(0, COPY)), 0)
    position = length - 1 - step if REVERSE else step
    mask = gl.expand_dims((step >= 0) & (step < end), 1) & (unit < room)
    _async_load(buffer, at + gl.expand_dims(position.to(gl.int64) * stride, 1) + unit, mask=mask)
    return _reinterpret(buffer, buffer.dtype, [SPAN, WARPS, UNITS], _ROWS)


@gluon.jit
def _values(buffer, first, GRID: tl.constexpr):
    """Returns steps (WARPS, UNITS) from ``first`` on in float32, all loaded before any is used."""
    values = ()
    for k in gl.static_range(_UNROLL):
        values = values + (buffer.index(first + k).load(GRID).to(gl.float32),)
    return values


@gluon.jit
def _store(at, stride, value, step, inside, length, steps, REVERSE: tl.constexpr):
    """Stores the units (1, UNITS) that are ``inside`` at steps (WARPS, 1), zeros beyond the row's length."""
    value = gl.where(step < length, value, 0.0)
    position = gl.where(step < length, length - 1 - step, step) if REVERSE else step
    gl.store(at + position.to(gl.int64) * stride, value.to(at.dtype.element_ty), mask=(step < steps) & inside)


@gluon.jit
def _join(p, e, q, f):
    """Composes two maps, the earlier first: h -> q (p h + e) + f; if e is 0, q e is 0 even for an infinite q."""
    return p * q, gl.where(e == 0, f, q * e + f)


@gluon.jit
def _after(p, e, state):
    """Returns p state + e; if the state is 0, p state is 0 even for an infinite p."""
    return gl.where(state == 0, e, p * state + e)


@gluon.jit
def _publish(at, p, e):
    """Stores a map or, with p = 0, a state (UNITS,) where later programs can read it: 64 bits at once."""
    low, high = p.to(gl.uint32, bitcast=True).to(gl.uint64), e.to(gl.uint32, bitcast=True).to(gl.uint64)
    gl.store(at, (low | (high << 32)).to(gl.int64, bitcast=True))


@gluon.jit
def _map_at(at, mask):
    """Returns P and e (UNITS,) of a word, those of the identity where not ``mask``; and 1 where it is absent."""
    word = gl.load(at, mask=mask, other=_IDENTITY, volatile=True)
    p, e = word.to(gl.int32), (word >> 32).to(gl.int32)
    return p.to(gl.float32, bitcast=True), e.to(gl.float32, bitcast=True), (word == _EMPTY).to(gl.int32)


@gluon.jit
def _wait(
    tiles_at, rank, groups_at, group_rank, states_at, block, start, UNITS: tl.constexpr, RADIX: tl.constexpr,
    LINE: tl.constexpr,
):  # fmt: skip
    """Waits for ``rank`` maps of tiles, ``group_rank`` maps of groups and the state after ``block`` blocks.

    Returns:
        P and e (UNITS,) of the tiles together, and the state before them, NaN after a timeout.
    """
    polls = 0
    missing = 1
    one, nothing = (
        gl.full([UNITS], 1.0, gl.float32, layout=LINE),
        gl.full([UNITS], 0.0, gl.float32, layout=LINE),
    )
    p, e, state = one, nothing, start
    while (missing > 0) & (polls < _SPINS):
        _, given, absent = _map_at(states_at + (block - 1) * UNITS, block > 0)
        state = gl.where(block > 0, given, start)
        p, e, p_groups, e_groups = one, nothing, one, nothing
        for k in gl.static_range(RADIX - 1):
            q, f, lacks = _map_at(tiles_at + k * UNITS, k < rank)
            p, e = _join(p, e, q, f)
            q, f, lacks_group = _map_at(groups_at + k * UNITS, k < group_rank)
            p_groups, e_groups = _join(p_groups, e_groups, q, f)
            absent |= lacks | lacks_group
        state = _after(p_groups, e_groups, state)
        missing = gl.max(absent, 0)
        polls += 1
    if missing > 0:
        state += float("nan")
        e += float("nan")
    return p, e, state


@gluon.jit
def _state_before(
    p, e, start, number, tiles, words, UNITS: tl.constexpr, RADIX: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Returns the state (UNITS,) before a tile.

    Args:
        p, e: (UNITS,), the map of the tile.
        start: (UNITS,), the state before the first tile.
        number, tiles: number of the tile in the order of the walk, and of all tiles.
        words: pointers (UNITS,) to the first word of these units: maps of tiles, maps of groups, states after blocks.
    """
    group, rank = number // RADIX, number % RADIX
    block, group_rank = group // RADIX, group % RADIX
    tiles_at, all_groups = words + group * RADIX * UNITS, words + tiles * UNITS
    groups_at, states_at = all_groups + block * RADIX * UNITS, all_groups + gl.cdiv(tiles, RADIX) * UNITS
    if rank < RADIX - 1:
        _publish(words + number * UNITS, p, e)
    elif group_rank < RADIX - 1:
        p_before, e_before, _ = _wait(
            tiles_at, rank, groups_at, group_rank * 0, states_at, block * 0, start, UNITS, RADIX, LINE
        )
        p_group, e_group = _join(p_before, e_before, p, e)
        _publish(all_groups + group * UNITS, p_group, e_group)
    p_before, e_before, state = _wait(
        tiles_at, rank, groups_at, group_rank, states_at, block, start, UNITS, RADIX, LINE
    )
    state = _after(p_before, e_before, state)
    if (rank == RADIX - 1) & (group_rank == RADIX - 1):
        nothing = gl.full([UNITS], 0.0, gl.float32, layout=LINE)
        _publish(states_at + block * UNITS, nothing, _after(p, e, state))
    return state


@gluon.jit
def _states(
    a, b, start, line, number, tiles, words, BACK: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
    UNITS: tl.constexpr, RADIX: tl.constexpr, GRID: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Returns the states (WARPS, UNITS) before the steps of each warp; with BACK from the last step to the first.

    Args:
        a, b: shared memory (SPAN, WARPS, UNITS), decays and inputs of the tile's steps.
        start, number, tiles: see `_state_before`.
        line: number of these units among the lines of all rows.
        words: pointer to the words of all lines, or None if a row has one tile.
    """
    p = gl.full([WARPS, UNITS], 1.0, gl.float32, layout=GRID)
    e = gl.full([WARPS, UNITS], 0.0, gl.float32, layout=GRID)
    for base in range(0, SPAN, _UNROLL):
        first = SPAN - _UNROLL - base if BACK else base
        decays, inputs = _values(a, first, GRID), _values(b, first, GRID)
        for k in gl.static_range(_UNROLL):
            decay = decays[_UNROLL - 1 - k if BACK else k]
            p, e = p * decay, decay * e + inputs[_UNROLL - 1 - k if BACK else k]
    all_p = gl.allocate_shared_memory(gl.float32, [WARPS, UNITS], _ROWS)
    all_e = gl.allocate_shared_memory(gl.float32, [WARPS, UNITS], _ROWS)
    all_p.store(p)
    all_e.store(e)
    all_p = _reinterpret(all_p, gl.float32, [WARPS, UNITS], _ROW)
    all_e = _reinterpret(all_e, gl.float32, [WARPS, UNITS], _ROW)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, GRID)), 1)
    p_tile = gl.full([UNITS], 1.0, gl.float32, layout=LINE)
    e_tile = gl.full([UNITS], 0.0, gl.float32, layout=LINE)
    for k in gl.static_range(WARPS):
        joined = WARPS - 1 - k if BACK else k
        p = gl.where(warp == joined, gl.expand_dims(p_tile, 0), p)  # the map of the warps before this one
        e = gl.where(warp == joined, gl.expand_dims(e_tile, 0), e)
        p_tile, e_tile = _join(p_tile, e_tile, all_p.index(joined).load(LINE), all_e.index(joined).load(LINE))
    if words is not None:
        count = tiles + gl.cdiv(tiles, RADIX) + gl.cdiv(tiles, RADIX * RADIX)
        at = words + line * count * UNITS + gl.arange(0, UNITS, layout=LINE)
        start = _state_before(p_tile, e_tile, start, number, tiles, at, UNITS, RADIX, LINE)
    return _after(p, e, gl.expand_dims(start, 0))


@gluon.jit
def _tile_of(vectors, tiles, UNITS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Returns the program's row, its first unit, the units from there on, and the numbers of its tile and line.

    A multiplication tells the compiler of what a number is a multiple, which it must know to copy AT_ONCE units.
    """
    lines = gl.num_programs(0) // tiles
    line, number = gl.program_id(0) % lines, gl.program_id(0) // lines
    of_row = gl.cdiv(vectors * AT_ONCE, UNITS)
    part = line % of_row
    room = (vectors - part * (UNITS // AT_ONCE)) * AT_ONCE
    return (line // of_row).to(gl.int64), part * UNITS, room, number, line.to(gl.int64)


@gluon.jit(do_not_specialize=["steps", "tiles"])
def scan_forward(
    decay, inputs, initial, lengths, outputs, words, decay_batch, decay_step, inputs_batch, inputs_step, vectors, steps,
    tiles, SPAN: tl.constexpr, WARPS: tl.constexpr, UNITS: tl.constexpr, AT_ONCE: tl.constexpr, RADIX: tl.constexpr,
    REVERSE: tl.constexpr, COPY: tl.constexpr, GRID: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Computes outputs (B, T, H); ``initial`` and ``lengths`` may be None, ``words`` too if a row has one tile.

    Strides and ``vectors``, the size of H, are in vectors of AT_ONCE units.
    """
    steps, tiles = steps.to(gl.int32), tiles.to(gl.int32)
    row, column, room, number, line = _tile_of(vectors, tiles, UNITS, AT_ONCE)
    hidden, decay_step, inputs_step = vectors * AT_ONCE, decay_step * AT_ONCE, inputs_step * AT_ONCE
    first = number * (SPAN * WARPS)
    length = steps
    if lengths is not None:
        length = gl.load(lengths + row).to(gl.int32)
    a_at = decay + row * decay_batch * AT_ONCE + column
    b_at = inputs + row * inputs_batch * AT_ONCE + column
    a = _copy(a_at, decay_step, room, first, length, length, REVERSE, SPAN, WARPS, UNITS, COPY)
    b = _copy(b_at, inputs_step, room, first, length, length, REVERSE, SPAN, WARPS, UNITS, COPY)
    async_copy.commit_group()
    unit = gl.arange(0, UNITS, layout=LINE)
    state = gl.full([UNITS], 0.0, gl.float32, layout=LINE)
    if initial is not None:
        state = gl.load(initial + row * hidden + column + unit, mask=unit < room, other=0.0)
    async_copy.wait_group(0)
    state = _states(a, b, state, line, number, tiles, words, False, SPAN, WARPS, UNITS, RADIX, GRID, LINE)
    step = first + SPAN * gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, GRID)), 1)
    unit = gl.expand_dims(unit, 0)
    made_at, inside = outputs + row * steps * hidden + column + unit, unit < room
    for base in range(0, SPAN, _UNROLL):
        decays, added = _values(a, base, GRID), _values(b, base, GRID)
        for k in gl.static_range(_UNROLL):
            state = decays[k] * state + added[k]
            _store(made_at, hidden, state, step + base + k, inside, length, steps, REVERSE)


@gluon.jit(do_not_specialize=["steps", "tiles"])
def scan_backward(
    decay, outputs, doutputs, initial, lengths, ddecay, dinputs, dinitial, words, decay_batch, decay_step,
    outputs_batch, outputs_step, doutputs_batch, doutputs_step, vectors, steps, tiles, SPAN: tl.constexpr,
    WARPS: tl.constexpr, UNITS: tl.constexpr, AT_ONCE: tl.constexpr, RADIX: tl.constexpr, REVERSE: tl.constexpr,
    COPY: tl.constexpr, GRID: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Computes the gradients: delta_i = dh_i + a_{i+1} delta_{i+1}, from the last step to the first."""
    steps, tiles = steps.to(gl.int32), tiles.to(gl.int32)
    row, column, room, number, line = _tile_of(vectors, tiles, UNITS, AT_ONCE)
    hidden, decay_step = vectors * AT_ONCE, decay_step * AT_ONCE
    outputs_step, doutputs_step = outputs_step * AT_ONCE, doutputs_step * AT_ONCE
    first = (tiles - 1 - number) * (SPAN * WARPS)
    length = steps
    if lengths is not None:
        length = gl.load(lengths + row).to(gl.int32)
    a_at = decay + row * decay_batch * AT_ONCE + column
    d_at = doutputs + row * doutputs_batch * AT_ONCE + column
    h_at = outputs + row * outputs_batch * AT_ONCE + column
    a = _copy(a_at, decay_step, room, first + 1, length, length, REVERSE, SPAN, WARPS, UNITS, COPY)
    d = _copy(d_at, doutputs_step, room, first, length, length, REVERSE, SPAN, WARPS, UNITS, COPY)
    h = _copy(h_at, outputs_step, room, first - 1, length - 1, length, REVERSE, SPAN, WARPS, UNITS, COPY)
    async_copy.commit_group()
    unit = gl.arange(0, UNITS, layout=LINE)
    begin = gl.full([UNITS], 0.0, gl.float32, layout=LINE)
    delta = begin
    if initial is not None:
        begin = gl.load(initial + row * hidden + column + unit, mask=unit < room, other=0.0)
        begin = begin.to(decay.dtype.element_ty).to(gl.float32)
    async_copy.wait_group(0)
    delta = _states(a, d, delta, line, number, tiles, words, True, SPAN, WARPS, UNITS, RADIX, GRID, LINE)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, GRID)), 1)
    unit = gl.expand_dims(unit, 0)
    made, inside = row * steps * hidden + column + unit, unit < room
    begin, warp_first = gl.expand_dims(begin, 0), first + SPAN * warp
    ddecay, dinputs = ddecay + made, dinputs + made
    for turn in range(0, SPAN, _UNROLL):
        base = SPAN - _UNROLL - turn
        decays, incoming, before = _values(a, base, GRID), _values(d, base, GRID), _values(h, base, GRID)
        for i in gl.static_range(_UNROLL):
            step = warp_first + base + (_UNROLL - 1 - i)
            delta = decays[_UNROLL - 1 - i] * delta + incoming[_UNROLL - 1 - i]
            state = before[_UNROLL - 1 - i]
            if i == _UNROLL - 1:
                state = gl.where(step == 0, begin, state)
            _store(dinputs, hidden, delta, step, inside, length, steps, REVERSE)
            _store(ddecay, hidden, delta * state, step, inside, length, steps, REVERSE)
    if first == 0:
        position = length - 1 if REVERSE else length * 0
        at_start = a_at + position.to(gl.int64) * decay_step + unit
        at_start = gl.load(at_start, mask=(length > 0) & inside, other=0.0).to(gl.float32)
        value = gl.where(length > 0, at_start * delta, 0.0)
        gl.store(dinitial + row * hidden + column + unit + 0 * warp, value, mask=(warp == 0) & inside)


_LINE = 128
"""Bytes of adjacent units of a program: a cache line."""

WARPS = 4
"""Warps of a program."""

SPAN = 64
"""Steps of a warp, at most; half as many on devices with less shared memory than _LARGE."""

_LARGE = 160 << 10
"""Bytes of shared memory of a program in which tiles of 4 x 64 steps leave room for a second program."""

RADIX = 8
"""Tiles of a group, and groups of a block."""


class TileGrid(NamedTuple):
    """Division of a call into programs.

    Attributes:
        units: units of a program. lines: groups of so many units, over all rows.
        span: steps of a warp. tiles: tiles of a row.
    """

    units: int
    lines: int
    span: int
    tiles: int

    def words(self, like: Tensor) -> Tensor | None:
        """Allocates the words that the tiles publish; see `_state_before`."""
        if self.tiles == 1:
            return None
        count = self.tiles + -(-self.tiles // RADIX) + -(-self.tiles // RADIX**2)
        shape = self.lines, count, self.units
        return torch.full(shape, _EMPTY.value, dtype=torch.int64, device=like.device)

    def constants(self, like: Tensor, reverse: bool) -> dict[str, Any]:
        """Returns the compile-time arguments."""
        at_once = _at_once(like)
        lanes = self.units // at_once
        grid = gl.BlockedLayout([1, self.units // 32], [1, 32], [WARPS, 1], [1, 0])
        return {
            "SPAN": self.span, "WARPS": WARPS, "UNITS": self.units, "AT_ONCE": at_once, "RADIX": RADIX,
            "REVERSE": reverse,
            "COPY": gl.BlockedLayout([1, at_once], [32 // lanes, lanes], [WARPS, 1], [1, 0]), "GRID": grid,
            "LINE": gl.SliceLayout(0, grid), "num_warps": WARPS,
            # So many programs fit the registers as fit the shared memory; the compiler would save some for more.
            "maxnreg": None if limits_of(like.device).shared >= _LARGE else 128,
        }  # fmt: skip


def _at_once(like: Tensor) -> int:
    """Returns the values that a thread copies at once, 16 bytes."""
    return 16 // like.dtype.itemsize


def _aligned(tensor: Tensor) -> Tensor:
    """Returns a tensor (B, T, H), or its copy, whose steps are multiples of 16 bytes and begin at such multiples."""
    tensor, at_once = rows_of(tensor), _at_once(tensor)
    apart = any(stride % at_once for stride in tensor.stride()[:2]) or tensor.data_ptr() % 16
    more = -tensor.shape[2] % at_once
    return functional.pad(tensor, (0, more)) if apart or more else tensor


def _in_vectors(*tensors: Tensor) -> list[int]:
    """Returns the strides of the first two axes of tensors, and then the last size, in vectors of 16 bytes."""
    at_once = _at_once(tensors[0])
    strides = [stride // at_once for tensor in tensors for stride in tensor.stride()[:2]]
    return [*strides, tensors[0].shape[2] // at_once]


def _state_of(initial: Tensor | None, like: Tensor) -> Tensor | None:
    """Returns the initial state (B, H) as wide as ``like``; or None."""
    if initial is None or initial.shape[1] == like.shape[2]:
        return None if initial is None else initial.contiguous()
    return functional.pad(initial, (0, like.shape[2] - initial.shape[1]))


def grid_of(like: Tensor) -> TileGrid:
    """Divides (B, T, H) into programs."""
    rows, steps, hidden = like.shape
    units = _LINE // like.dtype.itemsize
    most = SPAN if limits_of(like.device).shared >= _LARGE else SPAN // 2
    span = max(_UNROLL.value, min(most, triton.next_power_of_2(-(-steps // WARPS))))
    return TileGrid(units, rows * -(-hidden // units), span, -(-steps // (span * WARPS)))


def forward(call: RecurrenceArguments) -> Tensor:
    """Returns the outputs; see `scan.backend_of`."""
    steps, hidden = call.inputs.shape[1:]
    decay, inputs = _aligned(call.decay), _aligned(call.inputs)
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    if outputs.numel():
        cut = grid_of(inputs)
        scan_forward[(cut.lines * cut.tiles,)](
            decay, inputs, _state_of(call.initial, inputs), call.lengths, outputs, cut.words(inputs),
            *_in_vectors(decay, inputs), steps, cut.tiles,
            **cut.constants(inputs, call.reverse),
        )  # fmt: skip
    return outputs[:, :, :hidden].contiguous()


def backward(call: RecurrenceArguments, doutputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of decay, inputs and initial; see `scan.backend_of`."""
    hidden, steps = call.decay.shape[2], call.decay.shape[1]
    decay, outputs, doutputs = (_aligned(each) for each in (call.decay, call.inputs, doutputs))
    ddecay, dinputs = (torch.empty_like(decay, memory_format=torch.contiguous_format) for _ in range(2))
    dinitial = decay.new_empty(decay.shape[0], decay.shape[2], dtype=torch.float32)
    if ddecay.numel():
        cut = grid_of(decay)
        scan_backward[(cut.lines * cut.tiles,)](
            decay, outputs, doutputs, _state_of(call.initial, decay), call.lengths, ddecay, dinputs, dinitial,
            cut.words(decay), *_in_vectors(decay, outputs, doutputs), steps, cut.tiles,
            **cut.constants(decay, call.reverse),
        )  # fmt: skip
    ddecay, dinputs, dinitial = (each[..., :hidden].contiguous() for each in (ddecay, dinputs, dinitial))
    return ddecay, dinputs, dinitial
