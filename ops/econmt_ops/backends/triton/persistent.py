"""Launches of the persistent LSTM kernels, and the plan that divides a layer into programs.

Sizes: D directions, T steps, B rows, H units; see `persistent_kernels` for the work of a program.
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
from econmt_ops.backends.triton.launching import Launch, launch_of
from econmt_ops.backends.triton.persistent_kernels import lstm_backward, lstm_cells, lstm_forward


class Limits(NamedTuple):
    """Resources of a device for a launch whose programs are all resident at once.

    Attributes:
        processors: number of multiprocessors, each of which can hold one program.
        shared: bytes of shared memory that a program may use.
    """

    processors: int
    shared: int


_H200 = Limits(132, 232_448)
_WORTH_LEAVING_OUT = 0.8
"""Fraction of existing rows in a tile up to which the other rows are masked. On an H200, for both passes of 70 steps:
with 40 of 64 rows (H 1024) loading all takes 10 % longer; masking one of 16 (H 256, H 512) took 8 % longer."""
_REGISTERS = 512
"""Bytes of registers per thread for loads in flight."""


@functools.cache
def _limits(device: int) -> Limits:
    properties = torch.cuda.get_device_properties(device)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined] # torch's types lack it
    return Limits(properties.multi_processor_count, shared)


def limits_of(device: torch.device) -> Limits:
    """Returns the limits of a device; those of an H200 without a GPU, as in estimates and in the interpreter."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _H200
    return _limits(torch.cuda.current_device() if device.index is None else device.index)


