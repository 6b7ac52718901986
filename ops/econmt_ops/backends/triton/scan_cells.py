"""Layers of a linear recurrence without their products: nonlinearities, recurrence and output in one kernel.

A program runs all steps of a row for a tile of units, one unit per thread: the state stays in a register, and the next
steps are prefetched while a block of steps is computed. So every tensor is read or written once. The backward pass
reads the products, c and the gradient of h, recomputes the nonlinearities and writes the gradients of the products, in
place if allowed. The equations are those of `econmt_ops.cells.scan`.

If rows and units are too few to fill the device, rows are cut into chunks of steps: the same kernels first compute the
map c -> P c + e of each chunk, a scan over the chunks gives the states before them, and then all chunks run in
parallel.

Sizes: B batch, T steps, H hidden, K parts of the products.
"""

# mypy: disable-error-code=assignment

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.triton import interpreted, recurrence
from econmt_ops.backends.triton.pointwise import sigmoid, tanh
from econmt_ops.cells.scan import ScanInputs
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.chunks import rows_of
from econmt_ops.dispatch.device_limits import limits_of

_UNITS = 32
"""Maximum units per program, which is one warp: one unit per thread, so that many warps hide each other's latency."""

_FORWARD_BLOCK, _BACKWARD_BLOCK = 8, 4
"""Steps loaded at once, in 2 x block x (K + 1 forward, K + 3 backward) registers. Chunks are multiples of blocks."""

_FEW_STEPS = 256
"""Minimum steps of a chunk."""

_FULL, _WANTED = 4, 16
"""Programs per multiprocessor from which rows are not cut, and the number to reach by cutting them."""

_TILE = 32
"""Steps of a tile in the scan over the chunks."""


@triton.jit
def load_parts(place, there, PARTS: tl.constexpr, HIDDEN: tl.constexpr):
    """Loads PARTS consecutive parts, (UNITS,) each, from pointers to the first; zero where the mask is False."""
    found = ()
    for part in tl.static_range(PARTS):
        found = found + (tl.load(place + part * HIDDEN, mask=there, other=0.0),)
    return found


@triton.jit
def powers(f, i):
    """Returns e^-f and e^-i for the sums of two gates, from which f / (f + i) is (1 + e^-i) / (2 + e^-f + e^-i).

    If a sum is below -60, both powers are scaled so that the larger is e^60: the terms 1 and 2, which would be scaled
    too, are then negligible, and no power is infinite. A sum of -inf closes its gate.
    """
    f = tl.maximum(f, -1e30, propagate_nan=tl.PropagateNan.ALL)
    i = tl.maximum(i, -1e30, propagate_nan=tl.PropagateNan.ALL)
    least = tl.minimum(tl.minimum(f, i), 0.0)
    most = tl.minimum(-least, 60.0)
    return tl.exp(most + (least - f)), tl.exp(most + (least - i))


@triton.jit
def activate(sums, bias, PARTS: tl.constexpr, GATES: tl.constexpr, RECURRENCE: tl.constexpr, SQUASHES: tl.constexpr,
             ACC: tl.constexpr):  # fmt: skip
    """Returns the parts after their nonlinearities: u, the gates, and further parts unchanged.

    The gates of a shared recurrence are returned as `powers`.
    """
    SHARED: tl.constexpr = RECURRENCE == "shared"
    u = sums[0].to(ACC) + bias[0]
    if SQUASHES:
        u = tanh(u)
    found = (u,)
    if SHARED:
        found = found + powers(sums[1].to(ACC) + bias[1], sums[2].to(ACC) + bias[2])
    for part in tl.static_range(3 if SHARED else 1, PARTS):
        value = sums[part].to(ACC) + bias[part]
        if part <= GATES:
            value = sigmoid(value)
        found = found + (value,)
    return found


@triton.jit
def recur(parts, RECURRENCE: tl.constexpr):
    """Returns a and b of the recurrence c = a c + b."""
    if RECURRENCE == "gated":
        return parts[1], parts[2] * parts[0]
    elif RECURRENCE == "shared":
        inverse = 1.0 / (2.0 + parts[1] + parts[2])
        return (1.0 + parts[2]) * inverse, (1.0 + parts[1]) * inverse * parts[0]
    else:
        return parts[1], (1.0 - parts[1]) * parts[0]


