"""Recipes: the typed schema of one training run, whole.

A recipe is a YAML file. ``load_recipe`` reads it, applies ``key.sub=value`` overrides and returns a frozen
:class:`Recipe`; everything wrong with it is an :class:`~econmt.errors.InputError` that names the file, the line,
the key and, for an unknown key, the nearest valid one. Field descriptions here are the reference documentation:
the list of every key is generated from them.
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
"""By key of the section ``ops`` the functions of ``econmt_ops`` whose implementation it names."""


def implementation_names(key: str) -> list[str]:
    """The names that a key of :data:`OPS` may have: "auto", and those of its functions' implementations."""
    from econmt_ops.dispatch.traits import names_of  # PyTorch with it, which not every recipe needs

    return ["auto", *names_of(*OPS[key])]


def _check_implementation(name: str, info: ValidationInfo) -> str:
    if name != "auto":
        known = implementation_names(str(info.field_name))
        if name not in known:
            raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, known))})
    return name


Implementation = Annotated[str, AfterValidator(_check_implementation)]


class Ops(Section):
    """How the large operations treat their feature maps: memory and time change, not what is learnt.

    reference: as plain autograd. recompute: small inputs are kept, the rest is made again in the backward pass.
    compiled: the same with its inner steps compiled, which needs a C++ compiler. triton: kernels for a GPU.
    """

    encoder: Implementation = Field("auto", description="LSTM layers of the encoder, or of a language model")
    decoder: Implementation = Field(
        "auto",
        description="the decoder: with input feeding its whole loop, attention included; without, its LSTM layers",
    )
    attention: Implementation = Field("auto", description="attention of a decoder without input feeding")
    output: Implementation = Field("auto", description="output layer and loss")
    stash: Literal["auto", "outputs", "attention", "cells", "gates"] = Field(
        "auto",
        description="what recomputing LSTMs keep: outputs, also attention weights, also cell states, also gates",
    )


