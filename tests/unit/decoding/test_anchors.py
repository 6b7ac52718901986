"""Terms that begin where the attention is on the words that they translate."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from econmt.data.text.annotation import Annotation
from econmt.data.text.vocabulary import EOS
from econmt.decoding.constraints.batch import ConstrainedContinuations, DecodingConstraints
from econmt.decoding.constraints.inclusion import Phrase
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.ensemble import Ensemble
from econmt.decoding.terms import TokenOwners, _attention_weights
from tests.unit.decoding.toy import ToyModel, ToyState

TERM = Phrase((8, 9), False)
WORDS = 4
JOINS = torch.zeros(16, dtype=torch.bool)


def test_attention_over_an_annotated_source_is_divided_among_the_characters_that_it_stands_for() -> None:
    """A token of two characters of the first word and one of a term of two words, a blank, and the second word."""
    annotation = Annotation("ab<>c", [(0, 1), (0, 1), (2, 5), (2, 5), (4, 5)], [])
    annotated, sentence = TokenOwners([0, 0, 0, -1, 2], 3), TokenOwners([0, -1, 1, -1, 2], 3)
    expected = torch.tensor([[4, 1, 1, 0], [0, 0, 6, 0], [0, 0, 6, 0], [0, 0, 0, 6]]) / 6.0
    torch.testing.assert_close(_attention_weights(annotation, annotated, sentence), expected)


class Aligned(ToyModel):
    """Translates word n of the source by token 10 + n, in order, and attends to it with ``sure``, or to ``seen[n]``.

    Token 9 continues 8, and both together translate a word; 8 is as improbable as all other tokens.
    """

    size = 16

    def __init__(self, sure: float = 0.9, seen: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self.sure, self.seen = sure, seen or {}

    def written(self, prefix: int) -> list[int]:
        """Returns the tokens of a prefix's number, without BOS."""
        tokens = list[int]()
        while prefix:
            prefix, token = divmod(prefix, self.size + 1)
            tokens.append(token - 1)
        return tokens[::-1][1:]

    def word(self, prefix: int) -> int:
        """Returns the source word whose translation comes next; the last one after the end of the source."""
        written = self.written(prefix)
        done = len(written) - written.count(9)
        return min(done - (written[-1:] == [8]), WORDS)

    def table(self, sentence: int, prefix: int) -> Tensor:
        logits = torch.zeros(self.size)
        word = self.word(prefix)
        expected = 9 if self.written(prefix)[-1:] == [8] else EOS if word == WORDS else 10 + word
        logits[expected] = 12.0
        return logits.log_softmax(dim=0)

    def step(self, tokens: Tensor, state: ToyState) -> tuple[Tensor, Tensor, ToyState]:
        log_probs, _, after = super().step(tokens, state)
        attention = torch.full((len(tokens), state.positions), (1.0 - self.sure) / (state.positions - 1))
        for row, prefix in enumerate(after.prefixes.tolist()):
            word = self.word(prefix)
            attention[row, self.seen.get(word, word)] = self.sure
        return log_probs, attention, after


SOURCE = torch.tensor([[10, 11, 12, 13, EOS]]), torch.tensor([WORDS + 1])


def search(
    *terms: tuple[Phrase, tuple[int, ...]],
    model: ToyModel | Ensemble | None = None,
    limit: int = 12,
    **options: float,
) -> list[Hypothesis]:
    """Searches for the translation of a source of ``WORDS`` words with terms at source positions."""
    settings = SearchOptions(**options)  # type: ignore[arg-type]
    wanted = DecodingConstraints(tuple(term for term, _ in terms), spans=tuple(span for _, span in terms))
    chooser = ConstrainedContinuations([wanted], JOINS, settings)
    (found,) = beam_search(model or Aligned(), *SOURCE, torch.tensor([limit]), settings, chooser=chooser)
    return found


@pytest.mark.parametrize("beam_size", [1, 2, 3, 5, 10])
def test_a_term_stands_for_the_words_that_it_translates(beam_size: int) -> None:
    for word, expected in enumerate(([8, 9, 11, 12, 13], [10, 8, 9, 12, 13], [10, 11, 12, 8, 9])):
        place = word if word < 2 else 3
        assert search((TERM, (place,)), beam_size=beam_size)[0].ids == expected
    other = Phrase((14,), False)
    both = search((TERM, (2,)), (other, (0,)), beam_size=beam_size)[0].ids
    assert both == [14, 11, 8, 9, 13]


