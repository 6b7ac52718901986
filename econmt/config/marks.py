"""Marks on the keys of a recipe: the purposes for which a key's value makes no difference, and the task it belongs to.

A key without a mark matters for everything: a change of it refuses resuming, and makes plans and prepared text anew. A
mark on a section applies to all keys in it. A field is marked in its annotation, as in
``threads: Annotated[int | None, NO_PARAMETERS] = Field(None, ...)``.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

from pydantic import BaseModel

from econmt.config.yaml_reader import walk


class KeyMark(Enum):
    """Property of a recipe key."""

    NO_PARAMETERS = "changes the end or the speed of a run, not its parameters"
    NO_MEMORY = "does not change the memory plan of a run"
    NO_PREPARED_TEXT = "does not change the prepared text"
    TRANSLATION = "has no effect in the recipe of a language model"
    LANGUAGE_MODEL = "has no effect in the recipe of a translation model"


NO_PARAMETERS, NO_MEMORY, NO_PREPARED_TEXT, TRANSLATION, LANGUAGE_MODEL = KeyMark


@cache
def marked_keys(kind: type[BaseModel], mark: KeyMark) -> frozenset[str]:
    """Returns the dotted keys below a section that have a mark, those of marked sections included."""
    marked: set[str] = set()
    for key, _, field in walk(kind):
        if mark in field.metadata or key.rpartition(".")[0] in marked:
            marked.add(key)
    return frozenset(marked)
