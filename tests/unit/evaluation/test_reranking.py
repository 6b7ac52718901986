"""N-best lists are read as Moses wrote them, and put into the order that a judge says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sacrebleu

from econmt.errors import InputError
from econmt.evaluation.reranking import (
    RerankCandidate,
    WeightedScorer,
    by_models,
    by_reference,
    read_candidate,
    read_lists,
    rerank,
)
from econmt.evaluation.scoring import ScoredPair, Scorer

LINES = [
    "0 ||| ein Hund ||| logprob= -1.000000 ||| -0.500000 ||| 0-0 1-1",
    "0 ||| a &#124;&#124;&#124; b ||| logprob= -2.000000 ||| -0.700000",
    "1 |||  ||| logprob= 0.000000 ||| 0.000000",
    "2 ||| eine Katze läuft ||| logprob= -1.000000 ||| -0.100000",
    "2 ||| ein Hund läuft ||| logprob= -1.000000 ||| -0.200000",
]


def test_a_list_is_written_as_it_is_read() -> None:
    assert [read_candidate(line, "x").line for line in LINES] == LINES
    assert read_candidate(LINES[1], "x").text == "a ||| b"
    assert [len(own) for own in read_lists(LINES, "x")] == [2, 1, 2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["ein Hund"], "lists:1: expected number"),
        (["0 ||| a ||| x ||| nan"], "lists:1: expected number"),
        (["-1 ||| a ||| x ||| 1"], "lists:1: expected number"),
        (["1 ||| a ||| x ||| 1"], "lists:1: sentence 1, where 0 was expected"),
        ([LINES[0], LINES[3]], "lists:2: sentence 2, where 0 or the next was expected"),
        ([LINES[0], LINES[2], LINES[0]], "lists:3: sentence 0, where 1 or the next was expected"),
    ],
)
def test_what_is_no_list_is_told(lines: list[str], message: str) -> None:
    with pytest.raises(InputError) as refused:
        list(read_lists(lines, "lists"))
    assert message in str(refused.value)


def test_every_part_knows_the_number_of_its_first_sentence() -> None:
    """Also the third one, and one that is not full."""
    lists = [[RerankCandidate(number, "a", "", 0.0)] for number in range(5)]
    parts: list[tuple[list[int], int]] = []

    def judge(part: Sequence[list[RerankCandidate]], first: int) -> list[list[float]]:
        parts.append(([candidates[0].number for candidates in part], first))
        return [[1.0 + first] for _ in part]

    scores = [candidates[0].score for candidates in rerank(lists, judge, 2)]
    assert parts == [([0, 1], 0), ([2, 3], 2), ([4], 4)]
    assert scores == [1.0, 1.0, 3.0, 3.0, 5.0]


def test_all_fields_after_the_score_are_kept() -> None:
    line = "0 ||| a ||| f ||| 0.500000 ||| 0-0 ||| more ||| "
    assert read_candidate(line, "x").rest == "0-0 ||| more ||| "
    assert read_candidate(line, "x").line == line


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_references_decide(metric: str) -> None:
    references = ["a ||| b c", "", "ein Hund läuft weit"]
    judge = by_reference(metric, references, "13a")  # type: ignore[arg-type]
    lists = list(rerank(read_lists(LINES, "x"), judge, 2))
    assert [own[0].text for own in lists] == ["a ||| b", "", "ein Hund läuft"]
    score = sacrebleu.sentence_bleu if metric == "bleu" else sacrebleu.sentence_chrf
    assert lists[2][0].score == pytest.approx(score("ein Hund läuft", [references[2]]).score)
    assert lists[0][1].rest == "0-0 1-1"


class Asked(Scorer):
    """Thinks that texts are as improbable as they are long, and notes what it is asked."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def score(self, pairs: Sequence[tuple[str, str]], chunk_size: int = 0) -> list[ScoredPair]:  # type: ignore[override]
        self.pairs += pairs
        return [ScoredPair(-float(len(target)), target.split(), []) for _, target in pairs]


def test_models_decide() -> None:
    forwards, backwards = Asked(), Asked()
    weighted = [WeightedScorer(forwards, 0.5, False), WeightedScorer(backwards, 2.0, True)]
    judge = by_models(["s0", "s1", "s2"], weighted)
    lists = list(rerank(read_lists(LINES, "x"), judge, 2))
    assert forwards.pairs[0] == ("s0", "ein Hund")
    assert backwards.pairs[-1] == ("ein Hund läuft", "s2")
    by_text = {each.text: each.score for own in lists for each in own}
    assert by_text["ein Hund"] == pytest.approx(-0.5 - 0.5 * 8 / 3 - 2.0 * 2 / 2)
    assert lists[2][0].text == "ein Hund läuft"
    equal = [[RerankCandidate(0, text, "", 1.0) for text in "ba"]]
    assert [each.text for each in next(rerank(equal, lambda *_: [[2.0, 2.0]]))] == ["b", "a"]
