"""Words of both sides paired by attention, and unknown ones copied along it."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.data.text.vocabulary import SPECIAL_TOKENS, UNK, Vocabularies, WordVocabulary
from econmt.decoding.results import copied, hard_alignment
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.translator import Translator
from tests.unit.decoding.test_requests import subwords as subwords
from tests.unit.decoding.test_translator import Copying

WORDS = WordVocabulary([*SPECIAL_TOKENS, "ein", "Hund", "läuft"])


def seeing(places: list[int], width: int) -> Tensor:
    """Attention (T + 1, width) of tokens that see one place each, the end the last one."""
    return torch.eye(width)[[*places, width - 1]]


def test_words_are_paired_with_those_that_they_see() -> None:
    both = Vocabularies(WORDS, WORDS)
    pairs = hard_alignment(seeing([2, 0, 0], 4), ["a", "b", "c"], ["x", "y", "z"], both)
    assert pairs == [(2, 0), (0, 1), (0, 2)]
    # A word never has the end of the source for a partner.
    assert hard_alignment(torch.tensor([[0.1, 0.9], [0.0, 1.0]]), ["a"], ["x"], both) == [(0, 0)]
    assert hard_alignment(torch.ones(1, 3), ["a", "b"], [], both) == []


def test_subwords_are_paired_by_their_words(subwords: Vocabularies) -> None:
    source, target = ["▁Hun", "d", "▁und", "▁", "X"], ["▁", "▁do", "g", "▁an", "d", "▁"]
    pairs = hard_alignment(seeing([0, 1, 0, 2, 3, 4], 6), source, target, subwords)
    assert pairs == [(0, 0), (1, 1), (2, 1)]


def test_unknown_words_are_copied() -> None:
    options = SearchOptions(beam_size=2, replace_unk=True)
    made = Translator([Copying()], Vocabularies(WORDS, WORDS), options)
    (found,) = made.translate(["ein  Wombat läuft ☃"])
    assert found.text == "ein Wombat läuft ☃"
    assert found.tokens == ["ein", "Wombat", "läuft", "☃"]
    assert found.hypotheses[0].alignment == [(0, 0), (1, 1), (2, 2), (3, 3)]
    (plain,) = Translator([Copying()], Vocabularies(WORDS, WORDS), SearchOptions(beam_size=2)).translate(
        ["ein Wombat"]
    )
    assert plain.text == "ein <unk>"


def test_unknown_characters_are_copied_from_subwords(subwords: Vocabularies) -> None:
    text = "ein Hund☃ läuft"
    source = subwords.source.encode(text)
    unknown = source.index(UNK)
    attention = seeing([0, unknown], len(source) + 1)
    ids = [subwords.target.encode("ein")[0], UNK]
    tokens = copied(attention, ids, subwords.target.tokens(ids), text, subwords)
    assert tokens == ["▁ein", "☃"]
    assert subwords.target.joined(tokens) == "ein☃"
    # What the source vocabulary knows is copied as a word; U+2581 is a space.
    last = seeing([0, len(source) - 1], len(source) + 1)
    for spaced in (text, text.replace(" ", "▁")):
        tokens = copied(last, ids, subwords.target.tokens(ids), spaced, subwords)
        assert tokens == ["▁ein", "läuft"]
