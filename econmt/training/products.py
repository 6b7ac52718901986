"""How long matrix products take on this CPU in float32 and in bfloat16: what ``precision: auto`` goes by there."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import torch
from torch.nn import functional

MARGIN = 1.3
"""How many times as fast bfloat16 must be to be chosen.

Everything that is no product gains nothing, and casts cost; where bfloat16 is worth it it is twice as fast, so that no
noise of the measurement decides."""

_SIZES = (256, 512, 2048)
"""Rows, inputs and outputs of the product: the gates of an LSTM of 512, some milliseconds at most."""

_PROBE = (32, 256, 512)
"""Of a product before it: a CPU that has to imitate bfloat16 would take seconds for the large one."""

_REPEATS = 5


class ProductTimes(NamedTuple):
    """Seconds that one product takes."""

    float32: float
    bfloat16: float

    @property
    def fastest(self) -> torch.dtype:
        """bfloat16 if it is faster by the margin."""
        return torch.bfloat16 if self.float32 > MARGIN * self.bfloat16 else torch.float32


def time_products() -> ProductTimes:
    """Times the products of this CPU with as many threads as PyTorch has now; once a process."""
    return _timed(torch.get_num_threads())


@functools.cache
def _timed(threads: int) -> ProductTimes:  # noqa: ARG001
    """See :func:`time_products`; ``threads`` tells the answers apart."""
    times = _both(_PROBE)
    return _both(_SIZES) if times.bfloat16 < 2 * times.float32 else times


def _both(sizes: tuple[int, int, int]) -> ProductTimes:
    return ProductTimes(_seconds(sizes, torch.float32), _seconds(sizes, torch.bfloat16))


def _seconds(sizes: tuple[int, int, int], dtype: torch.dtype) -> float:
    """The shortest of a few products (rows, inputs) x (outputs, inputs): others' work can only lengthen them."""
    rows, inputs, outputs = sizes
    left, right = (
        torch.full((rows, inputs), 0.5, dtype=dtype),
        torch.full((outputs, inputs), 0.5, dtype=dtype),
    )
    shortest = float("inf")
    with torch.no_grad():
        functional.linear(left, right)  # the first call prepares
        for _ in range(_REPEATS):
            began = time.perf_counter()
            functional.linear(left, right)
            shortest = min(shortest, time.perf_counter() - began)
    return shortest