@triton.jit
def recur_back(parts, delta, before, RECURRENCE: tl.constexpr, SQUASHES: tl.constexpr):
    """Returns the gradients of the parts' sums, from the gradient of b and the c before the step."""
    u, f = parts[0], parts[1]
    if RECURRENCE == "gated":
        i = parts[2]
        du = delta * i
        rest = (delta * before * f * (1.0 - f), delta * u * i * (1.0 - i))
    elif RECURRENCE == "shared":
        i = parts[2]
        inverse = 1.0 / (2.0 + f + i)
        keep, take = (1.0 + i) * inverse, (1.0 + f) * inverse
        du = delta * take
        dshare = delta * (before - u) * inverse
        rest = (dshare * keep * f, -dshare * take * i)
    else:
        du = delta * (1.0 - f)
        rest = (delta * (before - u) * f * (1.0 - f),)
    if SQUASHES:
        du = du * (1.0 - u * u)
    return (du,) + rest


@triton.jit
def give(c, o, x, OUTPUT: tl.constexpr):
    """Returns h from c, the output gate o and the highway input x; o and x are ignored by outputs without them."""
    if OUTPUT == "relu":
        return tl.maximum(c, 0.0)
    elif OUTPUT == "gate":
        return o * c
    elif OUTPUT == "highway":
        return x + o * (tanh(c) - x)
    else:
        return c


@triton.jit
def give_back(c, o, x, dh, OUTPUT: tl.constexpr):
    """Returns the gradients of c, of the output gate's sum and of the highway input."""
    if OUTPUT == "relu":
        return tl.where(c > 0.0, dh, 0.0), dh, dh
    elif OUTPUT == "gate":
        return dh * o, dh * c * o * (1.0 - o), dh
    elif OUTPUT == "highway":
        squashed = tanh(c)
        through = dh * o
        return through * (1.0 - squashed * squashed), through * (squashed - x) * (1.0 - o), dh - through
    else:
        return dh, dh, dh


@triton.jit
def read_forward(
    source, begin, PARTS: tl.constexpr, HIDDEN: tl.constexpr, READS: tl.constexpr, BLOCK: tl.constexpr
):
    """Loads the parts of the products and, with READS, the input, for a block of steps."""
    products, read, row, unit, length, steps, read_batch, read_step = source
    place = products + (row * steps + begin) * (PARTS * HIDDEN) + unit
    found = ()
    for index in tl.static_range(BLOCK):
        there = (begin + index < length) & (unit < HIDDEN)
        values = load_parts(place + index * (PARTS * HIDDEN), there, PARTS, HIDDEN)
        if READS:
            at = row * read_batch + (begin + index).to(tl.int64) * read_step + unit
            values = values + (tl.load(read + at, mask=there, other=0.0),)
        found = found + (values,)
    return found


