"""Schema of a recipe, which describes one training run, and functions that find, read and write recipes.

A recipe is a YAML file. ``load_recipe`` reads it, applies ``key.sub=value`` overrides and returns a frozen
:class:`Recipe`; every mistake in it raises an :class:`~econmt.errors.InputError` that names the file, the line,
the key and, for an unknown key, the nearest valid one. The reference of all keys is generated from the
field descriptions here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Union

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from econmt.config import limits
from econmt.config.conditions import find_conflicts, idle_values
from econmt.config.data import CodesSubwords as CodesSubwords
from econmt.config.data import Data as Data
from econmt.config.data import Mixing as Mixing
from econmt.config.data import Noise as Noise
from econmt.config.data import SentencePieceSubwords as SentencePieceSubwords
from econmt.config.data import WordSubwords as WordSubwords
from econmt.config.migration import remove_keys
from econmt.config.model import AttentionSection as AttentionSection
from econmt.config.model import CoverageSection as CoverageSection
from econmt.config.model import Dropout as Dropout
from econmt.config.model import Initialization as Initialization
from econmt.config.model import Model as Model
from econmt.config.optimizer import Averaging as Averaging
from econmt.config.optimizer import BatchSize as BatchSize
from econmt.config.optimizer import EarlyStopping as EarlyStopping
from econmt.config.optimizer import OptimizerSection as OptimizerSection
from econmt.config.optimizer import ScheduleSection as ScheduleSection
from econmt.config.section import NO_MEMORY, NO_PARAMETERS, TRANSLATION, Section
from econmt.config.stacks import DecoderSection as DecoderSection
from econmt.config.stacks import EncoderSection as EncoderSection
from econmt.config.text import LanguageModelSection as LanguageModelSection
from econmt.config.text import TextData as TextData
from econmt.config.text import TextSubwords as TextSubwords
from econmt.config.text import TextWords as TextWords
from econmt.config.text import data_kind, model_kind
from econmt.config.training import ParallelSection as ParallelSection
from econmt.config.training import Training as Training
from econmt.config.yaml_reader import MISPLACED, dump_yaml, leaves, load_section
from econmt.errors import InputError

OPS = {
    "encoder": ("lstm", "bidirectional_lstm"),
    "decoder": ("attentional_lstm",),
    "attention": ("additive_attention",),
    "output": ("linear_cross_entropy",),
}
"""Functions of ``econmt_ops`` whose implementation each key of the section ``ops`` selects."""


def implementation_names(key: str) -> list[str]:
    """Returns the values that a key of :data:`OPS` accepts: "auto" and the implementations of its functions."""
    from econmt_ops.dispatch.traits import names_of  # needs PyTorch, which reading a recipe does not

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

    encoder: Annotated[Implementation, NO_PARAMETERS] = Field(
        "auto", description="recurrent layers of the encoder or language model"
    )
    decoder: Annotated[Implementation, NO_PARAMETERS, TRANSLATION] = Field(
        "auto",
        description="decoder: its whole loop with attention if it has input feeding, else its recurrent layers",
    )
    attention: Annotated[Implementation, NO_PARAMETERS, TRANSLATION] = Field(
        "auto", description="attention of a decoder without input feeding"
    )
    output: Annotated[Implementation, NO_PARAMETERS] = Field("auto", description="output layer and loss")
    stash: Annotated[Literal["auto", "least", "outputs", "attention", "cells", "gates"], NO_PARAMETERS] = (
        Field(
            "auto",
            description="what recompute keeps for the backward pass, from least to most memory: outputs, recomputing "
            "fewer steps at a time (least) or more; also attention weights; also cell states; also gates. auto: chosen "
            "by the implementation, or by the plan for memory_budget",
        )
    )


class Decoding(Section):
    """Search for translations, in validation and by default in ``econmt translate``."""

    beam_size: limits.BeamSize = Field(5, description="hypotheses kept at each step; 1 is greedy search")
    length_penalty_alpha: float = Field(
        1.0,
        ge=0.0,
        le=limits.LENGTH_PENALTY_ALPHA,
        description="divide scores by ((beta + length) / (beta + 1)) ** alpha; more favours longer translations",
    )
    length_penalty_beta: float = Field(
        0.0, ge=0.0, le=limits.LENGTH_PENALTY_BETA, description="beta in length_penalty_alpha"
    )
    max_output_factor: limits.OutputFactor = Field(
        2.0, description="maximum length of a translation: this times the source length, plus 10 tokens"
    )
    brevity_penalty_weight: limits.PenaltyWeight = Field(
        0.0, description="weight of the logarithm of BLEU's brevity penalty in scores; 0: off"
    )
    brevity_penalty_constant_length_ratio: limits.OutputFactor = Field(
        1.0, description="ratio of target to source length, in tokens, below which translations are penalized"
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
    block_ngram_repeat: int = Field(
        0,
        ge=0,
        le=limits.NGRAM,
        description="no n-gram of this many tokens may occur twice in a translation; 0: off",
    )
    min_output_length: int = Field(
        0, ge=0, le=limits.POSITIONS, description="minimum number of tokens of a translation"
    )
    ban_unk: bool = Field(False, description="no translation may contain <unk>")
    unk_penalty: limits.PenaltyWeight = Field(
        0.0, description="subtract this from the log-probability of each <unk> in the score; 0: off"
    )
    word_penalty: limits.PenaltyWeight = Field(
        0.0,
        description="subtract this from scores for each token, end included, after the log-probability is divided by "
        "the length penalty; favours short translations; 0: off",
    )
    repetition_penalty: limits.RepetitionPenalty = Field(
        1.0,
        description="multiply the log-probability of tokens that a translation already has by this in its score "
        "(Keskar et al., 2019); 1: off",
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


WRITTEN = "written"
"""Context of the validation of a recipe that econmt has written, which may have values without effect."""


class Recipe(Section):
    """Settings of one training run."""

    name: Annotated[str, NO_PARAMETERS, NO_MEMORY] = Field(description="name of the run", min_length=1)
    task: Literal["translation", "language_model"] = Field(
        "translation", description="kind of model: translation, or a language model of one text"
    )
    output: Annotated[str, NO_PARAMETERS, NO_MEMORY] = Field(
        description="model folder; training resumes from it if it exists", min_length=1
    )
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
    decoding: Annotated[Decoding, TRANSLATION] = Field(Decoding(), description="search for translations")

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
    def _sections_fit(self, info: ValidationInfo) -> Recipe:
        text = self.task == "language_model"
        needed_keys = ["data.source and data.target", "model.encoder and model.decoder"]
        if text:
            data_keys = "data.text, data.train and data.valid"
            needed_keys = [data_keys, "model.size and model.layers, and no encoder and decoder"]
        for kind, needed in zip((data_kind(self.data), model_kind(self.model)), needed_keys, strict=True):
            if (kind == "text") != text:
                raise ValueError(f"task: {self.task} needs {needed}")
        findings = list(find_conflicts(dict(leaves(self))))
        if info.context != WRITTEN:
            findings += [each for each in idle_values(self) if each.refused]
        if findings:
            details = [
                InitErrorDetails(type=PydanticCustomError(MISPLACED, "{problem}", each._asdict()), input=None)
                for each in findings
            ]
            raise ValidationError.from_exception_data("Recipe", details)
        if not text:
            self._check_factors()
        return self

    def _check_factors(self) -> None:
        names, widths = self.pairs.source_factors, self.translation_model.source_factors_num_embed
        if len(names) != len(widths):
            raise ValueError(
                f"data.source_factors has {len(names)} entries but model.source_factors_num_embed has {len(widths)}: "
                "give one width for each factor"
            )
        embedding = self.translation_model.embedding
        sums = self.translation_model.source_factors_combine == "sum"
        if names and sums and set(widths) != {embedding}:
            raise ValueError(
                f"model.source_factors_num_embed {widths}: source_factors_combine: sum adds embeddings, so each width "
                f"must equal the width of source embeddings, {embedding}"
            )


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
        InputError: if there is no such file.
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
    names = [name for end in (".yaml", ".yml") for name in (Path(f"{path}{end}"), path.with_suffix(end))]
    beside = [file for file in names if file.is_file()]
    if beside:
        raise InputError(f"{path}: no such recipe, but {beside[0]} is there; give its whole name")
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    advice = (
        f"did you mean the shipped recipe {near[0]}?" if near else f"shipped recipes: {', '.join(shipped)}"
    )
    raise InputError(f"{path}: no such recipe; {advice}")


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe given by path or by shipped name and applies ``key.sub=value`` overrides.

    Values without effect are errors, or print a note on standard error (:mod:`econmt.config.conditions`).

    Raises:
        InputError: if anything is wrong, with one line for each mistake that names file and line (or the override) and
            the key.
    """
    file = find_recipe(path)
    text = _text_of(file)
    return load_section(Recipe, text, str(file), overrides, remove=remove_keys, notes=_notes)


def read_recipe(file: Path | str) -> Recipe:
    """Reads the ``recipe.yaml`` of a model folder; accepts values without effect, which earlier versions wrote."""
    return parse_recipe(_text_of(Path(file)), str(file))


def parse_recipe(text: str, where: str) -> Recipe:
    """Reads a recipe from text; errors name it ``where``."""
    return load_section(Recipe, text, where, remove=remove_keys, context=WRITTEN)


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


def _notes(recipe: Recipe) -> Iterator[tuple[str, str]]:
    return ((each.key, each.problem) for each in idle_values(recipe) if not each.refused)


def recipe_text(recipe: Recipe, *, changed_only: bool = False) -> str:
    """Returns the resolved recipe as YAML in the order of the schema; :func:`parse_recipe` reads it back unchanged.

    ``changed_only`` leaves out values that equal the defaults.
    """
    return dump_yaml(recipe.model_dump(mode="json", exclude_defaults=changed_only))


def differing_keys(old: Recipe, new: Recipe) -> list[tuple[str, object, object]]:
    """Returns the differences of two recipes: dotted key, old value, new value; None where a recipe lacks the key."""
    before, after = dict(leaves(old)), dict(leaves(new))
    keys = [*before, *(key for key in after if key not in before)]
    return [(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]
