"""Division of a persistent LSTM layer into programs, so that all of a launch are on a device at the same time.

Sizes: D directions, T steps, B rows, H units; see `persistent_kernels` for the work of a program.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton

from econmt_ops.backends.triton import MOST_UNITS
from econmt_ops.dispatch.device_limits import DeviceLimits

_WORTH_LEAVING_OUT = 0.8
"""Fraction of existing rows in a tile up to which the other rows are masked. On an H200, for both passes of 70 steps:
with 40 of 64 rows (H 1024) loading all takes 10 % longer; masking one of 16 (H 256, H 512) took 8 % longer."""
_REGISTERS = 512
"""Bytes of registers per thread for loads in flight."""
_TILE = 64
"""Multiple of units whose products need no masks."""
_MANY_ROWS = 128
_MANY_UNITS = 1024
_REGISTERS_OF_MANY = 128
"""Rows that a program of an H200 may own in bfloat16, units of a layer up to which it may, and bytes of registers, as
above, for so many rows: the others hold gates."""
_MOST_REGISTERS = 255
"""Registers that a thread may have; programs of up to 8 warps leave it so many."""
_WIDE = (9, 10)
"""Major compute capabilities whose tensor cores take 64 rows for four warps, from shared memory."""
_FRAGMENTS = 4096
"""Values of an operand that a warp of other devices may hold whole; it does so if a product has several chunks."""
_MULTIPLIED = {(8, 0): 1.44e6}
_MULTIPLIED_ELSEWHERE = 0.435e6
"""Multiplications and additions of a multiprocessor of these devices in a microsecond, with sums in float32: of an A100
1,024 a clock at 1.41 GHz, of the RTX 30, 40 and 50 series 256 a clock at 1.7 GHz."""
_LAUNCHES = 7.0
_OF_RATE = 0.5
"""Microseconds of a small product and of a cell's kernel in a CUDA graph, as on an H200; and the part of the rate above
that products of a few rows reach."""


class Partition(NamedTuple):
    """Division of a layer's walk into programs.

    Attributes:
        units, rows: maximum units and rows that a program owns.
        warps: warps of a program.
        chunk: terms of a part of the sum over units (backward: over gates) that are multiplied at once.
        programs: maximum programs of a launch; further rows or directions use consecutive launches.
        split: parts of a chunk that become rows of one product, because newer tensor cores need 64 rows.
        rows_first: True if the rows of the batch, not the units, are the rows of the product.
        team: programs that split the sum among themselves, each for the units of all; only backward.
        registers: registers of a thread, where the compiler would save some for a second program; None: it decides.
    """

    units: int
    rows: int
    warps: int
    chunk: int
    programs: int
    split: int = 1
    rows_first: bool = False
    team: int = 1
    registers: int | None = None

    def groups(self, batch: int) -> int:
        """Returns the number of groups into which the rows of a batch are divided."""
        return triton.cdiv(batch, self.rows)

    def span(self, batch: int) -> int:
        """Returns the rows of a group: as few as possible, because a program loads data of each row at every step."""
        return triton.cdiv(batch, max(1, self.groups(batch)))

    def masked(self, batch: int) -> bool:
        """Returns True if rows beyond the group are masked; a few extra rows cost less than masking."""
        return self.span(batch) <= _WORTH_LEAVING_OUT * self.rows

    def parts(self, hidden: int) -> int:
        """Returns the number of programs that share the units of a group of rows."""
        return triton.cdiv(hidden, self.team * self.units) * self.team

    def chunks(self, terms: int) -> int:
        """Returns the number of chunks of a program's part of a sum of ``terms`` terms."""
        return triton.cdiv(terms // self.team, self.chunk * self.split)

    def launches(self, directions: int, batch: int, hidden: int) -> int:
        """Returns the number of consecutive launches of a walk."""
        return sum(1 for _ in launches_of(self, directions, batch, hidden))

    def shared(self, terms: int, outputs: int, itemsize: int) -> int:
        """Returns a program's bytes of shared memory, for ``outputs`` results of a product of ``terms`` terms."""
        chunks = self.chunks(terms)
        weights = self.split * self.team * outputs * self.chunk * chunks
        tiles = self.split * self.rows * self.chunk * min(2, chunks)
        return max((weights + tiles) * itemsize, weights * itemsize + 4 * self.team * outputs * self.rows)


@functools.cache
def divide(
    batch: int, hidden: int, products: torch.dtype, limits: DeviceLimits, *, back: bool, directions: int = 1
) -> Partition | None:
    """Returns the partition with the lowest estimated time, or None if none fits; ``products`` is the products' type.

    None fits, too, where launches in turn would take longer than steps that are launched one by one.
    """
    best: tuple[float, Partition] | None = None
    for candidate in candidates(hidden, products, limits, back=back):
        step = _step_cost(candidate, batch, hidden, products.itemsize, back)
        step += _product_cost(candidate, hidden, limits, back)
        cost = candidate.launches(directions, batch, hidden) * step
        if best is None or cost < best[0]:
            best = cost, candidate
    if best is None or best[0] > _most_cost(batch, hidden, limits, directions):
        return None
    return best[1]


def _most_cost(batch: int, hidden: int, limits: DeviceLimits, directions: int) -> float:
    """Returns the microseconds of a step that is launched by itself, where `_step_cost` can be compared with it."""
    if limits.capability[0] in _WIDE:
        return float("inf")
    rate = _MULTIPLIED.get(limits.capability, _MULTIPLIED_ELSEWHERE) * limits.multiprocessors
    return directions * (_LAUNCHES + 4 * batch * hidden**2 / (_OF_RATE * rate))


def candidates(
    hidden: int, products: torch.dtype, limits: DeviceLimits, *, back: bool
) -> Iterator[Partition]:
    """Yields all partitions that fit a device."""
    if hidden > MOST_UNITS:
        return
    rows_of_programs = (8, 16, 32, 64, _MANY_ROWS) if back else (16, 32, 64, _MANY_ROWS)
    takes_many = limits.capability[0] in _WIDE and products == torch.bfloat16
    takes_many = takes_many and hidden <= _MANY_UNITS and hidden % _TILE == 0
    teams = (1, 2, 4) if back else (1,)
    for units, rows, team in itertools.product((16, 32), rows_of_programs, teams):
        if units >= 2 * max(16, hidden) or (team > 1 and hidden < team * units):
            continue
        if rows == _MANY_ROWS and (not takes_many or units > 16 or (back and team < 4)):
            continue  # would keep registers in memory
        is_wide = limits.capability[0] in _WIDE
        shapes, registers = (_wide_shapes, None) if is_wide else (_narrow_shapes, _MOST_REGISTERS)
        for warps, split, rows_first in shapes(hidden, units, rows, team, back):
            shape = Partition(
                units, rows, warps, 0, limits.multiprocessors, split, rows_first, team, registers
            )
            found = _with_chunk(shape, hidden, products, limits, back)
            if found is not None and found.parts(hidden) <= limits.multiprocessors:
                yield found


def _narrow_shapes(_: int, units: int, rows: int, team: int, back: bool) -> Iterator[tuple[int, int, bool]]:
    """Yields warps, split and orientation for tensor cores that take 16 rows a warp; a split would be wasted there."""
    if rows * units <= 1024:  # more would not fit the registers
        yield 4 if rows * units <= 256 else 8, 1, back and rows >= 32 and rows > team * units


def _wide_shapes(
    hidden: int, units: int, rows: int, team: int, back: bool
) -> Iterator[tuple[int, int, bool]]:
    """Yields warps, split and orientation of products; among partitions of equal cost, the first is better.

    Tensor cores take 64 rows for four warps, so a product is split into as many parts as fill them. Eight warps, which
    have registers for twice the rows, may share 64 rows too; backward, the weights of the parts would fill those
    registers.
    """
    outputs = team * units if back else 4 * units
    warps = 4 if rows * units <= 256 and (back or hidden < 512) else 8
    rows_first = back and rows >= 32 and rows > outputs
    across = rows if rows_first else outputs
    for split in (1, 2, 4) if back and team == 1 else (4, 2, 1):
        if split * across in (64, 16 * warps) or (split == 1 and across > 16 * warps):
            yield warps, split, rows_first


def _with_chunk(
    partition: Partition, hidden: int, products: torch.dtype, limits: DeviceLimits, back: bool
) -> Partition | None:
    """Returns the partition with the largest chunk that fits shared memory and registers; None if none does."""
    terms, outputs = (4 * hidden, partition.units) if back else (hidden, 4 * partition.units)
    part = max(16, triton.next_power_of_2(triton.cdiv(terms // partition.team, partition.split)))
    sides = partition.split * partition.rows, partition.split * partition.team * outputs
    across, other = sides if partition.rows_first else sides[::-1]
    is_wide = limits.capability[0] in _WIDE
    for chunk in (part >> shift for shift in range(7)):
        found = partition._replace(chunk=chunk)
        chunks = found.chunks(terms)
        if chunk < 16:
            return None
        # Triton distributes chained products over all warps, even if only half of them have rows.
        if chunks > 1 and is_wide and across < 16 * found.warps:
            return None
        if chunks > 1 and not is_wide and (chunk < 64 or other * chunk > _FRAGMENTS or partition.team > 2):
            continue  # would wait for too many loads, or keep registers in memory
        tile = found.split * found.rows * chunk * products.itemsize
        fits = found.shared(terms, outputs, products.itemsize) <= limits.shared
        registers = _REGISTERS if found.rows < _MANY_ROWS else _REGISTERS_OF_MANY
        if fits and tile * min(2, chunks) <= registers * 32 * found.warps:
            return found
    return None


def _step_cost(partition: Partition, batch: int, hidden: int, itemsize: int, back: bool) -> float:
    """Estimates the microseconds of a step from the KiB that a program loads and keeps; fitted on an H200."""
    taken = partition.span(batch) * hidden * (4 if back else 1) // partition.team * itemsize / 1024
    kept = 4 * partition.units * hidden * itemsize / 1024
    cost = 1.45 + (0.0225 if back else 0.03) * taken + 0.008 * kept
    if partition.team > 1:
        cost += 1.2 + 0.0225 * 2 * partition.rows * partition.team * partition.units * 4 / 1024
    return cost


def _product_cost(partition: Partition, hidden: int, limits: DeviceLimits, back: bool) -> float:
    """Returns the microseconds of a step's product in a program, where `_step_cost` does not contain them."""
    rate = _MULTIPLIED.get(limits.capability, _MULTIPLIED_ELSEWHERE)
    if limits.capability[0] in _WIDE:
        return 0.0
    terms, outputs = (4 * hidden // partition.team, partition.team * partition.units)
    if not back:
        terms, outputs = hidden, 4 * partition.units
    across, other = (partition.rows, outputs) if partition.rows_first else (outputs, partition.rows)
    if partition.chunks(4 * hidden if back else hidden) > 1:
        across = max(across, 16 * partition.warps)
    return across * other * terms / rate


def launches_of(
    partition: Partition, directions: int, batch: int, hidden: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields the part of a walk that each launch handles: programs, first direction, first group of rows, groups."""
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
