"""Checks of the length-prediction task and the learned brevity penalty across the sections of a recipe."""

from __future__ import annotations

from typing import Any, Literal

LengthTask = Literal["none", "ratio", "length"]
BrevityPenaltyType = Literal["constant", "learned", "none"]


def check_lengths(recipe: Any) -> None:
    """Checks that settings which use predicted lengths have ``model.length_task``.

    Raises:
        ValueError: if not; the message names both keys.
    """
    stops_by_length_loss = recipe.training.early_stopping.metric == "length_loss"
    if recipe.task != "translation":
        if stops_by_length_loss:
            raise ValueError("training.early_stopping.metric length_loss needs model.length_task")
        return
    task, decoding = recipe.model.length_task, recipe.decoding
    if task == "none":
        settings = {
            "training.early_stopping.metric length_loss": stops_by_length_loss,
            "training.length_task_weight": recipe.training.length_task_weight != 1.0,
            "model.length_task_layers": recipe.model.length_task_layers != 1,
        }
        for key in (key for key, changed in settings.items() if changed):
            raise ValueError(f"{key} needs model.length_task: ratio or length")
    if task != "none" and recipe.parallel.pipeline > 1:
        raise ValueError(
            f"model.length_task {task} cannot be combined with parallel.pipeline above 1; set parallel.pipeline to 1, "
            "or length_task to none"
        )
    if decoding.brevity_penalty_type == "none" and decoding.brevity_penalty_weight > 0.0:
        raise ValueError(
            "decoding.brevity_penalty_weight needs decoding.brevity_penalty_type: constant or learned"
        )
    if decoding.brevity_penalty_type == "learned" and task == "none":
        raise ValueError("decoding.brevity_penalty_type learned needs model.length_task: ratio or length")
    check_penalty(decoding.brevity_penalty_type, decoding.brevity_penalty_weight)


def check_penalty(kind: BrevityPenaltyType, weight: float) -> None:
    """Checks that a learned brevity penalty has a weight.

    Raises:
        ValueError: if the weight is 0.
    """
    if kind == "learned" and weight == 0.0:
        raise ValueError(
            "brevity_penalty_type learned needs brevity_penalty_weight above 0, for example 1; type none turns it off"
        )
