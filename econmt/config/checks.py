"""Checks across the sections of a recipe; each raises a ValueError that names the conflicting keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from econmt.config.conditions import conflicts
from econmt.config.data import Data
from econmt.config.marks import LANGUAGE_MODEL, TRANSLATION, marked_keys
from econmt.config.text import data_kind, model_kind
from econmt.config.yaml_reader import leaves


def check_recipe(recipe: Any) -> None:
    """Checks that sections and keys of a recipe agree."""
    _check_task(recipe)
    for problem in conflicts(dict(leaves(recipe))):
        raise ValueError(problem)
    if isinstance(recipe.data, Data):
        _check_data(recipe.data, recipe)


def _check_task(recipe: Any) -> None:
    """Checks that the sections and keys of a recipe belong to its task."""
    text = recipe.task == "language_model"
    needed_keys = ["data.source and data.target", "model.encoder and model.decoder"]
    if text:
        data_keys = "data.text, data.train and data.valid"
        needed_keys = [data_keys, "model.size and model.layers, and no encoder and decoder"]
    for kind, needed in zip((data_kind(recipe.data), model_kind(recipe.model)), needed_keys, strict=True):
        if (kind == "text") != text:
            raise ValueError(f"task: {recipe.task} needs {needed}")
    schema: type[BaseModel] = type(recipe)
    without_effect = marked_keys(schema, TRANSLATION if text else LANGUAGE_MODEL)
    for key, _ in leaves(recipe, changed_only=True):
        if key in without_effect:
            raise ValueError(f"{key} has no effect with task: {recipe.task}; remove it")


def _check_data(data: Data, recipe: Any) -> None:
    """Checks that the data section of a translation recipe fits the model and the buckets."""
    model = recipe.model
    names, widths = data.source_factors, model.source_factors_num_embed
    if len(names) != len(widths):
        raise ValueError(
            f"data.source_factors has {len(names)} entries but model.source_factors_num_embed has {len(widths)}: give "
            "one width for each factor"
        )
    if not names:
        return
    if model.source_factors_combine == "sum" and set(widths) != {model.embedding}:
        raise ValueError(
            f"model.source_factors_num_embed {widths}: source_factors_combine: sum adds embeddings, so each width must "
            f"equal the width of source embeddings, {model.embedding}"
        )
