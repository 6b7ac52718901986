"""How gradients become updates: sections of a recipe that belong to the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from econmt.config import limits
from econmt.config.model import Probability, Section

Updates = Annotated[int, Field(ge=1, le=limits.UPDATES)]
Checkpoints = Annotated[int, Field(ge=1, le=limits.CHECKPOINTS)]


class StopMetric(NamedTuple):
    """What a checkpoint can be judged by.

    Attributes:
        title: its name in a sentence.
        column: of metrics.tsv.
        higher: whether more of it is better.
        of_translations: whether the validation text must be translated for it.
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
    "length_loss": StopMetric("length loss", "valid_length_loss", higher=False, of_translations=False),
}


class BatchSize(Section):
    """How many sentences go into one update."""

    type: Literal["sentence", "word"] = Field(
        "sentence", description="count sentences, or padded target tokens"
    )
    size: int = Field(
        64,
        ge=1,
        le=limits.BATCH,
        description="sentences, or target tokens, a batch; of a language model the rows into which its text is cut",
    )


class EarlyStopping(Section):
    """When training has learnt enough."""

    metric: Literal["perplexity", "bleu", "chrf", "ter", "length_loss"] = Field(
        "perplexity",
        description="what decides which checkpoint is best; chrf and ter are sacreBLEU's and stand in metrics.tsv if "
        "they decide; length_loss is that of model.length_task",
    )
    max_num_checkpoint_not_improved: Checkpoints | None = Field(
        8, description="stop after this many checkpoints without improvement; null: never"
    )


class OptimizerSection(Section):
    """The optimizer."""

    name: Literal[
        "adam",
        "adamw",
        "sgd",
        "nadam",
        "radam",
        "adagrad",
        "adadelta",
        "rmsprop",
        "adafactor",
        "nag",
        "adam8bit",
        "adamw8bit",
    ] = Field(
        "adam",
        description="algorithm, as of torch.optim; nag: sgd with Nesterov's momentum; adam8bit, adamw8bit: a moment of "
        "a matrix's value takes a byte, not four (after Dettmers et al., 2022); adafactor keeps a mean square of each "
        "row and column and no more, and its learning rate counts in shares of a matrix's root mean square",
    )
    learning_rate: float = Field(3.0e-4, gt=0.0, le=limits.RATE, description="learning rate after warm-up")
    betas: tuple[float, float] = Field(
        (0.9, 0.999),
        description="decay of Adam's first and second moment; of rmsprop and adadelta the second alone",
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
        description="decoupled weight decay (adamw, adamw8bit, adafactor), L2 penalty (all others)",
    )
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="momentum (sgd, nag, rmsprop)")

    @property
    def moments(self) -> float:
        """Values of state in float32 that it keeps for each of a matrix; Adafactor's of rows and columns are few."""
        with_momentum = int(self.momentum > 0.0)
        if self.name in ("adam8bit", "adamw8bit"):
            return 0.5
        few = {"sgd": with_momentum, "nag": 1, "adagrad": 1, "rmsprop": 1 + with_momentum, "adafactor": 0}
        return few.get(self.name, 2)

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimizerSection:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be at least 0 and less than 1")
        if self.name == "nag" and self.momentum == 0.0:
            raise ValueError("name: nag needs momentum above 0; without it is sgd")
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
    decay: Probability | None = Field(
        None,
        description="of an exponential moving average: each update keeps this share of the mean before, or less while "
        "there are few, 1 - 1 / updates; null: a mean in which all updates weigh the same",
    )

    @model_validator(mode="after")
    def _decay_has_a_mean(self) -> Averaging:
        if self.decay is not None and self.start == "never":
            raise ValueError("decay needs start: at-once or non-monotone")
        return self
