"""Shallow fusion with a language model, by trying all translations of a toy model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from econmt.config.recipe import LanguageModelSection
from econmt.data.text.vocabulary import EOS
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.fusion import ShallowFusion
from econmt.decoding.search.sampling import sample
from econmt.model.language_model import LanguageModel
from tests.unit.decoding.toy import WORDS, ToyModel, sources

LIMIT, WEIGHT = 4, 0.8
SENTENCES = (0, 1, 2)
MODEL = ToyModel(4, end_bias=1.0)


def fusion_of(cell: str = "lstm") -> ShallowFusion:
    torch.manual_seed(5)
    values = {"embedding": 3, "size": [5, 3], "layers": 2, "cell": cell}
    model = LanguageModel(LanguageModelSection.model_validate(values), ToyModel.size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-2.0, 2.0)
    return ShallowFusion(model, WEIGHT, torch.float32)


FUSION = fusion_of()


def search(
    *sentences: int, model: ToyModel = MODEL, fusion: ShallowFusion = FUSION, **options: Any
) -> list[list[Hypothesis]]:
    limits = torch.full((len(sentences),), LIMIT)
    settings = SearchOptions(attention=False, lm_weight=WEIGHT, **options)
    return beam_search(model, *sources(*sentences), limits, settings, fusion=fusion)


def of_language_model(ids: tuple[int, ...], fusion: ShallowFusion = FUSION) -> list[float]:
    """Returns the log-probabilities of the tokens and EOS, read as a line at the beginning of a text."""
    inputs = torch.tensor([[EOS, *ids]])
    with torch.no_grad():
        log_probs = fusion.model.log_probabilities(fusion.model(inputs)[0][0])
    return log_probs[torch.arange(len(ids) + 1), torch.tensor([*ids, EOS])].tolist()


def judged(sentence: int, ids: tuple[int, ...], repeats: float = 1.0) -> tuple[float, float]:
    """Returns a translation's score and log-probability by definition."""
    prefix, before, real, changed = 0, 2, 0.0, 0.0
    added = of_language_model(ids)
    for position, token in enumerate((*ids, EOS)):
        prefix = prefix * 7 + before + 1
        value = float(MODEL.table(sentence, prefix)[token])
        real += value
        changed += value * (repeats if token in ids[:position] else 1.0) + WEIGHT * added[position]
        before = token
    return changed / (len(ids) + 1), real


@pytest.mark.parametrize("repeats", [1.0, 1.6])
def test_a_wide_beam_finds_the_best_of_all_translations(repeats: float) -> None:
    everything = [ids for length in range(LIMIT + 1) for ids in product(WORDS, repeat=length)]
    found = search(*SENTENCES, beam_size=200, nbest_size=5, repetition_penalty=repeats)
    for sentence, hypotheses in zip(SENTENCES, found, strict=True):
        best = sorted(((*judged(sentence, ids, repeats), list(ids)) for ids in everything), reverse=True)[:5]
        assert [each.ids for each in hypotheses] == [ids for *_, ids in best]
        assert [each.score for each in hypotheses] == pytest.approx([each[0] for each in best], abs=1e-5)
        reals = [each.log_probability for each in hypotheses]
        assert reals == pytest.approx([each[1] for each in best], abs=1e-5)
    without = beam_search(
        MODEL,
        *sources(*SENTENCES),
        torch.full((3,), LIMIT),
        SearchOptions(attention=False, beam_size=200, nbest_size=5, repetition_penalty=repeats),
    )
    assert [each[0].ids for each in without] != [each[0].ids for each in found]


def greedy(sentence: int) -> list[int]:
    """Returns the translation whose every token is the best one after the tokens before it."""
    ids: tuple[int, ...] = ()
    prefix, before = 0, 2
    while len(ids) < LIMIT:
        prefix = prefix * 7 + before + 1
        inputs = torch.tensor([[EOS, *ids]])
        with torch.no_grad():
            added = FUSION.model.log_probabilities(FUSION.model(inputs)[0][0])[-1]
        values = MODEL.table(sentence, prefix) + WEIGHT * added
        before = max((*WORDS, EOS), key=lambda token: float(values[token]))
        if before == EOS:
            break
        ids = (*ids, before)
    return list(ids)


def test_a_beam_of_one_is_greedy_and_so_are_draws_from_one_token() -> None:
    expected = [greedy(sentence) for sentence in SENTENCES]
    assert [each[0].ids for each in search(*SENTENCES, beam_size=1)] == expected
    options = SearchOptions(attention=False, lm_weight=WEIGHT, sample=1)
    limits = torch.full((3,), LIMIT)
    drawn = sample(MODEL, *sources(*SENTENCES), limits, options, [1, 2, 3], FUSION)
    assert [each[0].ids for each in drawn] == expected
    for sentence, (each,) in zip(SENTENCES, drawn, strict=True):
        assert each.log_probability == pytest.approx(judged(sentence, tuple(each.ids))[1], abs=1e-5)


@pytest.mark.parametrize("cell", ["lstm", "qrnn2"])
def test_results_do_not_depend_on_the_batch(cell: str) -> None:
    options: dict[str, Any] = {"beam_size": 4, "nbest_size": 2}
    fusion, sentences = fusion_of(cell), (*SENTENCES, 5, 7, 3)
    together = search(*sentences, fusion=fusion, **options)
    for sentence, best in zip(sentences, together, strict=True):
        (alone,) = search(sentence, fusion=fusion, **options)
        assert [each.ids for each in alone] == [each.ids for each in best]
        assert [each.score for each in alone] == pytest.approx([each.score for each in best], abs=1e-5)
