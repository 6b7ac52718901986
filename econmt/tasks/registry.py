"""Which task the key ``task`` of a recipe means."""

from __future__ import annotations

from collections.abc import Callable

from econmt.data.store import PreparedData
from econmt.recipe import Recipe
from econmt.tasks.protocol import Task
from econmt.tasks.translation import TranslationTask

TASKS: dict[str, Callable[[Recipe, PreparedData], Task]] = {"translation": TranslationTask.of}
"""How each is made from a recipe and its prepared text."""


def make_task(recipe: Recipe, prepared: PreparedData) -> Task:
    """The task of a recipe over its prepared text."""
    return TASKS[recipe.task](recipe, prepared)
