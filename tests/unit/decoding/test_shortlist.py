"""Searching among the words that a lexicon gives, and sampling."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from econmt.data.text.vocabulary import BOS, EOS, PAD, UNK, Vocabularies
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import Hypothesis, SearchOptions
from econmt.decoding.search.sampling import draw, sample, uniform_numbers
from econmt.decoding.search.shortlist import Shortlists
from econmt.decoding.translator import Translator
from econmt.model import IncrementalModel
from tests.unit.decoding.test_real_model import make_model
from tests.unit.decoding.test_translator import Letters
from tests.unit.decoding.toy import ToyModel, sources

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
    listed[PAD] = SIZE - 1
    shortlists = Shortlists(listed, SIZE, 2, joint)
    together = list(translator(shortlists).translate(LINES))
    for line, found in zip(LINES, together, strict=True):
        (alone,) = translator(shortlists).translate([line])
        assert found.tokens == alone.tokens
        assert found.score == pytest.approx(alone.score, abs=1e-6)
        own = [*Few().encode(line), EOS]
        known = {int(word) for ids in (own, [BOS]) for word in listed[ids, :2].flatten()}
        assert {*found.hypotheses[0].ids} <= known | {0, 1, 2, 3} | ({*own} if joint else set())
    padded = torch.tensor([[4, EOS, PAD], [5, 6, EOS]])
    assert torch.equal(shortlists.allowed(padded, [])[:1], shortlists.allowed(padded[:1, :2], []))


def test_probabilities_are_those_over_the_listed_words_and_what_is_wished_is_listed() -> None:
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
    shortlists = Shortlists(table(2), SIZE, 2, joint=False)
    request = Request("abc", constraints=("qrs",), target_prefix="po")
    one, plain = translator(shortlists).translate([request, "abc"])
    assert one.text.startswith("po")
    assert "qrs" in one.text
    (alone,) = translator(shortlists).translate(["abc"])
    assert plain.text == alone.text
    same = torch.full((2, 1), 4)
    others = (~shortlists.allowed(same, [[], []])[0]).nonzero()[:2, 0].tolist()
    allowed = shortlists.allowed(same, [others[:1], others[1:]])
    assert allowed[:, others].tolist() == [[True, False], [False, True]], "each its own"


def drawn(
    model: ToyModel, sentences: list[int], numbers: list[int] | None = None, **options: float
) -> list[list[Hypothesis]]:
    source, lengths = sources(*sentences)
    settings = SearchOptions(**{"sample": 0, **options})  # type: ignore[arg-type]
    return sample(model, source, lengths, torch.full_like(lengths, 3), settings, numbers or sentences)


def all_ids(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.ids for hypothesis in hypotheses] for hypotheses in found]


@pytest.mark.slow
def test_translations_come_as_often_as_they_are_probable() -> None:
    model, count = ToyModel(5), 20_000
    (found,) = drawn(model, [1], nbest_size=count)
    counted = Counter(tuple(hypothesis.ids) for hypothesis in found)
    # PAD and BOS are never drawn, so their share goes to the other tokens of the same step: the expected frequency is
    # the product of the steps' own shares. After three tokens EOS is certain.
    for ids, often in counted.most_common(12):
        prefix, expected = 0, 1.0
        for before, token in zip((2, *ids), (*ids, EOS), strict=True):
            prefix = prefix * 7 + before + 1
            shares = model.table(1, prefix).exp()
            shares[[0, 2]] = 0.0
            expected *= float(shares[token] / shares.sum())
        if len(ids) == 3:
            expected /= float(shares[EOS] / shares.sum())
        error = math.sqrt(expected * (1 - expected) / count)
        assert often / count == pytest.approx(expected, abs=4.5 * error)


def test_log_probabilities_and_draws_depend_on_the_sentence() -> None:
    model = ToyModel(2)
    changed = {"min_output_length": 2, "ban_unk": True, "repetition_penalty": 2.0}
    for options in ({}, {"temperature": 3.0}, {"sample": 2}, changed):
        (found,) = drawn(model, [0], nbest_size=20, **options)
        for hypothesis in found:
            assert options != changed or (len(hypothesis.ids) >= 2 and UNK not in hypothesis.ids)
            expected = model.log_probability(0, tuple(hypothesis.ids))
            assert hypothesis.log_probability == pytest.approx(expected, abs=1e-5)
            assert hypothesis.score == pytest.approx(expected / (len(hypothesis.ids) + 1), abs=1e-5)
    for found in drawn(ToyModel(1, end_bias=5.0), [0, 1, 2], nbest_size=3, min_output_length=6):
        assert [(len(each.ids), each.cut) for each in found] == [(6, True)] * 3
    together = all_ids(drawn(ToyModel(), [0, 1, 2], [10, 11, 12], nbest_size=6))
    assert all_ids(drawn(ToyModel(), [1], [11], nbest_size=6)) == [together[1]]
    assert all_ids(drawn(ToyModel(), [1], [99], nbest_size=6)) != [together[1]]
    # Two sentences that are alike, in one batch, do not share their luck.
    same = all_ids(drawn(ToyModel(), [1, 1], [11, 13], nbest_size=6))
    assert same[0] != same[1]


@pytest.mark.parametrize("top", [0, 2, 9])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 100.0])
@pytest.mark.parametrize("share", [0.4, 0.41, 0.6, 0.7, 0.8, 1.0])
def test_tokens_are_drawn_as_often_as_they_are_probable(top: int, temperature: float, share: float) -> None:
    """The most probable ones alone, and of these the fewest whose sharpened probabilities reach the share."""
    log_probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()
    ranked = log_probs.argsort(descending=True)[: top or None]
    probabilities = (log_probs[ranked].double() / temperature).softmax(0)
    kept = probabilities.cumsum(0) - probabilities < share
    expected = torch.zeros(5, dtype=torch.float64)
    expected[ranked[kept]] = probabilities[kept] / probabilities[kept].sum()
    tokens = draw(log_probs.expand(2000, 5), uniform_numbers(1, 1, 2000, 1)[0], top, temperature, share)
    assert {*tokens.tolist()} <= {*ranked[kept].tolist()}
    torch.testing.assert_close(
        torch.bincount(tokens, minlength=5) / 2000, expected.float(), atol=0.04, rtol=0.0
    )


def test_uniform_numbers_and_tokens_without_probability() -> None:
    log_probs = torch.tensor([[-torch.inf, math.log(0.5), -torch.inf, math.log(0.5), -torch.inf]]).repeat(
        3, 1
    )
    edges = torch.tensor([0.0, 0.5, 1.0 - 2.0**-24], dtype=torch.float64)
    assert draw(log_probs, edges, 0, 1.0).tolist() == [1, 3, 3]
    numbers = uniform_numbers(7, 3, 50, 200)
    assert numbers.shape == (200, 50)
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.02)
    # A longer limit, as another batch may have, leaves the earlier positions as they are.
    torch.testing.assert_close(uniform_numbers(7, 3, 50, 300)[:200], numbers, rtol=0, atol=0)