class Partition(NamedTuple):
    """Division of a layer's walk into programs.

    Attributes:
        units, rows: maximum units and rows that a program owns.
        warps: warps of a program.
        chunk: terms of a part of the sum over units (backward: over gates) that are multiplied at once.
        programs: maximum programs of a launch; further rows or directions use consecutive launches.
        split: parts of a chunk that become rows of one product, because newer tensor cores need 64 rows.
        rows_first: True if the rows of the batch, not the units, are the rows of the product.
        ahead: chunks that are prefetched while one is multiplied.
        team: programs that split the sum among themselves, each for the units of all; only backward.
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
        return sum(1 for _ in _launches(self, directions, batch, hidden))

    def shared(self, terms: int, outputs: int, itemsize: int) -> int:
        """Returns a program's bytes of shared memory, for ``outputs`` results of a product of ``terms`` terms."""
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
    """Returns the partition with the lowest estimated time, or None if none fits.

    Args:
        batch, hidden: B and H.
        products: type of the products.
        limits: limits of the device.
        back: True for the backward pass.
        directions: D.
        together: True if all directions have to share a launch, False if none may; None: whichever is faster.
    """
    best: tuple[float, Partition] | None = None
    for candidate in candidates(hidden, products, limits, back=back):
        count = candidate.parts(hidden) * candidate.groups(batch) * directions
        if together and directions > 1 and count > limits.processors:
            continue
        if together is False:
            candidate = candidate._replace(programs=min(limits.processors, count // directions))
        step = _step_cost(candidate, batch, hidden, products.itemsize, back)
        cost = candidate.launches(directions, batch, hidden) * step
        if best is None or cost < best[0]:
            best = cost, candidate
    return None if best is None else best[1]


def partition_of(
    batch: int,
    hidden: int,
    products: torch.dtype,
    device: torch.device,
    directions: int,
    together: str,
    back: bool,
) -> Partition:
    """Returns how a walk is parted: `plan` for a layer that some launch serves.

    ``together``: "yes" or "no", whether all directions share a launch; "auto": whichever is faster.
    """
    shares = {"yes": True, "no": False, "auto": None}[together]
    limits = limits_of(device)
    partition = plan(batch, hidden, products, limits, back=back, directions=directions, together=shares)
    assert partition is not None, "a layer that no launch can serve"
    return partition


def candidates(hidden: int, products: torch.dtype, limits: Limits, *, back: bool) -> Iterator[Partition]:
    """Yields all partitions that fit a device."""
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
    partition: Partition, hidden: int, products: torch.dtype, limits: Limits, back: bool
) -> Partition | None:
    """Returns the partition with the largest chunk that fits shared memory and registers; None if none does."""
    terms, outputs = (4 * hidden, partition.units) if back else (hidden, 4 * partition.units)
    part = max(16, triton.next_power_of_2(triton.cdiv(terms // partition.team, partition.split)))
    across = partition.split * (partition.rows if partition.rows_first else partition.team * outputs)
    for chunk in (part >> shift for shift in range(7)):
        found = partition._replace(chunk=chunk)
        chunks = found.chunks(terms)
        if chunk < 16 or (chunks > 1 and across < 16 * found.warps):
            return None  # Triton distributes chained products over all warps, even if only half of them have rows
        tile = found.split * found.rows * chunk * products.itemsize
        fits = found.shared(terms, outputs, products.itemsize) <= limits.shared
        if fits and tile * min(found.ahead + 1, chunks) <= _REGISTERS * 32 * found.warps:
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


def _launches(
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


def _walk(
    partition: Partition, directions: int, batch: int, hidden: int, steps: int, back: bool
) -> Iterator[tuple[int, ...]]:
    """Yields the launches with their steps: all, or one at a time in the interpreter, where programs cannot wait."""
    for programs, *part in _launches(partition, directions, batch, hidden):
        if not interpreted():
            yield programs, 0, steps, *part
            continue
        for step in reversed(range(steps)) if back else range(steps):
            yield programs, step, step + 1, *part


def _halves(partition: Partition) -> list[tuple[bool, bool]]:
    """Returns flags (multiplies, ends) of each launch of a step; teams that cannot wait take two launches."""
    return [(True, False), (False, True)] if interpreted() and partition.team > 1 else [(True, True)]


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
        "AHEAD": min(partition.ahead, partition.chunks(terms)),
        "MASKED": partition.masked(batch),
        "ROWS_FIRST": partition.rows_first,
        "BACKWARDS": _mask(backwards),
        "PRECISION": "tf32" if products == torch.float32 and waits else "ieee",
        "UP": products == torch.bfloat16 and not waits,
        "WAIT": waits,
        "num_warps": partition.warps,
        "num_stages": 1,
        **({"launch_cooperative_grid": True} if waits else {}),
    }


@functools.cache
def counters_of(partition: Partition, directions: int, batch: int, hidden: int) -> tuple[int, int]:
    """Returns how many integers the counters of a walk take: of groups of rows, and in all.

    There is a counter for each direction and group of rows, and one for each team of those.
    """
    groups = directions * partition.groups(batch)
    teams = groups * (partition.parts(hidden) // partition.team if partition.team > 1 else 0)
    return groups * COUNTER_STRIDE.value, (groups + teams) * COUNTER_STRIDE.value


@functools.cache
def forward_launch(
    partition: Partition,
    shape: tuple[int, int, int, int],
    types: tuple[torch.dtype, ...],
    backwards: tuple[bool, ...],
    has: tuple[bool, bool, bool, bool],
) -> tuple[Launch, tuple[tuple[int, ...], ...]]:
    """Returns the launch of the forward kernel, and the last arguments of each of a walk's launches.

    Args:
        partition: how the walk is parted.
        shape: D, T, B and 4H.
        types: of sums, recurrent matrix and outputs.
        backwards: for each direction True if it walks backwards.
        has: True each if there is a first state, if there are lengths, if cells and if sums are kept.
    """
    directions, steps, batch, width = shape
    hidden = width // 4
    first, lengths, cells, sums = has
    launch = launch_of(
        lstm_forward, *types, D=directions, HAS_FIRST=first, HAS_LENGTHS=lengths, RING=types[1] != types[2],
        KEEP_CELLS=cells, KEEP_SUMS=sums, **_constants(partition, batch, hidden, hidden, types[1], backwards),
    )  # fmt: skip
    span = partition.span(batch)
    parts = _walk(partition, directions, batch, hidden, steps, back=False)
    return launch, tuple((*part, span) for part in parts)


@functools.cache
def backward_launch(
    partition: Partition,
    shape: tuple[int, int, int, int],
    types: tuple[torch.dtype, ...],
    backwards: tuple[bool, ...],
    has: tuple[bool, bool, bool],
) -> tuple[tuple[Launch, ...], tuple[tuple[int, ...], ...]]:
    """Returns the launches of a step of the backward kernel, and the last arguments of each of a walk's launches.

    Args:
        partition, shape, backwards: as in `forward_launch`.
        types: of sums, recurrent matrix, outputs' gradient and the last h's gradient.
        has: True each if there are lengths, a gradient of the last h, and one of the last c.
    """
    directions, steps, batch, width = shape
    lengths, last_h, last_c = has
    constants = _constants(partition, batch, width, width // 4, types[1], backwards)
    launches = tuple(
        launch_of(
            lstm_backward, *types, HAS_LENGTHS=lengths, RING=types[1] != types[0], TEAM=partition.team,
            MULTIPLIES=multiplies, ENDS=ends, HAS_LAST_H=last_h, HAS_LAST_C=last_c, **constants,
        )
        for multiplies, ends in _halves(partition)
    )  # fmt: skip
    span = partition.span(batch)
    parts = _walk(partition, directions, batch, width // 4, steps, back=True)
    return launches, tuple((*part, span) for part in parts)


def walk_cells(
    sums: Tensor, first_c: Tensor | None, cells: Tensor, lengths: Tensor | None, backwards: tuple[bool, ...]
) -> None:
    """Writes cells (D, T, B, H), c before the step at each position, from sums (D, T, B, 4H) and first_c (D, B, H).

    ``first_c`` None: zeros.
    """
    directions, steps, batch, width = sums.shape
    hidden = width // 4
    rows, units = 4, 64
    programs = directions * triton.cdiv(batch, rows) * triton.cdiv(hidden, units)
    lstm_cells[(programs,)](
        sums, cells if first_c is None else first_c, cells, cells if lengths is None else lengths, steps, batch,
        H=hidden, ROWS=rows, UNITS=units, AHEAD=8, BACKWARDS=_mask(backwards), HAS_FIRST=first_c is not None,
        HAS_LENGTHS=lengths is not None, num_warps=4,
    )  # fmt: skip


def _mask(backwards: tuple[bool, ...]) -> int:
    """Returns the directions that walk backwards as a bit mask."""
    return sum(1 << number for number, each in enumerate(backwards) if each)
