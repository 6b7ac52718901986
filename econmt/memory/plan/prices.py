"""Costs of recomputation: the order in which a plan gives up feature maps."""

from __future__ import annotations

from typing import NamedTuple

from econmt.config.recipe import OPS
from econmt.model import Implementations
from econmt_ops.core.chunks import STASHES

PRICES = {
    "cpu": {"decoder": 160.0, "output": 0.0, "stash": 2000.0},
    "cuda": {"decoder": 30.0, "output": 0.0, "stash": 350.0},
}
"""By device and key of a recipe's section ``ops``: milliseconds that each GiB costs that is not kept.

Those of the CPU are measured: the multi30k recipe, 64 sentence pairs of 16 x 16 positions,
float32, one thread of an AMD EPYC (Zen 4); recomputing the output layer made a step quicker. Those of CUDA are measured
too: the iwslt recipe, 128 sentence pairs of 100 x 100 positions, float32, an
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
    prices, leanest = PRICES[device], Implementations.leanest(device)
    free = {key: getattr(leanest, key) for key in OPS if getattr(given, key) == "auto"}
    savings = []
    free_stash = given.stash == "auto"
    fastest = leanest.traits("decoder")
    assert fastest is not None
    levels = STASHES[: STASHES.index(fastest.model_stash) + 1][::-1]
    decoder: dict[str, str] = {key: free[key] for key in ("decoder", "attention") if key in free}
    if decoder:
        # The decoder's layers at first go on keeping what takes the least time.
        keep = {"stash": levels[0]} if "encoder" in free and free_stash else {}
        savings.append(_Saving(prices["decoder"], [{**decoder, **keep}]))
    if "output" in free:
        savings.append(_Saving(prices["output"], [{"output": free["output"]}]))
    chosen = {"encoder": free["encoder"]} if "encoder" in free else {}
    recurrent = map(given.traits, ("encoder", "decoder"))
    free_stash = free_stash and any(traits is None or traits.takes_stash for traits in recurrent)
    steps = [{**chosen, "stash": level} for level in levels] if free_stash else [chosen]
    savings.append(_Saving(prices["stash"], [step for step in steps if step]))
    found = [given]
    for saving in sorted(savings, key=lambda saving: saving.price):
        for step in saving.steps:
            found.append(found[-1]._replace(**step))
    return found
