"""Diverse beam search against the paper's algorithm, hypothesis by hypothesis."""

from __future__ import annotations

import pytest
import torch

from econmt.data.text.vocabulary import BOS, EOS, PAD, Vocabularies
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.diversity import Diversity
from econmt.decoding.translator import Translator
from econmt.errors import InputError
from tests.unit.decoding.test_alignment import WORDS
from tests.unit.decoding.test_translator import Copying
from tests.unit.decoding.toy import ToyModel, sources

LIMIT = 5


def diverse(model: ToyModel, sentences: list[int], options: SearchOptions) -> list[list[Hypothesis]]:
    source, lengths = sources(*sentences)
    limits = torch.tensor([LIMIT] * len(sentences))
    return beam_search(model, source, lengths, limits, options, chooser=Diversity(len(sentences), options))


def by_the_paper(
    model: ToyModel, sentence: int, groups: int, width: int, strength: float
) -> list[tuple[list[int], float]]:
    """All that ends, with its log-probability."""
    live: list[list[tuple[list[int], float, int]]] = [[([], 0.0, 0)] for _ in range(groups)]
    free = [width] * groups
    ended: list[tuple[list[int], float]] = []
    for position in range(LIMIT + 1):
        counts = [0] * model.size
        for group in range(groups):
            candidates = []
            for ids, total, prefix in live[group]:
                after = prefix * (model.size + 1) + (ids[-1] if ids else BOS) + 1
                table = model.table(sentence, after)
                for token in range(model.size):
                    if token in (PAD, BOS) or (position == LIMIT and token != EOS):
                        continue
                    value = total + float(table[token].double())
                    candidates.append((value - strength * counts[token], ids, value, after, token))
            candidates.sort(key=lambda each: -each[0])
            live[group] = []
            for _, ids, value, after, token in candidates[: free[group]]:
                counts[token] += 1
                if token == EOS:
                    ended.append((ids, value))
                    free[group] -= 1
                else:
                    live[group].append(([*ids, token], value, after))
    return ended


@pytest.mark.parametrize(
    ("groups", "width", "strength"), [(2, 1, 0.7), (3, 2, 0.4), (2, 3, 3.0), (4, 2, 0.0)]
)
def test_it_is_the_papers(groups: int, width: int, strength: float) -> None:
    model = ToyModel(3, end_bias=-0.5)
    options = SearchOptions(
        beam_size=groups * width,
        nbest_size=groups * width,
        beam_groups=groups,
        diversity_strength=strength,
    )
    sentences = [0, 1, 2, 5]
    for sentence, found in zip(sentences, diverse(model, sentences, options), strict=True):
        ended = by_the_paper(model, sentence, groups, width, strength)
        expected = sorted(ended, key=lambda each: -each[1] / (len(each[0]) + 1))
        assert sorted(each.ids for each in found) == sorted(ids for ids, _ in expected[: len(found)])
        assert [each.log_probability for each in found] == pytest.approx(
            [total for _, total in expected[: len(found)]], abs=1e-5
        )
        assert len(found) == groups * width


def test_a_sentence_does_not_depend_on_the_others() -> None:
    model = ToyModel(1, end_bias=1.0)
    options = SearchOptions(beam_size=6, nbest_size=3, beam_groups=3)
    together = diverse(model, list(range(9)), options)
    for sentence in range(9):
        (alone,) = diverse(model, [sentence], options)
        assert [each.ids for each in alone] == [each.ids for each in together[sentence]]
        assert alone[0].attention is not None


def test_strength_makes_the_first_words_differ() -> None:
    model = ToyModel(7, spread=3.0)
    options = SearchOptions(beam_size=3, nbest_size=3, beam_groups=3, diversity_strength=50.0)
    for found in diverse(model, [0, 1, 2], options):
        assert len({(*each.ids, EOS)[0] for each in found}) == 3


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="beam_groups 2 must divide beam_size 5"):
        SearchOptions(beam_size=5, beam_groups=2)
    for other in ({"sample": 0}, {"block_ngram_repeat": 2}):
        with pytest.raises(
            ValueError, match=f"beam_groups cannot be combined with {next(iter(other))}; remove"
        ):
            SearchOptions(beam_size=4, beam_groups=2, **other)
    options = SearchOptions(beam_size=4, beam_groups=2)
    with pytest.raises(InputError, match="beam_groups cannot be combined with avoided phrases"):
        Translator([Copying()], Vocabularies(WORDS, WORDS), options.changed(avoid=("ein",)))
    made = Translator([Copying()], Vocabularies(WORDS, WORDS), options)
    assert next(made.translate(["ein Hund"])).text == "ein Hund"
    with pytest.raises(InputError, match="input:2: beam_groups cannot be combined with constraints"):
        list(made.translate(["ein", Request("ein Hund", constraints=["Hund"])]))
