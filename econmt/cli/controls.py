"""Options of ``econmt translate`` that say how to search, and what translations must hold."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from econmt.cli.options import within
from econmt.config import limits

BeamOption = Annotated[
    int | None,
    typer.Option(
        "--beam-size",
        "-b",
        min=1,
        max=limits.BEAM,
        help="Hypotheses kept; 1: greedy.",
        show_default="the recipe's",
    ),
]


class BrevityType(str, Enum):
    """Reference lengths of the brevity penalty."""

    constant = "constant"
    learned = "learned"
    none = "none"


BrevityTypeOption = Annotated[
    BrevityType | None,
    typer.Option(
        help="Lengths that the brevity penalty wants: a constant ratio to the source's, or what the model has learnt.",
        show_default="the recipe's",
    ),
]
BrevityWeightOption = Annotated[
    float | None,
    typer.Option(
        callback=within(0.0, limits.PENALTY),
        help="Times the logarithm of BLEU's brevity penalty, added to scores; 0: off.",
        show_default="the recipe's",
    ),
]
BrevityRatioOption = Annotated[
    float | None,
    typer.Option(
        callback=within(0.0, limits.OUTPUT_FACTOR, above=True),
        help="For that a translation should have this times the source's tokens.",
        show_default="the recipe's",
    ),
]
CoverageWeightOption = Annotated[
    float | None,
    typer.Option(
        callback=within(0.0, limits.PENALTY),
        help="Times the coverage penalty of Wu et al. (2016), added to scores; 0: off.",
        show_default="the recipe's",
    ),
]


class SearchPrecision(str, Enum):
    """Precision of a search's matrix products; auto picks the faster one on this device."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


SearchPrecisionOption = Annotated[
    SearchPrecision,
    typer.Option(
        "--precision",
        help="Of products; auto: what is faster here, int8 for models of econmt quantize. bfloat16 and int8 move "
        "scores by some hundredths; training translates in float32.",
    ),
]


class SearchStop(str, Enum):
    """When the search for a sentence ends."""

    all = "all"
    first = "first"


SearchStopOption = Annotated[
    SearchStop | None,
    typer.Option(
        help="all: when nothing better can come; first: with a sentence's first whole translation.",
        show_default="the recipe's",
    ),
]
PruneOption = Annotated[
    float | None,
    typer.Option(
        callback=within(0.0, limits.PENALTY),
        help="Give hypotheses up that score so far below the best whole translation; 0: none.",
        show_default="the recipe's",
    ),
]
JsonInputOption = Annotated[
    bool,
    typer.Option(
        "--json-input",
        help='A line is a JSON object: {"text": ..., "constraints": [...], "avoid": [...], "target_prefix": ..., '
        '"factors": [...]}; other keys are passed on to --output-type json.',
    ),
]
AvoidListOption = Annotated[
    Path | None, typer.Option(help="Text file, a phrase a line, of what no translation may hold.")
]
GlossaryOption = Annotated[
    Path | None,
    typer.Option(help="Terms, a line each: source phrase, tab, the target phrase that must translate it."),
]
NGramOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=limits.NGRAM,
        help="No translation holds N tokens in a row twice; 0: it may.",
        show_default="the recipe's",
    ),
]
GroupsOption = Annotated[
    int,
    typer.Option(
        min=1, max=limits.BEAM, help="Groups of the beam that keep away from each other's tokens; 1: none."
    ),
]
DiversityOption = Annotated[
    float,
    typer.Option(
        callback=within(0.0, limits.PENALTY), help="What a token costs that a group before has chosen."
    ),
]
MarkupOption = Annotated[
    bool,
    typer.Option(
        "--markup",
        help="Leave tags and placeholders out of what is translated, and put them into the translation by alignments.",
    ),
]
SplitOption = Annotated[
    bool,
    typer.Option(
        "--split-sentences", help="A line is a paragraph: translate its sentences one by one; lines stay."
    ),
]
ReplaceOption = Annotated[
    bool,
    typer.Option(
        "--replace-unk",
        help="Write unknown words as the source has the word that they see most, instead of <unk>.",
    ),
]
CaseOption = Annotated[
    bool,
    typer.Option(
        "--restore-case",
        help="Translate lines in capitals as if they were not, and put the result in capitals.",
    ),
]
LexiconOption = Annotated[
    Path | None,
    typer.Option(
        "--restrict-lexicon",
        help="File of econmt lexicon: compute no words but those that it has for the words of a sentence.",
    ),
]
LexiconTopOption = Annotated[
    int | None,
    typer.Option(
        "--restrict-lexicon-topk",
        min=1,
        max=limits.SHORTLIST,
        help="So many of the most probable for each word.",
        show_default="all that the file has",
    ),
]
