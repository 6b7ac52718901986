"""Checks of source factors across the sections of a recipe."""

from __future__ import annotations

from typing import Any

from econmt.config.data import Data
from econmt.config.model import Model


def check_factors(recipe: Any) -> None:
    """Checks that the source factors of data and model agree and are not combined with unsupported settings.

    Raises:
        ValueError: if not; the message names the conflicting keys.
    """
    data, model = recipe.data, recipe.model
    if not (isinstance(data, Data) and isinstance(model, Model)):
        return
    names, widths = data.source_factors, model.source_factors_num_embed
    if len(names) != len(widths):
        raise ValueError(
            f"data.source_factors has {len(names)} entries but model.source_factors_num_embed has {len(widths)}: give "
            "one width for each factor"
        )
    if not names:
        if model.source_factors_combine != "concat":
            raise ValueError("model.source_factors_combine needs data.source_factors; set them, or remove it")
        return
    if model.source_factors_combine == "sum" and set(widths) != {model.embedding}:
        raise ValueError(
            f"model.source_factors_num_embed {widths}: source_factors_combine: sum adds embeddings, so each width must "
            f"equal model.embedding, {model.embedding}"
        )
    if not data.noise.is_idle:
        raise ValueError(
            "data.noise changes words and cannot be combined with data.source_factors; remove one of them"
        )
    if any(data.tags):
        raise ValueError(
            "data.tags adds a word that has no data.source_factors; remove one of them, or write the tags and their "
            "factors into the files"
        )
    if recipe.parallel.pipeline > 1:
        raise ValueError(
            "data.source_factors cannot be combined with parallel.pipeline above 1; set parallel.pipeline to 1"
        )
