"""Constraints against all translations, tried one by one, and against every way to find phrases in one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch

from econmt.data.text.vocabulary import EOS, UNK
from econmt.decoding.batches import pad_sources
from econmt.decoding.constraints.avoidance import Moves
from econmt.decoding.constraints.batch import ConstrainedContinuations, DecodingConstraints
from econmt.decoding.constraints.inclusion import MOST_READINGS, Automata, Phrase, Phrases, share_out
from econmt.decoding.search.beam import SearchOptions, beam_search
from econmt.model import IncrementalModel
from tests.unit.decoding.test_real_model import DEVICES, SIZE, SOURCES, make_model, teacher_forced
from tests.unit.decoding.toy import JOINS, ToyModel, everything, search


def holds(ids: Sequence[int], phrases: Sequence[Phrase]) -> bool:
    """Whether all phrases have places of their own."""
    if not phrases:
        return True
    first, *rest = phrases
    size = len(first.ids)
    for at in range(len(ids) - size + 1):
        follows = ids[at + size : at + size + 1]
        goes_on = first.ends_word and follows and follows[0] >= 0 and bool(JOINS[follows[0]])
        if tuple(ids[at : at + size]) == first.ids and not goes_on:
            # What is taken is no token any more, and no letter goes on across it.
            gone = [-9 - JOINS[token].item() for token in ids[at : at + size]]
            left = [*ids[:at], *gone, *ids[at + size :]]
            if holds(left, rest):
                return True
    return False


def constraints(
    *phrases: Sequence[int], prefix: Sequence[int] = (), ends_word: bool = False
) -> DecodingConstraints:
    return DecodingConstraints(tuple(Phrase(tuple(ids), ends_word) for ids in phrases), tuple(prefix))


def random_wishes(seed: int, count: int) -> list[DecodingConstraints]:
    """In every other one words end, and as vocabularies have it no phrase begins within a word then."""
    draw = random.Random(seed)

    def phrase(ends: bool) -> Phrase:
        first = draw.choice((UNK, 4) if ends else (UNK, 4, 5))
        rest = [draw.choice((UNK, 4, 5)) for _ in range(draw.randint(0, 2))]
        return Phrase((first, *rest), ends and (first, *rest)[-1] != UNK)

    def a_wish(ends: bool) -> DecodingConstraints:
        prefix = phrase(False).ids if draw.random() < 0.3 else ()
        return DecodingConstraints(tuple(phrase(ends) for _ in range(draw.randint(0, 5))), prefix)

    return [a_wish(bool(number % 2)) for number in range(count)]


@pytest.mark.parametrize("beam_size", [1, 2, 5])
@pytest.mark.parametrize("limit", [0, 6, 14])
def test_everything_wished_is_there_however_small_the_beam_and_the_room(beam_size: int, limit: int) -> None:
    sentence_constraints = random_wishes(beam_size + limit, 16)
    model = ToyModel(beam_size, end_bias=2.0, spread=3.0)
    options = {"beam_size": beam_size, "nbest_size": beam_size}
    found = search(model, range(16), limit, constraints=sentence_constraints, **options)
    for sentence, (wished, hypotheses) in enumerate(zip(sentence_constraints, found, strict=True)):
        assert hypotheses
        room = max(limit, len(wished.prefix) + sum(len(phrase.ids) for phrase in wished.phrases))
        for hypothesis in hypotheses:
            assert holds(hypothesis.ids, wished.phrases), (wished, hypothesis.ids)
            assert tuple(hypothesis.ids[: len(wished.prefix)]) == wished.prefix
            assert len(hypothesis.ids) <= room
            assert hypothesis.log_probability == pytest.approx(
                model.log_probability(sentence, tuple(hypothesis.ids)), abs=1e-4
            )


@pytest.mark.parametrize("device", DEVICES)
def test_the_model_holds_what_is_wished_of_it(device: str) -> None:
    model = make_model("additive", device=device)
    phrases = (Phrase((4, 5), False), Phrase((9,), True))
    joins = torch.tensor([token > 15 for token in range(SIZE)])
    wished = [DecodingConstraints(phrases, prefix) for prefix in ((), (7,), (4, 9), (20, 4))]
    options = SearchOptions(beam_size=3, nbest_size=3, block_ngram_repeat=2)
    source, lengths = pad_sources(SOURCES, torch.device(device))
    control = ConstrainedContinuations(wished, joins, options)
    found = beam_search(
        IncrementalModel(model), source, lengths, torch.tensor([9, 3, 7, 30]), options, chooser=control
    )
    for row, (each, hypotheses) in enumerate(zip(wished, found, strict=True)):
        for hypothesis in hypotheses:
            ids = hypothesis.ids
            assert tuple(ids[: len(each.prefix)]) == each.prefix
            assert (4, 5) in pairwise(ids)
            assert any(one == 9 and not joins[other] for one, other in pairwise([*ids, EOS]))
            log_probs = teacher_forced(model, SOURCES[row], ids)
            total = log_probs.gather(1, torch.tensor([*ids, EOS])[:, None]).sum()
            assert hypothesis.log_probability == pytest.approx(float(total), abs=1e-3)


def test_a_text_is_accepted_where_its_tokens_can_be_divided_among_the_phrases() -> None:
    """Phrases are repeated, begin one another and overlap; every text of up to six tokens is tried."""
    for wished in random_wishes(100, 25):
        sentence = Phrases(wished.phrases, JOINS.tolist())
        reached = {(): sentence.start}
        for ids in everything(6):
            if ids:
                reached[ids] = sentence.after(reached[ids[:-1]], ids[-1])
            accepted = sentence.remaining(reached[ids]) == 0
            assert accepted == holds(ids, wished.phrases), (wished.phrases, ids)


def test_what_remains_is_the_least_number_of_tokens() -> None:
    for wished in [*random_wishes(7, 20), constraints((4, 5), (4, 4)), constraints((4, 5), (5, 4), (4, 5))]:
        sentence = Phrases(wished.phrases, JOINS.tolist())
        for ids in everything(3):
            progress = sentence.start
            for token in ids:
                progress = sentence.after(progress, token)
            remaining = sentence.remaining(progress)
            if remaining <= 4:
                least = min(
                    len(rest) for rest in everything(remaining) if holds((*ids, *rest), wished.phrases)
                )
                assert remaining == least, (wished.phrases, ids)


def test_phrases_that_overlap_and_tables_of_the_automaton() -> None:
    pairs = [(4 + 2 * number, 5 + 2 * number) for number in range(40)]
    phrases = [Phrase(ids, False) for pair in pairs for ids in (pair, pair[::-1])]
    sentence = Phrases(phrases, [False] * 90)
    progress = sentence.start
    for one, other in pairs:
        for token in (one, other, one, 3):
            progress = sentence.after(progress, token)
    assert len(progress) <= 2 * MOST_READINGS
    assert sentence.remaining(progress) == 80
    for one, other in pairs:
        for token in (one, other, one, other, 3):
            progress = sentence.after(progress, token)
    assert sentence.remaining(progress) == 0
    sentence_constraints = random_wishes(4, 5)
    sentences = [Phrases(each.phrases, JOINS.tolist()) for each in sentence_constraints]
    automata = Automata(sentences, JOINS)
    states, _ = automata.start([()] * 5)
    progress = [sentence.start for sentence in sentences]
    draw = random.Random(1)
    for _ in range(10):
        every = torch.tensor([[UNK, EOS, 4, 5]] * 5)
        found = automata.remaining(automata.after(states, torch.arange(5), every))
        for row, sentence in enumerate(sentences):
            after = [
                sentence.remaining(sentence.after(progress[row], token)) for token in every[row].tolist()
            ]
            assert found[row].tolist() == after
        tokens = [draw.choice((UNK, 4, 5)) for _ in range(5)]
        progress = [s.after(p, t) for s, p, t in zip(sentences, progress, tokens, strict=True)]
        states = automata.after(states, torch.arange(5), torch.tensor(tokens)[:, None])[:, 0]
        automata.expand(states)


def test_the_best_of_the_risky_tokens_is_offered_whichever_phrase_it_begins() -> None:
    control = ConstrainedContinuations([constraints()], JOINS, SearchOptions(beam_size=2))
    log_probs = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    numbers = partial(torch.tensor, dtype=torch.int64)
    moves = [
        (Moves({}, numbers([]), numbers(risky), False), numbers(rows))
        for risky, rows in (([1, 4], [0, 2]), ([5, 1], [2, 0]), ([], [1]), ([0], [2]))
    ]
    left = log_probs.clone()
    tokens, values = control._take_risky(left, moves)
    for row, risky in enumerate(([1, 4, 5], [], [0, 1, 4, 5])):
        offered = {token: log_probs[row, token].item() for token in risky}
        assert values[row].item() == max(offered.values(), default=-torch.inf)
        assert not risky or tokens[row].item() == max(offered, key=lambda token: offered[token])
        expected = log_probs[row].index_fill(0, torch.tensor(risky, dtype=torch.int64), -torch.inf)
        assert torch.equal(left[row], expected)


def test_rows_without_a_term_are_lost_where_others_have_all() -> None:
    """Two sentences of rows of which some are lost; one of a sentence that has ended counts as another."""
    wishes = [constraints((4,)), constraints((5,))]
    control = ConstrainedContinuations(wishes, JOINS, SearchOptions(beam_size=3))
    sentences = torch.tensor([0, 0, 1, 1])
    for lost, free, expected in (
        ((1, 0, 1, 1), (3, 3), (1, 0, 0, 0)),
        ((1, 0, 1, 1), (3, 2), (1, 0, 1, 1)),
        ((1, 1, 0, 1), (3, 2), (0, 0, 0, 1)),
    ):
        control._anchors.lost = lambda owners, lost=lost: torch.tensor(lost).bool()  # type: ignore[method-assign]
        assert control._lost(sentences, torch.tensor(free)).int().tolist() == list(expected)


def test_terms_may_begin_anywhere_where_a_row_would_end_or_has_no_room() -> None:
    """One sentence, whose rows lack two, one and one of its tokens."""
    control = ConstrainedContinuations([constraints((4,), (5,))], JOINS, SearchOptions(beam_size=4))
    control._states = torch.tensor([0, 1, 1])
    control._automata.remaining = lambda states: torch.tensor([2, 1, 1])  # type: ignore[method-assign]
    log_probs = torch.zeros(3, 6).index_fill(1, torch.tensor(5), 1.0)
    log_probs[:2, EOS] = 2.0
    for free, room, expected in (
        (4, (9, 9, 9), (0, 1, 0)),
        (3, (9, 9, 9), (0, 0, 0)),
        (4, (2, 1, 1), (1, 1, 1)),
        (4, (3, 2, 2), (0, 1, 0)),
        (3, (3, 2, 1), (0, 0, 1)),
    ):
        found = control._falls_back(
            log_probs, torch.zeros(3).long(), torch.tensor([free]), torch.tensor(room)
        )
        assert found.int().tolist() == list(expected)


def test_what_terms_cost_and_which_places_they_get() -> None:
    """Unless the translation is shorter than that."""
    control = ConstrainedContinuations([constraints((4,))] * 2, JOINS, SearchOptions())
    control._anchors.any = True
    control._anchors.given = torch.tensor([-6.0, -3.0, 0.0], dtype=torch.float64)
    control._owners, control._usual_penalties = torch.tensor([0, 1, 1]), torch.tensor([2.0, 5.0])
    found = control.added(torch.tensor([1, 0, 2]), torch.tensor(3.0))
    assert found.tolist() == pytest.approx([0.0, -6.0 / 2.0 + 6.0 / 3.0, 0.0])
    totals = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -torch.inf]])
    banks = torch.tensor([[0, 0, 0, 0, 1, 2, 2]])
    assert share_out(totals, banks, 3).tolist() == [[5, 4, 0]]
    assert share_out(totals, banks, 5).tolist() == [[5, 4, 0, 1, 2]]
    assert share_out(totals, banks, 2).tolist() == [[5, 4]]
    assert share_out(totals, torch.zeros_like(banks), 4).tolist() == [[0, 1, 2, 3]]


class Telling(ToyModel):
    """Its probabilities depend on the last token alone: ``after`` gives some, all others are alike and tiny."""

    def __init__(self, size: int, after: dict[int, dict[int, float]]) -> None:
        super().__init__()
        self.size, self.after = size, after

    def table(self, sentence: int, prefix: int) -> torch.Tensor:
        probabilities = torch.full((self.size,), 1e-6)
        for token, probability in self.after[prefix % (self.size + 1) - 1].items():
            probabilities[token] = probability
        return (probabilities / probabilities.sum()).log()


def test_a_phrase_whose_last_word_would_rather_go_on_ends_all_the_same() -> None:
    joins = torch.arange(10) > 4
    joining = dict.fromkeys(range(5, 10), 0.19)
    stubborn = Telling(10, dict.fromkeys(range(10), joining))
    # The word goes on more probably than another one begins, but only that comes to an end.
    torn = Telling(
        10, {**dict.fromkeys(range(10), joining), 2: {4: 1.0}, 4: {**joining, UNK: 0.04}, UNK: {EOS: 0.9}}
    )
    for beam_size in (1, 2, 4):
        wished = [DecodingConstraints((Phrase((4,), True),))]
        options = {"beam_size": beam_size, "length_penalty_alpha": 0.0}
        (found,), (other,) = (
            search(model, [0], 6, constraints=wished, joins=joins, **options)[0] for model in (stubborn, torn)
        )
        places = [at for at, token in enumerate(found.ids) if token == 4]
        assert any(at + 1 == len(found.ids) or not joins[found.ids[at + 1]] for at in places), found.ids
        assert other.ids == [4, UNK]


def test_translations_end_though_it_is_cheap_to_put_the_last_phrase_off() -> None:
    model = Telling(6, {2: {5: 1.0}, 5: {5: 0.9, 4: 0.1}, 4: {EOS: 0.6, 5: 0.4}})
    wished = [DecodingConstraints((Phrase((4,), False),))]
    ((found,),) = search(model, [0], 12, constraints=wished, beam_size=2, length_penalty_alpha=0.0)
    assert not found.cut
    assert found.ids == [5, 4]
