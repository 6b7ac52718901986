"""Scoring and continuation of a text with a language model, which keeps its state between calls.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from econmt.data.text.vocabulary import BOS, EOS, PAD, Vocabulary, split_words
from econmt.decoding.search.sampling import draw
from econmt.model.language_model import LanguageModel, State
from econmt_ops import linear_cross_entropy
from econmt_ops.core.precision import autocast_to

WINDOW = 1000
"""Number of tokens read at once."""


class ScoredLine(NamedTuple):
    """A line and its log-probabilities given all lines before it.

    Attributes:
        tokens: tokens of the line without its end.
        token_log_probabilities: natural logarithm of the probability of each token and of the line's end.
        words: number of words, including the line's end.
    """

    tokens: list[str]
    token_log_probabilities: list[float]
    words: int

    @property
    def log_probability(self) -> float:
        """Sum of the log-probabilities."""
        return math.fsum(self.token_log_probabilities)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability per word; infinite if it overflows."""
        return perplexity_of(self.log_probability, self.words)


def perplexity_of(log_probability: float, count: int = 1) -> float:
    """Computes the exponential of the mean negative log-probability of ``count`` words or tokens; infinity if large."""
    mean = -log_probability / count
    return math.inf if mean >= 700.0 else math.exp(mean)


@dataclass
class TextReader:
    """Reader of a text from its beginning by a model in evaluation mode; only the model's state is kept.

    Args:
        precision: type of matrix products, float32, bfloat16 or float16.
    """

    model: LanguageModel
    vocabulary: Vocabulary
    device: torch.device
    precision: torch.dtype

    def __post_init__(self) -> None:
        self._state: State | None = None
        self._last = EOS  # a text starts like a line

    def read(self, ids: Sequence[int]) -> list[float]:
        """Reads the next ids of the text; returns the log-probability of each given all before it."""
        return list(self._scores(ids))

    def _scores(self, ids: Sequence[int]) -> Iterator[float]:
        """Reads the next ids of the text, a window at a time, and yields their log-probabilities."""
        for first in range(0, len(ids), WINDOW):
            window = ids[first : first + WINDOW]
            log_probs = self._read(window)
            self._last = window[-1]
            yield from log_probs.double().tolist()

    @torch.inference_mode()
    def _read(self, ids: Sequence[int]) -> Tensor:
        """Reads a window; returns its log-probabilities (N,)."""
        inputs = torch.tensor([[self._last, *ids[:-1]]], device=self.device)
        model = self.model
        with autocast_to(self.device, self.precision):
            hidden, self._state = model(inputs, self._state)
            losses = linear_cross_entropy(
                hidden.flatten(0, 1),
                model.output.weight,
                torch.tensor(ids, device=self.device),
                bias=model.output.bias,
                reduction="none",
                implementation=model.implementations.output,
            )
        return -losses

    def score(self, lines: Iterable[str]) -> Iterator[ScoredLine]:
        """Reads whole lines and yields each, as soon as it is read, with its log-probabilities."""
        texts = list(lines)
        encoded = self.vocabulary.encode_many(texts)
        scores = self._scores([token for ids in encoded for token in (*ids, EOS)])
        for text, ids in zip(texts, encoded, strict=True):
            token_scores = [next(scores) for _ in range(len(ids) + 1)]
            yield ScoredLine(self.vocabulary.tokens(ids), token_scores, len(split_words(text)) + 1)

    def continued(self, prompt: str, length: int, **drawing: Any) -> Iterator[str]:
        """Yields the lines of a text that begins with ``prompt`` and has ``length`` more tokens of :meth:`write`."""
        line = self.vocabulary.encode(prompt)
        self.read(line)
        for token in self.write(length, **drawing):
            if token == EOS:
                yield self.vocabulary.decode(line)
                line = []
            else:
                line.append(token)
        if line:
            yield self.vocabulary.decode(line)

    @torch.inference_mode()
    def write(
        self, count: int, *, temperature: float = 1.0, top_k: int = 0, seed: int = 1, top_p: float = 1.0
    ) -> Iterator[int]:
        """Draws the next ids of the text from the ``top_k`` most probable ones, and reads them; 0 draws from all.

        Of these the most probable ones are taken that have ``top_p`` of their probability. Log-probabilities are
        divided by ``temperature``.
        """
        generator = np.random.Generator(np.random.Philox(key=[seed, 0]))
        for _ in range(count):
            inputs = torch.tensor([[self._last]], device=self.device)
            with autocast_to(self.device, self.precision):
                hidden, self._state = self.model(inputs, self._state)
                log_probs: Tensor = self.model.log_probabilities(hidden[0])
            log_probs[:, [PAD, BOS]] = -math.inf  # no text has them
            uniform = torch.from_numpy(generator.random(1, dtype=np.float32)).double().to(self.device)
            self._last = int(draw(log_probs, uniform, top_k, temperature, top_p))
            yield self._last
