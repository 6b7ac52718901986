"""Sections of a recipe about training, and about the division of a run among processes (ranks)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from econmt.config import limits
from econmt.config.data import Positions
from econmt.config.optimizer import (
    NOT_CAPTURABLE,
    Averaging,
    BatchSize,
    Checkpoints,
    EarlyStopping,
    GradientClipping,
    OptimizerSection,
    ScheduleSection,
    Updates,
)
from econmt.config.section import (
    LANGUAGE_MODEL,
    NO_MEMORY,
    NO_PARAMETERS,
    TRANSLATION,
    Layers,
    Probability,
    Regex,
    Section,
)
from econmt.config.yaml_reader import SizeOrAuto, parse_size


class Training(Section):
    """Optimisation, batches, precision, checkpoints and the end of training."""

    batch: BatchSize = Field(BatchSize(), description="size of a batch")
    bptt: Annotated[Positions, LANGUAGE_MODEL] = Field(
        35,
        description="language model: tokens of each row in a batch; its state is carried over to the next batch",
    )
    bptt_jitter: Annotated[bool, LANGUAGE_MODEL] = Field(
        False,
        description="draw bptt at random for each batch and scale the learning rate with it (Merity et al., 2018)",
    )
    activation_regularization: Annotated[float, LANGUAGE_MODEL] = Field(
        0.0,
        ge=0.0,
        le=limits.PENALTY,
        description="weight of the mean square of the top layer's outputs after dropout, which is added to the loss of "
        "a token in training (AR; Merity et al., 2017)",
    )
    temporal_activation_regularization: Annotated[float, LANGUAGE_MODEL] = Field(
        0.0,
        ge=0.0,
        le=limits.PENALTY,
        description="weight of the mean square of the difference between the top layer's outputs at neighbouring "
        "positions, before dropout, which is added likewise (TAR)",
    )
    valid_rows: Annotated[int, LANGUAGE_MODEL] = Field(
        1,
        ge=1,
        le=limits.TRANSLATED,
        description="rows into which a language model's validation text is cut at checkpoints: more rows are faster, "
        "but each starts without context; the final figures always give every word at least 1,000 tokens of context",
    )
    max_buckets: Annotated[int | None, TRANSLATION] = Field(
        None,
        ge=1,
        le=limits.BUCKETS,
        description="maximum number of buckets, the shapes to which pairs are padded; derived from the text. null: 12 "
        "to 127, as many as save more padding on a GPU than the capture of their CUDA graphs takes",
    )
    bucket_width: Annotated[Positions | None, TRANSLATION] = Field(
        None, description="use fixed buckets instead: round lengths up to multiples of this many tokens"
    )
    trim_batches: Annotated[Literal["auto", "always", "never"], TRANSLATION] = Field(
        "auto",
        description="trim each batch to its longest pair; never keeps few shapes; auto trims on the CPU only",
    )
    cuda_graphs: Annotated[Literal["auto", "off"], NO_PARAMETERS] = Field(
        "auto",
        description="replay the step of each batch shape as a CUDA graph on a GPU; off: launch each kernel",
    )
    memory_budget: Annotated[SizeOrAuto | None, NO_PARAMETERS] = Field(
        None,
        description="maximum bytes, as 4GiB or 512MiB, including CUDA's context and libraries on a GPU; auto: the free "
        "memory of the device; null: unlimited",
    )
    update_interval: int = Field(
        1,
        ge=1,
        le=limits.MICRO_BATCHES,
        description="number of batches to accumulate gradients over for one update",
    )
    optimizer: OptimizerSection = Field(OptimizerSection(), description="optimizer and learning rate")
    optimizer_in_backward: Annotated[Literal["auto", "always", "never"], NO_PARAMETERS] = Field(
        "auto",
        description="update parameters during the backward pass and free each gradient then; results are the same to "
        "the bit. Rules out clipping by norm, float16, several processes and update_interval above 1; updates of "
        "several micro-batches are made at their end. auto: in CUDA graphs, where possible; always: on every device",
    )
    averaging: Averaging = Field(Averaging(), description="averaging of the parameters over updates")
    schedule: Annotated[ScheduleSection, NO_MEMORY] = Field(
        ScheduleSection(), description="schedule of the learning rate"
    )
    gradient_clipping: GradientClipping = Field(GradientClipping(), description="clipping of gradients")
    label_smoothing: Probability = Field(0.0, description="probability mass spread over all tokens")
    guided_alignment_weight: Annotated[float, NO_MEMORY, TRANSLATION] = Field(
        0.1,
        gt=0.0,
        le=limits.PENALTY,
        description="weight of the cross-entropy between the attention and data.alignment, a mean over target tokens, "
        "which is added to the loss (Chen et al., 2016)",
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = Field(
        "auto",
        description="precision of matrix products and feature maps; optimizer state, cell state and softmax "
        "stay float32. auto: bfloat16 on a GPU that supports it and on a CPU that is clearly faster with it (measured "
        "when the run begins, then kept), float16 on a GPU of compute capability 7, else float32. On a GPU, float32 "
        "means IEEE products, tf32 allows TF32. float16 scales the loss",
    )
    param_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which parameters and their gradients are stored in training. bfloat16: matrices take half "
        "the memory, and each update is rounded stochastically, which changes results; needs products in bfloat16, one "
        "process and no averaging. Saved parameters are float32",
    )
    loss_scale: Annotated[int, NO_MEMORY] = Field(
        1 << 16,
        ge=1,
        le=limits.LOSS_SCALE,
        description="factor of the loss in the first update in float16, a power of two. An update whose gradients "
        "overflow is skipped and halves it; below 0.0001 the run stops",
    )
    loss_scale_window: Annotated[Updates, NO_MEMORY] = Field(
        2000, description="updates in a row without overflow after which the loss scale doubles"
    )
    max_updates: Annotated[Updates | None, NO_PARAMETERS, NO_MEMORY] = Field(
        None, description="stop after this many updates"
    )
    max_epochs: Annotated[Updates | None, NO_PARAMETERS, NO_MEMORY] = Field(
        None, description="stop after this many epochs"
    )
    max_seconds: Annotated[int | None, NO_PARAMETERS, NO_MEMORY] = Field(
        None,
        ge=1,
        le=limits.SECONDS,
        description="stop after this many seconds, from the start of the command and summed over resumed runs; "
        "preparing, planning, validating and saving count, scoring the test text at the end does not",
    )
    checkpoint_interval: Annotated[Updates, NO_MEMORY] = Field(
        500,
        description="updates between checkpoints (validate and save); a run that ends between two of them is validated "
        "and saved, too, but early stopping and schedules leave that checkpoint out",
    )
    decode_and_evaluate: Annotated[int, TRANSLATION] = Field(
        -1,
        ge=-1,
        le=limits.SENTENCES,
        description="validation sentences to translate at each checkpoint for BLEU; -1: all, 0: none",
    )
    bleu_tokenizer: Annotated[
        Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"], NO_MEMORY, TRANSLATION
    ] = Field(
        "auto",
        description="sacreBLEU's tokenizer; auto: by data.target: zh for Chinese, ja-mecab or ko-mecab if installed, "
        "char for other languages without spaces, else 13a. BLEU's signature names it",
    )
    early_stopping: EarlyStopping = Field(EarlyStopping(), description="best checkpoint, and when to stop")
    keep_last_params: Annotated[Checkpoints, NO_PARAMETERS, NO_MEMORY] = Field(
        3,
        description="newest parameter files to keep, besides the best and those needed to go back one checkpoint",
    )
    initialize_from: Annotated[str | None, NO_MEMORY] = Field(
        None,
        min_length=1,
        description="start a new run from these parameters: a model folder (its best checkpoint) or a parameter file, "
        "of the same vocabulary and model section; relative to the working directory",
    )
    update_vocab: Annotated[bool, NO_MEMORY] = Field(
        False,
        description="allow initialize_from a different vocabulary (its files are beside it): embeddings of shared "
        "tokens are copied, the others are initialised randomly",
    )
    fixed_param_names: list[Regex] = Field(
        [], description="regular expressions; parameters whose full name matches one of them are frozen"
    )
    seed: int = Field(
        1, ge=0, le=limits.SEED, description="seed of initial parameters, dropout and the order of the data"
    )
    device: Annotated[str, NO_PARAMETERS, NO_MEMORY] = Field(
        "auto", description="device: cpu, cuda, cuda:N, or auto for a GPU if there is one"
    )
    threads: Annotated[int | None, NO_PARAMETERS, NO_MEMORY] = Field(
        None,
        ge=1,
        le=limits.THREADS,
        description="CPU threads; null: the fastest number, measured when the run begins, then kept",
    )
    log_interval: Annotated[Updates, NO_PARAMETERS, NO_MEMORY] = Field(
        50, description="updates between two lines of the log"
    )

    @property
    def in_graphs(self) -> bool:
        """True if training steps on a GPU are captured in CUDA graphs; two optimizers wait for the device."""
        return self.cuda_graphs == "auto" and self.optimizer.name not in NOT_CAPTURABLE

    @model_validator(mode="after")
    def _it_ends(self) -> Training:
        limits = (self.max_updates, self.max_epochs, self.max_seconds)
        patience = self.early_stopping.max_num_checkpoint_not_improved
        if all(limit is None for limit in (*limits, patience)):
            raise ValueError(
                "the run would never end: set max_updates, max_epochs, max_seconds or "
                "early_stopping.max_num_checkpoint_not_improved"
            )
        if self.schedule.min_learning_rate > self.optimizer.learning_rate:
            raise ValueError(
                f"schedule.min_learning_rate {self.schedule.min_learning_rate} is more than optimizer.learning_rate "
                f"{self.optimizer.learning_rate}; lower it"
            )
        if self.loss_scale & (self.loss_scale - 1):
            power = 1 << self.loss_scale.bit_length()
            raise ValueError(
                f"loss_scale {self.loss_scale} is not a power of two; use {power // 2} or {power}"
            )
        budget = self.memory_budget
        if budget is not None and budget != "auto" and parse_size(str(budget)) < 1024:
            raise ValueError(
                f"memory_budget {self.memory_budget} means bytes, too few for any model; add a unit, as in 4GiB"
            )
        return self


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
