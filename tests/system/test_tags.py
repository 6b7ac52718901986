"""Tags land on the aligned words of a model that has learnt its language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import econmt
from econmt.data.text.number_words import english, german
from tests.conftest import RunEconmt

NUMBERS = (*range(2, 10), 100, 1000, 20, 30, 40, 50, 60)
ENGLISH, GERMAN = ([words(each).split()[-1] for each in NUMBERS] for words in (english, german))
MEANS = dict(zip(ENGLISH, GERMAN, strict=True))


@pytest.mark.thorough
def test_tags_land_on_the_words_that_translate_theirs(run_econmt: RunEconmt, tmp_path: Path) -> None:
    done = run_econmt(["train", "quickstart", f"output={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stderr
    model = econmt.load(tmp_path / "run", device="cpu")
    lines, words = [], []
    for number in range(32):
        thousands, hundreds, ones = (ENGLISH[:8][(number + step) % 8] for step in (0, 3, 6))
        plain = f"{thousands} thousand {hundreds} hundred and {ENGLISH[10 + number % 5]} {ones}".split()
        at = [0, 1, 2, 3, 5, 6][number % 6]
        words.append(plain[at])
        lines.append(" ".join(f"<b>{word}</b>" if place == at else word for place, word in enumerate(plain)))
    plain_texts = [each.text for each in model.translate([re.sub("<.*?>", "", line) for line in lines])]
    found = [each.text for each in model.translate(lines, markup=True)]
    assert [re.sub("<.*?>", "", text).split() for text in found] == [text.split() for text in plain_texts]
    inside = [text.partition("<b>")[2].partition("</b>")[0].split() for text in found]
    landed = [MEANS[word] in words for word, words in zip(words, inside, strict=True)]
    assert sum(landed) >= 30
    assert sum(map(len, inside)) <= 1.5 * len(inside), "and on few others"
