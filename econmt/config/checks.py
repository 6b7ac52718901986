"""Checks across the sections of a recipe; the messages name the conflicting keys."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from econmt.config.conditions import find_conflicts, idle_values
from econmt.config.data import Data
from econmt.config.text import data_kind, model_kind
from econmt.config.yaml_reader import MISPLACED, leaves


def check_recipe(recipe: Any, *, accept_idle: bool) -> None:
    """Checks that sections and keys of a recipe agree.

    Args:
        recipe: the recipe.
        accept_idle: True for a recipe that an earlier version may have written, with values that have no effect.

    Raises:
        ValueError: sections are those of another task, or do not fit each other.
        ValidationError: values cannot be combined, or would have no effect; with an error for each.
    """
    _check_task(recipe)
    findings = list(find_conflicts(dict(leaves(recipe))))
    if not accept_idle:
        findings += [each for each in idle_values(recipe) if each.refused]
    if findings:
        kind: Any = MISPLACED
        details = [
            InitErrorDetails(type=PydanticCustomError(kind, "{problem}", each._asdict()), input=None)
            for each in findings
        ]
        raise ValidationError.from_exception_data("Recipe", details)
    if isinstance(recipe.data, Data):
        _check_data(recipe.data, recipe)


def _check_task(recipe: Any) -> None:
    """Checks that the sections of a recipe belong to its task."""
    text = recipe.task == "language_model"
    needed_keys = ["data.source and data.target", "model.encoder and model.decoder"]
    if text:
        data_keys = "data.text, data.train and data.valid"
        needed_keys = [data_keys, "model.size and model.layers, and no encoder and decoder"]
    for kind, needed in zip((data_kind(recipe.data), model_kind(recipe.model)), needed_keys, strict=True):
        if (kind == "text") != text:
            raise ValueError(f"task: {recipe.task} needs {needed}")


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
