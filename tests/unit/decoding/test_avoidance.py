"""Phrases that are avoided or begin where the attention is, against the text that tokens make."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from econmt.data.text.annotation import Annotation
from econmt.data.text.glossary import units
from econmt.data.text.vocabulary import EOS, SPECIAL_TOKENS, UNK, WORD_START, Vocabulary, WordVocabulary
from econmt.decoding.constraints.avoidance import START, Avoidance
from econmt.decoding.constraints.batch import ConstrainedContinuations, DecodingConstraints
from econmt.decoding.constraints.inclusion import Phrase
from econmt.decoding.constraints.phrases import Spelling, is_of_word
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.ensemble import Ensemble
from econmt.decoding.terms import TokenOwners, _attention_weights
from tests.unit.decoding.toy import ToyModel, ToyState, search


class Pieces(Vocabulary):
    """A vocabulary of given subwords."""

    of_pieces = True

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = [*SPECIAL_TOKENS, *pieces]
        self.size = len(self._pieces)

    def encode(self, text: str) -> list[int]:
        raise AssertionError

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        raise AssertionError

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.tokens(ids)).replace(WORD_START, " ")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._pieces[i] for i in ids]


PIECES = [f"{WORD_START}{word}" for word in ("", "a", "ab", "b", "c", "(", "(a", "狗")] + [
    *("a", "b", "c", "ab", "abc", ")", ".", "a.", ".b", "狗", "猫", "狗猫")
]
VOCABULARY = Pieces(PIECES)


def occurs(text: str, phrase: str) -> bool:
    """Whether a phrase is in a text, its first and last words not parts of longer ones."""
    before = "(?<![abc])" if is_of_word(phrase[0]) else ""
    after = "(?![abc])" if is_of_word(phrase[-1]) else ""
    return re.search(before + re.escape(phrase) + after, text) is not None


def is_ruled_out(avoidance: Avoidance, joins: Sequence[bool], ids: Sequence[int]) -> bool:
    """Whether a search would have let these tokens pass, the end behind them."""
    reached = START
    for token in ids:
        moves = avoidance.moves(reached)
        if token in moves.masked or (moves.only_joining and not joins[token]):
            return True
        reached = avoidance.after(reached, token)
        assert avoidance.moves(reached).only_joining == (token in moves.risky)
    return avoidance.moves(reached).only_joining


@pytest.mark.parametrize(
    "phrases", [["a"], ["ab"], ["a b"], ["."], ["狗"], ["狗猫"], ["a", "ab c"], ["(a"], ["b)"], ["a  b"]]
)
def test_what_is_ruled_out_is_what_would_write_a_phrase(phrases: list[str]) -> None:
    spelling = Spelling(VOCABULARY)
    avoidance, joins = Avoidance(phrases, spelling), spelling.joins.tolist()
    draw = random.Random(len(phrases[0]))
    seen = {True: 0, False: 0}
    for _ in range(1500):
        ids = [draw.randrange(4, VOCABULARY.size) for _ in range(draw.randint(1, 4))]
        wrong = any(occurs(VOCABULARY.decode(ids), phrase.replace("  ", " ")) for phrase in phrases)
        assert is_ruled_out(avoidance, joins, ids) == wrong, VOCABULARY.tokens(ids)
        seen[wrong] += 1
    assert min(seen.values()) > 10


def test_words_are_ruled_out_at_once_and_no_n_gram_comes_twice() -> None:
    avoidance = Avoidance(["b a"], Spelling(WordVocabulary([*SPECIAL_TOKENS, "a", "b", "ab"])))
    reached = avoidance.after(START, 5)
    assert avoidance.moves(reached).masked.tolist() == [4]
    assert avoidance.moves(reached).risky.tolist() == []
    assert avoidance.moves(avoidance.after(START, 6)).masked.tolist() == []
    for width in (1, 2, 3):
        model, free = ToyModel(1, end_bias=-4.0), [DecodingConstraints()] * 4
        options = {"nbest_size": 3, "block_ngram_repeat": width}
        found = search(model, range(4), 12, constraints=free, beam_size=3, **options)
        for hypotheses in found:
            assert hypotheses
            assert not any(repeats(hypothesis.ids, width) for hypothesis in hypotheses)
        plain = search(model, range(4), 12, beam_size=3)
        assert any(repeats(hypotheses[0].ids, width) for hypotheses in plain)


@pytest.mark.parametrize("vocabulary", [WordVocabulary([*SPECIAL_TOKENS, "a", "b"]), VOCABULARY])
def test_the_token_of_unknown_words_can_be_avoided(vocabulary: WordVocabulary | Pieces) -> None:
    avoidance = Avoidance(["<unk>", "a b"], Spelling(vocabulary))
    reached = START
    for token in (4, 5, 4):
        assert UNK in avoidance.moves(reached).masked.tolist()
        reached = avoidance.after(reached, token)
    assert UNK in avoidance.moves(reached).masked.tolist()
    assert avoidance.is_in([5, UNK])
    assert not avoidance.is_in([5])
    assert UNK not in Avoidance(["a b"], Spelling(vocabulary)).moves(START).masked.tolist()


def test_units_are_words_and_signs_and_hypotheses_that_need_a_word_to_go_on_do_not_fill_the_beam() -> None:
    assert units("Ein  Hund-Haus, 12%") == ["Ein", "Hund", "-", "Haus", ",", "12", "%"]
    assert units("我是Kim。") == ["我", "是", "Kim", "。"]

    class Alike(ToyModel):
        """The avoided word is by far the most probable one, and hardly ever goes on."""

        def table(self, sentence: int, prefix: int) -> torch.Tensor:
            logits = torch.tensor([0.0, 0.0, 0.0, 2.0, 5.0, -9.0, 3.0])
            return logits.log_softmax(dim=0)

        size = 7

    spelling = Spelling(Pieces([f"{WORD_START}a", "b", f"{WORD_START}c"]))
    for beam_size in (1, 2, 4):
        options = {"joins": spelling.joins, "beam_size": beam_size}
        constraints = [DecodingConstraints(avoidances=(Avoidance(["a"], spelling),))]
        ((found,),) = search(Alike(), [0], 6, constraints=constraints, **options)
        assert set(found.ids) <= {6}, found.ids


@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_an_avoided_word_is_not_begun_where_constraints_leave_it_no_room_to_go_on(beam_size: int) -> None:
    vocabulary = Pieces([f"{WORD_START}a", "b", f"{WORD_START}c"])
    spelling = Spelling(vocabulary)
    options = {"joins": spelling.joins, "beam_size": beam_size, "nbest_size": beam_size}
    for seed in range(12):
        model = ToyModel(seed, end_bias=-3.0)
        model.size = vocabulary.size
        constraints = DecodingConstraints((Phrase((6, 6), True),), avoidances=(Avoidance(["a"], spelling),))
        (found,) = search(model, [0], constraints=[constraints], **options)
        for hypothesis in found:
            text = vocabulary.decode(hypothesis.ids)
            assert "c c" in text
            assert not occurs(text.replace("<unk>", " "), "a"), text


@pytest.mark.parametrize(("prefix", "expected"), [((), [[5]]), ((6,), [[6, 4, 5]])])
def test_an_avoided_phrase_is_written_only_if_no_translation_has_ended(
    prefix: tuple[int, ...], expected: list[list[int]]
) -> None:
    """The sentence must have a "b": it begins with one, or with "c a", behind which all words are avoided."""

    class Model(ToyModel):
        size = 7

        def table(self, sentence: int, prefix: int) -> torch.Tensor:
            best = {5: EOS, 6: 4}.get(prefix % 8 - 1, 5)
            logits = torch.tensor([-9.0, -9.0, -9.0, -3.0, -4.0, -3.0, -2.0])
            return logits.index_fill(0, torch.tensor(best), -0.1)

    spelling = Spelling(WordVocabulary([*SPECIAL_TOKENS, "a", "b", "c"]))
    pairs = Avoidance(["a a", "a b", "a c", "c b", "c c", "<unk>"], spelling)
    wish = DecodingConstraints((Phrase((5,), False),), prefix, (pairs,))
    options = {"joins": spelling.joins, "beam_size": 2, "nbest_size": 2}
    (found,) = search(Model(), [0], 6, constraints=[wish], **options)
    assert [hypothesis.ids for hypothesis in found] == expected


def repeats(ids: Sequence[int], width: int) -> bool:
    """Whether an n-gram comes twice."""
    grams = [tuple(ids[at : at + width]) for at in range(len(ids) - width + 1)]
    return len(grams) > len(set(grams))


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


def anchored(
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
        assert anchored((TERM, (place,)), beam_size=beam_size)[0].ids == expected
    other = Phrase((14,), False)
    assert anchored((TERM, (2,)), (other, (0,)), beam_size=beam_size)[0].ids == [14, 11, 8, 9, 13]
    assert anchored((TERM, (0,)), (TERM, (2,)), beam_size=beam_size)[0].ids == [8, 9, 11, 8, 9, 13]
    unseen = anchored((TERM, (1,)), model=Aligned(seen={1: WORDS}), beam_size=beam_size)[0].ids
    assert unseen == [10, 11, 12, 13, 8, 9]
    assert beam_size > 1 or anchored((TERM, ()), beam_size=1)[0].ids != [10, 8, 9, 12, 13], "without a place"


def test_a_term_does_not_begin_with_less_than_half_of_the_attention() -> None:
    assert anchored((TERM, (1,)), model=Aligned(0.4), beam_size=1)[0].ids == [10, 11, 12, 13, 8, 9]
    for half in (0.5, 0.6):
        assert anchored((TERM, (1,)), model=Aligned(half), beam_size=1)[0].ids == [10, 8, 9, 12, 13]


def test_a_word_that_is_translated_otherwise_is_not_translated_again() -> None:
    """The attention returns to word 1 at the end."""
    model = Aligned(0.95, seen={3: 1})
    for found in anchored((TERM, (1,)), model=model, beam_size=6, nbest_size=6, limit=8):
        assert found.ids[1:3] == [8, 9]


def test_the_longest_output_leaves_room_for_a_term() -> None:
    for found in anchored((TERM, (3,)), limit=3, beam_size=3, nbest_size=3):
        assert found.ids[:2] == [8, 9] or found.ids[1:] == [8, 9]


def test_log_probabilities_are_those_of_the_model_and_scores_are_not() -> None:
    model = Aligned()
    found = anchored((TERM, (1,)), model=model, beam_size=5, length_penalty_alpha=1.0)[0]
    assert found.log_probability == pytest.approx(model.log_probability(0, tuple(found.ids)), abs=1e-4)
    given = float(model.table(0, 3 * 17 + 11)[8] + model.table(0, (3 * 17 + 11) * 17 + 9)[9])
    # The attention of the three other words and of the end, which is 0.1 over the other four positions.
    costs = 4 * 0.1 / 4
    rest = found.log_probability - given - costs
    # Six tokens with the end, and as many in a usual translation: five of the source, and one more of the term.
    assert found.score == pytest.approx(rest / 6 + given / 6, abs=1e-4)


@pytest.mark.parametrize("beam_size", [1, 5])
def test_what_the_model_writes_by_itself_is_not_changed(beam_size: int) -> None:
    plain = beam_search(Aligned(), *SOURCE, torch.tensor([12]), SearchOptions(beam_size=beam_size))[0][0]
    found = anchored((Phrase((11, 12), False), (1, 2)), beam_size=beam_size)[0]
    assert found.ids == plain.ids == [10, 11, 12, 13]
    assert found.log_probability == pytest.approx(plain.log_probability, abs=1e-6)


def test_a_word_that_only_begins_like_a_term_does_not_count() -> None:
    """The model writes 11 12 by itself; the term 11 14 needs the attention on the same word."""
    assert anchored((Phrase((11, 14), False), (1,)), beam_size=5)[0].ids[:3] == [10, 11, 14]


def test_improbable_terms_and_anchors_of_ensembles() -> None:
    """The cost of the term, shared by more tokens, would outweigh a second translation of the source."""
    found = anchored((TERM, (1,)), model=Aligned(0.6), limit=40, beam_size=8, nbest_size=8)
    assert found[0].ids == [10, 8, 9, 12, 13]
    assert len(found[0].ids) == min(len(each.ids) for each in found)
    model = Ensemble([Aligned(), Aligned(0.7)], "linear")
    assert anchored((TERM, (1,)), model=model, beam_size=3)[0].ids == [10, 8, 9, 12, 13]
