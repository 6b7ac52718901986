"""Changes of the next tokens' log-probabilities, and penalties in the scores of translations.

Changes are for least length, unknown words, repetitions and a language model; penalties for brevity, coverage and
words. Both act on the choice of tokens and on scores; the log-probability of a translation remains that of the model.

Shapes: B sentences, K beam size, R rows, S source positions, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.data.text.vocabulary import EOS, UNK
from econmt.decoding.search.fusion import FusedRows, ShallowFusion
from econmt.decoding.search.options import SearchOptions


class Adjustments:
    """Changes that a search's options make, and the sums by which they have lowered its rows' log-probabilities.

    Args:
        options: options of the search; nothing is changed unless ``adjusts`` is True. rows: R at the first step.
        fusion: the language model of a search with ``lm_weight``.
    """

    def __init__(self, options: SearchOptions, rows: int, fusion: ShallowFusion | None = None) -> None:
        self._adjusts = options.adjusts
        self._least, self._bans_unk = options.min_output_length, options.ban_unk
        self._unk, self._repetition = options.unk_penalty, options.repetition_penalty
        self._history = torch.zeros(rows, 0, dtype=torch.int64)
        self._lowered = torch.zeros(rows, dtype=torch.float64)
        self._fused = None if fusion is None else FusedRows(fusion, rows)

    def apply(self, log_probs: Tensor, position: int) -> None:
        """Changes the log-probabilities (R, V) of the token at ``position``, counted from 1, in place."""
        if position <= self._least:
            log_probs[:, EOS] = -torch.inf
        if self._repetition > 1.0 and self._history.shape[1]:
            history = self._history.to(log_probs.device)
            log_probs.scatter_(1, history, log_probs.gather(1, history) * self._repetition)
        if self._bans_unk:
            log_probs[:, UNK] = -torch.inf
        elif self._unk:
            log_probs[:, UNK] -= self._unk
        if self._fused is not None:
            self._fused.add_to(log_probs)

    def lowered(self, steps: Tensor, parents: Tensor, tokens: Tensor, costs: Tensor | None = None) -> Tensor:
        """Returns the sums by which hypotheses now lie below the model's log-probabilities, (B, K) float64.

        ``steps`` are the changed log-probabilities of the ``tokens`` that extend the rows ``parents``, less ``costs``,
        all (B, K).
        """
        if not self._adjusts and costs is None:
            return self._lowered[parents]
        real = steps if costs is None else steps + costs
        if self._adjusts:
            repeated = (self._history[parents] == tokens[:, :, None]).any(dim=2)
            alone = real if self._fused is None else real - self._fused.added(parents, tokens)
            real = (alone + (tokens == UNK) * self._unk) / torch.where(repeated, self._repetition, 1.0)
        return self._lowered[parents] + (real - steps).masked_fill(steps == -torch.inf, 0.0)

    def grow(self, parents: Tensor, tokens: Tensor, lowered: Tensor | None = None) -> None:
        """Informs that the rows are now those that extend ``parents`` (R',) by ``tokens`` (R',)."""
        if self._repetition > 1.0:
            self._history = torch.cat([self._history[parents], tokens[:, None]], dim=1)
        elif self._adjusts:
            self._history = self._history[parents]
        if self._fused is not None:
            self._fused.grow(parents, tokens)
        if lowered is not None:
            self._lowered = lowered


_LEAST_SEEN = 1e-10
"""Lower bound of the attention that a source position has got, before its logarithm is taken."""


class Penalties:
    """Brevity, coverage and word penalties of a search's hypotheses, none of them positive.

    Args:
        options: options of the search. lengths: source lengths including EOS, (B,) on the CPU.
        source: source ids, (B, S), for shape and device.
    """

    def __init__(self, options: SearchOptions, lengths: Tensor, source: Tensor) -> None:
        self._options = options
        self._expected = lengths.double() * options.brevity_penalty_constant_length_ratio
        self._seen: Tensor | None = None
        if options.coverage_penalty_weight:
            self._seen = torch.zeros(source.shape, device=source.device)
            positions = torch.arange(source.shape[1], device=source.device)
            self._outside = positions >= lengths.to(source.device)[:, None] - 1

    def look(self, attention: Tensor) -> None:
        """Adds the rows' attention (R, S) of this step; S may shrink when the longest sentences finish."""
        if self._seen is not None:
            self._seen = self._seen[:, : attention.shape[1]] + attention

    def of(self, position: int, numbers: Tensor, parents: Tensor) -> Tensor:
        """Computes the penalties of translations of ``position`` tokens, including EOS, (B', K) float64.

        Brevity: weight * min(0, 1 - ratio * source / target) with lengths including EOS, as in Sockeye. Coverage:
        weight * sum over source tokens without EOS of log min(sum of attention, 1) (Wu et al., 2016, equation 15).
        Words: - weight * ``position``, not divided by the length penalty.
        ``numbers`` (B',) are sentence indices, ``parents`` (B', K) the rows that end.
        """
        options = self._options
        short = options.brevity_penalty_weight * (1.0 - self._expected[numbers] / position).clamp(max=0.0)
        penalties = (short - options.word_penalty * position)[:, None].expand(parents.shape)
        if self._seen is not None:
            device = self._seen.device
            seen = self._seen[parents.to(device)].double().clamp(_LEAST_SEEN, 1.0).log()
            seen = seen.masked_fill(self._outside[numbers.to(device)][:, None, : seen.shape[2]], 0.0)
            penalties = penalties + options.coverage_penalty_weight * seen.sum(dim=2).cpu()
        return penalties

    def grow(self, parents: Tensor) -> None:
        """Informs that the rows are now those that extend ``parents`` (R',)."""
        if self._seen is not None:
            self._seen = self._seen[parents.to(self._seen.device)]
