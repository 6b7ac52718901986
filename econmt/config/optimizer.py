"""Recipe sections of batches, optimizer, learning-rate schedule, clipping, averaging and early stopping."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from econmt.config import limits
from econmt.config.section import NO_MEMORY, NO_PARAMETERS, TRANSLATION, Probability, Section

Updates = Annotated[int, Field(ge=1, le=limits.UPDATES)]
Checkpoints = Annotated[int, Field(ge=1, le=limits.CHECKPOINTS)]

NOT_CAPTURABLE = ("adagrad", "adafactor")
"""Names of the optimizers that wait for a GPU in each step, so that CUDA graphs cannot capture them."""


class StopMetric(NamedTuple):
    """Metric that selects the best checkpoint.

    Attributes:
        title: its name in messages.
        column: its column in metrics.tsv.
        higher: True if higher values are better.
        of_translations: True if it needs translations of the validation text.
    """

    title: str
    column: str
    higher: bool
    of_translations: bool = True


METRICS = {
    "perplexity": StopMetric("perplexity", "valid_perplexity", higher=False, of_translations=False),
    "bleu": StopMetric("BLEU", "bleu", higher=True),
    "chrf": StopMetric("chrF", "chrf", higher=True),
    "ter": StopMetric("TER", "ter", higher=False),
    "accuracy": StopMetric("accuracy", "valid_accuracy", higher=True, of_translations=False),
    "hook": StopMetric("figure of the validation hook", "hook", higher=True),
}


class BatchSize(Section):
    """Size of a batch."""

    type: Annotated[Literal["sentence", "word"], TRANSLATION] = Field(
        "sentence", description="unit of size: sentence pairs, or padded target tokens (word)"
    )
    size: int = Field(
        64,
        ge=1,
        le=limits.BATCH,
        description="sentence pairs or padded target tokens per batch; rows of text for a language model",
    )


class EarlyStopping(Section):
    """Choice of the best checkpoint, and the criterion for stopping."""

    metric: Annotated[
        Literal["perplexity", "bleu", "chrf", "ter", "accuracy", "hook"], NO_MEMORY, TRANSLATION
    ] = Field(
        "perplexity",
        description="validation metric that selects the best checkpoint; chrf and ter are computed by sacreBLEU, only "
        "if chosen here, and so is accuracy, the percentage of target tokens that are the most probable ones given the "
        "reference before them; hook is the figure that the program of "
        "econmt train --validation-hook returns, higher is better",
    )
    max_num_checkpoint_not_improved: Annotated[Checkpoints | None, NO_PARAMETERS, NO_MEMORY] = Field(
        8, description="stop after this many checkpoints without improvement; null: do not stop early"
    )


class OptimizerSection(Section):
    """Optimizer and learning rate."""

    name: Literal[
        "adam", "adamw", "sgd", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "adafactor", "adam8bit"
    ] = Field(
        "adam",
        description="algorithm, as in torch.optim; adam8bit: moments of matrices in 8 bits instead of 32 (after "
        "Dettmers et al., 2022); adafactor: one mean square per row and column, learning rate relative to the root "
        "mean square of a matrix",
    )
    learning_rate: float = Field(3.0e-4, gt=0.0, le=limits.RATE, description="learning rate after warmup")
    betas: tuple[float, float] = Field(
        (0.9, 0.999),
        description="decay rates of Adam's first and second moments; rmsprop and adadelta use only the second",
        strict=False,
    )
    eps: float = Field(
        1.0e-8,
        gt=0.0,
        le=1.0,
        description="term added to the root mean square (adafactor: epsilon 1 of torch.optim)",
    )
    weight_decay: float = Field(
        0.0,
        ge=0.0,
        le=limits.RATE,
        description="weight decay: decoupled (adamw, adafactor) or as an L2 penalty (all others)",
    )
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="momentum (sgd, rmsprop)")

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimizerSection:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be at least 0 and less than 1")
        return self


class ScheduleSection(Section):
    """Schedule of the learning rate."""

    name: Literal["constant", "inverse-sqrt", "noam", "cosine", "linear", "plateau-reduce"] = Field(
        "constant",
        description="constant; inverse-sqrt: decays with the inverse square root of the updates after warmup; noam: "
        "learning_rate * size ** -0.5 * min(update ** -0.5, update * warmup ** -1.5), with the size of the decoder or "
        "language model; cosine, linear: falls to min_learning_rate at decay_updates along half a cosine or a line; "
        "plateau-reduce: multiplied by reduce_factor when the early-stopping metric stalls, restoring the best "
        "parameters and optimizer state",
    )
    warmup: int = Field(
        0,
        ge=0,
        le=limits.UPDATES,
        description="number of updates over which the learning rate rises linearly from 0",
    )
    decay_updates: Updates | None = Field(
        None, description="update at which min_learning_rate is reached (cosine, linear), usually max_updates"
    )
    min_learning_rate: float = Field(
        0.0, ge=0.0, le=limits.RATE, description="lowest learning rate after warmup (cosine, linear)"
    )
    reduce_factor: float = Field(0.7, gt=0.0, lt=1.0, description="factor of each reduction (plateau-reduce)")
    reduce_num_not_improved: Checkpoints = Field(
        3, description="checkpoints without improvement before a reduction (plateau-reduce)"
    )

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> ScheduleSection:
        if self.name in ("cosine", "linear") and (self.decay_updates or 0) <= self.warmup:
            raise ValueError(
                f"name: {self.name} needs decay_updates of more than warmup ({self.warmup}); set it, usually to "
                "max_updates"
            )
        return self


class GradientClipping(Section):
    """Clipping of gradients."""

    type: Literal["norm", "value", "none"] = Field(
        "norm", description="clip the global norm, clip each value, or do not clip"
    )
    threshold: float = Field(1.0, gt=0.0, le=limits.GRADIENT, description="largest norm or absolute value")


class Averaging(Section):
    """Averaging of the parameters over updates; the mean is validated and saved instead of the parameters."""

    start: Literal["never", "non-monotone", "at-once"] = Field(
        "never", description="non-monotone: start when validation stops improving (Merity et al., 2018)"
    )
    non_monotone_interval: Checkpoints = Field(
        5, description="begin when perplexity is worse than the best before this many checkpoints ago"
    )
    decay: Probability | None = Field(
        None,
        description="decay of an exponential moving average (at first 1 - 10 / (updates + 9)); null: plain mean",
    )
