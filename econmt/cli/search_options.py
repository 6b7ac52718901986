"""Groups of options that say how text is searched for, drawn, and put into batches."""

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
"""Keys of the recipe's search, in a dictionary of those that are given as options."""
InputLengthOption = Annotated[
    int | None,
    recipe_option(
        "decoding.max_input_length",
        help="Longest sentence, in tokens, taken whole; score refuses longer ones.",
    ),
]


@dataclass(frozen=True)
class SearchComputing(Computing):
    """Device, threads and precision of a search, which can multiply in 8 bits."""

    precision: Annotated[
        Literal["auto", "float32", "bfloat16", "int8"],
        typer.Option(
            help="Of products; auto: what is faster here, int8 for models of econmt quantize. bfloat16 and int8 move "
            "scores by some hundredths; training translates in float32.",
        ),
    ] = "auto"


@dataclass(frozen=True)
class HypothesisOptions:
    """Options of a search that are no keys of a recipe, named as in econmt.decoding.search.options."""

    nbest_size: Annotated[
        limits.NBestSize,
        typer.Option(
            help="Translations of a line; more than 1 are printed as in Moses: number ||| text ||| log-probability "
            "||| score.",
        ),
    ] = 1
    beam_groups: Annotated[
        limits.BeamSize,
        typer.Option(help="Groups of the beam that keep away from each other's tokens; 1: none."),
    ] = 1
    diversity_strength: Annotated[
        limits.PenaltyWeight, typer.Option(help="What a token costs that a group before has chosen.")
    ] = 0.5
    replace_unk: Annotated[
        bool,
        typer.Option(
            "--replace-unk",
            help="Write unknown words as the source has the word that they see most, instead of <unk>.",
        ),
    ] = False
    restore_case: Annotated[
        bool,
        typer.Option(
            "--restore-case",
            help="Translate lines in capitals as if they were not, and put the result in capitals.",
        ),
    ] = False
    markup: Annotated[
        bool,
        typer.Option(
            "--markup",
            help="Leave tags and placeholders out of what is translated, and put them into the translation by "
            "alignments.",
        ),
    ] = False


@dataclass(frozen=True)
class Drawing:
    """Random draws of tokens."""

    top_k: Annotated[
        limits.TopTokens, typer.Option(help="Draw among the K most probable tokens; 0: all.")
    ] = 0
    temperature: Annotated[
        limits.Temperature, typer.Option(help="Divides log-probabilities before drawing.")
    ] = 1.0
    seed: Annotated[limits.Seed, typer.Option(help="Of the draws.")] = 1


@dataclass(frozen=True)
class Sampling(Drawing):
    """Choice between searching and drawing translations."""

    sample: Annotated[bool, typer.Option("--sample", help="Draw translations instead of searching.")] = False


@dataclass(frozen=True)
class LineBatches:
    """Division of the input into chunks and batches, and the treatment of long lines."""

    batch_size: BatchSizeOption = None
    chunk_size: Annotated[
        int,
        typer.Option(
            min=1, max=limits.LINES, help="Lines read and sorted by length before any is translated."
        ),
    ] = CHUNK_SIZE
    max_input_length: InputLengthOption = None
    long_lines: Annotated[
        Literal["cut", "skip"],
        typer.Option(help="A longer one: translate its beginning, or skip it and write an empty line."),
    ] = "cut"


@dataclass(frozen=True)
class WordRules:
    """Words and phrases that translations must contain or must not contain."""

    avoid_list: Annotated[
        Path | None, typer.Option(help="Text file, a phrase a line, of what no translation may hold.")
    ] = None
    glossary: Annotated[
        Path | None,
        typer.Option(
            help="Terms, a line each: source phrase, tab, the target phrase that must translate it."
        ),
    ] = None
    restrict_lexicon: Annotated[
        Path | None,
        typer.Option(
            help="File of econmt lexicon: compute no words but those that it has for the words of a sentence."
        ),
    ] = None
    restrict_lexicon_topk: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.SHORTLIST,
            help="So many of the most probable for each word.",
            show_default="all that the file has",
        ),
    ] = None

    @property
    def files(self) -> list[Path]:
        """Files that are read."""
        return [path for path in (self.avoid_list, self.glossary, self.restrict_lexicon) if path is not None]
