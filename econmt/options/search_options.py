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
from econmt.decoding.search.options import LM_WEIGHT
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
"""Options that replace the recipe's search keys, as a dictionary of those given; the others are alike."""
HypothesisKeys = Annotated[
    dict[str, Any],
    RecipeKeys("decoding", ["nbest_size", "replace_unk", "restore_case", "markup"], heading="Hypotheses"),
]
DrawingKeys = Annotated[
    dict[str, Any], RecipeKeys("decoding", ["top_p", "temperature", "seed"], heading="Random draws")
]
LineKeys = Annotated[
    dict[str, Any],
    RecipeKeys("decoding", [*_BATCHES, "chunk_size", "long_lines"], heading="Batches of lines"),
]


@dataclass(frozen=True)
class SearchComputing(Computing):
    """Device, threads and precision of a search, which can multiply in 8 bits."""

    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = option(
        "auto",
        help="Precision of matrix products; auto picks the faster one on this device, on a CPU int8 for models of "
        "econmt quantize. 16 and 8 bits move scores by some hundredths; validation in training uses float32.",
    )


RestoreCase = Annotated[bool, recipe_option("decoding.restore_case").metadata["typer"]]
GlossaryMode = Annotated[
    Literal["auto", "annotate", "constrain"], recipe_option("decoding.glossary_mode").metadata["typer"]
]
TopTokens = Annotated[
    limits.TopTokens, typer.Option(help="Draw from the K most probable tokens; 0: all tokens.")
]


@dataclass(frozen=True)
class Sampling:
    """Choice between searching and drawing translations."""

    heading: ClassVar[str] = "Random draws"
    sample: bool = option(False, help="Draw translations instead of searching.")
    top_k: TopTokens = 0


@dataclass(frozen=True)
class SearchedModels(ModelChoice):
    """Translation models, and a language model that takes part in their search."""

    language_model: Path | None = option(
        None,
        help="Folder of a language model with the target vocabulary, whose log-probability of each token is added to "
        "the score (shallow fusion).",
    )
    lm_weight: float | None = option(
        None,
        min=0.0,
        max=limits.PENALTY,
        help="Factor of the language model's log-probabilities; 0 leaves it out.",
        show_default=str(LM_WEIGHT),
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
    glossary_mode: GlossaryMode = "auto"

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
