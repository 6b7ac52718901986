"""``econmt translate``: text in, translations out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from econmt.cli import controls, options
from econmt.cli.computing import counting_lines, load_models
from econmt.cli.factors import FactorFiles, FactorsOption
from econmt.cli.options import AveragingMode, within
from econmt.config import limits
from econmt.data.files import notice
from econmt.data.text.corpus import read_lines
from econmt.decoding.attention_picture import draw_attention, missing_note
from econmt.decoding.constraints.glossary import read_avoid_list
from econmt.decoding.formats import format_nbest, format_translation
from econmt.decoding.paragraphs import ParagraphTranslator, sentence_splitter
from econmt.decoding.requests import Request, read_request
from econmt.decoding.streams import STANDARD_INPUT, LineOutput, read_chunks, standard_input
from econmt.decoding.translation import Translation
from econmt.decoding.translator import CHUNK_SIZE, Translator


class OutputType(str, Enum):
    """Output for each translation."""

    translation = "translation"
    score = "score"
    translation_with_alignments = "translation_with_alignments"
    json = "json"
    attention = "attention"


_WITH_ATTENTION = (OutputType.attention, OutputType.translation_with_alignments)
OutputTypeOption = Annotated[
    OutputType,
    typer.Option(
        help="The text; score, tab, text; text, tab, pairs of source and target words; a JSON object; the same "
        "with the attention matrix."
    ),
]
PictureOption = Annotated[
    Path | None, typer.Option(help="Draw the attention of the first line that is not blank.")
]
NBestOption = Annotated[
    int,
    typer.Option(
        min=1,
        max=limits.NBEST,
        help="Translations of a line; more than 1 are printed as Moses does: number ||| text ||| log-probability ||| "
        "score.",
    ),
]
TopKOption = Annotated[
    int, typer.Option(min=0, max=limits.WORDS, help="Draw among the K most probable tokens; 0: all.")
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        callback=within(0.0, limits.TEMPERATURE, above=True), help="Divides log-probabilities before drawing."
    ),
]


class LongLines(str, Enum):
    """Treatment of a source that is too long."""

    cut = "cut"
    skip = "skip"


LongLinesOption = Annotated[
    LongLines, typer.Option(help="A longer one: translate its beginning, or skip it and write an empty line.")
]
ChunkSizeOption = Annotated[
    int,
    typer.Option(min=1, max=limits.LINES, help="Lines read and sorted by length before any is translated."),
]
OutputFactorOption = Annotated[
    float | None,
    typer.Option(
        callback=within(0.0, limits.OUTPUT_FACTOR, above=True),
        help="Longest output: this times the source length, plus 10.",
        show_default="the recipe's",
    ),
]


def translate(
    context: typer.Context,
    models: options.ModelsOption,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="Text file, also .gz.", show_default="standard input"),
    ] = None,
    input_factors: FactorsOption = None,
    json_input: controls.JsonInputOption = False,
    output: options.OutputOption = None,
    beam_size: controls.BeamOption = None,
    nbest_size: NBestOption = 1,
    batch_size: options.BatchSizeOption = None,
    chunk_size: ChunkSizeOption = CHUNK_SIZE,
    max_input_length: options.InputLengthOption = None,
    long_lines: LongLinesOption = LongLines.cut,
    length_penalty_alpha: options.AlphaOption = None,
    length_penalty_beta: options.BetaOption = None,
    max_output_factor: OutputFactorOption = None,
    brevity_penalty_type: controls.BrevityTypeOption = None,
    brevity_penalty_weight: controls.BrevityWeightOption = None,
    brevity_penalty_constant_length_ratio: controls.BrevityRatioOption = None,
    coverage_penalty_weight: controls.CoverageWeightOption = None,
    beam_search_stop: controls.SearchStopOption = None,
    beam_prune: controls.PruneOption = None,
    output_type: OutputTypeOption = OutputType.translation,
    attention_picture: PictureOption = None,
    avoid_list: controls.AvoidListOption = None,
    glossary: controls.GlossaryOption = None,
    restrict_lexicon: controls.LexiconOption = None,
    restrict_lexicon_topk: controls.LexiconTopOption = None,
    block_ngram_repeat: controls.NGramOption = None,
    beam_groups: controls.GroupsOption = 1,
    diversity_strength: controls.DiversityOption = 0.5,
    markup: controls.MarkupOption = False,
    split_sentences: controls.SplitOption = False,
    replace_unk: controls.ReplaceOption = False,
    restore_case: controls.CaseOption = False,
    sample: Annotated[bool, typer.Option("--sample", help="Draw translations instead of searching.")] = False,
    top_k: TopKOption = 0,
    temperature: TemperatureOption = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=limits.SEED, help="Of --sample.")] = 1,
    checkpoint: options.CheckpointsOption = None,
    ensemble_mode: options.EnsembleOption = AveragingMode.linear,
    device: options.DeviceOption = "auto",
    threads: options.ThreadsOption = None,
    precision: controls.SearchPrecisionOption = controls.SearchPrecision.auto,
) -> None:
    """Translate raw text, one sentence a line; line n of the output is the translation of line n of the input.

    A blank line gives an empty line. Input that pauses is translated at once, so that the verb can sit in a pipe or
    answer a person.

    \b
    Example:
      echo "A dog runs." | econmt translate -m runs/multi30k
      econmt translate -m runs/a -m runs/b -i test.en -o test.de --beam-size 10
    """
    _check_options(context, locals())
    read = [input_file, *(input_factors or ()), *filter(None, (avoid_list, glossary, restrict_lexicon))]
    lines_out = LineOutput(output, read)
    loaded = load_models(models, checkpoint, device, precision.value, threads)
    translator = loaded.translator(
        _search_options(locals()),
        batch_size=batch_size,
        chunk_size=chunk_size,
        max_input_length=max_input_length,
        long_lines=long_lines.value,
        avoid=() if avoid_list is None else read_avoid_list(avoid_list),
        glossary=glossary,
        restrict_lexicon=restrict_lexicon,
        restrict_lexicon_topk=restrict_lexicon_topk,
        warn=_warn,
    )
    data = loaded.recipe.pairs
    factors = FactorFiles(input_factors, data.source_factors, json_input=json_input)
    translator.factor_files = factors.names
    splitter = sentence_splitter(data.source) if split_sentences else None
    _run(
        translator if splitter is None else ParagraphTranslator(translator, splitter, data.target),
        translator,
        chunk_size,
        input_file,
        json_input,
        factors,
        lines_out,
        output_type,
        attention_picture,
    )


_OF_SEARCH = (
    "beam_size",
    "nbest_size",
    "length_penalty_alpha",
    "length_penalty_beta",
    "max_output_factor",
    "brevity_penalty_type",
    "brevity_penalty_weight",
    "brevity_penalty_constant_length_ratio",
    "coverage_penalty_weight",
    "beam_search_stop",
    "beam_prune",
    "beam_groups",
    "diversity_strength",
    "block_ngram_repeat",
    "ensemble_mode",
    "temperature",
    "seed",
    "replace_unk",
    "restore_case",
    "markup",
)
"""Options that are fields of :class:`~econmt.decoding.search.beam.SearchOptions` of the same name."""


def _search_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the search options among the values of all options by name."""
    found = {name: value.value if isinstance(value := given[name], Enum) else value for name in _OF_SEARCH}
    seen = given["attention_picture"] is not None or given["output_type"] in _WITH_ATTENTION
    attention = given["replace_unk"] or given["markup"] or seen
    return {**found, "sample": given["top_k"] if given["sample"] else None, "attention": attention}


