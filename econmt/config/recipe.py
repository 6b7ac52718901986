"""Recipe: the typed schema of one training run.

A recipe is a YAML file. ``load_recipe`` reads it, applies ``key.sub=value`` overrides and returns a frozen
:class:`Recipe`; every mistake in it raises an :class:`~econmt.errors.InputError` that names the file, the line,
the key and, for an unknown key, the nearest valid one. ``docs/recipes.md``, the reference of all keys, is generated
from the field descriptions here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Union

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticKnownError

from econmt.config import limits
from econmt.config.conditions import idle_values
from econmt.config.data import Data as Data
from econmt.config.data import Mixing as Mixing
from econmt.config.data import Noise as Noise
from econmt.config.data import Positions, check_mixing
from econmt.config.data import SentencePieceSubwords as SentencePieceSubwords
from econmt.config.data import WordSubwords as WordSubwords
from econmt.config.factors import check_factors
from econmt.config.lengths import BrevityPenaltyType, check_lengths
from econmt.config.migration import rename
from econmt.config.migration import rename_ops as rename_ops
from econmt.config.model import AttentionSection as AttentionSection
from econmt.config.model import Coverage as Coverage
from econmt.config.model import DecoderSection as DecoderSection
from econmt.config.model import Dropout as Dropout
from econmt.config.model import EncoderSection as EncoderSection
from econmt.config.model import Initialization as Initialization
from econmt.config.model import Model as Model
from econmt.config.model import Probability, Regex, Section
from econmt.config.optimizer import METRICS, Checkpoints, Updates
from econmt.config.optimizer import Averaging as Averaging
from econmt.config.optimizer import BatchSize as BatchSize
from econmt.config.optimizer import EarlyStopping as EarlyStopping
from econmt.config.optimizer import GradientClipping as GradientClipping
from econmt.config.optimizer import OptimizerSection as OptimizerSection
from econmt.config.optimizer import ScheduleSection as ScheduleSection
from econmt.config.parallel import ParallelSection as ParallelSection
from econmt.config.parallel import check_pipeline
from econmt.config.text import LanguageModelSection as LanguageModelSection
from econmt.config.text import TextData as TextData
from econmt.config.text import TextSubwords as TextSubwords
from econmt.config.text import TextWords as TextWords
from econmt.config.text import check_task, data_kind, model_kind
from econmt.config.unfused import check_stepped
from econmt.config.yaml_reader import SizeOrAuto, changed_values, dump_yaml, leaves, load_section, parse_size
from econmt.errors import InputError, printable, talk

OPS = {
    "encoder": ("lstm", "bidirectional_lstm"),
    "decoder": ("attentional_lstm",),
    "attention": ("additive_attention",),
    "output": ("linear_cross_entropy",),
}
"""Functions of ``econmt_ops`` whose implementation each key of the section ``ops`` selects."""


def implementation_names(key: str) -> list[str]:
    """Returns the values that a key of :data:`OPS` accepts: "auto" and the implementations of its functions."""
    from econmt_ops.dispatch.traits import (
        names_of,
    )  # imported here: it needs PyTorch, reading a recipe does not

    return ["auto", *names_of(*OPS[key])]


def _check_implementation(name: str, info: ValidationInfo) -> str:
    if name != "auto":
        known = implementation_names(str(info.field_name))
        if name not in known:
            raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, known))})
    return name


Implementation = Annotated[str, AfterValidator(_check_implementation)]


class Ops(Section):
    """Implementation of each large operation: affects memory and speed, not the result of training.

    reference: plain autograd, keeps every feature map. recompute: keeps small inputs and recomputes the rest in the
    backward pass. compiled: recompute with compiled inner steps (needs a C++ compiler). triton: GPU kernels.
    """

    encoder: Implementation = Field("auto", description="recurrent layers of the encoder or language model")
    decoder: Implementation = Field(
        "auto",
        description="decoder: its whole loop with attention if it has input feeding, else its recurrent layers",
    )
    attention: Implementation = Field("auto", description="attention of a decoder without input feeding")
    output: Implementation = Field("auto", description="output layer and loss")
    stash: Literal["auto", "outputs", "attention", "cells", "gates"] = Field(
        "auto",
        description="what recompute keeps for the backward pass, from least to most memory: outputs; also attention "
        "weights; also cell states; also gates. auto: chosen by the implementation, or by the plan for memory_budget",
    )


class Training(Section):
    """Optimisation, batches, precision, checkpoints and the end of training."""

    batch: BatchSize = Field(BatchSize(), description="size of a batch")
    bptt: Positions = Field(
        35,
        description="language model: tokens of each row in a batch; its state is carried over to the next batch",
    )
    bptt_jitter: bool = Field(
        False,
        description="draw bptt at random for each batch and scale the learning rate with it (Merity et al., 2018)",
    )
    valid_rows: int = Field(
        1,
        ge=1,
        le=limits.TRANSLATED,
        description="rows into which a language model's validation text is cut at checkpoints: more rows are faster, "
        "but each starts without context; the final figures always give every word at least 1,000 tokens of context",
    )
    max_buckets: int = Field(
        12,
        ge=1,
        le=limits.BUCKETS,
        description="maximum number of buckets, the shapes to which pairs are padded; derived from the text",
    )
    bucket_width: Positions | None = Field(
        None, description="use fixed buckets instead: round lengths up to multiples of this many tokens"
    )
    trim_batches: Literal["auto", "always", "never"] = Field(
        "auto",
        description="trim each batch to its longest pair; never keeps few shapes; auto trims on the CPU only",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="replay the step of each batch shape as a CUDA graph on a GPU; off: launch each kernel",
    )
    memory_budget: SizeOrAuto | None = Field(
        None, description="maximum bytes, as 4GiB or 512MiB; auto: the memory of the device; null: unlimited"
    )
    update_interval: int = Field(
        1,
        ge=1,
        le=limits.MICRO_BATCHES,
        description="number of batches to accumulate gradients over for one update",
    )
    optimizer: OptimizerSection = Field(OptimizerSection(), description="optimizer and learning rate")
    averaging: Averaging = Field(Averaging(), description="averaging of the parameters over updates")
    schedule: ScheduleSection = Field(ScheduleSection(), description="schedule of the learning rate")
    gradient_clipping: GradientClipping = Field(GradientClipping(), description="clipping of gradients")
    label_smoothing: Probability = Field(0.0, description="probability mass spread over all tokens")
    length_task_weight: float = Field(
        1.0,
        gt=0.0,
        le=limits.PENALTY,
        description="weight of the loss of model.length_task, relative to the cross-entropy",
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = Field(
        "auto",
        description="precision of matrix products and feature maps; weights, optimizer state, cell state and softmax "
        "stay float32. auto: bfloat16 on a GPU that supports it and on a CPU that is clearly faster with it (measured "
        "when the run begins, then kept), else float32. On a GPU, float32 means IEEE products, tf32 allows TF32",
    )
    max_updates: Updates | None = Field(None, description="stop after this many updates")
    max_epochs: Updates | None = Field(None, description="stop after this many epochs")
    max_tokens: int | None = Field(
        None, ge=1, le=limits.TOKENS, description="stop after this many target tokens"
    )
    max_seconds: int | None = Field(
        None, ge=1, le=limits.SECONDS, description="stop after this many seconds, summed over resumed runs"
    )
    checkpoint_interval: Updates = Field(500, description="updates between checkpoints (validate and save)")
    decode_and_evaluate: int = Field(
        -1,
        ge=-1,
        le=limits.SENTENCES,
        description="validation sentences to translate at each checkpoint for BLEU; -1: all, 0: none",
    )
    decode_and_evaluate_device: str | None = Field(
        None, description="device of decode_and_evaluate: cpu, cuda or cuda:N; null: as device"
    )
    monitor_pattern: Regex | None = Field(
        None,
        description="regular expression; metrics.tsv records the norms of the parameters whose full name it matches, "
        "and of their gradients before norm clipping, at each checkpoint. Disables CUDA graphs",
    )
    bleu_tokenizer: Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"] = Field(
        "auto",
        description="sacreBLEU's tokenizer; auto: by data.target: zh for Chinese, ja-mecab or ko-mecab if installed, "
        "char for other languages without spaces, else 13a. BLEU's signature names it",
    )
    early_stopping: EarlyStopping = Field(EarlyStopping(), description="best checkpoint, and when to stop")
    keep_last_params: Checkpoints = Field(
        3,
        description="newest parameter files to keep, besides the best and those needed to go back one checkpoint",
    )
    initialize_from: str | None = Field(
        None,
        min_length=1,
        description="start a new run from these parameters: a model folder (its best checkpoint) or a parameter file, "
        "of the same vocabulary and model section; relative to the working directory",
    )
    update_vocab: bool = Field(
        False,
        description="allow initialize_from a different vocabulary (its files are beside it): embeddings of shared "
        "tokens are copied, the others are initialised randomly",
    )
    fixed_param_names: list[Regex] = Field(
        [], description="regular expressions; parameters whose full name matches one of them are frozen"
    )
    fixed_param_strategy: (
        Literal[
            "all_except_decoder",
            "all_except_outer_layers",
            "all_except_embeddings",
            "all_except_output_proj",
            "encoder_and_source_embeddings",
            "encoder_half_and_source_embeddings",
        ]
        | None
    ) = Field(
        None, description="predefined set of parameters to freeze as well; tied matrices freeze together"
    )
    seed: int = Field(
        1, ge=0, le=limits.SEED, description="seed of initial parameters, dropout and the order of the data"
    )
    device: str = Field("auto", description="device: cpu, cuda, cuda:N, or auto for a GPU if there is one")
    threads: int | None = Field(
        None,
        ge=1,
        le=limits.THREADS,
        description="CPU threads; null: the fastest number, measured when the run begins, then kept",
    )
    log_interval: Updates = Field(50, description="updates between two lines of the log")

    @property
    def in_graphs(self) -> bool:
        """True if training steps on a GPU are captured in CUDA graphs; monitoring gradients rules them out."""
        return self.cuda_graphs == "auto" and self.monitor_pattern is None

    @model_validator(mode="after")
    def _it_ends(self) -> Training:
        limits = (self.max_updates, self.max_epochs, self.max_tokens, self.max_seconds)
        if (
            all(limit is None for limit in limits)
            and self.early_stopping.max_num_checkpoint_not_improved is None
        ):
            raise ValueError(
                "the run would never end: set max_updates, max_epochs, max_tokens, max_seconds or "
                "early_stopping.max_num_checkpoint_not_improved"
            )
        budget = self.memory_budget
        if budget is not None and budget != "auto" and parse_size(str(budget)) < 1024:
            raise ValueError(
                f"memory_budget {self.memory_budget} means bytes, too few for any model; add a unit, as in 4GiB"
            )
        if self.update_vocab and self.initialize_from is None:
            raise ValueError("update_vocab needs initialize_from; set it, or remove update_vocab")
        if self.averaging.start != "never" and self.schedule.name == "plateau-reduce":
            raise ValueError("averaging cannot be combined with schedule plateau-reduce; remove one of them")
        metric = self.early_stopping.metric
        if METRICS[metric].of_translations and self.decode_and_evaluate == 0:
            raise ValueError(f"early_stopping.metric {metric} needs decode_and_evaluate other than 0")
        return self


class Decoding(Section):
    """Search for translations, in validation and by default in ``econmt translate``."""

    beam_size: limits.BeamSize = Field(5, description="hypotheses kept at each step; 1 is greedy search")
    length_penalty_alpha: limits.LengthPenaltyAlpha = Field(
        1.0,
        description="divide scores by ((beta + length) / (beta + 1)) ** alpha; more favours longer translations",
    )
    length_penalty_beta: limits.LengthPenaltyBeta = Field(0.0, description="beta in length_penalty_alpha")
    max_output_factor: limits.OutputFactor = Field(
        2.0, description="maximum length of a translation: this times the source length, plus 10 tokens"
    )
    brevity_penalty_type: BrevityPenaltyType = Field(
        "constant",
        description="reference length of the brevity penalty: constant: a fixed ratio to the source length; learned: "
        "the prediction of model.length_task (mean over an ensemble); none: no penalty",
    )
    brevity_penalty_weight: limits.PenaltyWeight = Field(
        0.0, description="weight of the logarithm of BLEU's brevity penalty in scores; 0: off"
    )
    brevity_penalty_constant_length_ratio: limits.OutputFactor = Field(
        1.0, description="ratio of target to source length, in tokens, for brevity_penalty_type constant"
    )
    coverage_penalty_weight: limits.PenaltyWeight = Field(
        0.0,
        description="weight of the coverage penalty (Wu et al., 2016): the sum over source tokens of log(min(a, 1)), "
        "where a is the attention that a token gets over the translation; 0: off",
    )
    beam_search_stop: Literal["all", "first"] = Field(
        "all",
        description="stop when no better translation is possible (all), or at the first finished one (first)",
    )
    beam_prune: limits.PenaltyWeight = Field(
        0.0, description="drop hypotheses that score this much below the best finished translation; 0: off"
    )
    block_ngram_repeat: limits.NGram = Field(
        0, description="forbid that any n-gram of this many tokens occurs twice in a translation; 0: off"
    )
    batch_size: int = Field(
        64, ge=1, le=limits.TRANSLATED, description="number of sentences translated together"
    )
    max_input_length: int = Field(
        1000,
        ge=1,
        le=limits.INPUT_LENGTH,
        description="maximum number of source tokens: longer sources are cut, and validation pairs with a longer side "
        "are left out of the perplexity",
    )


class Recipe(Section):
    """Settings of one training run."""

    name: str = Field(description="name of the run", min_length=1)
    task: Literal["translation", "language_model"] = Field(
        "translation", description="kind of model: translation, or a language model of one text"
    )
    output: str = Field(description="model folder; training resumes from it if it exists", min_length=1)
    data: Annotated[
        Union[Annotated[Data, Tag("pairs")], Annotated[TextData, Tag("text")]], Discriminator(data_kind)
    ] = Field(description="text, subwords and filters")
    model: Annotated[
        Union[Annotated[Model, Tag("pairs")], Annotated[LanguageModelSection, Tag("text")]],
        Discriminator(model_kind),
    ] = Field(Model(), description="architecture of the model")
    ops: Ops = Field(Ops(), description="implementation of each large operation")
    training: Training = Field(description="optimisation, batches and checkpoints")
    parallel: ParallelSection = Field(ParallelSection(), description="division of one run among processes")
    decoding: Decoding = Field(Decoding(), description="search for translations")

    @property
    def pairs(self) -> Data:
        """Data section of a translation recipe."""
        assert isinstance(self.data, Data)
        return self.data

    @property
    def translation_model(self) -> Model:
        """Model section of a translation recipe."""
        assert isinstance(self.model, Model)
        return self.model

    @model_validator(mode="after")
    def _task_fits(self) -> Recipe:
        check_task(self)
        check_pipeline(self)
        check_mixing(self)
        check_factors(self)
        check_stepped(self)
        check_lengths(self)
        return self

    @model_validator(mode="after")
    def _shares_fit(self) -> Recipe:
        if self.parallel.shard_optimizer and self.training.averaging.start != "never":
            raise ValueError(
                "parallel.shard_optimizer cannot be combined with training.averaging; set training.averaging.start to "
                "never, or shard_optimizer to false"
            )
        return self

    @model_validator(mode="after")
    def _tying_fits(self) -> Recipe:
        if not (isinstance(self.data, Data) and isinstance(self.model, Model)):
            return self
        words = self.data.subwords
        shared = self.model.weight_tying in ("src_trg", "src_trg_softmax")
        if shared and (isinstance(words, WordSubwords) or not words.joint):
            raise ValueError(
                f"model.weight_tying {self.model.weight_tying} shares the source embedding and needs "
                "data.subwords.joint: true"
            )
        if self.model.decoder.copy_attention and (isinstance(words, WordSubwords) or not words.joint):
            raise ValueError(
                "model.decoder.copy_attention copies source tokens into the target and needs data.subwords.joint: true"
            )
        return self


def model_folder(recipe: Recipe) -> Path:
    """Returns the model folder of a recipe, relative to the working directory."""
    return Path(recipe.output)


def shipped_recipes() -> dict[str, Path]:
    """Returns the recipes that come with econmt by name, from a checkout or an installed wheel."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "_recipes", package.parent / "recipes"
    return {
        file.stem: file for file in sorted((installed if installed.is_dir() else checkout).glob("*.yaml"))
    }


