"""Glossaries with a model that was trained on annotated sources, and with one that was not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import econmt
from econmt.data.text.annotation import term_tag_ids
from econmt.data.text.glossary import Glossary
from econmt.errors import InputError
from econmt_serve.models import LoadedModels, TranslationJob
from econmt_serve.settings import Settings
from tests.unit.cli.conftest import SUBWORDS, Call
from tests.unit.training.tiny import Run

TERMS = Glossary({"b": "G H", "e": "A"})
LINES = ["a b c", "d", "h g f e d", "b e b"]


@pytest.fixture(scope="module")
def model(annotating: Path) -> econmt.TrainedModel:
    return econmt.load(annotating, device="cpu")


@pytest.fixture(scope="module")
def annotating(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that knows annotation, far too little trained to follow it."""
    keys = ("data.subwords={type: bpe, size: 40}", *SUBWORDS[1:], "data.annotate_terms.share=0.5")
    run = Run(text, tmp_path_factory.mktemp("annotating") / "run", keys)
    run.train()
    return run.folder.path


def counted(text: str) -> tuple[int, int]:
    words = text.split()
    pairs = list(itertools.pairwise(words))
    return pairs.count(("G", "H")), words.count("A")


def test_terms_are_annotated_and_forced_where_they_still_lack(model: econmt.TrainedModel) -> None:
    assert term_tag_ids(model.vocabularies.source)
    found = model.translate(LINES, glossary=TERMS, nbest_size=2)
    for each, line in zip(found, LINES, strict=True):
        for hypothesis in each.hypotheses:
            glossary, letters = counted(hypothesis.text), line.split()
            assert glossary[0] >= letters.count("b")
            assert glossary[1] >= letters.count("e")
        # Sources and attention are those of the sentence, not those of the annotated one.
        assert each.source_tokens == model.vocabularies.source.tokens(model.vocabularies.source.encode(line))
        assert each.attention.shape == (len(each.tokens) + 1, len(each.source_tokens) + 1)
        torch.testing.assert_close(each.attention.sum(dim=1), torch.ones(len(each.tokens) + 1))
    plain = model.translate(LINES)
    assert found[1].text == plain[1].text


def test_annotation_alone_is_an_ordinary_search_of_another_source(model: econmt.TrainedModel) -> None:
    found = model.translate(LINES, glossary=TERMS, glossary_mode="annotate")
    b, e = "<term> G H </term>", "<term> A </term>"
    written = [f"a {b} c", "d", f"h g f {e} d", f"{b} {e} {b}"]
    assert [each.text for each in found] == [each.text for each in model.translate(written)]
    # Draws cannot be constrained, but sources can be annotated.
    drawn = model.translate(LINES, glossary=TERMS, sample=True, seed=3)
    again = model.translate(written, sample=True, seed=3)
    assert [each.text for each in drawn] == [each.text for each in again]
    constrained = model.translate(LINES, glossary=TERMS, glossary_mode="constrain")
    assert counted(constrained[0].text)[0] >= 1


@pytest.mark.parametrize("mode", ["auto", "annotate", "constrain"])
def test_terms_that_are_there_anyway_change_nothing_in_any_mode(
    model: econmt.TrainedModel, mode: str
) -> None:
    options: dict[str, Any] = {"min_output_length": 3}
    plain = model.translate(LINES, **options)
    terms = {line: each.text.split()[-1] for line, each in zip(LINES, plain, strict=True)}
    assert len(terms) == len(LINES)
    options |= {"glossary": Glossary(terms), "glossary_mode": mode}
    for found, expected in zip(model.translate(LINES, **options), plain, strict=True):
        assert found.source_tokens == expected.source_tokens
        rest: Any = {"hypotheses": [], "attention": None}
        assert found._replace(**rest) == expected._replace(**rest)
        assert torch.equal(found.attention, expected.attention)


def test_a_line_in_capitals_and_markup_keep_their_form(model: econmt.TrainedModel) -> None:
    found = model.translate(["A B C"], glossary=TERMS, restore_case=True)[0].text
    assert counted(found)[0] >= 1
    marked = model.translate(["a <b>b</b> c"], glossary=TERMS, markup=True)[0].text
    assert marked.count("<b>") == marked.count("</b>") == 1
    assert "term" not in marked


def test_the_server_annotates_the_terms_of_requests(model: econmt.TrainedModel) -> None:
    served = LoadedModels(model, Settings(glossary_mode="annotate"), 0)
    request = econmt.Request("a b c", glossary=TERMS)
    answers = served.translate([request], TranslationJob(constrained=True))
    expected = model.translate(["a b c"], glossary=TERMS, glossary_mode="annotate")[0].text
    assert [getattr(each, "text", each) for each in answers] == [expected]


def test_a_file_of_terms_is_annotated_and_draws_are_not_constrained(
    call: Call, annotating: Path, model: econmt.TrainedModel, tmp_path: Path
) -> None:
    (tmp_path / "terms").write_text("b = G H\n")
    with pytest.raises(InputError, match="sample cannot be combined"):
        model.translate(["b"], glossary=TERMS, glossary_mode="constrain", sample=True)
    options = ("translate", "-m", annotating, "--glossary", tmp_path / "terms")
    assert counted(call(*options, text="a b\n").lines[0])[0] == 1
