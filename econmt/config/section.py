"""Base class of all sections of a recipe, and the types of values that several of them have."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field

from econmt.config import limits

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
