"""Source factors in a recipe: what must agree between its sections."""

from __future__ import annotations

from typing import Any

from econmt.config.data import Data
from econmt.config.model import Model


def check_factors(recipe: Any) -> None:
    """Makes sure that the source factors of the data are those of the model, and that all else can have them.

    Raises:
        ValueError: naming the keys that do not go together.
    """
    data, model = recipe.data, recipe.model
    if not (isinstance(data, Data) and isinstance(model, Model)):
        return
    names, widths = data.source_factors, model.source_factors_num_embed
    if len(names) != len(widths):
        raise ValueError(
            f"data.source_factors has {len(names)} entries and model.source_factors_num_embed {len(widths)}: give one "
            "width for each factor"
        )
    if not names:
        if model.source_factors_combine != "concat":
            raise ValueError("model.source_factors_combine needs data.source_factors")
        return
    if model.source_factors_combine == "sum" and set(widths) != {model.embedding}:
        raise ValueError(
            f"model.source_factors_num_embed {widths}: source_factors_combine sum adds vectors, so each must be as "
            f"wide as model.embedding, {model.embedding}"
        )
    if not data.noise.is_idle:
        raise ValueError(
            "data.noise changes words, whose data.source_factors are of the words before: leave one of them out"
        )
    if any(data.tags):
        raise ValueError(
            "data.tags puts a word before sources that data.source_factors has nothing for: leave one of them out, or "
            "write the tags and their factors into the files"
        )
    if recipe.parallel.pipeline > 1:
        raise ValueError("data.source_factors cannot be divided over ranks: give parallel.pipeline: 1")
