"""The precision of a run, chosen at its start and then kept, and that of translating and scoring.

Precisions differ by rounding, so a run that goes on must use the one that it began with: it is a part of its saved
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from econmt.recipe import Recipe
from econmt.training.devices import resolve_precision
from econmt.training.products import time_products

LEAST_SIZE = 128
"""Hidden values of the smallest model whose products are worth casting for: below, casts take what products save."""

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Precision(NamedTuple):
    """The dtype of products and feature maps, and why it is that one."""

    dtype: torch.dtype
    why: str

    @property
    def name(self) -> str:
        """As a recipe names it."""
        return str(self.dtype).removeprefix("torch.")


def precision_of_run(recipe: Recipe, device: torch.device, saved: str = "") -> Precision:
    """The precision that a run trains with.

    Args:
        recipe: of the run; a precision that it names goes before everything else.
        device: where it computes.
        saved: the name of the precision that the run began with; empty at its start.
    """
    named = recipe.training.precision
    if named != "auto":
        return Precision(_NAMES[named], "as the recipe says")
    if saved:
        return Precision(_NAMES[saved], "as the run began")
    return automatic_precision([recipe], device)


def automatic_precision(recipes: Sequence[Recipe], device: torch.device) -> Precision:
    """The precision that auto means for the models of these recipes.

    Args:
        recipes: of the models that compute together. device: where.
    """
    if device.type != "cpu":
        return Precision(resolve_precision("auto", device), f"auto: the rule for {device.type}")
    if max(max(recipe.model.encoder.size, recipe.model.decoder.size) for recipe in recipes) < LEAST_SIZE:
        return Precision(torch.float32, "auto: too small a model to gain")
    times = time_products()
    return Precision(
        times.fastest,
        f"auto: a matrix product takes {times.float32 * 1e3:.2f} ms in float32, {times.bfloat16 * 1e3:.2f} ms in "
        "bfloat16",
    )
