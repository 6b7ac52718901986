"""However the ops are computed, training learns the same, and tags land on the aligned words."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

import econmt
from econmt.data.text.number_words import english, german
from econmt.model import Implementations
from econmt_ops.backends.compiled import has_compiler
from tests.conftest import run_python
from tests.system.golden_losses import FILE, KINDS, REFERENCE, UPDATES, curve, variants

NAMES = ["recompute", *(["compiled"] if has_compiler() else [])]
CASES = [
    pytest.param(kind, setting, marks=pytest.mark.thorough if name == "compiled" else ())
    for kind in KINDS
    for name in NAMES
    for setting in variants(kind, name)
]

FIRST = 60
"""Updates of the implementations, whose differences would grow from one to the next."""


@cache
def reference(kind: str) -> list[float]:
    return curve(kind, REFERENCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_it_was(kind: str) -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert set(golden) == set(KINDS)
    losses = reference(kind)
    assert len(losses) == len(golden[kind]) == UPDATES
    assert losses == pytest.approx(golden[kind], rel=1e-4)
    # The run has learnt something: a mistake in a gradient would show.
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what does not matter here
@pytest.mark.parametrize(
    ("kind", "setting"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_every_implementation_learns_what_the_reference_learns(kind: str, setting: Implementations) -> None:
    losses = curve(kind, setting, FIRST)
    assert losses == pytest.approx(reference(kind)[:FIRST], rel=1e-5)


def test_every_op_and_every_level_is_among_them() -> None:
    settings = {case.values[1] for case in CASES}
    for op in ("encoder", "decoder", "output"):
        assert REFERENCE._replace(**{op: "recompute"}) in settings
    for level in ("outputs", "attention", "cells", "gates"):
        assert Implementations.everywhere("recompute", level) in settings
    for name in NAMES:
        assert any(setting[:4] == (name,) * 4 for setting in settings)


NUMBERS = (*range(2, 10), 100, 1000, 20, 30, 40, 50, 60)
ENGLISH, GERMAN = ([words(each).split()[-1] for each in NUMBERS] for words in (english, german))
MEANS = dict(zip(ENGLISH, GERMAN, strict=True))


@pytest.mark.thorough
def test_tags_land_on_the_words_that_translate_theirs(tmp_path: Path) -> None:
    run_python("-m", "econmt", "train", "quickstart", f"output={tmp_path / 'run'}", cwd=tmp_path)
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
