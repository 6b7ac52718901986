"""Searching among the words that a lexicon gives."""

from __future__ import annotations

import pytest
import torch

from econmt.data.text.vocabulary import BOS, EOS, Vocabularies
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.shortlist import Shortlists
from econmt.decoding.translator import Translator
from econmt.model import IncrementalModel
from tests.unit.decoding.test_real_model import make_model
from tests.unit.decoding.test_translator import Letters

SIZE = 23
LINES = ["abc", "h", "rsqabs", "fa", "ddde"]


class Few(Letters):
    size = SIZE


def translator(shortlists: Shortlists | None, models: int = 1, **given: object) -> Translator:
    options = SearchOptions(**{"beam_size": 3, "batch_size": 3, **given})  # type: ignore[arg-type]
    vocabularies = Vocabularies(Few(), Few())
    made = [IncrementalModel(make_model("additive", seed)) for seed in range(1, models + 1)]
    return Translator(made, vocabularies, options, shortlists=shortlists)


@pytest.mark.parametrize("given", [{}, {"sample": 0, "seed": 3}], ids=["search", "sample"])
def test_batches_in_bfloat16_have_lists_of_other_lengths(given: dict[str, object]) -> None:
    options = SearchOptions(**{"beam_size": 3, "batch_size": 2, **given})  # type: ignore[arg-type]
    model = IncrementalModel(make_model("additive", 1), torch.bfloat16)
    listed = Shortlists(table(2), SIZE, 2, joint=False)
    both = Translator([model], Vocabularies(Few(), Few()), options, shortlists=listed)
    lines = ["abcdefgh", "h", "rsqabs", "fa", "d", "d"]
    assert len(list(both.translate(lines))) == len(lines)


def table(width: int, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.stack([torch.randperm(SIZE)[:width] for _ in range(SIZE)]).int()


def everything() -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.int32).repeat(SIZE, 1)


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("given", [{}, {"sample": 0, "nbest_size": 2, "seed": 3}, {"block_ngram_repeat": 2}])
def test_a_lexicon_of_all_words_changes_nothing(models: int, given: dict[str, object]) -> None:
    shortlists = Shortlists(everything(), SIZE, SIZE, joint=False)
    found = list(translator(shortlists, models, **given).translate(LINES))
    for one, other in zip(found, translator(None, models, **given).translate(LINES), strict=True):
        assert one.tokens == other.tokens
        assert one.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.parametrize("joint", [False, True])
def test_only_listed_words_are_written_whatever_the_batch_holds(joint: bool) -> None:
    listed = table(3)
    shortlists = Shortlists(listed, SIZE, 2, joint)
    together = list(translator(shortlists).translate(LINES))
    for line, found in zip(LINES, together, strict=True):
        (alone,) = translator(shortlists).translate([line])
        assert found.tokens == alone.tokens
        assert found.score == pytest.approx(alone.score, abs=1e-6)
        own = [*Few().encode(line), EOS]
        known = {int(word) for ids in (own, [BOS]) for word in listed[ids, :2].flatten()}
        assert {*found.hypotheses[0].ids} <= known | {0, 1, 2, 3} | ({*own} if joint else set())
    assert {len(set(found.tokens)) for found in together} != {0}


def test_probabilities_are_those_over_the_listed_words() -> None:
    model = make_model("additive")
    listed = table(4)
    (found,) = translator(Shortlists(listed, SIZE, 4, joint=False)).translate(["abc"])
    ids = found.hypotheses[0].ids
    source = torch.tensor([[4, 5, 6, EOS]])
    allowed = torch.zeros(SIZE, dtype=torch.bool)
    allowed[torch.cat([listed[[4, 5, 6, EOS, BOS]].flatten().long(), torch.arange(4)])] = True
    with torch.no_grad():
        hidden = model(source, torch.tensor([4]), torch.tensor([[BOS, *ids]]))
        logits = hidden[0] @ model.output.weight.T + model.output.bias
    each = logits.masked_fill(~allowed, -torch.inf).log_softmax(1)
    expected = each[torch.arange(len(ids) + 1), [*ids, EOS]].sum()
    assert found.log_probability == pytest.approx(float(expected), abs=1e-4)


def test_what_is_wished_is_listed() -> None:
    shortlists = Shortlists(table(2), SIZE, 2, joint=False)
    request = Request("abc", constraints=("qrs",), target_prefix="po")
    one, plain = translator(shortlists).translate([request, "abc"])
    assert one.text.startswith("po")
    assert "qrs" in one.text
    (alone,) = translator(shortlists).translate(["abc"])
    assert plain.text == alone.text
