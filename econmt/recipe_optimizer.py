"""How gradients become updates: sections of a recipe that belong to the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from econmt import limits
from econmt.recipe_model import Section

Updates = Annotated[int, Field(ge=1, le=limits.UPDATES)]
Checkpoints = Annotated[int, Field(ge=1, le=limits.CHECKPOINTS)]


class OptimizerSection(Section):
    """The optimizer."""

    name: Literal["adam", "adamw", "sgd", "nadam", "radam", "adagrad", "rmsprop", "adafactor"] = Field(
        "adam",
        description="algorithm, as of torch.optim; adafactor keeps a mean square of each row and column and no more, "
        "and its learning rate counts in shares of a matrix's own root mean square",
    )
    learning_rate: float = Field(3.0e-4, gt=0.0, le=limits.RATE, description="learning rate after warm-up")
    betas: tuple[float, float] = Field(
        (0.9, 0.999),
        description="decay of Adam's first and second moment; of rmsprop the second alone",
        strict=False,
    )
    eps: float = Field(
        1.0e-8,
        gt=0.0,
        le=1.0,
        description="what is added to the root of the mean square; of adafactor its least",
    )
    weight_decay: float = Field(
        0.0,
        ge=0.0,
        le=limits.RATE,
        description="decoupled weight decay (adamw, adafactor), L2 penalty (all others)",
    )
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="momentum (sgd, rmsprop)")

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimizerSection:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be at least 0 and less than 1")
        return self


class ScheduleSection(Section):
    """How the learning rate changes."""

    name: Literal["constant", "inverse-sqrt", "plateau-reduce"] = Field(
        "constant",
        description="constant; inverse-sqrt: falls with the square root of updates after warm-up; plateau-reduce: "
        "multiplied by reduce_factor when the early-stopping metric stalls, going back to the best parameters and "
        "optimizer state",
    )
    warmup: int = Field(
        0, ge=0, le=limits.UPDATES, description="updates over which the rate rises linearly from zero"
    )
    reduce_factor: float = Field(0.7, gt=0.0, lt=1.0, description="factor of one reduction (plateau-reduce)")
    reduce_num_not_improved: Checkpoints = Field(
        3, description="checkpoints without improvement before a reduction (plateau-reduce)"
    )

    @model_validator(mode="after")
    def _inverse_sqrt_needs_warmup(self) -> ScheduleSection:
        if self.name == "inverse-sqrt" and self.warmup == 0:
            raise ValueError("name: inverse-sqrt needs warmup of at least 1 update")
        return self


class GradientClipping(Section):
    """Bound on the gradient."""

    type: Literal["norm", "value", "none"] = Field(
        "norm", description="global norm, each value, or no clipping"
    )
    threshold: float = Field(1.0, gt=0.0, le=limits.GRADIENT, description="largest norm or value")


class Averaging(Section):
    """The mean of the parameters over the updates, which is validated and saved in their place."""

    start: Literal["never", "non-monotone", "at-once"] = Field(
        "never",
        description="never; non-monotone: when validation has not improved for some checkpoints (NT-ASGD, Merity et "
        "al., 2018); at-once: from the first update on",
    )
    non_monotone_interval: Checkpoints = Field(
        5,
        description="checkpoints: averaging begins when a perplexity is above the best of all but so many before it",
    )
