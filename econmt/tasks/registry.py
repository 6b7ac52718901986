"""Registry of tasks by the recipe's key ``task``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from econmt.config.recipe import Recipe, TextData
from econmt.data.batching.store import PreparedData
from econmt.data.text.vocabulary import Vocabularies
from econmt.tasks.language_model import LanguageModelTask
from econmt.tasks.protocol import Task
from econmt.tasks.translation import TranslationTask

TASKS: dict[str, Callable[..., Task]] = {
    "translation": TranslationTask.of_sizes,
    "language_model": LanguageModelTask,
}
"""Factory of each task from a recipe and the sizes of its vocabularies, :attr:`econmt.tasks.protocol.Task.sizes`."""


def make_task(recipe: Recipe, prepared: PreparedData) -> Task:
    """Creates the task of a recipe with the vocabularies of its prepared data."""
    return task_of(recipe, prepared.vocabularies)


def task_of(recipe: Recipe, vocabularies: Vocabularies) -> Task:
    """Creates the task of a recipe with its vocabularies."""
    sides = vocabularies.sides[1:] if isinstance(recipe.data, TextData) else vocabularies.sides
    return task_of_sizes(recipe, (*(side.size for side in sides), *vocabularies.factor_sizes))


def task_of_sizes(recipe: Recipe, sizes: Sequence[int]) -> Task:
    """Creates the task of a recipe with the sizes of its vocabularies."""
    return TASKS[recipe.task](recipe, *sizes)
