"""Groups of options for searching and drawing translations, batches of lines, and constraints on words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from econmt.config import limits
from econmt.config.recipe import Decoding
from econmt.data.text.glossary import Glossary, read_glossary
from econmt.decoding.constraints.phrases import read_avoid_list
from econmt.decoding.search.options import CHUNK_SIZE, LM_WEIGHT
from econmt.options.option_groups import RecipeKeys, option, recipe_option
from econmt.options.shared_options import Computing, ModelChoice

_BATCHES = ("batch_size", "max_input_length")
SearchKeys = Annotated[
    dict[str, Any],
    RecipeKeys(
        "decoding",
        [name for name in Decoding.model_fields if name not in _BATCHES],
        {"beam_size": "-b"},
        heading="Search",
    ),
]
"""Options that replace the recipe's search keys, as a dictionary of those given."""


@dataclass(frozen=True)
class SearchComputing(Computing):
    """Device, threads and precision of a search, which can multiply in 8 bits."""

    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = option(
        "auto",
        help="Precision of matrix products; auto picks the faster one on this device, on a CPU int8 for models of "
        "econmt quantize. 16 and 8 bits move scores by some hundredths; validation in training uses float32.",
    )


RestoreCase = Annotated[
    bool,
    typer.Option(
        help="Translate lines in capitals in lower case, and convert the translation back to capitals."
    ),
]


@dataclass(frozen=True)
class HypothesisOptions:
    """Options of a search that are no recipe keys; the names are those of ``econmt.decoding.search.options``."""

    heading: ClassVar[str] = "Hypotheses"
    nbest_size: limits.NBestSize = option(
        1,
        help="Number of translations of a line; more than 1 are printed as in Moses: number ||| text ||| "
        "log-probability ||| score.",
    )
    replace_unk: bool = option(False, help="Replace <unk> by the source word with the highest attention.")
    restore_case: RestoreCase = False
    markup: bool = option(
        False,
        help="Remove tags and placeholders before translating, and insert them into the translation by its "
        "alignment.",
    )


@dataclass(frozen=True)
class Drawing:
    """Random draws of tokens."""

    heading: ClassVar[str] = "Random draws"
    top_k: limits.TopTokens = option(0, help="Draw from the K most probable tokens; 0: all tokens.")
    top_p: limits.TopShare = option(
        1.0,
        help="Draw from the fewest most probable tokens whose probabilities add up to this; 1: all tokens.",
    )
    temperature: limits.Temperature = option(1.0, help="Divisor of the log-probabilities before drawing.")
    seed: limits.Seed = option(1, help="Seed of the random draws.")


@dataclass(frozen=True)
class Sampling(Drawing):
    """Choice between searching and drawing translations."""

    sample: bool = option(False, help="Draw translations instead of searching.")


@dataclass(frozen=True)
class SearchedModels(ModelChoice):
    """Translation models, and a language model that takes part in their search."""

    language_model: Path | None = option(
        None,
        help="Folder of a language model with the target vocabulary, whose log-probability of each token is added to "
        "the score (shallow fusion).",
    )
    lm_weight: limits.PenaltyWeight = option(
        LM_WEIGHT, help="Factor of the language model's log-probabilities; 0 leaves it out."
    )


@dataclass(frozen=True)
class LineBatches:
    """Chunks and batches of lines, and the treatment of long lines."""

    heading: ClassVar[str] = "Batches of lines"
    batch_size: int | None = recipe_option("decoding.batch_size")
    chunk_size: int = option(
        CHUNK_SIZE,
        help="Number of lines that are read and sorted by length before they are translated.",
        min=1,
        max=limits.LINES,
    )
    max_input_length: int | None = recipe_option(
        "decoding.max_input_length", help="Maximum number of tokens of a sentence; see --long-lines."
    )
    long_lines: Literal["cut", "skip"] = option(
        "cut", help="Treatment of longer sentences: translate the beginning, or write an empty line."
    )


@dataclass(frozen=True)
class WordLists:
    """Files of words and phrases that translations must contain or must not contain."""

    heading: ClassVar[str] = "Words of the translation"
    avoid_list: Path | None = option(
        None, help="Text file of phrases, one a line, that no translation may contain."
    )
    glossary: Path | None = option(
        None,
        help="Text file of terms, one a line, and the translation that each must have, with a tab, = or a comma "
        "between them. Blank lines and those that begin with # are skipped.",
    )
    glossary_mode: Literal["auto", "annotate", "constrain"] = option(
        "auto",
        help="How sentences whose translations lack a term are translated again. annotate: terms are written into the "
        "source with their translations, for a model trained with data.annotate_terms; constrain: translations are "
        "constraints of the search; auto: annotate if the model knows that, and constrain the search if a term still "
        "lacks.",
    )

    def read(self) -> tuple[tuple[str, ...], Glossary | None]:
        """Reads the files: returns the phrases to avoid, and the glossary, None without one.

        Raises:
            InputError: if a file cannot be read; the message names the line.
        """
        avoid = () if self.avoid_list is None else read_avoid_list(self.avoid_list)
        return avoid, None if self.glossary is None else read_glossary(self.glossary)


@dataclass(frozen=True)
class WordRules(WordLists):
    """Rules for the words of translations."""

    restrict_lexicon: Path | None = option(
        None, help="Lexicon file of econmt lexicon; restricts the output vocabulary, which is faster."
    )
    restrict_lexicon_topk: int | None = option(
        None,
        help="Number of the most probable translations used of each word.",
        min=1,
        max=limits.SHORTLIST,
        show_default="all that the file has",
    )

    @property
    def files(self) -> list[Path]:
        """Files that are given."""
        return [path for path in (self.avoid_list, self.glossary, self.restrict_lexicon) if path is not None]
