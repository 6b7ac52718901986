"""Copying of source words by attention: a pointer-generator (See et al., 2017, section 2.2).

    p(w) = g softmax(l)_w + (1 - g) sum over s with x_s = w of a_s          g = sigmoid(v . [context; h; word] + b)

with logits l, attention a over source ids x, input h of the output layer, and the embedding of the previous word. Both
sides share one vocabulary, so that a source id is a target id. The loss needs the probability of the target word only,
so training never computes the mixture for all words.

Shapes: B batch, T target positions, S source positions, N rows, V vocabulary, E encoder size, D input width of the
output layer, I embedding size.
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
        hidden: input of the output layer, (B, T, D). words: embeddings of the previous target words, (B, T, I).
        values: vectors that attention sums, (B, S, E). attention: (B, T, S).
    """

    hidden: Tensor
    words: Inputs
    values: Tensor
    attention: Tensor


class Copied(NamedTuple):
    """Copy distributions of N rows.

    Attributes:
        gates: logits of g, (N,). attention: (N, S), 0 at padding. ids: source words, (N, S).
        first: see :func:`first_positions`, (N, S).
    """

    gates: Tensor
    attention: Tensor
    ids: Tensor
    first: Tensor

    def mixed(self, log_probs: Tensor) -> Tensor:
        """Replaces the log-probabilities of the softmax (N, V), in place, by those of the mixture."""
        seen = self.attention.to(log_probs.dtype)
        mass = torch.zeros_like(seen).scatter_add_(1, self.first, seen).gather(1, self.first)
        gates = self.gates.to(log_probs.dtype).unsqueeze(1)
        log_probs += functional.logsigmoid(gates)
        # A word that occurs twice in a source is written twice, with the same value.
        both = torch.logaddexp(log_probs.gather(1, self.ids), functional.logsigmoid(-gates) + mass.log())
        return log_probs.scatter_(1, self.ids, both)


class Predictions(NamedTuple):
    """Predictions of a model at N target positions.

    Attributes:
        hidden: input of the output layer, (N, D). weight, bias: parameters of the output layer, (V, D) and (V,).
        copied: copy distributions of a model that copies, else None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    copied: Copied | None = None

    def log_probs(self, rows: slice) -> Tensor:
        """Computes log-probabilities (n, V) of the next word in some rows, in float32."""
        logits = functional.linear(self.hidden[rows], self.weight, self.bias)
        log_probs = logits.float().log_softmax(dim=1)
        if self.copied is None:
            return log_probs
        return Copied(*(part[rows] for part in self.copied)).mixed(log_probs)


def first_positions(ids: Tensor) -> Tensor:
    """Returns the position at which each id of ids (B, S) first occurs in its row, (B, S) int64."""
    return (ids.unsqueeze(2) == ids.unsqueeze(1)).to(torch.int8).argmax(2)


class Copying(nn.Module):
    """Gate g between generating and copying; encoder_size is E, width D, embedding I.

    Attributes:
        weight: weights of context, output layer input and previous word, (E + D + I,). bias: (1,).
    """

    def __init__(self, encoder_size: int, width: int, embedding: int) -> None:
        super().__init__()
        self._sizes = [encoder_size, width, embedding]
        self.weight = nn.Parameter(torch.empty(sum(self._sizes)))
        self.bias = nn.Parameter(torch.zeros(1))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Weights of the context (E,), of the output layer's input (D,) and of the previous word (I,)."""
        return torch.split(self.weight, self._sizes)

    def forward(self, decoded: Decoded, rows: Tensor) -> Tensor:
        """Computes the logits of g, (B, T), in the accumulate type; ``rows`` (B T, D) are the hidden vectors as rows.

        The context itself is not computed: attention sums the products of values and weights.
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
        """Draws initial values of all parameters; the bias is 0."""
        initialize_matrix(self.weight[None, :], init)
        nn.init.zeros_(self.bias)


def mixture_losses(
    losses: Tensor, gates: Tensor, attention: Tensor, source: Tensor, target: Tensor, pad: int
) -> Tensor:
    """Computes -log p(w) of the words w of a target, 0 at padding, (B, T).

    Args:
        losses: cross-entropies of the softmax alone, (B, T). gates: logits of g, (B, T). attention: (B, T, S).
        source: ids, (B, S). target: ids, (B, T). pad: id of padding.
    """
    matches = source.unsqueeze(1) == target.unsqueeze(2)
    mass = attention.where(matches, 0.0).sum(2, dtype=losses.dtype)
    absent = mass <= 0.0
    copied = mass.masked_fill(absent, 1.0).log().masked_fill(absent, -torch.inf)
    both = torch.logaddexp(functional.logsigmoid(gates) - losses, functional.logsigmoid(-gates) + copied)
    return -both.masked_fill(target == pad, 0.0)