def _check_options(context: typer.Context, given: Mapping[str, Any]) -> None:
    """Refuse options that would change nothing, and places that cannot be written to."""
    if given["sample"]:
        options.refuse_idle(context, "is for searching; leave out that or --sample", "beam_size")
    else:
        why = "is for --sample; give that too, or leave it out"
        options.refuse_idle(context, why, "top_k", "temperature", "seed")
    if given["beam_groups"] == 1:
        options.refuse_idle(
            context, "is of --beam-groups; give that too, or leave it out", "diversity_strength"
        )
    if given["split_sentences"]:
        why = "is of a sentence, and a line has several with --split-sentences; leave out one of them"
        options.refuse_idle(context, why, "nbest_size", "sample", "output_type", "attention_picture")
    if given["restrict_lexicon"] is None:
        why = "is of --restrict-lexicon; give that too, or leave it out"
        options.refuse_idle(context, why, "restrict_lexicon_topk")
    options.check_writable(given["output"])
    options.check_picture(given["attention_picture"])
    options.check_not_of_model(given["output"], given["models"])


def _warn(text: str) -> None:
    notice(f"warning: {text}")


def _chunks(input_file: Path | None, size: int) -> Iterator[list[str]]:
    """Lines of the input file, or of standard input, which may pause."""
    if input_file is None:
        descriptor = standard_input()
        if os.isatty(descriptor):
            notice("reading from the terminal: a sentence a line, Ctrl-D ends")
        yield from read_chunks(descriptor, size)
        return
    lines = read_lines(input_file)
    while chunk := list(islice(lines, size)):
        yield chunk


def _requests(lines: Sequence[str], first: int, where: str) -> list[Request]:
    """Reads requests from lines of JSON, numbered from ``first``; a blank line is a blank sentence."""
    return [
        read_request(line, f"{where}:{number}") if line.strip() else Request(line)
        for number, line in enumerate(lines, first)
    ]


def _run(
    translator: Translator | ParagraphTranslator,
    searcher: Translator,
    chunk_size: int,
    input_file: Path | None,
    json_input: bool,
    factors: FactorFiles,
    output: LineOutput,
    output_type: OutputType,
    picture: Path | None,
) -> None:
    where = STANDARD_INPUT if input_file is None else str(input_file)
    start, lines, tokens = time.monotonic(), 0, 0
    several = searcher.options.nbest_size > 1
    with counting_lines("translating", input_file, "lines", output) as done, output as write:
        for chunk in _chunks(input_file, chunk_size):
            requests = _requests(chunk, lines + 1, where) if json_input else [Request(line) for line in chunk]
            requests = factors.given_to(requests, where)
            translations = translator.translate_chunk(requests, lines + 1, where, done)
            if several and output_type not in (OutputType.json, OutputType.attention):
                numbered = enumerate(translations, lines)
                aligned = output_type == OutputType.translation_with_alignments
                write(row for number, each in numbered for row in format_nbest(each, number, aligned=aligned))
            else:
                write(
                    format_translation(translation, output_type.value, request.passed)
                    for translation, request in zip(translations, requests, strict=True)
                )
            if picture is not None and _draw(translations, picture):
                picture = None
            lines += len(chunk)
            tokens += sum(len(translation.tokens) + 1 for translation in translations)
        factors.finish(where)
    seconds = time.monotonic() - start
    notice(
        f"{lines} lines, {tokens} target tokens in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.0f} tokens/s)"
        + "".join(f"; search in {name}" for name in sorted(searcher.searches))
    )


def _draw(translations: Sequence[Translation], picture: Path) -> bool:
    """Draw the first translation that has attention; whether there was one."""
    for translation in translations:
        if translation.attention is not None:
            tokens = translation.source_tokens, translation.tokens
            missing = draw_attention(translation.attention, *tokens, picture)
            if missing:
                _warn(missing_note(missing, picture))
            return True
    return False
