"""Walks of an LSTM layer in one launch: how they are parted into programs, and their launches.

D directions, T steps, B rows, H units; see `persistent_kernels` for what a program does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from econmt_ops.backends.triton import MOST_UNITS, interpreted
from econmt_ops.backends.triton.exchange import COUNTER_STRIDE
from econmt_ops.backends.triton.persistent_kernels import lstm_backward, lstm_cells, lstm_forward


class Limits(NamedTuple):
    """What a device offers to a launch whose programs are all there at once.

    Attributes:
        processors: each can always hold one program.
        shared: bytes of shared memory a program may have.
        wide_products: whether the matrix units take 64 rows at once (capability 9).
    """

    processors: int
    shared: int
    wide_products: bool


_H200 = Limits(132, 232_448, True)
_WORTH_LEAVING_OUT = 0.8
"""The share of a tile's rows that are there, up to which the others are not read. On an H200, both passes of 70 steps:
at 40 of 64 rows (H 1024) reading all takes 10 % longer; leaving out one of 16 (H 256, H 512) took 8 % longer."""
_REGISTERS = 512
"""Bytes a thread may have for what is on its way to it."""


@functools.cache
def _limits(device: int) -> Limits:
    found = torch.cuda.get_device_properties(device)
    shared: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined] # torch's types lack it
    return Limits(found.multi_processor_count, shared, found.major >= 9)


def limits_of(device: torch.device) -> Limits:
    """The limits of a device; those of an H200 where there is none, as in estimates and in the interpreter."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _H200
    return _limits(torch.cuda.current_device() if device.index is None else device.index)


