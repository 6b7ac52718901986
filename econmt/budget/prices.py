"""Time costs of recomputation, which determine the order in which a plan gives up feature maps."""

from __future__ import annotations

from operator import itemgetter

from econmt.config.recipe import OPS
from econmt.model import Implementations
from econmt_ops.core.chunks import STASHES

PRICES = {
    "cpu": {"decoder": 160.0, "output": 0.0, "stash": 2000.0},
    "cuda": {"decoder": 30.0, "output": 0.0, "stash": 350.0},
}
"""Milliseconds for each GiB that is recomputed instead of kept, by device and key of a recipe's section ``ops``.

Measured in float32. CPU: the multi30k recipe, 64 sentence pairs of 16 x 16 positions, one thread of an AMD EPYC Zen 4.
GPU: the iwslt recipe, 128 sentence pairs of 100 x 100 positions, an H200. Recomputing the output layer made neither
slower. They are constants so that a recipe always has the same plan: measurements would differ from run to run, and
with them the plan and the rounding of the parameters.
"""


def settings(of_recipe: Implementations, device: str) -> list[Implementations]:
    """Returns the settings that a plan chooses from on "cpu" or "cuda", fastest first, each keeping less than the last.

    The first is that of the recipe. The others change what it leaves at auto, in the order of the prices.
    """
    prices, leanest = PRICES[device], Implementations.leanest(device)
    free = {key: getattr(leanest, key) for key in OPS if getattr(of_recipe, key) == "auto"}
    # Ways to keep less: their prices, and for each step the fields that it changes.
    savings: list[tuple[float, list[dict[str, str]]]] = []
    free_stash = of_recipe.stash == "auto"
    fastest = leanest.traits("decoder")
    assert fastest is not None
    levels = STASHES[: STASHES.index(fastest.model_stash) + 1][::-1]
    decoder: dict[str, str] = {key: free[key] for key in ("decoder", "attention") if key in free}
    if decoder:
        # At first the decoder's layers keep the stash with which they are fastest.
        keep = {"stash": levels[0]} if "encoder" in free and free_stash else {}
        savings.append((prices["decoder"], [{**decoder, **keep}]))
    if "output" in free:
        savings.append((prices["output"], [{"output": free["output"]}]))
    chosen = {"encoder": free["encoder"]} if "encoder" in free else {}
    recurrent = map(of_recipe.traits, ("encoder", "decoder"))
    free_stash = free_stash and any(traits is None or traits.takes_stash for traits in recurrent)
    steps = [{**chosen, "stash": level} for level in levels] if free_stash else [chosen]
    savings.append((prices["stash"], [step for step in steps if step]))
    ladder = [of_recipe]
    for _, changes in sorted(savings, key=itemgetter(0)):
        for step in changes:
            ladder.append(ladder[-1]._replace(**step))
    return ladder