class Training(Section):
    """How the parameters are learnt."""

    batch: BatchSize = Field(BatchSize(), description="how many sentences go into one update")
    bptt: Positions = Field(
        35,
        description="tokens of each row that a batch of a language model has; its state goes on to the next",
    )
    bptt_jitter: bool = Field(
        False,
        description="draw bptt anew for each batch, in steps of 5, the learning rate in proportion (Merity et al., "
        "2018)",
    )
    valid_rows: int = Field(
        1,
        ge=1,
        le=limits.TRANSLATED,
        description="rows into which a language model's validation text is cut at checkpoints; more are faster, and "
        "each begins without what stands before it; for the figures at the end each word is given at least the 1,000 "
        "tokens before it",
    )
    max_buckets: int = Field(
        12,
        ge=1,
        le=limits.BUCKETS,
        description="most buckets: shapes to which pairs are padded, chosen from the text to pad it least",
    )
    bucket_width: Positions | None = Field(
        None, description="fixed buckets instead: lengths are rounded up to multiples of this"
    )
    trim_batches: Literal["auto", "always", "never"] = Field(
        "auto", description="cut batches to their own longest pair; never: few shapes; auto: on the CPU only"
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="on a GPU, capture a step for each shape of batches and replay it; off: launch every kernel",
    )
    memory_budget: SizeOrAuto | None = Field(
        None,
        description="bytes training may take, as 4GiB, 512MiB or a number; auto: what the device has; null: any",
    )
    update_interval: int = Field(
        1,
        ge=1,
        le=limits.MICRO_BATCHES,
        description="batches whose gradients are added up before one update",
    )
    optimizer: OptimizerSection = Field(OptimizerSection(), description="the optimizer")
    averaging: Averaging = Field(Averaging(), description="the mean of the parameters over the updates")
    schedule: ScheduleSection = Field(ScheduleSection(), description="how the learning rate changes")
    gradient_clipping: GradientClipping = Field(GradientClipping(), description="bound on the gradient")
    label_smoothing: Probability = Field(0.0, description="probability mass spread over all tokens")
    length_task_weight: float = Field(
        1.0,
        gt=0.0,
        le=limits.PENALTY,
        description="this times the loss of model.length_task, a target token, is added to the cross-entropy",
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = Field(
        "auto",
        description="of products and feature maps; weights, optimizer, cell state and softmax stay float32. auto: "
        "bfloat16 on a GPU that has it, and on a CPU that multiplies it clearly faster, measured when the run begins "
        "and kept; else float32. On a GPU float32 means IEEE products everywhere, tf32 allows TF32 everywhere",
    )
    max_updates: Updates | None = Field(None, description="stop after this many updates")
    max_epochs: Updates | None = Field(None, description="stop after this many passes over the data")
    max_tokens: int | None = Field(
        None, ge=1, le=limits.TOKENS, description="stop after this many target tokens"
    )
    max_seconds: int | None = Field(
        None, ge=1, le=limits.SECONDS, description="stop after this much training time of all runs"
    )
    checkpoint_interval: Updates = Field(500, description="updates between checkpoints: validate, save")
    decode_and_evaluate: int = Field(
        -1,
        ge=-1,
        le=limits.SENTENCES,
        description="validation sentences translated at a checkpoint for BLEU; -1: all, 0: none",
    )
    decode_and_evaluate_device: str | None = Field(
        None,
        description="where those are translated: cpu, cuda or cuda:N; null: where the model is trained",
    )
    monitor_pattern: Regex | None = Field(
        None,
        description="regular expression: of parameters whose whole name it matches, metrics.tsv has at each checkpoint "
        "the norm, and that of the gradient before norms are clipped; steps are then not captured in CUDA graphs",
    )
    bleu_tokenizer: Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"] = Field(
        "auto",
        description="how sacreBLEU cuts text into words; auto: by data.target, zh for Chinese, ja-mecab and ko-mecab "
        "if they are installed, else char for languages without blanks, 13a for all others; BLEU's signature says it",
    )
    early_stopping: EarlyStopping = Field(EarlyStopping(), description="when training has learnt enough")
    keep_last_params: Checkpoints = Field(
        3,
        description="newest parameter files kept, beside the best and those that going back one checkpoint needs",
    )
    initialize_from: str | None = Field(
        None,
        min_length=1,
        description="first parameters of a new run instead of random ones: a model folder (its best checkpoint) or a "
        "parameter file of a model with the same vocabulary and the same model section; relative to the working "
        "directory, as output is",
    )
    update_vocab: bool = Field(
        False,
        description="let initialize_from have another vocabulary, whose files lie beside it: rows of tokens that both "
        "have are taken over, those of the others are drawn",
    )
    fixed_param_names: list[Regex] = Field(
        [], description="regular expressions: parameters whose whole name one of them matches are not learnt"
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
        None,
        description="what else is not learnt: of all but something, or what is named; of a matrix that is tied to "
        "another one, both are learnt or neither",
    )
    seed: int = Field(
        1, ge=0, le=limits.SEED, description="of initial parameters, dropout and the order of the data"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    threads: int | None = Field(
        None,
        ge=1,
        le=limits.THREADS,
        description="CPU threads; null: as many as are fastest here, measured when the run begins and kept",
    )
    log_interval: Updates = Field(50, description="updates between lines of the log")

    @property
    def in_graphs(self) -> bool:
        """Whether a GPU's steps are captured in CUDA graphs, which show no gradient to a monitor."""
        return self.cuda_graphs == "auto" and self.monitor_pattern is None

    @model_validator(mode="after")
    def _it_ends(self) -> Training:
        limits = (self.max_updates, self.max_epochs, self.max_tokens, self.max_seconds)
        if (
            all(limit is None for limit in limits)
            and self.early_stopping.max_num_checkpoint_not_improved is None
        ):
            raise ValueError(
                "the run would never end: give max_updates, max_epochs, max_tokens, max_seconds or "
                "early_stopping.max_num_checkpoint_not_improved"
            )
        budget = self.memory_budget
        if budget is not None and budget != "auto" and parse_size(str(budget)) < 1024:
            raise ValueError(
                f"memory_budget {self.memory_budget}: these are bytes, too few for any model; give a unit, as 4GiB"
            )
        if self.update_vocab and self.initialize_from is None:
            raise ValueError("update_vocab needs initialize_from: the model whose vocabulary is another one")
        if self.averaging.start != "never" and self.schedule.name == "plateau-reduce":
            raise ValueError(
                "averaging keeps one learning rate, and schedule plateau-reduce goes back: give one of them"
            )
        metric = self.early_stopping.metric
        if METRICS[metric].of_translations and self.decode_and_evaluate == 0:
            raise ValueError(f"early_stopping.metric {metric} needs decode_and_evaluate other than 0")
        return self


class Decoding(Section):
    """How validation, and by default ``econmt translate``, searches for a translation."""

    beam_size: limits.BeamSize = Field(5, description="hypotheses kept at each step; 1 is greedy search")
    length_penalty_alpha: limits.LengthPenaltyAlpha = Field(
        1.0, description="scores are divided by ((beta + length) / (beta + 1)) ** alpha"
    )
    length_penalty_beta: limits.LengthPenaltyBeta = Field(0.0, description="see length_penalty_alpha")
    max_output_factor: limits.OutputFactor = Field(
        2.0, description="longest output: this times the source length, plus 10"
    )
    brevity_penalty_type: BrevityPenaltyType = Field(
        "constant",
        description="what lengths the brevity penalty wants: constant: a ratio to the source's; learned: what "
        "model.length_task expects of each sentence, of an ensemble the mean; none: there is no penalty",
    )
    brevity_penalty_weight: limits.PenaltyWeight = Field(
        0.0, description="this times the logarithm of BLEU's brevity penalty is added to scores; 0: off"
    )
    brevity_penalty_constant_length_ratio: limits.OutputFactor = Field(
        1.0,
        description="for the brevity penalty of type constant a translation should have this times the source's tokens",
    )
    coverage_penalty_weight: limits.PenaltyWeight = Field(
        0.0,
        description="this times the sum of log(min(attention, 1)) over source tokens, attention summed over the "
        "translation, is added to scores (Wu et al., 2016); 0: off",
    )
    beam_search_stop: Literal["all", "first"] = Field(
        "all",
        description="all: when nothing better can come; first: as soon as a sentence has one whole translation",
    )
    beam_prune: limits.PenaltyWeight = Field(
        0.0,
        description="hypotheses whose score is so far below the best whole translation's are given up; 0: off",
    )
    block_ngram_repeat: limits.NGram = Field(
        0, description="no translation holds so many tokens in a row twice; 0: it may"
    )
    batch_size: int = Field(64, ge=1, le=limits.TRANSLATED, description="sentences translated together")
    max_input_length: int = Field(
        1000,
        ge=1,
        le=limits.INPUT_LENGTH,
        description="longest source, in tokens, that is translated whole: longer ones are cut, and validation pairs "
        "with a longer side do not count for the perplexity",
    )


class Recipe(Section):
    """One training run, whole."""

    name: str = Field(description="name of the run", min_length=1)
    task: Literal["translation", "language_model"] = Field("translation", description="what is learnt")
    output: str = Field(description="model folder; the same command again resumes from it", min_length=1)
    data: Annotated[
        Union[Annotated[Data, Tag("pairs")], Annotated[TextData, Tag("text")]], Discriminator(data_kind)
    ] = Field(description="where the text is and how it becomes token ids")
    model: Annotated[
        Union[Annotated[Model, Tag("pairs")], Annotated[LanguageModelSection, Tag("text")]],
        Discriminator(model_kind),
    ] = Field(Model(), description="the translation model, or the language model")
    ops: Ops = Field(Ops(), description="how the large operations keep their feature maps")
    training: Training = Field(description="how the parameters are learnt")
    parallel: ParallelSection = Field(ParallelSection(), description="how several processes share one run")
    decoding: Decoding = Field(Decoding(), description="how translations are searched for")

    @property
    def pairs(self) -> Data:
        """The data section of a translation recipe."""
        assert isinstance(self.data, Data)
        return self.data

    @property
    def translation_model(self) -> Model:
        """The model section of a translation recipe."""
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
                "parallel.shard_optimizer has no share of the mean of the parameters: give training.averaging.start "
                "never, or shard_optimizer false"
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
                "model.decoder.copy_attention takes source words for target words and needs data.subwords.joint: true"
            )
        return self


