"""Parallel section of a recipe: division of one run among processes (ranks)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from econmt.config import limits
from econmt.config.marks import NO_MEMORY, NO_PARAMETERS
from econmt.config.model import Section


class ParallelSection(Section):
    """Division of one run among several processes (ranks); their number is an option of the command."""

    pipeline: Annotated[int, NO_PARAMETERS] = Field(
        1,
        ge=1,
        le=limits.LAYERS,
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


def check_pipeline(recipe: Any) -> None:
    """Checks that the settings of a recipe work with pipeline parallelism.

    Raises:
        ValueError: if not; the message names both keys.
    """
    stages = recipe.parallel.pipeline
    if stages == 1:
        return
    if recipe.training.memory_budget is not None:
        raise ValueError(
            f"parallel.pipeline {stages} cannot be combined with training.memory_budget; remove one of them"
        )
    name = recipe.training.optimizer.name
    if name in ("adafactor", "adam8bit", "adamw8bit"):
        raise ValueError(
            f"parallel.pipeline {stages} cannot be combined with optimizer {name}; choose another one"
        )
    if recipe.training.monitor_pattern is not None:
        raise ValueError(
            f"parallel.pipeline {stages} cannot be combined with training.monitor_pattern (no rank has all gradients); "
            "remove one of them"
        )
    if recipe.training.fixed_param_names or recipe.training.fixed_param_strategy:
        raise ValueError(
            f"parallel.pipeline {stages} cannot freeze parameters; remove training.fixed_param_names and "
            "training.fixed_param_strategy"
        )
    if recipe.parallel.shard_optimizer:
        raise ValueError(
            f"parallel.pipeline {stages} cannot be combined with parallel.shard_optimizer (each rank already holds "
            "only the optimizer state of its layers); remove shard_optimizer"
        )
    parts = {"model": recipe.model}
    if recipe.task == "translation":
        parts = {"model.encoder": recipe.model.encoder, "model.decoder": recipe.model.decoder}
        if recipe.model.decoder.copy_attention:
            raise ValueError(
                f"parallel.pipeline {stages} cannot be combined with model.decoder.copy_attention (no rank has both "
                "the attention and the output layer); remove one of them"
            )
    for name, part in parts.items():
        if part.cell != "lstm":
            raise ValueError(f"parallel.pipeline {stages} does not support {name}.cell {part.cell}; use lstm")
    layers = max(part.layers for part in parts.values())
    if layers < stages:
        depth = "one layer" if layers == 1 else f"{layers} layers"
        raise ValueError(
            f"parallel.pipeline {stages}: {' and '.join(parts)} have at most {depth}; a pipeline cannot have more "
            "stages than layers"
        )
