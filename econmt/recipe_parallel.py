"""How several processes share one run: the section of a recipe that belongs to ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from econmt import limits
from econmt.recipe_model import Section


class ParallelSection(Section):
    """How ranks share the work, where there are several; how many there are is said when the command is given."""

    reduction: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="how gradients travel when they are added up over ranks; bfloat16 halves the bytes and rounds",
    )
    shard_optimizer: bool = Field(
        False,
        description="each rank holds the optimizer's state of some parameters only and updates these (ZeRO-1); what "
        "is learnt and saved is the same",
    )
    timeout: int = Field(
        120,
        ge=1,
        le=limits.SECONDS,
        description="seconds after which a rank that does not come to an exchange is given up, and with it the run",
    )
