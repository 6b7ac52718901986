"""Scores of additive attention and their gradients, as pure functions that torch.compile can fuse.

Shapes: B batch, S source positions, A attention size.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYER_NORM_EPSILON = 1e-5


def additive_forward(query: Tensor, keys: Tensor, score: Tensor) -> Tensor:
    """Computes score . tanh(query + keys_s), (B, S), up to a constant that cancels in the softmax over s.

    Since tanh x = 2 sigmoid(2 x) - 1, that constant is the sum of -score; sigmoid is the cheaper function. Queries are
    (B, A), keys (B, S, A); ``score`` (A,) has the accumulate type, in which everything is computed.
    """
    return torch.matmul(_halves(query, keys, score.dtype), score * 2)


def _halves(query: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes sigmoid(2 query + 2 keys_s), (B, S, A)."""
    return torch.add((query.to(dtype) * 2).unsqueeze(1), keys, alpha=2).sigmoid_()


def additive_backward(
    query: Tensor, keys: Tensor, score: Tensor, de: Tensor, dkeys: Tensor, dscore: Tensor
) -> Tensor:
    """Computes the gradients of :func:`additive_forward`, recomputing tanh in one workspace (B, S, A).

    With s = sigmoid(2 x), 1 - tanh^2 x = 4 (s - s^2). Rows of ``de`` (B, S) sum to zero, as gradients of a softmax's
    inputs do, so that sum de tanh x = 2 sum de s.

    Added in place are de_s (s - s^2) to ``dkeys`` (B, S, A), which the caller multiplies by 4 score, once for all
    steps, and sum de_s tanh to ``dscore`` (A,). Returns the gradient of the query (B, A). All in the accumulate type.
    """
    hidden = _halves(query, keys, score.dtype)
    dscore.addmv_(hidden.view(-1, hidden.shape[2]).t(), de.reshape(-1), alpha=2)
    hidden.addcmul_(hidden, hidden, value=-1)
    dkeys.addcmul_(de.unsqueeze(2), hidden)
    return torch.bmm(de.unsqueeze(1), hidden).squeeze(1) * (score * 4)
