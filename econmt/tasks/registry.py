"""Registry of tasks by the recipe's key ``task``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from econmt.config.recipe import Recipe
from econmt.data.batching.store import PreparedData
from econmt.data.text.vocabulary import Vocabularies
from econmt.tasks.language_model import LanguageModelTask
from econmt.tasks.protocol import Task
from econmt.tasks.translation import TranslationTask

TASKS: dict[str, Callable[[Recipe, Vocabularies], Task]] = {
    "translation": TranslationTask.of,
    "language_model": LanguageModelTask.of,
}
"""Factory of each task from a recipe and its vocabularies."""

_FACTORIES_BY_SIZES: dict[str, Callable[..., Task]] = {
    "translation": TranslationTask.of_sizes,
    "language_model": LanguageModelTask,
}


def make_task(recipe: Recipe, prepared: PreparedData) -> Task:
    """Creates the task of a recipe with the vocabularies of its prepared data."""
    return TASKS[recipe.task](recipe, prepared.vocabularies)


def task_of_sizes(recipe: Recipe, sizes: Sequence[int]) -> Task:
    """Creates the task of a recipe with vocabulary sizes, see :attr:`econmt.tasks.protocol.Task.sizes`."""
    return _FACTORIES_BY_SIZES[recipe.task](recipe, *sizes)
