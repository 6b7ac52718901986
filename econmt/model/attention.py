"""Attention of a decoder over the encoder's outputs, for all target positions at once.

Shapes: B batch, T target positions, S source positions, A attention size, H decoder size, E encoder size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.model.implementations import Implementations
from econmt.model.layers import initialize_linear, initialize_matrix
from econmt_ops import additive_attention
from econmt_ops.core.precision import accumulate_dtype


class Attention(nn.Module):
    """Additive (Bahdanau et al., 2015), dot, scaled dot or bilinear (Luong et al., 2015) attention.

    Attributes:
        query: (A, H) weight of the projection of decoder states to queries; None: the states are the queries.
        score: (A,) weights of the sum over tanh(query + key); None: scores are products of query and key.
        scale: factor of these products.
    """

    query: nn.Parameter | None
    score: nn.Parameter | None

    def __init__(self, config: recipe.AttentionSection, encoder_size: int, decoder_size: int) -> None:
        super().__init__()
        self.key: nn.Linear | None = None
        self.query = None
        self.score = None
        self.gain: nn.Parameter | None = None
        self.shift: nn.Parameter | None = None
        self.scale = 1.0
        if config.type == "additive":
            self.key = nn.Linear(encoder_size, config.size)
            self.query = nn.Parameter(torch.empty(config.size, decoder_size))
            self.score = nn.Parameter(torch.empty(config.size))
            if config.layer_norm:
                self.gain = nn.Parameter(torch.ones(config.size))
                self.shift = nn.Parameter(torch.zeros(config.size))
        elif config.type == "bilinear":
            self.key = nn.Linear(encoder_size, decoder_size, bias=False)
        elif config.type == "scaled_dot":
            self.scale = 1.0 / math.sqrt(decoder_size)

    @property
    def layer_norm(self) -> tuple[Tensor, Tensor] | None:
        """Gain and bias of the layer normalisation, each (A,); None without one."""
        if self.gain is None or self.shift is None:
            return None
        return self.gain, self.shift

    def values(self, values: Tensor) -> Tensor:
        """Returns the vectors (B, S, E) that attention sums, from the encoder's outputs ``values`` (B, S, E)."""
        return values

    def keys(self, values: Tensor) -> Tensor:
        """Computes the keys (B, S, A or H) from the encoder's outputs ``values`` (B, S, E), once per sentence."""
        if self.key is None:
            return values
        by_time = values.transpose(0, 1)
        # Recomputing LSTMs return outputs with time as the outer axis. Multiplying them in the other order would copy
        # them, and autograd would keep the copy.
        time_first = by_time.is_contiguous() and not values.is_contiguous()
        keys: Tensor = self.key(by_time).transpose(0, 1) if time_first else self.key(values)
        return keys

    def forward(
        self, states: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, implementations: Implementations
    ) -> tuple[Tensor, Tensor]:
        """Computes the attention of decoder states (B, T, H) over keys (B, S, A or H) of source lengths (B,).

        Returns:
            Contexts (B, T, E), sums of values (B, S, E), and attention weights (B, T, S).
        """
        if self.score is not None and self.query is not None:
            query = nn.functional.linear(states, self.query)
            return additive_attention(
                query,
                keys,
                values,
                self.score,
                lengths=lengths,
                layer_norm=self.layer_norm,
                implementation=implementations.attention,
            )
        scores = torch.matmul(states, keys.transpose(1, 2))
        scores = scores.to(accumulate_dtype(scores.dtype)) * self.scale
        positions = torch.arange(keys.shape[1], device=keys.device)
        padding = positions[None, :] >= lengths[:, None]
        weights = torch.softmax(scores.masked_fill(padding[:, None, :], -torch.inf), dim=-1)
        return torch.matmul(weights.to(values.dtype), values), weights

    def initialize(self, init: recipe.Initialization) -> None:
        """Draws initial values of all parameters."""
        if self.key is not None:
            initialize_linear(self.key, init)
        if self.query is not None:
            initialize_matrix(self.query, init)
        if self.score is not None:
            initialize_matrix(self.score[None, :], init)
