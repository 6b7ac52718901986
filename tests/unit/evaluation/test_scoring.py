"""Metrics are sacreBLEU's; scores of pairs, and the order of n-best lists by a judge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import sacrebleu
import torch
from torch import Tensor

from econmt.config.recipe import load_recipe
from econmt.data.text.vocabulary import BOS, EOS, PAD, Vocabularies, WordVocabulary
from econmt.errors import EconmtError, InputError
from econmt.evaluation import metrics, reranking
from econmt.evaluation.scoring import ScoredPair, Scorer, token_ids
from econmt.model.translation import ROWS_AT_ONCE, Predictions

WORDS = WordVocabulary(["<pad>", "<unk>", "<s>", "</s>", "a", "b", "c"])


class Bigram:
    """Predicts the next token from the one before and the source's length, through a table as output weight."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.output_weight = torch.randn(7, 8, generator=generator)
        self.output_bias = torch.randn(7, generator=generator)
        self.shapes: list[tuple[int, ...]] = []

    def predict(
        self, source: Tensor, source_lengths: Tensor, target_input: Tensor, positions: Tensor
    ) -> Predictions:
        self.shapes.append(tuple(target_input.shape))
        assert not (target_input == EOS).any()
        hidden = torch.nn.functional.one_hot(target_input, 8).float()
        hidden[:, :, 7] = source_lengths[:, None].float() / 10
        return Predictions(hidden[positions], self.output_weight, self.output_bias)

    def log_probability(self, source_length: int, ids: Sequence[int]) -> float:
        total = 0.0
        for before, token in zip([BOS, *ids], [*ids, EOS], strict=True):
            logits = self.output_weight[:, before] + self.output_weight[:, 7] * (source_length + 1) / 10
            total += float((logits + self.output_bias).log_softmax(dim=0)[token])
        return total


def scorer(*models: Bigram, **options: object) -> Scorer:
    return Scorer(models, Vocabularies(WORDS, WORDS), **options)  # type: ignore[arg-type]


PAIRS = [("a b c", "b"), ("a", "c b a a"), ("b", ""), ("c c", "a d")]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_log_probabilities_are_sums_over_tokens_and_the_end(batch_size: int) -> None:
    model = Bigram(1)
    scored = scorer(model, batch_size=batch_size).score(PAIRS, 3)
    for (source, target), found in zip(PAIRS, scored, strict=True):
        expected = model.log_probability(len(source.split()), WORDS.encode(target))
        assert found.log_probability == pytest.approx(expected, abs=1e-5)
        assert len(found.token_log_probabilities) == found.length == len(target.split()) + 1
        assert found.tokens == [word if word != "d" else "<unk>" for word in target.split()]


def test_pairs_of_similar_work_share_a_batch() -> None:
    """The longer side decides, with its end; blank sources are done at once."""
    model = Bigram(1)
    sizes = [(9, 1), (1, 3), (0, 1), (1, 1), (3, 0), (1, 9)]
    sources, targets = [" ".join("a" * source) for source, _ in sizes], [[5] * target for _, target in sizes]
    done: list[int] = []
    scorer(model, batch_size=2).score_ids(sources, targets, done.append)
    assert done == [1, 2, 2, 1]
    assert model.shapes == [(2, 10), (2, 4), (1, 2)]
    for words, batches in ((99, [(2, 2)]), (100, [(1, 2), (1, 2)])):  # 200 positions in a batch of two
        model.shapes.clear()
        scorer(model, batch_size=2).score_ids([" ".join("a" * words)] * 2, [[5]] * 2)
        assert model.shapes == batches


def test_the_vocabulary_is_taken_a_slice_of_rows_at_a_time() -> None:
    long = " ".join("abc"[i % 3] for i in range(ROWS_AT_ONCE))
    model = Bigram(2)
    found = list(scorer(model).score([("a", long), ("a", "b")]))
    assert found[0].log_probability == pytest.approx(model.log_probability(1, WORDS.encode(long)), rel=1e-5)
    assert found[1].log_probability == pytest.approx(model.log_probability(1, [5]), abs=1e-5)


