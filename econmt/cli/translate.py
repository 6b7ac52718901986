"""``econmt translate``: translates text with trained models."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from econmt.api.commands import load_models
from econmt.cli.computing import counting_lines, line_chunks, line_output
from econmt.cli.factors import FactorFiles, FactorsOption
from econmt.data.files import notice
from econmt.data.text.words import has_words
from econmt.decoding.attention_picture import draw_attention, missing_note
from econmt.decoding.formats import OutputType, format_nbest, format_translation
from econmt.decoding.requests import Request, read_request
from econmt.decoding.streams import STANDARD_INPUT, LineOutput, standard_input
from econmt.decoding.translation import Translation
from econmt.decoding.translator import Translator
from econmt.elsewhere import text_division
from econmt.options.option_groups import option
from econmt.options.search_options import (
    DrawingKeys,
    HypothesisKeys,
    LineKeys,
    Sampling,
    SearchComputing,
    SearchedModels,
    SearchKeys,
    WordRules,
)
from econmt.options.shared_options import OutputOption, check_picture


@dataclass(frozen=True)
class TextInput:
    """Text to translate."""

    heading: ClassVar[str] = "Input"
    input_file: Path | None = option(
        None, "--input", "-i", help="Text file, also .gz.", show_default="standard input"
    )
    input_factors: FactorsOption = None
    json_input: bool = option(
        False,
        help='Read JSON objects, one a line: {"text": ..., "constraints": [...], "avoid": [...], "target_prefix": '
        '..., "factors": [...], "glossary": {...}}; other keys are copied to --output-type json.',
    )
    split_sentences: bool = option(
        False, help="Treat each line as a paragraph: split it into sentences and join their translations."
    )


@dataclass(frozen=True)
class TranslationOutput:
    """Output of translations."""

    heading: ClassVar[str] = "Output"
    output: OutputOption = None
    output_type: OutputType = option(
        "translation",
        help="Format of each translation: text; score and text; text and pairs of aligned words; JSON object; JSON "
        "with the attention matrix.",
    )
    attention_picture: Path | None = option(
        None, help="Picture to draw the attention of the first non-blank line in."
    )

    @property
    def needs_attention(self) -> bool:
        """True if the output shows the attention."""
        shows_attention = self.output_type in ("attention", "translation_with_alignments")
        return self.attention_picture is not None or shows_attention


def translate(
    model: SearchedModels,
    text: TextInput,
    output: TranslationOutput,
    search: SearchKeys,
    hypotheses: HypothesisKeys,
    sampling: Sampling,
    drawing: DrawingKeys,
    lines: LineKeys,
    rules: WordRules,
    computing: SearchComputing,
) -> None:
    """Translate raw text, one sentence per line; line n of the output is the translation of line n of the input.

    A blank line gives an empty line. Lines are translated as soon as the input pauses, so that the command works in a
    pipe or interactively.

    \b
    Example:
      echo "A dog runs." | econmt translate -m runs/multi30k
      econmt translate -m runs/a -m runs/b -i test.en -o test.de --beam-size 10
      econmt translate -m runs/multi30k --language-model runs/german
    """
    check_picture(output.attention_picture)
    read = [text.input_file, *(text.input_factors or ()), *rules.files]
    models = [*model.models, *([] if model.language_model is None else [model.language_model])]
    lines_out = line_output(output.output, read, models)
    loaded = load_models(model.models, computing, model.checkpoint)
    by_attention = hypotheses.get("replace_unk"), hypotheses.get("markup"), text.split_sentences
    avoid, glossary = rules.read()
    translator = loaded.translator(
        {
            **search,
            **hypotheses,
            **drawing,
            **lines,
            "ensemble_mode": model.ensemble_mode,
            "split_sentences": text.split_sentences,
            "glossary_mode": rules.glossary_mode,
            "attention": any(by_attention) or output.needs_attention,
            "sample": sampling.top_k if sampling.sample else None,
            "lm_weight": model.lm_weight,
        },
        avoid=avoid,
        glossary=glossary,
        restrict_lexicon=rules.restrict_lexicon,
        restrict_lexicon_topk=rules.restrict_lexicon_topk,
        language_model=model.language_model,
        warn=_warn,
    )
    data = loaded.recipe.pairs
    factors = FactorFiles(text.input_factors, data.source_factors, json_input=text.json_input)
    translator.factor_files = factors.names
    several = (
        SeveralSentences(text_division().splitter_for(data.source)) if not text.split_sentences else None
    )
    _run(translator, text, factors, output, lines_out, several)


def _warn(text: str) -> None:
    notice(f"warning: {text}")


class SeveralSentences:
    """Count of the lines that have several sentences, of which a model may translate only the first."""

    def __init__(self, split: Callable[[str], Sequence[object]]) -> None:
        self._split = split
        self._count, self._first = 0, 0

    def count(self, requests: Sequence[Request], first: int) -> None:
        """Looks through lines, numbered from ``first``."""
        for number, request in enumerate(requests, first):
            if has_words(request.text) and len(self._split(request.text)) > 1:
                self._count += 1
                self._first = self._first or number

    def warn(self, where: str) -> None:
        """Warns if there are any."""
        if self._count:
            lines = "1 line has" if self._count == 1 else f"{self._count:,} lines have"
            _warn(
                f"{where}:{self._first}: {lines} several sentences, this one first; parts may be missing in the "
                "translation. --split-sentences translates them one by one"
            )


def _run(
    translator: Translator,
    text: TextInput,
    factors: FactorFiles,
    output: TranslationOutput,
    lines_out: LineOutput,
    several: SeveralSentences | None,
) -> None:
    """Translates the input and writes the output; finally reports the speed, the searches and doubtful lines."""
    where = STANDARD_INPUT if text.input_file is None else str(text.input_file)
    if text.input_file is None and os.isatty(standard_input()):
        notice("reading from the terminal: one sentence per line, Ctrl-D ends")
    start, lines, tokens = time.monotonic(), 0, 0
    picture = output.attention_picture
    listed = translator.options.nbest_size > 1 and output.output_type not in ("json", "attention")
    with counting_lines("translating", text.input_file, "lines", lines_out) as done, lines_out as write:
        for chunk in line_chunks(text.input_file, translator.options.chunk_size):
            requests = [
                read_request(line, f"{where}:{number}") if text.json_input and line.strip() else Request(line)
                for number, line in enumerate(chunk, lines + 1)
            ]
            requests = factors.add_to(requests, where)
            if several is not None:
                several.count(requests, lines + 1)
            translations = translator.translate_chunk(requests, lines + 1, where, done)
            if listed:
                numbered = enumerate(translations, lines)
                aligned = output.output_type == "translation_with_alignments"
                write(row for number, each in numbered for row in format_nbest(each, number, aligned=aligned))
            else:
                write(
                    format_translation(translation, output.output_type, request.passed)
                    for translation, request in zip(translations, requests, strict=True)
                )
            if picture is not None and _draw(translations, picture):
                picture = None
            lines += len(chunk)
            tokens += sum(len(each.tokens) + 1 for each in translations if each.source_tokens)
        factors.finish(where)
    if several is not None:
        several.warn(where)
    seconds = time.monotonic() - start
    count = f"{lines} {'line' if lines == 1 else 'lines'}, {tokens} target tokens"
    notice(
        f"{count} in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.0f} tokens/s)"
        + "".join(f"; search in {name}" for name in sorted(translator.searches))
    )


def _draw(translations: Sequence[Translation], picture: Path) -> bool:
    """Draws the attention of the first translation that has any; returns True if one has."""
    for translation in translations:
        if translation.attention is not None:
            tokens = translation.source_tokens, translation.tokens
            missing = draw_attention(translation.attention, *tokens, picture)
            if missing:
                _warn(missing_note(missing, picture))
            return True
    return False
