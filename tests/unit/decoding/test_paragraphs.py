"""Paragraphs are split, translated and put together; lines stay."""

from __future__ import annotations

import sys

import pytest

from econmt.data.text.subwords import SPECIAL_TOKENS, Vocabularies, WordVocabulary
from econmt.decoding.paragraphs import ParagraphTranslator, sentence_splitter
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.translator import Translator
from econmt.errors import InputError
from tests.unit.decoding.test_translator import Copying

WORDS = WordVocabulary([*SPECIAL_TOKENS, "A", "dog.", "Mr.", "Smith", "runs!", "It", "is", "3.5", "m."])


def made(target: str = "de", **options: object) -> tuple[ParagraphTranslator, list[str]]:
    said: list[str] = []
    translator = Translator(
        [Copying()], Vocabularies(WORDS, WORDS), SearchOptions(beam_size=2), warn=said.append, max_length=3
    )
    return ParagraphTranslator(translator, sentence_splitter("en-US"), target), said


LINES = ["A dog. Mr. Smith runs! It is 3.5 m.", "", "A dog."]


def test_lines_keep_their_sentences() -> None:
    pytest.importorskip("sentence_splitter")
    translator, said = made()
    done: list[int] = []
    found = translator.translate_chunk([Request(line) for line in LINES], 5, "text", done.append)
    assert [each.text for each in found] == LINES
    assert (sum(done), found[1].tokens) == (3, [])
    assert found[0].tokens == LINES[0].split()
    assert found[0].log_probability == pytest.approx(-0.1 * 12)
    assert len(said) == 1
    assert said[0].startswith("text:5: 4 source tokens"), "of the line, not of the sentence"
    assert [each.text for each in made("zh")[0].translate_chunk([Request(LINES[0])], 1, "x")] == [
        "A dog.Mr. Smith runs!It is 3.5 m."
    ]


def test_what_cannot_be_split_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_splitter")
    with pytest.raises(InputError, match=r"text:4: constraints and source factors apply to single"):
        made()[0].translate_chunk([Request("A"), Request("A", avoid=["dog."])], 3, "text")
    with pytest.raises(InputError, match="no rules for the source language 'vi'"):
        sentence_splitter("vi")
    monkeypatch.setitem(sys.modules, "sentence_splitter", None)
    with pytest.raises(InputError, match="pip install sentence-splitter, or give one sentence"):
        sentence_splitter("en")
