"""How several processes share one run: the section of a recipe that belongs to ranks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from econmt.config import limits
from econmt.config.model import Section


class ParallelSection(Section):
    """How ranks share the work, where there are several; how many there are is said when the command is given."""

    pipeline: int = Field(
        1,
        ge=1,
        le=limits.LAYERS,
        description="ranks that hold one model together: its layers are divided over them and work at different chunks "
        "of time; several such pipelines share the rows of a batch",
    )
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


def check_pipeline(recipe: Any) -> None:
    """Makes sure that what a recipe trains can be divided over a pipeline.

    Raises:
        ValueError: naming both keys that do not go together.
    """
    stages = recipe.parallel.pipeline
    if stages == 1:
        return
    if recipe.training.memory_budget is not None:
        raise ValueError(f"parallel.pipeline {stages} knows no training.memory_budget: leave one of them out")
    name = recipe.training.optimizer.name
    if name in ("adafactor", "adam8bit", "adamw8bit"):
        raise ValueError(
            f"parallel.pipeline {stages}: {name} needs whole matrices, give another training.optimizer.name"
        )
    if recipe.training.monitor_pattern is not None:
        raise ValueError(
            f"parallel.pipeline {stages}: no rank has all gradients, leave training.monitor_pattern out"
        )
    if recipe.training.fixed_param_names or recipe.training.fixed_param_strategy:
        raise ValueError(
            f"parallel.pipeline {stages} learns all parameters: leave training.fixed_param_names and _strategy out"
        )
    if recipe.parallel.shard_optimizer:
        raise ValueError(
            f"parallel.pipeline {stages}: each rank has its own layers' optimizer state, leave shard_optimizer out"
        )
    parts = {"model": recipe.model}
    if recipe.task == "translation":
        parts = {"model.encoder": recipe.model.encoder, "model.decoder": recipe.model.decoder}
        if recipe.model.decoder.copy_attention:
            raise ValueError(
                f"parallel.pipeline {stages}: no rank has the attention and the output layer, leave "
                "model.decoder.copy_attention out"
            )
    for name, part in parts.items():
        if part.cell != "lstm":
            raise ValueError(
                f"parallel.pipeline {stages}: {name}.cell {part.cell} cannot be divided over ranks, give lstm"
            )
    layers = max(part.layers for part in parts.values())
    if layers < stages:
        many = "one layer" if layers == 1 else f"{layers} layers"
        raise ValueError(
            f"parallel.pipeline {stages}: {' and '.join(parts)} have at most {many}; a pipeline has at most as many "
            "stages as layers"
        )