class Partition(NamedTuple):
    """How a walk is parted.

    Attributes:
        units, rows: what a program owns, at most.
        warps: of a program.
        chunk: of the sum over units (backward: over gates), how many terms of a part are multiplied at once.
        programs: of a launch, at most. More rows or directions than they can serve take launches one after the other.
        split: into how many parts, made as rows of one product, a chunk is cut: newer matrix units want 64 rows.
        rows_first: the rows of the batch, not the units, are the rows of the product.
        ahead: how many chunks are on their way while one is multiplied.
        team: so many programs part the sum among themselves, each for the units of all; only backward.
    """

    units: int
    rows: int
    warps: int
    chunk: int
    programs: int
    split: int = 1
    rows_first: bool = False
    ahead: int = 1
    team: int = 1

    def groups(self, batch: int) -> int:
        """Into how many groups the rows of a batch are parted."""
        return triton.cdiv(batch, self.rows)

    def span(self, batch: int) -> int:
        """Rows of a group: as few as may be, since what a program takes in at a step is a share of each row."""
        return triton.cdiv(batch, max(1, self.groups(batch)))

    def masked(self, batch: int) -> bool:
        """Whether rows that a group has not are left out; few are taken in for less than leaving them out costs."""
        return self.span(batch) <= _WORTH_LEAVING_OUT * self.rows

    def parts(self, hidden: int) -> int:
        """Among how many programs the units of a group of rows are parted."""
        return triton.cdiv(hidden, self.team * self.units) * self.team

    def chunks(self, terms: int) -> int:
        """Into how many chunks a program's part of a sum of so many terms is cut."""
        return triton.cdiv(terms // self.team, self.chunk * self.split)

    def launches(self, directions: int, batch: int, hidden: int) -> int:
        """How many launches, one after the other, serve a walk."""
        return sum(1 for _ in _launches(self, directions, batch, hidden))

    def shared(self, terms: int, outputs: int, itemsize: int) -> int:
        """Bytes of shared memory of a program whose units have so many outputs of a product of so many terms."""
        chunks = self.chunks(terms)
        weights = self.split * self.team * outputs * self.chunk * chunks
        tiles = self.split * self.rows * self.chunk * min(self.ahead + 1, chunks)
        return (weights + tiles) * itemsize


@functools.cache
def plan(
    batch: int,
    hidden: int,
    products: torch.dtype,
    limits: Limits,
    *,
    back: bool,
    directions: int = 1,
    together: bool | None = None,
) -> Partition | None:
    """The partition that is estimated to be fastest, or None if none fits.

    Args:
        batch, hidden: B and H.
        products: the type of the products.
        limits: of the device.
        back: of the backward pass.
        directions: D.
        together: whether all directions must be (or must not be) in one launch; None: whatever is faster.
    """
    best: tuple[float, Partition] | None = None
    for candidate in candidates(hidden, products, limits, back=back):
        whole = candidate.parts(hidden) * candidate.groups(batch) * directions
        if together and directions > 1 and whole > limits.processors:
            continue
        if together is False:
            candidate = candidate._replace(programs=min(limits.processors, whole // directions))
        step = _step_cost(candidate, batch, hidden, products.itemsize, back)
        cost = candidate.launches(directions, batch, hidden) * step
        if best is None or cost < best[0]:
            best = cost, candidate
    return None if best is None else best[1]


def candidates(hidden: int, products: torch.dtype, limits: Limits, *, back: bool) -> Iterator[Partition]:
    """All partitions that fit a device."""
    if hidden > MOST_UNITS:
        return
    rows_of_programs = (8, 16, 32, 64) if back else (16, 32, 64)
    teams = (1, 2, 4) if back else (1,)
    for units, rows, team in itertools.product((16, 32), rows_of_programs, teams):
        if units >= 2 * max(16, hidden) or (team > 1 and hidden < team * units):
            continue
        for warps, split, rows_first in _shapes(hidden, units, rows, team, back):
            shape = Partition(units, rows, warps, 0, limits.processors, split, rows_first, team=team)
            found = _with_chunk(shape, hidden, products, limits, back)
            if found is not None and found.parts(hidden) <= limits.processors:
                yield found


def _shapes(hidden: int, units: int, rows: int, team: int, back: bool) -> Iterator[tuple[int, int, bool]]:
    """Warps, parts and orientation of products; of partitions of the same cost, the first is better.

    Matrix units give 64 rows to four warps, so a product is made in as many parts as fill them. Eight warps, which have
    registers for twice the rows, may share 64 rows too; backward, the parts' weights would fill those registers.
    """
    outputs = team * units if back else 4 * units
    warps = 4 if rows * units <= 256 and (back or hidden < 512) else 8
    rows_first = back and rows >= 32 and rows > outputs
    across = rows if rows_first else outputs
    for split in (1, 2, 4) if back and team == 1 else (4, 2, 1):
        if split * across in (64, 16 * warps) or (split == 1 and across > 16 * warps):
            yield warps, split, rows_first


def _with_chunk(
    partition: Partition, hidden: int, products: torch.dtype, limits: Limits, back: bool
) -> Partition | None:
    """The partition with the largest chunk that fits shared memory and registers; None if none does."""
    terms, outputs = (4 * hidden, partition.units) if back else (hidden, 4 * partition.units)
    part = max(16, triton.next_power_of_2(triton.cdiv(terms // partition.team, partition.split)))
    across = partition.split * (partition.rows if partition.rows_first else partition.team * outputs)
    for chunk in (part >> shift for shift in range(7)):
        found = partition._replace(chunk=chunk)
        chunks = found.chunks(terms)
        if chunk < 16 or (chunks > 1 and across < 16 * found.warps):
            return None  # Triton gives products in a chain to all warps, though only half of them have rows
        tile = found.split * found.rows * chunk * products.itemsize
        fits = found.shared(terms, outputs, products.itemsize) <= limits.shared
        if fits and tile * min(found.ahead + 1, chunks) <= _REGISTERS * 32 * found.warps:
            return found
    return None


def _step_cost(partition: Partition, batch: int, hidden: int, itemsize: int, back: bool) -> float:
    """Microseconds of a step, fitted to an H200: by the KiB a program takes in at a step, and those that it keeps."""
    taken = partition.span(batch) * hidden * (4 if back else 1) // partition.team * itemsize / 1024
    kept = 4 * partition.units * hidden * itemsize / 1024
    cost = 1.45 + (0.0225 if back else 0.03) * taken + 0.008 * kept
    if partition.team > 1:
        cost += 1.2 + 0.0225 * 2 * partition.rows * partition.team * partition.units * 4 / 1024
    return cost


def _launches(
    partition: Partition, directions: int, batch: int, hidden: int
) -> Iterator[tuple[int, int, int, int]]:
    """Which part of a walk each launch serves: programs, first direction, first group of rows, groups."""
    parts = partition.parts(hidden)
    groups = partition.groups(batch)
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


def _halves(partition: Partition) -> list[tuple[bool, bool]]:
    """Whether each launch of a step multiplies and ends it: programs that cannot wait for their team take two."""
    return [(True, False), (False, True)] if interpreted() and partition.team > 1 else [(True, True)]


def _constants(
    partition: Partition, batch: int, terms: int, hidden: int, like: Tensor, backwards: tuple[bool, ...]
) -> dict[str, object]:
    """What both kernels are compiled for, and how they are launched."""
    waits = not interpreted()
    return {
        "H": hidden,
        "UNITS": partition.units,
        "ROWS": partition.rows,
        "CHUNK": partition.chunk,
        "CHUNKS": partition.chunks(terms),
        "SPLIT": partition.split,
        "AHEAD": min(partition.ahead, partition.chunks(terms)),
        "MASKED": partition.masked(batch),
        "ROWS_FIRST": partition.rows_first,
        "BACKWARDS": _mask(backwards),
        "PRECISION": "tf32" if like.dtype == torch.float32 and waits else "ieee",
        "UP": like.dtype == torch.bfloat16 and not waits,
        "WAIT": waits,
        "num_warps": partition.warps,
        "num_stages": 1,
        **({"launch_cooperative_grid": True} if waits else {}),
    }


def _counters(
    partition: Partition, directions: int, batch: int, hidden: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A counter for each direction and group of rows, and one for each team of those."""
    groups = directions * partition.groups(batch)
    teams = groups * (partition.parts(hidden) // partition.team if partition.team > 1 else 0)
    counters = torch.zeros((groups + teams) * COUNTER_STRIDE.value, dtype=torch.int32, device=device)
    return counters, counters[groups * COUNTER_STRIDE.value :]


def walk_forward(
    partition: Partition,
    sums: Tensor,
    recurrent: Tensor,
    outputs: Tensor,
    cells: Tensor | None,
    first: tuple[Tensor, Tensor] | None,
    last: tuple[Tensor, Tensor],
    lengths: Tensor | None,
    backwards: tuple[bool, ...],
    keep_sums: bool,
) -> None:
    """All steps of a layer.

    Args:
        partition: how.
        sums: (D, T, B, 4H), the inputs' share of the gates and, where h is exchanged in another type than that of the
            outputs, at each walk's first position that of the first h; become the sums with ``keep_sums``.
        recurrent: (D, 4H, H), in the type of the products; h is exchanged in that type too.
        outputs: (T, B, D H) is written.
        cells: (D, T, B, H) float32 is written, c before the step at each position; or None.
        first: h, in the type of the outputs, and c, float32, (D, B, H); None: zeros.
        last: is written, the same after the last step.
        lengths: (B,) on the device; or None.
        backwards: which directions walk backwards.
        keep_sums: see ``sums``.
    """
    directions, steps, batch, width = sums.shape
    ring = recurrent.dtype != outputs.dtype
    exchange = recurrent.new_empty(directions, 2, batch, width // 4) if ring else outputs
    counters, _ = _counters(partition, directions, batch, width // 4, sums.device)
    span = partition.span(batch)
    for programs, begin, end, *part in _walk(partition, directions, batch, width // 4, steps, back=False):
        lstm_forward[(programs,)](
            sums, recurrent, exchange, outputs, sums if cells is None else cells,
            *(last if first is None else first), *last,
            counters if lengths is None else lengths, counters, steps, batch, begin, end, *part, span,
            D=directions, HAS_FIRST=first is not None, HAS_LENGTHS=lengths is not None, RING=ring,
            KEEP_CELLS=cells is not None, KEEP_SUMS=keep_sums,
            **_constants(partition, batch, width // 4, width // 4, recurrent, backwards),
        )  # fmt: skip


def walk_backward(
    partition: Partition,
    sums: Tensor,
    recurrent: Tensor,
    cells: Tensor,
    doutputs: Tensor,
    dsums: Tensor,
    last_dh: Tensor | None,
    last_dc: Tensor | None,
    first_dc: Tensor,
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
        last_dh, last_dc: (D, B, H), the gradients of the last state, that of c float32; None: zeros.
        first_dc: (D, B, H) float32 is written, the gradient of the first c.
        lengths, backwards: as in `walk_forward`.
    """
    directions, steps, batch, width = sums.shape
    ring = recurrent.dtype != dsums.dtype
    exchange = recurrent.new_empty(directions, 2, batch, width) if ring else dsums
    scale = first_dc
    if ring:
        scale = _scale(*(part for part in (doutputs, last_dh, last_dc) if part is not None))
    counters, team_counters = _counters(partition, directions, batch, width // 4, sums.device)
    partials = scale
    if partition.team > 1:
        programs = partition.parts(width // 4) * directions * partition.groups(batch)
        partials = first_dc.new_empty(programs, partition.rows, partition.team * partition.units)
    span = partition.span(batch)
    for programs, begin, end, *part in _walk(partition, directions, batch, width // 4, steps, back=True):
        for multiplies, ends in _halves(partition):
            lstm_backward[(programs,)](
                sums, recurrent, exchange, partials, scale, cells, doutputs, dsums,
                doutputs if last_dh is None else last_dh, first_dc if last_dc is None else last_dc, first_dc,
                counters if lengths is None else lengths, counters, team_counters, steps, batch, begin, end, *part,
                span, doutputs.stride(0), doutputs.stride(1), HAS_LENGTHS=lengths is not None, RING=ring,
                TEAM=partition.team, MULTIPLIES=multiplies, ENDS=ends, HAS_LAST_H=last_dh is not None,
                HAS_LAST_C=last_dc is not None,
                **_constants(partition, batch, width, width // 4, recurrent, backwards),
            )  # fmt: skip


def walk_cells(
    sums: Tensor, first_c: Tensor | None, cells: Tensor, lengths: Tensor | None, backwards: tuple[bool, ...]
) -> None:
    """Writes cells (D, T, B, H), c before the step at each position, from sums (D, T, B, 4H) and first_c (D, B, H).

    No first c: zeros.
    """
    directions, steps, batch, width = sums.shape
    hidden = width // 4
    rows, units = 4, 64
    programs = directions * triton.cdiv(batch, rows) * triton.cdiv(hidden, units)
    lstm_cells[(programs,)](
        sums, cells if first_c is None else first_c, cells, cells if lengths is None else lengths, steps, batch,
        H=hidden, ROWS=rows, UNITS=units, BACKWARDS=_mask(backwards), HAS_FIRST=first_c is not None,
        HAS_LENGTHS=lengths is not None, num_warps=4,
    )  # fmt: skip


def _mask(backwards: tuple[bool, ...]) -> int:
    """The directions that walk backwards as bits."""
    return sum(1 << number for number, each in enumerate(backwards) if each)


def _scale(*gradients: Tensor) -> Tensor:
    """The power of two that brings the largest of these gradients to about 64, as one number on the device.

    Float16 then has room for gradients a thousand times as large, and for those down to a ten millionth.
    """
    largest = torch.stack([gradient.abs().amax().float() for gradient in gradients]).amax()
    return torch.exp2(6.0 - torch.log2(largest.clamp(1e-30, 1e30)).ceil())
