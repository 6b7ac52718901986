"""Scores of pairs: what they are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from econmt.data.text.vocabulary import BOS, EOS, PAD, Vocabularies, WordVocabulary
from econmt.evaluation.scoring import Scorer, token_ids
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


def test_blank_sources_do_not_reach_the_model() -> None:
    model = Bigram(1)
    empty, impossible = scorer(model).score([("", ""), ("  ", "a")])
    assert empty.log_probability == 0.0
    assert empty.perplexity == 1.0
    assert impossible.log_probability == -math.inf
    assert impossible.perplexity == math.inf
    assert model.shapes == []


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


def test_token_ids() -> None:
    encode = token_ids(WORDS)
    assert encode("a  c <unk>") == [4, 6, 1]
    for special in (PAD, BOS, EOS):
        with pytest.raises(KeyError):
            encode(WORDS.tokens([special])[0])
