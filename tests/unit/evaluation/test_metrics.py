"""Metrics as the trainer uses them: the same figure as sacreBLEU by hand on the files."""

from __future__ import annotations

import pytest
import sacrebleu

from econmt.errors import InputError
from econmt.evaluation.metrics import bleu, corpus_score, make_metric

HYPOTHESES = [
    "Ein Hund rennt über die Wiese.  ",
    "Zwei Männer sitzen auf einer Bank",
    "",
    "Das ist ein Test.",
]
REFERENCES = ["Ein Hund läuft über die Wiese.", "Zwei Männer sitzen auf der Bank. ", "", "Dies ist ein Test."]


def test_bleu_is_that_of_the_stripped_lines() -> None:
    found = bleu(HYPOTHESES, REFERENCES)
    theirs = sacrebleu.BLEU()
    expected = theirs.corpus_score(
        [line.rstrip() for line in HYPOTHESES], [[line.rstrip() for line in REFERENCES]]
    )
    assert found.value == expected.score
    assert found.value == pytest.approx(49.0, abs=10)
    assert found.signature == str(theirs.get_signature())
    assert found.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert found.text == expected.format(2, signature=found.signature)
    assert found.name == "BLEU"


def test_chrf_and_ter() -> None:
    lines, references = ([line.rstrip() for line in side] for side in (HYPOTHESES, REFERENCES))
    for name, theirs in (("chrf", sacrebleu.CHRF()), ("ter", sacrebleu.TER())):
        found = corpus_score(make_metric(name, [REFERENCES]), HYPOTHESES)
        assert found.value == theirs.corpus_score(lines, [references]).score


def test_a_perfect_translation() -> None:
    assert bleu(REFERENCES, REFERENCES).value == pytest.approx(100.0)
    assert corpus_score(make_metric("ter", [REFERENCES]), REFERENCES).value == 0.0


def test_several_references_can_only_help() -> None:
    both = corpus_score(make_metric("bleu", [REFERENCES, HYPOTHESES]), HYPOTHESES)
    assert both.value == pytest.approx(100.0)
    assert "nrefs:2" in both.signature


def test_counts_must_agree() -> None:
    with pytest.raises(ValueError, match="3 hypotheses and 4 references"):
        bleu(HYPOTHESES[:3], REFERENCES)
    with pytest.raises(ValueError, match="0 hypotheses"):
        bleu([], [])


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(InputError, match="metric 'meteor'"):
        make_metric("meteor", [REFERENCES])
