"""Copying source words by the attention, beside the output layer: a pointer-generator (See et al., 2017, section 2.2).

    p(w) = g softmax(l)_w + (1 - g) sum over s with x_s = w of a_s          g = sigmoid(v . [context; h; word] + b)

with the attention a over source ids x, h what the output layer reads, and the word before. Both sides have one
vocabulary, so that a source id is a target id. Of the vocabulary's distribution a loss needs the target's share alone,
and the mixture of all words is never made in training.

Shapes: B batch, T target positions, S source positions, N rows, V vocabulary, E encoder size, D width of what the
output layer reads, I embedding size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config import recipe
from econmt.model.layers import initialize_matrix
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.repeated import Inputs, UniqueRows


class Decoded(NamedTuple):
    """Results of a decoder under teacher forcing.

    Attributes:
        hidden: (B, T, D) what the output layer reads. words: (B, T, I) embeddings of the target before.
        values: (B, S, E) that the attention sums. attention: (B, T, S).
    """

    hidden: Tensor
    words: Inputs
    values: Tensor
    attention: Tensor


class Copied(NamedTuple):
    """Copy distributions of N rows.

    Attributes:
        gates: (N,) logits of g. attention: (N, S), 0 at padding. ids: (N, S) the source's words. first: (N, S), see
            :func:`first_places`.
    """

    gates: Tensor
    attention: Tensor
    ids: Tensor
    first: Tensor

    def mixed(self, log_probs: Tensor) -> Tensor:
        """The mixture's log-probabilities in the place of those of the softmax (N, V)."""
        seen = self.attention.to(log_probs.dtype)
        mass = torch.zeros_like(seen).scatter_add_(1, self.first, seen).gather(1, self.first)
        gates = self.gates.to(log_probs.dtype).unsqueeze(1)
        log_probs += functional.logsigmoid(gates)
        # A word that stands there twice gets the same number twice.
        both = torch.logaddexp(log_probs.gather(1, self.ids), functional.logsigmoid(-gates) + mass.log())
        return log_probs.scatter_(1, self.ids, both)


class Predictions(NamedTuple):
    """Predictions of a model at N target positions.

    Attributes:
        hidden: (N, D). weight: (V, D) and bias: (V,) of the output layer. copied: of a model that copies.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    copied: Copied | None = None

    def log_probs(self, rows: slice) -> Tensor:
        """Log-probabilities (n, V) of the next word in some rows, in float32."""
        logits = functional.linear(self.hidden[rows], self.weight, self.bias)
        found = logits.float().log_softmax(dim=1)
        return found if self.copied is None else Copied(*(part[rows] for part in self.copied)).mixed(found)


def first_places(ids: Tensor) -> Tensor:
    """Returns for ids (B, S) the position at which each first occurs in its row, (B, S) int64."""
    return (ids.unsqueeze(2) == ids.unsqueeze(1)).to(torch.int8).argmax(2)


class Copying(nn.Module):
    """The gate g between generating and copying.

    Args:
        encoder_size, width, embedding: E, D, I.

    Attributes:
        weight: (E + D + I,) of context, of what the output layer reads, and of the word before. bias: (1,).
    """

    def __init__(self, encoder_size: int, width: int, embedding: int) -> None:
        super().__init__()
        self._sizes = [encoder_size, width, embedding]
        self.weight = nn.Parameter(torch.empty(sum(self._sizes)))
        self.bias = nn.Parameter(torch.zeros(1))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """(E,) of the context, (D,) of what the output layer reads, (I,) of the word before."""
        return torch.split(self.weight, self._sizes)

    def forward(self, decoded: Decoded, rows: Tensor) -> Tensor:
        """Logits of g (B, T), in the accumulate type; ``rows`` (B T, D): the hidden vectors once more, one a row.

        No context is made: its share is what the attention sums of the values' shares.
        """
        hidden, words, values, attention = decoded
        of_context, of_state, of_word = (part.unsqueeze(1) for part in self.weights)
        shares = torch.bmm(values, of_context.to(values.dtype).expand(len(values), -1, -1))
        context = torch.bmm(attention, shares.to(attention.dtype)).squeeze(2)
        state = functional.linear(rows, of_state.t()).view(hidden.shape[:2])
        if isinstance(words, UniqueRows):
            word = functional.linear(words.rows, of_word.t()).squeeze(1)[words.places]
        else:
            word = functional.linear(words, of_word.t()).squeeze(2)
        exact = accumulate_dtype(hidden.dtype)
        return context.to(exact) + state.to(exact) + word.to(exact) + self.bias.to(exact)

    def initialize(self, init: recipe.Initialization) -> None:
        """Draw first values of all parameters; the gate begins without a preference."""
        initialize_matrix(self.weight[None, :], init)
        nn.init.zeros_(self.bias)


def mixture_loss(
    losses: Tensor, gates: Tensor, attention: Tensor, source: Tensor, target: Tensor, pad: int
) -> Tensor:
    """-log p(w) summed over the words w of a target, padding not counted.

    Args:
        losses: (B, T) cross-entropies of the softmax alone. gates: (B, T) logits of g. attention: (B, T, S).
        source: (B, S) ids. target: (B, T) ids. pad: the padding id.
    """
    matches = source.unsqueeze(1) == target.unsqueeze(2)
    mass = attention.where(matches, 0.0).sum(2, dtype=losses.dtype)
    nowhere = mass <= 0.0
    copied = mass.masked_fill(nowhere, 1.0).log().masked_fill(nowhere, -torch.inf)
    both = torch.logaddexp(functional.logsigmoid(gates) - losses, functional.logsigmoid(-gates) + copied)
    return -both.masked_fill(target == pad, 0.0).sum()
