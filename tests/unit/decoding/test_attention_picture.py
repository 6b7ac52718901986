"""Words of both sides paired by attention, and the heat map that shows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from econmt.data.text.vocabulary import SPECIAL_TOKENS, UNK, Vocabularies, WordVocabulary
from econmt.decoding import attention_picture
from econmt.decoding.attention_picture import draw_attention, fonts_for, missing_note, token_label
from econmt.decoding.results import copied, hard_alignment
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.translator import Translator
from tests.unit.decoding.test_requests import subwords as subwords
from tests.unit.decoding.test_translator import Copying

SOURCE = ["\u2581ein", "\u2581und", "\u2581zwanzig"]
TARGET = ["\u2581twenty", "-", "one"]


def pixels(path: Path) -> np.ndarray:
    return np.asarray(imread(path))[:, :, :3]


def drawn(attention: torch.Tensor, path: Path) -> np.ndarray:
    draw_attention(attention, SOURCE, TARGET, path)
    return pixels(path)


def darkest(image: np.ndarray) -> tuple[float, float]:
    """Where the dark blue cell is: (down, right) as shares of the picture, the colour bar left out."""
    blue = (image[:, :, 2] > image[:, :, 0] + 0.25) & (image[:, :, 0] < 0.1)
    blue[:, int(0.8 * blue.shape[1]) :] = False
    rows, columns = np.nonzero(blue)
    return float(rows.mean() / image.shape[0]), float(columns.mean() / image.shape[1])


def test_what_a_picture_shows_in_which_fonts(tmp_path: Path) -> None:
    corner, right, below = (torch.zeros(4, 4) for _ in range(3))
    corner[0, 0], right[0, 3], below[3, 0] = 1.0, 1.0, 1.0
    places = [darkest(drawn(attention, tmp_path / "a.png")) for attention in (corner, right, below)]
    assert places[1][0] == pytest.approx(places[0][0], abs=0.01)
    assert places[1][1] > places[0][1] + 0.3
    assert places[2][1] == pytest.approx(places[0][1], abs=0.01)
    assert places[2][0] > places[0][0] + 0.3
    for shape in ((3, 3), (4, 3), (4, 4)):
        assert drawn(torch.full(shape, 0.25), tmp_path / "a.png").size > 0
    with pytest.raises(ValueError, match=r"\(3, 5\) does not fit 3 source tokens"):
        draw_attention(torch.zeros(3, 5), SOURCE, TARGET, tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"\(2, 3\) does not fit 3 target tokens"):
        draw_attention(torch.zeros(2, 3), SOURCE, TARGET, tmp_path / "a.png")
    assert token_label("\u2581zwanzig") == "\u2423zwanzig"
    draw_attention(torch.zeros(1, 1), ["$"], ["$x_$"], tmp_path / "a.png")
    assert pixels(tmp_path / "a.png").size > 0
    from matplotlib.font_manager import FontProperties, findfont, get_font

    usual = get_font(findfont(FontProperties())).get_charmap()
    # A sign of mathematics that comes with matplotlib in STIX alone.
    letter = "\N{MATHEMATICAL BOLD SCRIPT CAPITAL A}"
    assert ord(letter) not in usual
    names, missing = fonts_for(f"a {letter}")
    assert missing == ""
    known = [get_font(findfont(FontProperties(family=name))).get_charmap() for name in names[1:]]
    assert any(ord(letter) in each for each in known)
    assert fonts_for("abc") == (names[:1], "")


def test_letters_of_no_font_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unassigned = "\U0002ffff"  # no letter, and none of any font
    path = tmp_path / "a.png"
    assert draw_attention(torch.zeros(1, 1), ["a"], [unassigned], path) == unassigned
    assert pixels(path).size > 0
    assert missing_note(unassigned, path).startswith(
        f"{path}: no font of this machine has U+2FFFF, drawn as boxes"
    )
    assert "and 2 more" in missing_note("abcdefg", path)
    monkeypatch.setattr(attention_picture, "fonts_for", lambda text: (["DejaVu Sans"], ""))
    assert draw_attention(torch.zeros(1, 1), ["a"], ["b"], path) == ""


WORDS = WordVocabulary([*SPECIAL_TOKENS, "ein", "Hund", "läuft"])


def seeing(places: list[int], width: int) -> Tensor:
    """Attention (T + 1, width) of tokens that see one place each, the end the last one."""
    return torch.eye(width)[[*places, width - 1]]


def test_words_are_paired_with_what_they_see_and_copied(subwords: Vocabularies) -> None:
    both = Vocabularies(WORDS, WORDS)
    pairs = hard_alignment(seeing([2, 0, 0], 4), ["a", "b", "c"], ["x", "y", "z"], both)
    assert pairs == [(2, 0), (0, 1), (0, 2)]
    # A word never has the end of the source for a partner.
    assert hard_alignment(torch.tensor([[0.1, 0.9], [0.0, 1.0]]), ["a"], ["x"], both) == [(0, 0)]
    assert hard_alignment(torch.ones(1, 3), ["a", "b"], [], both) == []
    source, target = ["▁Hun", "d", "▁und", "▁", "X"], ["▁", "▁do", "g", "▁an", "d", "▁"]
    pairs = hard_alignment(seeing([0, 1, 0, 2, 3, 4], 6), source, target, subwords)
    assert pairs == [(0, 0), (1, 1), (2, 1)]
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
    text = "ein Hund☃ läuft"
    source = subwords.source.encode(text)
    unknown = source.index(UNK)
    attention = seeing([0, unknown], len(source) + 1)
    ids = [subwords.target.encode("ein")[0], UNK]
    tokens = copied(attention, ids, subwords.target.tokens(ids), text, subwords)
    assert tokens == ["▁ein", "☃"]
    assert subwords.target.joined(tokens) == "ein☃"
    assert copied(seeing([1], 2), [UNK], ["<unk>"], text, subwords) == ["ein"], (
        "the end is no word of a cut source"
    )
    # What the source vocabulary knows is copied as a word; U+2581 is a space.
    last = seeing([0, len(source) - 1], len(source) + 1)
    for spaced in (text, text.replace(" ", "▁")):
        tokens = copied(last, ids, subwords.target.tokens(ids), spaced, subwords)
        assert tokens == ["▁ein", "läuft"]
