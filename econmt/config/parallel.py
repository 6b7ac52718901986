"""Parallel section of a recipe: division of one run among processes (ranks)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from econmt.config import limits
from econmt.config.marks import NO_MEMORY, NO_PARAMETERS
from econmt.config.section import Layers, Section


class ParallelSection(Section):
    """Division of one run among several processes (ranks); their number is an option of the command."""

    pipeline: Annotated[Layers, NO_PARAMETERS] = Field(
        1,
        description="number of ranks among which the layers of one model are divided (pipeline parallelism over "
        "chunks of time); if there are more ranks, several pipelines share the rows of a batch",
    )
    reduction: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="precision in which gradients are summed over ranks; bfloat16 halves the traffic but rounds",
    )
    shard_optimizer: Annotated[bool, NO_PARAMETERS] = Field(
        False,
        description="each rank holds the optimizer state of a part of the parameters and updates only these (ZeRO-1); "
        "saves memory, does not change the result",
    )
    timeout: Annotated[int, NO_PARAMETERS, NO_MEMORY] = Field(
        120,
        ge=1,
        le=limits.SECONDS,
        description="seconds to wait for a rank in a collective before the run is stopped with an error",
    )
