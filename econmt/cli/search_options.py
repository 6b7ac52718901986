"""Groups of options for searching and drawing translations, batches of lines, and constraints on words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from econmt.cli.option_groups import RecipeKeys, recipe_option
from econmt.cli.options import BatchSizeOption, Computing
from econmt.config import limits
from econmt.config.recipe import Decoding
from econmt.decoding.translator import CHUNK_SIZE

_BATCHES = ("batch_size", "max_input_length")
SearchKeys = Annotated[
    dict[str, Any],
    RecipeKeys(
        "decoding", [name for name in Decoding.model_fields if name not in _BATCHES], {"beam_size": "-b"}
    ),
]
"""Options that replace the recipe's search keys, as a dictionary of those given."""


@dataclass(frozen=True)
class SearchComputing(Computing):
    """Device, threads and precision of a search, which can multiply in 8 bits."""

    precision: Annotated[
        Literal["auto", "float32", "bfloat16", "int8"],
        typer.Option(
            help="Precision of matrix products; auto picks the faster one on this device, on a CPU int8 for models of "
            "econmt quantize. bfloat16 and int8 move scores by some hundredths; validation in training uses float32.",
        ),
    ] = "auto"


@dataclass(frozen=True)
class HypothesisOptions:
    """Options of a search that are no recipe keys; the names are those of ``econmt.decoding.search.options``."""

    nbest_size: Annotated[
        limits.NBestSize,
        typer.Option(
            help="Number of translations of a line; more than 1 are printed as in Moses: number ||| text ||| "
            "log-probability ||| score.",
        ),
    ] = 1
    beam_groups: Annotated[
        limits.BeamSize,
        typer.Option(
            help="Number of groups of a diverse beam search, which avoid each other's tokens; 1: no groups."
        ),
    ] = 1
    diversity_strength: Annotated[
        limits.PenaltyWeight,
        typer.Option(help="Penalty for a token that an earlier group has chosen at the same position."),
    ] = 0.5
    replace_unk: Annotated[
        bool,
        typer.Option(
            "--replace-unk",
            help="Replace <unk> by the source word with the highest attention.",
        ),
    ] = False
    restore_case: Annotated[
        bool,
        typer.Option(
            "--restore-case",
            help="Translate lines in capitals in lower case, and convert the translation back to capitals.",
        ),
    ] = False
    markup: Annotated[
        bool,
        typer.Option(
            "--markup",
            help="Remove tags and placeholders before translating, and insert them into the translation by its "
            "alignment.",
        ),
    ] = False


@dataclass(frozen=True)
class Drawing:
    """Random draws of tokens."""

    top_k: Annotated[
        limits.TopTokens, typer.Option(help="Draw from the K most probable tokens; 0: all tokens.")
    ] = 0
    temperature: Annotated[
        limits.Temperature, typer.Option(help="Divisor of the log-probabilities before drawing.")
    ] = 1.0
    seed: Annotated[limits.Seed, typer.Option(help="Seed of the random draws.")] = 1


@dataclass(frozen=True)
class Sampling(Drawing):
    """Choice between searching and drawing translations."""

    sample: Annotated[bool, typer.Option("--sample", help="Draw translations instead of searching.")] = False


@dataclass(frozen=True)
class LineBatches:
    """Chunks and batches of lines, and the treatment of long lines."""

    batch_size: BatchSizeOption = None
    chunk_size: Annotated[
        int,
        typer.Option(
            min=1,
            max=limits.LINES,
            help="Number of lines that are read and sorted by length before they are translated.",
        ),
    ] = CHUNK_SIZE
    max_input_length: Annotated[
        int | None,
        recipe_option(
            "decoding.max_input_length", help="Maximum number of tokens of a sentence; see --long-lines."
        ),
    ] = None
    long_lines: Annotated[
        Literal["cut", "skip"],
        typer.Option(help="Treatment of longer sentences: translate the beginning, or write an empty line."),
    ] = "cut"


@dataclass(frozen=True)
class WordRules:
    """Words and phrases that translations must contain or must not contain."""

    avoid_list: Annotated[
        Path | None, typer.Option(help="Text file of phrases, one a line, that no translation may contain.")
    ] = None
    glossary: Annotated[
        Path | None,
        typer.Option(
            help="Text file of terms, one a line: source phrase, tab, and the target phrase that must translate it."
        ),
    ] = None
    restrict_lexicon: Annotated[
        Path | None,
        typer.Option(
            help="Lexicon file of econmt lexicon; restricts the output vocabulary, which is faster."
        ),
    ] = None
    restrict_lexicon_topk: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.SHORTLIST,
            help="Number of the most probable translations used of each word.",
            show_default="all that the file has",
        ),
    ] = None

    @property
    def files(self) -> list[Path]:
        """Files that are given."""
        return [path for path in (self.avoid_list, self.glossary, self.restrict_lexicon) if path is not None]