def test_an_ensemble_averages_token_by_token() -> None:
    models = Bigram(1), Bigram(2)
    alone = [next(iter(scorer(model).score([("a", "b c")]))).token_log_probabilities for model in models]
    (found,) = scorer(*models, mode="linear").score([("a", "b c")])
    expected = [math.log((math.exp(one) + math.exp(other)) / 2) for one, other in zip(*alone, strict=True)]
    assert found.token_log_probabilities == pytest.approx(expected, abs=1e-5)
    (log_linear,) = scorer(*models, mode="log_linear").score([("a", "b c")])
    # The normalised geometric mean is at least the mean of the logarithms.
    for value, one, other in zip(log_linear.token_log_probabilities, *alone, strict=True):
        assert value >= (one + other) / 2 - 1e-6
    assert log_linear.token_log_probabilities != pytest.approx(expected, abs=1e-4)


def test_token_ids_are_those_of_words_and_of_no_special_token() -> None:
    encode = token_ids(WORDS)
    assert encode("a  c <unk>") == [4, 6, 1]
    for special in (PAD, BOS, EOS):
        with pytest.raises(KeyError):
            encode(WORDS.tokens([special])[0])


def test_a_list_is_written_as_it_is_read() -> None:
    all_fields = "0 ||| a ||| f ||| 0.500000 ||| 0-0 ||| more ||| "
    assert reranking.read_candidate(all_fields, "x").rest == "0-0 ||| more ||| "
    for line in (*LINES, all_fields):
        assert reranking.read_candidate(line, "x").line == line
    assert reranking.read_candidate(LINES[1], "x").text == "a ||| b"
    assert [len(own) for own in reranking.read_lists(LINES, "x")] == [2, 1, 2]


LINES = [
    "0 ||| ein Hund ||| logprob= -1.000000 ||| -0.500000 ||| 0-0 1-1",
    "0 ||| a &#124;&#124;&#124; b ||| logprob= -2.000000 ||| -0.700000",
    "1 |||  ||| logprob= 0.000000 ||| 0.000000",
    "2 ||| eine Katze läuft ||| logprob= -1.000000 ||| -0.100000",
    "2 ||| ein Hund läuft ||| logprob= -1.000000 ||| -0.200000",
]


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
        list(reranking.read_lists(lines, "lists"))
    assert message in str(refused.value)


def test_every_part_knows_the_number_of_its_first_sentence() -> None:
    """Also the third one, and one that is not full."""
    lists = [[reranking.RerankCandidate(number, "a", "", 0.0)] for number in range(5)]
    parts: list[tuple[list[int], int]] = []

    def judge(part: Sequence[list[reranking.RerankCandidate]], first: int) -> list[list[float]]:
        parts.append(([candidates[0].number for candidates in part], first))
        return [[1.0 + first] for _ in part]

    scores = [candidates[0].score for candidates in reranking.rerank(lists, judge, 2)]
    assert parts == [([0, 1], 0), ([2, 3], 2), ([4], 4)]
    assert scores == [1.0, 1.0, 3.0, 3.0, 5.0]


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_references_decide(metric: str) -> None:
    references = ["a ||| b c", "", "ein Hund läuft weit"]
    judge = reranking.by_reference(metric, references, "13a")  # type: ignore[arg-type]
    lists = list(reranking.rerank(reranking.read_lists(LINES, "x"), judge, 2))
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