LARGEST_RECIPE = 1_000_000
"""Maximum size of a recipe in bytes; parsing a few megabytes of YAML takes a minute."""


def find_recipe(name: Path | str) -> Path:
    """Returns the file of a recipe given by path or by shipped name.

    Raises:
        InputError: if there is neither such a file nor such a name; the message lists the shipped names.
    """
    path, shipped = Path(name), shipped_recipes()
    if path.is_file():
        return path
    if str(name) in shipped:
        return shipped[str(name)]
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a recipe, which is a YAML file")
    if path.exists():
        raise InputError(
            f"{path}: not a regular file (a pipe cannot be read twice); give a recipe, which is a YAML file"
        )
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    advice = (
        f"did you mean the shipped recipe {near[0]}?" if near else f"shipped recipes: {', '.join(shipped)}"
    )
    raise InputError(f"{path}: no such recipe; {advice}")


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe given by path or by shipped name and applies ``key.sub=value`` overrides.

    Values without effect are errors or print a note on standard error (:mod:`econmt.config.conditions`).

    Raises:
        InputError: if anything is wrong, with one line for each mistake that names file and line (or the override) and
            the key.
    """
    file = find_recipe(path)
    text = _text_of(file)
    return load_section(Recipe, text, str(file), overrides, rename=rename, check=idle_values, note=_note)


def read_recipe(file: Path) -> Recipe:
    """Reads the ``recipe.yaml`` of a model folder; accepts values without effect, which earlier versions wrote.

    Raises:
        InputError: as :func:`load_recipe`; also if there is no such file.
    """
    return parse_recipe(_text_of(file), str(file))


def parse_recipe(text: str, where: str) -> Recipe:
    """Reads a recipe from text; errors name it ``where``."""
    return load_section(Recipe, text, where, rename=rename)


def _text_of(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > LARGEST_RECIPE:
            raise InputError(
                f"{file}: {size / 1e6:,.1f} MB is too large for a recipe (at most 1 MB); is this the right file?"
            )
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{file}:{line}: not valid UTF-8; save the recipe as UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from None


def _note(text: str) -> None:
    talk(printable(text))


def recipe_text(recipe: Recipe, *, changed_only: bool = False) -> str:
    """Returns the resolved recipe as YAML in the order of the schema; :func:`parse_recipe` reads it back unchanged.

    Args:
        recipe: the recipe.
        changed_only: leave out values that equal the defaults.
    """
    return dump_yaml(changed_values(recipe) if changed_only else recipe.model_dump(mode="json"))


def differing_keys(old: Recipe, new: Recipe) -> list[tuple[str, object, object]]:
    """Returns the differences of two recipes: dotted key, old value, new value; None where a recipe lacks the key."""
    before, after = dict(leaves(old)), dict(leaves(new))
    keys = [*before, *(key for key in after if key not in before)]
    return [(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]
