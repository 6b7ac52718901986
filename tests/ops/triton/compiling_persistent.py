"""Launches for `compiling`: the persistent kernels of an LSTM layer, divided as on cards that this machine does not have.

A name is that of a card's multiprocessors, batch and hidden size, and options: "24 64x256 both back float16" walks back in both directions, float32 with float16 products;
with "resets" states begin anew; "gru" is a GRU.
Names whose partitions are equal are compiled once, and those without a partition are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from econmt_ops.backends.triton.partition import Partition, divide
from econmt_ops.backends.triton.persistent import walk_launches
from econmt_ops.dispatch.device_limits import H200, DeviceLimits
from econmt_ops.dispatch.rule import rules_only
from tests.ops.simulated_gpu import SHARED

CARDS = {80: (42, 108), 86: (20, 28, 46, 82), 89: (24, 34, 60, 128), 90: (132,), 120: (20, 36, 48, 170)}
"""Numbers of multiprocessors by compute capability: of an A30's half and an A100; of the RTX 3050, 3060, 3070, 3090; 4060,
4060 Ti, 4080 Laptop, 4090; an H200; the RTX 5050, 5060 Ti, 5070, 5090."""
SIZES = (
    "64x512", "128x512", "64x256 both", "32x128", "128x384", "64x500 both", "128x640", "64x1024", "128x1024",
    "256x1024",
    "128x1500", "17x33",
)  # fmt: skip
"""Batches and hidden sizes."""


class Walk(NamedTuple):
    """A walk and how it is parted."""

    partition: Partition
    batch: int
    hidden: int
    directions: int
    back: bool
    ring: bool
    resets: bool = False
    gru: bool = False

    def compile(self) -> None:
        """Launches it, over five steps of rows that have lengths and an initial state."""
        products = torch.float16 if self.ring else torch.bfloat16
        wide = torch.float32 if self.ring else products
        size = self.directions, 5, self.batch, 4 * self.hidden
        backwards = (False, True)[: self.directions]
        x, weights, exact = (torch.zeros(16, dtype=kind) for kind in (wide, products, torch.float32))
        exchange = weights if self.ring else x
        lengths, counters = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
        resets = torch.zeros(16, dtype=torch.bool)
        flags = {"HAS_LENGTHS": True, "HAS_RESETS": self.resets, "GRU": self.gru}
        others = ("HAS_LAST_H", "HAS_LAST_C") if self.back else ("HAS_FIRST", "KEEP_CELLS", "KEEP_SUMS")
        types = (wide, products, wide, wide, wide)[: 5 if self.back else 4]
        with rules_only("cuda"):
            (launch,), parts = walk_launches(
                self.partition, size, types, backwards, back=self.back, **flags, **dict.fromkeys(others, True)
            )
            before = x if self.gru else exact
            own = (exact, before, x, x, x, x, exact) if self.back else (x, exact, x, exact, x, x)
            tensors = x, weights, exchange, *own, lengths, resets, counters, exact
            more, strides = ((4096, 8192), (512, 512)) if self.back else ((4096,), ())
            programs, *numbers = parts[0]
            launch(programs, tensors, (5, self.batch, *numbers, *more), strides)


def walk_of(capability: int, name: str) -> Walk | None:
    """The walk of that name; None if it has no partition."""
    multiprocessors, sizes, *options = name.split()
    batch, hidden = map(int, sizes.split("x"))
    back, ring, directions = "back" in options, "float16" in options, 2 if "both" in options else 1
    pair = divmod(capability, 10)
    limits = DeviceLimits(int(multiprocessors), SHARED[pair] << 10, pair, H200.memory)
    products = torch.float16 if ring else torch.bfloat16
    found = divide(batch, hidden, products, limits, back=back, directions=directions)
    if found is None:
        return None
    return Walk(found, batch, hidden, directions, back, ring, "resets" in options, "gru" in options)


def launches(capability: int, *names: str) -> dict[str, Callable[[], None]]:
    """Launches by name: these, or one of each kernel."""
    if names:
        named = {name: walk_of(capability, name) for name in names}
        return {name: walk.compile for name, walk in named.items() if walk is not None}
    found: dict[Walk, str] = {}
    options = itertools.product(CARDS[capability], SIZES, ("", " back"), ("", " float16"))
    every = [f"{card} {size}{back}{ring}" for card, size, back, ring in options]
    every += [f"{name} {kind}" for name in every if "128x512" in name for kind in ("resets", "gru")]
    for name in every:
        walk = walk_of(capability, name)
        if walk is not None:
            # The rows of a launch are arguments, but for whether they fill a tile.
            batch = 17 if walk.partition.masked(walk.batch) else walk.partition.rows
            alike = walk._replace(partition=walk.partition._replace(programs=0), batch=batch)
            found.setdefault(alike, name)
    walks = {name: walk_of(capability, name) for name in found.values()}
    return {name: walk.compile for name, walk in walks.items() if walk is not None}