def model_folder(recipe: Recipe) -> Path:
    """The folder of the recipe's run, relative to the working directory."""
    return Path(recipe.output)


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with econmt, by name; from a checkout or from an installed wheel."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "_recipes", package.parent / "recipes"
    return {
        file.stem: file for file in sorted((installed if installed.is_dir() else checkout).glob("*.yaml"))
    }


LARGEST_RECIPE = 1_000_000
"""Bytes; reading YAML takes a minute for a few megabytes."""


def find_recipe(name: Path | str) -> Path:
    """The file of a recipe given by path or by shipped name.

    Raises:
        InputError: there is no such file and no such name; the message lists the names.
    """
    path, shipped = Path(name), shipped_recipes()
    if path.is_file():
        return path
    if str(name) in shipped:
        return shipped[str(name)]
    if path.is_dir():
        raise InputError(f"{path}: a folder; a recipe is a YAML file")
    if path.exists():
        raise InputError(
            f"{path}: not a file that can be read again, as a pipe is not; a recipe is a YAML file"
        )
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    advice = (
        f"did you mean the shipped recipe {near[0]}?" if near else f"shipped recipes: {', '.join(shipped)}"
    )
    raise InputError(f"{path}: no such recipe; {advice}")


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe given by path or by shipped name and applies ``key.sub=value`` overrides.

    Values without effect are refused or noted on standard error (:mod:`econmt.config.conditions`).

    Raises:
        InputError: one line for each thing that is wrong, each naming file and line (or the override) and the key.
    """
    file = find_recipe(path)
    text = _text_of(file)
    return load_section(Recipe, text, str(file), overrides, rename=rename, check=idle_values, note=_note)


def read_recipe(file: Path) -> Recipe:
    """Reads the ``recipe.yaml`` of a model folder; an earlier version may have written values without effect.

    Raises:
        InputError: as :func:`load_recipe`; also if there is no such file.
    """
    return parse_recipe(_text_of(file), str(file))


def parse_recipe(text: str, where: str) -> Recipe:
    """Reads a recipe from text; ``where`` is what errors call it."""
    return load_section(Recipe, text, where, rename=rename)


def _text_of(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > LARGEST_RECIPE:
            raise InputError(
                f"{file}: {size / 1e6:,.1f} MB; a recipe has some kilobytes, at most 1 MB: is this the right file?"
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
    """The resolved recipe as YAML in the schema's order; :func:`parse_recipe` reads it back unchanged.

    Args:
        recipe: what to write.
        changed_only: leave out what equals the defaults.
    """
    return dump_yaml(changed_values(recipe) if changed_only else recipe.model_dump(mode="json"))


def differing_keys(old: Recipe, new: Recipe) -> list[tuple[str, object, object]]:
    """Where two recipes differ: dotted key, old value, new value; None where a recipe lacks the key."""
    before, after = dict(leaves(old)), dict(leaves(new))
    keys = [*before, *(key for key in after if key not in before)]
    return [(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]
