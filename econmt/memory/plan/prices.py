"""What keeping less costs: the order in which a plan gives up feature maps."""

from __future__ import annotations

from typing import NamedTuple

from econmt.model import Implementations
from econmt_ops.core.chunks import STASHES

PRICES = {
    "cpu": {"attention": 160.0, "output": 0.0, "lstm": 2000.0},
    "cuda": {"attention": 30.0, "output": 0.0, "lstm": 350.0},
}
"""By device and op: milliseconds that a training step takes longer for each GiB that it does not keep.

Those of the CPU are measured (scripts/measure_prices.py): the multi30k recipe, 64 sentence pairs of 16 x 16 positions,
float32, one thread of an AMD EPYC (Zen 4); recomputing the output layer made a step quicker. Those of CUDA are measured
too (scripts/bench_memory.py, docs/results.md): the iwslt recipe, 128 sentence pairs of 100 x 100 positions, float32, an
H200; recomputing the output layer made a step no slower. A run takes them as they stand, so that the same recipe always
has the same plan: figures measured at its start would differ from one start to the next, and with them the rounding of
what is learnt.
"""


class _Saving(NamedTuple):
    """A way to keep less: its price, and the fields of :class:`Implementations` that it changes, step by step."""

    price: float
    steps: list[dict[str, str]]


def settings(given: Implementations, device: str) -> list[Implementations]:
    """The settings that a plan may choose from, the fastest first, each keeping less than the one before.

    The first is the given one. What it leaves at auto is then changed in the order of the prices; what it names stays.

    Args:
        given: the recipe's.
        device: "cpu" or "cuda", whose prices count.
    """
    prices = PRICES[device]
    savings = []
    free_stash = given.stash == "auto"
    if given.attention == "auto":
        # With input feeding the decoder's layers are part of the loop: at first they go on keeping their gates.
        keep = {"stash": "gates"} if given.lstm == "auto" and free_stash else {}
        savings.append(_Saving(prices["attention"], [{"attention": "recompute", **keep}]))
    if given.output == "auto":
        savings.append(_Saving(prices["output"], [{"output": "recompute"}]))
    chosen = {"lstm": "recompute"} if given.lstm == "auto" else {}
    levels = [{"stash": level} for level in reversed(STASHES)] if free_stash else [{}]
    steps = [{**chosen, **level} for level in levels] if given.lstm != "reference" else []
    savings.append(_Saving(prices["lstm"], [step for step in steps if step]))
    found = [given]
    for saving in sorted(savings, key=lambda saving: saving.price):
        for step in saving.steps:
            found.append(found[-1]._replace(**step))
    return found
