"""Which task the key ``task`` of a recipe means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from econmt.config.recipe import Recipe
from econmt.data.batching.store import PreparedData
from econmt.data.text.subwords import Vocabularies
from econmt.tasks.language_model import LanguageModelTask
from econmt.tasks.protocol import Task
from econmt.tasks.translation import TranslationTask

TASKS: dict[str, Callable[[Recipe, Vocabularies], Task]] = {
    "translation": TranslationTask.of,
    "language_model": LanguageModelTask.of,
}
"""How each is made from a recipe and its vocabularies."""

_OF_SIZES: dict[str, Callable[..., Task]] = {
    "translation": TranslationTask.of_sizes,
    "language_model": LanguageModelTask,
}


def make_task(recipe: Recipe, prepared: PreparedData) -> Task:
    """The task of a recipe over its prepared text."""
    return TASKS[recipe.task](recipe, prepared.vocabularies)


def task_of_sizes(recipe: Recipe, sizes: Sequence[int]) -> Task:
    """The task of a recipe whose vocabularies have so many entries, see :attr:`econmt.tasks.protocol.Task.sizes`."""
    return _OF_SIZES[recipe.task](recipe, *sizes)
