"""The length-ratio task of a recipe, and the brevity penalty that is learnt by it."""

from __future__ import annotations

from typing import Any, Literal

LengthTask = Literal["none", "ratio", "length"]
BrevityPenaltyType = Literal["constant", "learned", "none"]


def check_lengths(recipe: Any) -> None:
    """Makes sure that what a recipe wants of lengths is learnt.

    Raises:
        ValueError: naming both keys that do not go together.
    """
    judged = recipe.training.early_stopping.metric == "length_loss"
    if recipe.task != "translation":
        if judged:
            raise ValueError("training.early_stopping.metric length_loss needs model.length_task")
        return
    task, decoding = recipe.model.length_task, recipe.decoding
    if task == "none":
        idle = {
            "training.early_stopping.metric length_loss": judged,
            "training.length_task_weight": recipe.training.length_task_weight != 1.0,
            "model.length_task_layers": recipe.model.length_task_layers != 1,
        }
        for key in (key for key, given in idle.items() if given):
            raise ValueError(f"{key} needs model.length_task: ratio or length")
    if task != "none" and recipe.parallel.pipeline > 1:
        raise ValueError(
            f"model.length_task {task} cannot be divided over ranks: give parallel.pipeline: 1, or length_task none"
        )
    if decoding.brevity_penalty_type == "none" and decoding.brevity_penalty_weight > 0.0:
        raise ValueError(
            "decoding.brevity_penalty_weight needs decoding.brevity_penalty_type: constant or learned"
        )
    if decoding.brevity_penalty_type == "learned" and task == "none":
        raise ValueError("decoding.brevity_penalty_type learned needs model.length_task: ratio or length")
    check_penalty(decoding.brevity_penalty_type, decoding.brevity_penalty_weight)


def check_penalty(kind: BrevityPenaltyType, weight: float) -> None:
    """Makes sure that a penalty that is asked for by its type has a weight.

    Raises:
        ValueError: it has none.
    """
    if kind == "learned" and weight == 0.0:
        raise ValueError(
            "brevity_penalty_type learned needs brevity_penalty_weight above 0, as 1; type none leaves it out"
        )
