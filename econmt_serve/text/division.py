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


def divider(languages: tuple[str, str], *, split: bool, markup: bool) -> Divide:
    """Returns a function that divides lines.

    Args:
        languages: codes of the source and target languages, by whose rules sentences are split and joined.
        split: True if lines are split into sentences. markup: True if tags and placeholders are taken out, too.
    """
    how = division_of(languages if split else None)

    def divide(line: str) -> tuple[list[str], Callable[[Sequence[Translation]], Translation]]:
        passage = line_passage(line, how) if markup else plain_passage(line, how)
        return [sentence.text for sentence in passage.sentences], passage.joined

    return divide