def test_models_decide_and_counts_must_agree() -> None:
    forwards, backwards = Asked(), Asked()
    scorer = reranking.WeightedScorer
    weighted = [scorer(forwards, 0.5, False), scorer(backwards, 2.0, True)]
    judge = reranking.by_models(["s0", "s1", "s2"], weighted)
    lists = list(reranking.rerank(reranking.read_lists(LINES, "x"), judge, 2))
    assert forwards.pairs[0] == ("s0", "ein Hund")
    assert backwards.pairs[-1] == ("ein Hund läuft", "s2")
    by_text = {each.text: each.score for own in lists for each in own}
    assert by_text["ein Hund"] == pytest.approx(-0.5 - 0.5 * 8 / 3 - 2.0 * 2 / 2)
    assert lists[2][0].text == "ein Hund läuft"
    equal = [[reranking.RerankCandidate(0, text, "", 1.0) for text in "ba"]]
    assert [each.text for each in next(reranking.rerank(equal, lambda *_: [[2.0, 2.0]]))] == ["b", "a"]
    with pytest.raises(ValueError, match="3 hypotheses and 4 references"):
        metrics.bleu(["a"] * 3, ["a"] * 4)
    with pytest.raises(ValueError, match="0 hypotheses"):
        metrics.bleu([], [])


@pytest.mark.parametrize(
    ("name", "languages"),
    [("13a", "de vi trg txt"), ("zh", "zh zh_CN tok.zh cmn-Hant TOK.ZH"), ("char", "th khm")],
)
def test_a_target_language_chooses_the_tokenizer(name: str, languages: str) -> None:
    assert [metrics.tokenizer_of(language) for language in languages.split()] == [(name, "")] * len(
        languages.split()
    )


@pytest.mark.parametrize(("language", "name"), [("ja", "ja-mecab"), ("ko", "ko-mecab")])
def test_without_mecab_characters_count(monkeypatch: pytest.MonkeyPatch, language: str, name: str) -> None:
    monkeypatch.setattr(metrics, "_is_installed", lambda _: True)
    assert metrics.tokenizer_of(language) == (name, "")
    monkeypatch.setattr(metrics, "_is_installed", lambda _: False)
    found = metrics.tokenizer_of(language)
    assert found.name == "char"
    assert f"pip install 'sacrebleu[{language}]'" in found.note


def test_a_run_keeps_its_tokenizer_and_the_recipe_may_name_it() -> None:
    auto = load_recipe("quickstart", ["data.target=zh"])
    assert metrics.recipe_tokenizer(auto).name == "zh"
    assert metrics.recipe_tokenizer(auto, "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp").name == "13a"
    named = load_recipe("quickstart", ["data.target=zh", "training.bleu_tokenizer=char"])
    assert metrics.recipe_tokenizer(named, "nrefs:1|tok:13a|smooth:exp").name == "char"


def test_a_tokenizer_that_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        TOKENIZERS = ("ja-mecab",)

        def __init__(self, **_: object) -> None:
            raise RuntimeError

    monkeypatch.setattr(metrics, "BLEU", Missing)
    told = r"tokenizer 'ja-mecab': not installed; pip install 'sacrebleu\[ja\]'"
    with pytest.raises(EconmtError, match=told):
        metrics.make_metric("bleu", [["a"]], tokenize="ja-mecab")


def test_scores_keep_no_lines() -> None:
    """sacreBLEU's tokenizers remember the lines of every metric that there has been."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp

    score = metrics.bleu(["a b c d e"] * 2, ["a b c d f"] * 2)
    assert metrics.bleu(["a b c d e"] * 2, ["a b c d f"] * 2) == score
    assert [kind.__call__.cache_info().currsize for kind in (Tokenizer13a, TokenizerRegexp)] == [0, 0]


def test_a_system_is_better_in_the_direction_of_the_metric() -> None:
    """An equal one is neither better nor worse; TER falls."""
    lines = [f"the {word} dog runs home now" for word in ("red", "old", "big", "shy")]
    half = [*lines[:2], "a", "b"]
    systems = {"first": half, "same": half, "best": lines, "worst": ["x"] * 4}
    found = metrics.paired_bootstrap(
        systems, {name: metrics.make_metric(name, [lines]) for name in ("ter", "bleu")}, 20
    )
    assert [each.name for each in found] == ["TER", "BLEU"]
    for significance in found:
        assert [each.better for each in significance.systems] == [None, None, True, False]
        assert significance.systems[0].p_value is None
        assert significance.systems[1].p_value is not None
