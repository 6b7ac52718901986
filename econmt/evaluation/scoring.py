"""Log-probabilities and perplexities of existing translations.

Shapes: B sentences, T target positions, N target tokens, V target vocabulary, D width of the output layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple

import torch

from econmt.data.text.source_factors import encode_sources
from econmt.data.text.vocabulary import BOS, EOS, PAD, Vocabularies, Vocabulary
from econmt.decoding.batches import batches_by_length, evaluation_mode, pad_sources
from econmt.decoding.search.ensemble import EnsembleMode, average_log_probs
from econmt.decoding.text_reader import perplexity_of
from econmt.decoding.translator import CHUNK_SIZE
from econmt.model import TranslationModel
from econmt_ops.core.precision import autocast_to


class ScoredPair(NamedTuple):
    """Sentence pair with its log-probabilities.

    Attributes:
        log_probability: natural logarithm of the probability of the target given the source, EOS included.
        tokens: target tokens without EOS.
        token_log_probabilities: log-probability of each token and of EOS, one more than ``tokens``; empty for a blank
            source.
    """

    log_probability: float
    tokens: list[str]
    token_log_probabilities: list[float]

    @property
    def length(self) -> int:
        """Number of target tokens, including EOS."""
        return len(self.tokens) + 1

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability per token, including EOS; infinite if it overflows."""
        return perplexity_of(self.log_probability, self.length)


def token_ids(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Returns a function from tokens, separated by spaces, to ids; it raises KeyError(token).

    Padding and sentence marks have no token.
    """
    ids = {token: index for index, token in enumerate(vocabulary.tokens(range(vocabulary.size)))}
    for special in (PAD, BOS, EOS):
        del ids[vocabulary.tokens([special])[0]]

    return lambda text: [ids[token] for token in text.split(" ") if token]


def _pair_name(number: int, stream: int | None) -> str:
    return f"pair {number + 1}" + ("" if stream is None else f": factors[{stream}]")


@dataclass
class Scorer:
    """Scores sentence pairs with one model or an ensemble, as the search of :mod:`econmt.decoding` scores them.

    Args:
        models: models on ``device`` that share the vocabularies.
        vocabularies: source and target vocabulary.
        device: device of the models. precision: type of matrix products: float32, bfloat16 or float16.
        batch_size: number of pairs scored together.
        warn: called with a message about doubtful source factors; None: nobody is told.
    """

    models: Sequence[TranslationModel]
    vocabularies: Vocabularies
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: torch.dtype = torch.float32
    batch_size: int = field(default=64, kw_only=True)
    mode: EnsembleMode = field(default="linear", kw_only=True)
    warn: Callable[[str], None] | None = field(default=None, kw_only=True)

    def score(self, pairs: Iterable[tuple[str, str]], chunk_size: int = CHUNK_SIZE) -> Iterator[ScoredPair]:
        """Scores raw text, in order.

        Targets are segmented into tokens again. A search may have written the same text with other tokens, whose
        log-probability differs; :meth:`score_ids` scores token ids.
        """
        stream = iter(pairs)
        while chunk := list(islice(stream, chunk_size)):
            sources, texts = map(list, zip(*chunk, strict=True))
            yield from self.score_ids(sources, self.vocabularies.target.encode_many(texts))

    def score_ids(
        self,
        sources: Sequence[str],
        targets: Sequence[Sequence[int]],
        done: Callable[[int], object] = lambda _: None,
        *,
        factors: Sequence[Sequence[str]] = (),
        name_of: Callable[[int, int | None], str] = _pair_name,
    ) -> list[ScoredPair]:
        """Scores target ids, without BOS and EOS, given raw source lines.

        A blank source line has one translation, the empty one, with probability 1, as in translation.

        Args:
            sources: source lines. targets: target ids.
            done: called with the number of pairs scored since the last call.
            factors, name_of: see :func:`econmt.data.text.source_factors.encode_sources`; no factors if the model has
                none.

        Raises:
            InputError: source factors are missing, or their number is not that of the words.
        """
        source_ids = encode_sources(
            self.vocabularies, sources, factors or [()] * len(sources), name_of, warn=self.warn
        )
        results: list[ScoredPair] = []
        for target in targets:
            tokens = self.vocabularies.target.tokens(target)
            results.append(ScoredPair(-math.inf if tokens else 0.0, tokens, []))
        filled = [index for index, line in enumerate(sources) if line.strip() and source_ids[index]]
        done(len(sources) - len(filled))
        # The work of attention and output layer grows with the longer side.
        lengths = [max(len(source_ids[index]), len(targets[index])) + 1 for index in filled]
        with torch.inference_mode(), evaluation_mode(self.models):
            for batch in batches_by_length(lengths, self.batch_size, self.batch_size * 100):
                chosen = [filled[position] for position in batch]
                scores = self._batch([source_ids[i] for i in chosen], [targets[i] for i in chosen])
                for index, token_scores in zip(chosen, scores, strict=True):
                    results[index] = ScoredPair(math.fsum(token_scores), results[index].tokens, token_scores)
                done(len(chosen))
        return results

    def _batch(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-probability of every target token and EOS of each pair."""
        source, source_lengths = pad_sources(sources, self.device)
        output, lengths = pad_sources(targets, self.device)
        begin = torch.full_like(output[:, :1], BOS)
        inputs = torch.cat([begin, output[:, :-1].masked_fill(output[:, :-1] == EOS, PAD)], dim=1)
        valid = torch.arange(output.shape[1], device=self.device) < lengths[:, None]
        words = output[valid]
        with autocast_to(self.device, self.precision):
            predictions = [model.predict(source, source_lengths, inputs, valid) for model in self.models]
            parts = []
            for rows in predictions[0].blocks():
                each = [prediction.log_probs(rows) for prediction in predictions]
                log_probs = each[0] if len(each) == 1 else average_log_probs(torch.stack(each), self.mode)
                parts.append(log_probs.gather(1, words[rows, None])[:, 0])
        flat = torch.cat(parts).tolist()
        ends = list(accumulate(lengths.tolist()))
        return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
