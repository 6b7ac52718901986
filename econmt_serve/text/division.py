"""Division of lines into sentences without markup, which are translated one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from econmt.api.text import Divide, Translation
from econmt_serve.text.markup_reader import line_passage
from econmt_serve.text.passages import TextDivision, division, plain_passage
from econmt_serve.text.sentences import splitter_for as splitter_for


def division_of(languages: tuple[str, str] | None) -> TextDivision:
    """Returns the division into sentences by the rules of a source and a target language; None: lines stay whole."""
    return TextDivision() if languages is None else division(splitter_for(languages[0]), languages[1])


def divider(language: str, *, split: bool, markup: bool) -> Divide:
    """Returns a function that divides lines.

    Args:
        language: code of the source language, by whose rules sentences are split.
        split: True if lines are split into sentences. markup: True if tags and placeholders are taken out, too.
    """

    def divide(line: str, target: str) -> tuple[list[str], Callable[[Sequence[Translation]], Translation]]:
        how = division_of((language, target) if split else None)
        passage = line_passage(line, how) if markup else plain_passage(line, how)
        return [sentence.text for sentence in passage.sentences], passage.joined

    return divide