@triton.jit
def place_of(lengths, steps, span, chunks, HIDDEN: tl.constexpr, UNITS: tl.constexpr):
    """Returns row, units, a mask of them, place of their states, begin and end of the chunk, and the row's length."""
    groups: tl.constexpr = (HIDDEN + UNITS - 1) // UNITS
    number = tl.program_id(0)
    row, chunk = (number // (groups * chunks)).to(tl.int64), number // groups % chunks
    unit = number % groups * UNITS + tl.arange(0, UNITS)
    length = steps if lengths is None else tl.load(lengths + row).to(tl.int32)
    state = (row * chunks + chunk) * HIDDEN + unit
    return row, unit, unit < HIDDEN, state, chunk * span, tl.minimum(chunk * span + span, steps), length


@triton.jit(do_not_specialize=["steps", "span", "chunks"])
def scan_cell_forward(
    products, bias, read, first, lengths, outputs, last, decays, cells, read_batch, read_step, steps, span, chunks,
    PARTS: tl.constexpr, HIDDEN: tl.constexpr, GATES: tl.constexpr, RECURRENCE: tl.constexpr, OUTPUT: tl.constexpr,
    SQUASHES: tl.constexpr, SUMMARY: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Computes outputs (B, T, H), zero beyond a row's length, and with ``cells`` c at each step (B, T, H).

    A program handles a chunk of ``span`` steps; first and last (B, chunks, H) are c before and after each chunk. With
    SUMMARY it only computes the chunk's map c -> decays c + last, both (B, chunks, H).
    """
    row, unit, inside, state, start, stop, length = place_of(lengths, steps, span, chunks, HIDDEN, UNITS)
    READS: tl.constexpr = OUTPUT == "highway" and PARTS == 1 + GATES
    kind: tl.constexpr = outputs.dtype.element_ty
    biases = ()
    for part in tl.static_range(PARTS):
        biases = biases + (tl.load(bias + part * HIDDEN + unit, mask=inside, other=0.0).to(ACC),)
    c, p = tl.zeros((UNITS,), ACC), tl.full((UNITS,), 1.0, ACC)
    if not SUMMARY:
        c = tl.load(first + state, mask=inside, other=0.0)
    source = products, read, row, unit, length, steps, read_batch, read_step
    block = read_forward(source, start, PARTS, HIDDEN, READS, BLOCK)
    for number in range(tl.cdiv(stop - start, BLOCK)):
        begin = start + number * BLOCK
        behind = read_forward(source, begin + BLOCK, PARTS, HIDDEN, READS, BLOCK)
        at = (row * steps + begin) * HIDDEN + unit
        for index in tl.static_range(BLOCK):
            live = begin + index < length
            values = block[index]
            parts = activate(values, biases, PARTS, GATES, RECURRENCE, SQUASHES, ACC)
            a, b = recur(parts, RECURRENCE)
            c = tl.where(live, a * c + b, c)
            if SUMMARY:
                p = tl.where(live, a * p, p)
            else:
                h = give(c, parts[GATES], values[-1].to(ACC) if READS else parts[PARTS - 1], OUTPUT)
                there = (begin + index < stop) & inside
                tl.store(outputs + at + index * HIDDEN, tl.where(live, h, 0.0).to(kind), mask=there)
                if cells is not None:
                    tl.store(cells + at + index * HIDDEN, c, mask=there)
        block = behind
    tl.store(last + state, c, mask=inside)
    if SUMMARY:
        tl.store(decays + state, p, mask=inside)


@triton.jit
def read_backward(
    source, begin, PARTS: tl.constexpr, HIDDEN: tl.constexpr, READS: tl.constexpr, BLOCK: tl.constexpr
):
    """Loads the parts, c before the step, the input and the gradient of h, for a block of steps."""
    (products, read, cells, doutputs, row, unit, length, steps, read_batch, read_step, doutputs_batch,
     doutputs_step) = source  # fmt: skip
    inside = unit < HIDDEN
    place = products + (row * steps + begin) * (PARTS * HIDDEN) + unit
    earlier = cells + (row * steps + begin - 1) * HIDDEN + unit
    found = ()
    for index in tl.static_range(BLOCK):
        step = begin + index
        there = (step >= 0) & (step < length) & inside
        values = load_parts(place + index * (PARTS * HIDDEN), there, PARTS, HIDDEN)
        before = tl.load(earlier + index * HIDDEN, mask=(step >= 1) & (step <= length) & inside, other=0.0)
        x, dh = before, before
        if READS:
            at = row * read_batch + step.to(tl.int64) * read_step + unit
            x = tl.load(read + at, mask=there, other=0.0)
        if doutputs is not None:
            at = row * doutputs_batch + step.to(tl.int64) * doutputs_step + unit
            dh = tl.load(doutputs + at, mask=there, other=0.0)
        found = found + ((values, before, x, dh),)
    return found


@triton.jit(do_not_specialize=["steps", "span", "chunks"])
def scan_cell_backward(
    products, bias, read, first, lengths, cells, doutputs, dlast, dproducts, dread, dfirst, decays, dbias,
    read_batch, read_step, doutputs_batch, doutputs_step, steps, span, chunks,
    PARTS: tl.constexpr, HIDDEN: tl.constexpr, GATES: tl.constexpr, RECURRENCE: tl.constexpr, OUTPUT: tl.constexpr,
    SQUASHES: tl.constexpr, SUMMARY: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Computes dproducts (B, T, K H) and, for a highway, dread (B, T, H), zero beyond a row's length.

    A program handles a chunk as in the forward pass; dlast and dfirst (B, chunks, H) are the gradients of c after and
    before each chunk, and with SUMMARY it only computes the map dlast -> decays dlast + dfirst. dbias:
    (B, chunks, K H), the unrounded sum of dproducts per chunk. dproducts may alias the products. first: (B, H), the
    initial c.
    """
    row, unit, inside, state, begin_of_chunk, stop, length = place_of(
        lengths, steps, span, chunks, HIDDEN, UNITS
    )
    READS: tl.constexpr = OUTPUT == "highway" and PARTS == 1 + GATES
    kind: tl.constexpr = dproducts.dtype.element_ty
    biases, sums = (), ()
    for part in tl.static_range(PARTS):
        biases = biases + (tl.load(bias + part * HIDDEN + unit, mask=inside, other=0.0).to(ACC),)
        sums = sums + (tl.zeros((UNITS,), ACC),)
    start = tl.load(first + row * HIDDEN + unit, mask=inside, other=0.0)
    carried, p = tl.zeros((UNITS,), ACC), tl.full((UNITS,), 1.0, ACC)
    if dlast is not None:
        carried = tl.load(dlast + state, mask=inside, other=0.0).to(ACC)
    blocks = tl.cdiv(stop - begin_of_chunk, BLOCK)
    end = begin_of_chunk + (blocks - 1) * BLOCK
    source = (products, read, cells, doutputs, row, unit, length, steps, read_batch, read_step, doutputs_batch,
              doutputs_step)  # fmt: skip
    block = read_backward(source, end, PARTS, HIDDEN, READS, BLOCK)
    # c after the last step of the chunk: no later step of the chunk loads it as its previous c
    c = tl.load(cells + (row * steps + stop - 1) * HIDDEN + unit, mask=inside & (length >= stop), other=0.0)
    for number in range(blocks):
        begin = end - number * BLOCK
        ahead = read_backward(source, begin - BLOCK, PARTS, HIDDEN, READS, BLOCK)
        place = dproducts + (row * steps + begin) * (PARTS * HIDDEN) + unit
        for index in tl.static_range(BLOCK - 1, -1, -1):
            step = begin + index
            values, before, x, dh = block[index]
            before = tl.where(step == 0, start, before)
            dh = tl.zeros((UNITS,), ACC) if doutputs is None else dh.to(ACC)
            parts = activate(values, biases, PARTS, GATES, RECURRENCE, SQUASHES, ACC)
            a, _ = recur(parts, RECURRENCE)
            x = x.to(ACC) if READS else parts[PARTS - 1]
            dc, dgate, dx = give_back(c, parts[GATES], x, dh, OUTPUT)
            live = step < length
            delta = tl.where(live, dc + carried, 0.0)
            carried = tl.where(live, a * delta, carried)
            if SUMMARY:
                p = tl.where(live, a * p, p)
            if not SUMMARY:
                made = recur_back(parts, delta, before, RECURRENCE, SQUASHES)
                if OUTPUT == "gate" or OUTPUT == "highway":
                    made = made + (dgate,)
                there = (step < stop) & inside
                if READS:
                    tl.store(dread + (row * steps + step) * HIDDEN + unit, dx.to(kind), mask=there)
                elif OUTPUT == "highway":
                    made = made + (dx,)
                total = ()
                for part in tl.static_range(PARTS):
                    tl.store(
                        place + index * (PARTS * HIDDEN) + part * HIDDEN, made[part].to(kind), mask=there
                    )
                    total = total + (sums[part] + made[part],)
                sums = total
            c = before
        block = ahead
    tl.store(dfirst + state, carried, mask=inside)
    if SUMMARY:
        tl.store(decays + state, p, mask=inside)
    else:
        for part in tl.static_range(PARTS):
            at = (state - unit) * PARTS + part * HIDDEN + unit
            tl.store(dbias + at, sums[part], mask=inside)


class _Cut(NamedTuple):
    """Division of a call into programs: units of a program, steps of a chunk, and chunks of a row."""

    units: int
    span: int
    chunks: int

    def grid(self, batch: int, hidden: int) -> tuple[int]:
        """Returns the launch grid."""
        return (batch * triton.cdiv(hidden, self.units) * self.chunks,)


def _chunks(batch: int, steps: int, hidden: int, device: torch.device) -> int:
    """Returns the chunks of a row: one, unless rows and units are too few to fill the device and steps are many."""
    programs = max(1, batch * triton.cdiv(hidden, _UNITS))
    if device.type != "cuda" or steps < 2 * _FEW_STEPS:
        return 1
    processors = limits_of(device).multiprocessors
    if programs >= _FULL * processors:
        return 1
    return int(min(triton.cdiv(_WANTED * processors, programs), steps // _FEW_STEPS))


def _cut(like: Tensor) -> _Cut:
    """Returns the division for a tensor of shape (B, T, H)."""
    batch, steps, hidden = like.shape
    units = min(_UNITS, triton.next_power_of_2(max(1, hidden)))
    chunks = _chunks(batch, steps, hidden, like.device)
    # Chunks are multiples of blocks.
    span = steps if chunks == 1 else triton.cdiv(steps, chunks * _FORWARD_BLOCK) * _FORWARD_BLOCK
    return _Cut(units, span, triton.cdiv(steps, max(1, span)))


def _states(decays: Tensor, ends: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Returns the states before each chunk, (B, chunks, H), given the maps c -> decays c + ends and first (B, H)."""
    begin = first.unsqueeze(1)
    if interpreted() or first.dtype == torch.float64:  # which the kernels of the recurrence do not take
        states = begin.repeat(1, decays.shape[1], 1)
        for chunk in range(decays.shape[1] - 1):
            last, to = (-1 - chunk, -2 - chunk) if reverse else (chunk, chunk + 1)
            states[:, to] = decays[:, last] * states[:, last] + ends[:, last]
        return states
    after = recurrence.forward(RecurrenceArguments(decays, ends, first, None, reverse, "triton"))
    return torch.cat([after[:, 1:], begin] if reverse else [begin, after[:, :-1]], 1)


def _constants(inputs: ScanInputs, units: int) -> dict[str, Any]:
    """Returns the compile-time arguments of both kernels."""
    cell, products, hidden = inputs.cell, inputs.products, inputs.first.shape[1]
    return {
        "PARTS": products.shape[2] // hidden, "HIDDEN": hidden, "GATES": cell.gates - 1,
        "RECURRENCE": cell.recurrence.name, "OUTPUT": cell.output.name, "SQUASHES": cell.squashes,
        "UNITS": units, "ACC": tl.float64 if products.dtype == torch.float64 else tl.float32, "num_warps": 1,
    }  # fmt: skip


def forward(inputs: ScanInputs, outputs: Tensor, last: Tensor, cells: Tensor | None) -> None:
    """Writes outputs (B, T, H), contiguous; last (B, H): c after a row's last step, and cells (B, T, H) or None."""
    batch, steps, hidden = outputs.shape
    _, products, bias, read, first, lengths = inputs
    read, before = rows_of(read), first.contiguous()
    cut = _cut(outputs)
    decays, ends = last, last
    if cut.chunks > 1:
        decays, ends = (first.new_empty(batch, cut.chunks, hidden) for _ in range(2))
    for summary in (True, False) if cut.chunks > 1 else (False,):
        scan_cell_forward[cut.grid(batch, hidden)](
            products, bias, read, before, lengths, outputs, ends, decays, cells, *read.stride()[:2], steps, cut.span,
            cut.chunks, SUMMARY=summary, BLOCK=_FORWARD_BLOCK, **_constants(inputs, cut.units),
        )  # fmt: skip
        if summary:
            before = _states(decays, ends, before, False)
    if cut.chunks > 1:
        last.copy_(ends[:, -1])


def backward(
    inputs: ScanInputs,
    cells: Tensor,
    doutputs: Tensor | None,
    dlast: Tensor | None,
    dproducts: Tensor,
    dread: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Writes the gradients of products and input; returns those of ``first`` and of the bias, in the accumulate type.

    ``inputs`` and ``cells`` were given to and written by :func:`forward`; ``doutputs`` and ``dlast`` may be None.
    ``dproducts`` (B, T, K H), contiguous, may be the products themselves; ``dread`` is None unless a highway reads the
    input.
    """
    batch, steps, hidden = cells.shape
    _, products, bias, read, first, lengths = inputs
    assert bias is not None
    read, first = rows_of(read), first.contiguous()
    doutputs = None if doutputs is None else rows_of(doutputs)
    cut = _cut(cells)
    dfirst, decays = (first.new_empty(batch, cut.chunks, hidden) for _ in range(2))
    dbias = first.new_empty(batch * cut.chunks, bias.shape[0])
    after = None if dlast is None else dlast.contiguous()
    for summary in (True, False) if cut.chunks > 1 else (False,):
        scan_cell_backward[cut.grid(batch, hidden)](
            products, bias, read, first, lengths, cells, doutputs, None if summary else after, dproducts, dread, dfirst,
            decays, dbias, *read.stride()[:2], *(0, 0) if doutputs is None else doutputs.stride()[:2], steps, cut.span,
            cut.chunks, SUMMARY=summary, BLOCK=_BACKWARD_BLOCK, **_constants(inputs, cut.units),
        )  # fmt: skip
        if summary:
            after = _states(decays, dfirst, torch.zeros_like(first) if after is None else after, True)
    return dfirst[:, 0], dbias.sum(0)