def test_without_anchors_a_term_may_stand_anywhere() -> None:
    assert search((TERM, ()), beam_size=1)[0].ids != [10, 8, 9, 12, 13]


@pytest.mark.parametrize("beam_size", [1, 5])
def test_a_term_that_is_in_the_source_twice_is_written_at_both_places(beam_size: int) -> None:
    assert search((TERM, (0,)), (TERM, (2,)), beam_size=beam_size)[0].ids == [8, 9, 11, 8, 9, 13]


@pytest.mark.parametrize("beam_size", [1, 5])
def test_a_term_that_is_never_attended_to_comes_last(beam_size: int) -> None:
    model = Aligned(seen={1: WORDS})
    assert search((TERM, (1,)), model=model, beam_size=beam_size)[0].ids == [10, 11, 12, 13, 8, 9]


def test_a_term_does_not_begin_with_less_than_half_of_the_attention() -> None:
    assert search((TERM, (1,)), model=Aligned(0.4), beam_size=1)[0].ids == [10, 11, 12, 13, 8, 9]
    assert search((TERM, (1,)), model=Aligned(0.6), beam_size=1)[0].ids == [10, 8, 9, 12, 13]


def test_a_word_that_is_translated_otherwise_is_not_translated_again() -> None:
    """The attention returns to word 1 at the end."""
    model = Aligned(0.95, seen={3: 1})
    for found in search((TERM, (1,)), model=model, beam_size=6, nbest_size=6, limit=8):
        assert found.ids[1:3] == [8, 9]


def test_the_longest_output_leaves_room_for_a_term() -> None:
    for found in search((TERM, (3,)), limit=3, beam_size=3, nbest_size=3):
        assert found.ids[:2] == [8, 9] or found.ids[1:] == [8, 9]


@pytest.mark.parametrize("beam_size", [1, 5])
def test_what_the_model_writes_by_itself_is_not_changed(beam_size: int) -> None:
    plain = beam_search(Aligned(), *SOURCE, torch.tensor([12]), SearchOptions(beam_size=beam_size))[0][0]
    found = search((Phrase((11, 12), False), (1, 2)), beam_size=beam_size)[0]
    assert found.ids == plain.ids == [10, 11, 12, 13]
    assert found.log_probability == pytest.approx(plain.log_probability, abs=1e-6)


def test_a_word_that_only_begins_like_a_term_does_not_count() -> None:
    """The model writes 11 12 by itself; the term 11 14 needs the attention on the same word."""
    assert search((Phrase((11, 14), False), (1,)), beam_size=5)[0].ids[:3] == [10, 11, 14]


def test_log_probabilities_are_those_of_the_model_and_scores_are_not() -> None:
    model = Aligned()
    found = search((TERM, (1,)), model=model, beam_size=5, length_penalty_alpha=1.0)[0]
    assert found.log_probability == pytest.approx(model.log_probability(0, tuple(found.ids)), abs=1e-4)
    given = float(model.table(0, 3 * 17 + 11)[8] + model.table(0, (3 * 17 + 11) * 17 + 9)[9])
    # The attention of the three other words and of the end, which is 0.1 over the other four positions.
    costs = 4 * 0.1 / 4
    rest = found.log_probability - given - costs
    # Six tokens with the end, and as many in a usual translation: five of the source, and one more of the term.
    assert found.score == pytest.approx(rest / 6 + given / 6, abs=1e-4)


def test_an_improbable_term_does_not_make_long_translations_better() -> None:
    """The cost of the term, shared by more tokens, would outweigh a second translation of the source."""
    found = search((TERM, (1,)), model=Aligned(0.6), limit=40, beam_size=8, nbest_size=8)
    assert found[0].ids == [10, 8, 9, 12, 13]
    assert len(found[0].ids) == min(len(each.ids) for each in found)


def test_ensembles_have_anchors() -> None:
    model = Ensemble([Aligned(), Aligned(0.7)], "linear")
    assert search((TERM, (1,)), model=model, beam_size=3)[0].ids == [10, 8, 9, 12, 13]
