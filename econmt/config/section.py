"""Base class of all sections of a recipe, types of values that several have, and marks on keys.

A mark names a purpose for which a key's value makes no difference, or the task that the key belongs to. A key without a
mark matters for everything: a change of it refuses resuming, and makes plans and prepared text anew. A mark on a
section applies to all keys in it. A field is marked in its annotation, as in
``threads: Annotated[int | None, NO_PARAMETERS] = Field(None, ...)``.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field

from econmt.config import limits
from econmt.config.yaml_reader import walk

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Width = Annotated[int, Field(ge=1, le=limits.WIDTH)]
Layers = Annotated[int, Field(ge=1, le=limits.LAYERS)]


def _check_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a valid regular expression ({error})") from None
    return pattern


number_or_section = Discriminator(
    lambda value: "section" if isinstance(value, (dict, BaseModel)) else "number"
)
"""Chooses between the members tagged number and section of a key that holds one probability or a section of them."""

width_or_widths = Discriminator(lambda value: "list" if isinstance(value, list) else "number")
"""Chooses between the members tagged number and list of a key that holds the width of all layers or a list of them."""

Regex = Annotated[str, Field(min_length=1, max_length=limits.REGEX), AfterValidator(_check_regex)]


class Section(BaseModel):
    """Base class of all recipe sections: rejects unknown keys, checks types strictly, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @property
    def is_default(self) -> bool:
        """True if all keys have their default values."""
        return self == type(self)()


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
