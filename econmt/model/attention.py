"""Attention of a decoder over the encoder's outputs, for all target positions at once.

Shapes: B batch, T target positions, S source positions, A attention size, H decoder size, E encoder size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config import recipe
from econmt.model.implementations import Implementations
from econmt.model.layers import initialize_linear, initialize_matrix
from econmt_ops import Coverage, additive_attention
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.precision import accumulate_dtype

LARGEST_FERTILITY = 2.0
"""Largest fertility N of a source position, as in Tu et al. (2016)."""


class CoverageLayer(nn.Module):
    """Coverage (B, S, C): the attention that each source position got so far, an input of the attention scores.

    count: C_t = C_{t-1} + a_t. fertility: C_t = C_{t-1} + a_t / (N sigmoid(u . v_s)) with N the largest fertility (Tu
    et al., 2016, equations 8 and 9). Activations: C_t = f(W [C_{t-1}; a_t; v_s; h_t] + b). gru: a GRU with state C and
    inputs [a_t; v_s; h_t] (their equation 6).
    """

    def __init__(
        self, config: recipe.CoverageSection, attention_size: int, encoder_size: int, decoder_size: int
    ) -> None:
        super().__init__()
        self.kind, self.state_size = config.type, decoder_size
        width, adds = config.num_hidden, config.type in ("count", "fertility")
        self.key = nn.Linear(width, attention_size, bias=False)
        parts = {"fertility": 1, "gru": 3 * width}.get(self.kind, width)
        reads = encoder_size if adds else 1 + encoder_size + decoder_size
        self.read = None if self.kind == "count" else nn.Linear(reads, parts)
        self.recur = None if adds else nn.Linear(width, parts, bias=False)

    def weights(self, values: Tensor) -> Coverage:
        """Returns the weights as ``econmt_ops`` takes them, for the encoder's outputs ``values`` (B, S, E)."""
        if self.read is None:
            return Coverage("sum", self.key.weight, values.new_ones(*values.shape[:2], 1))
        attention, of_values, state = self.split(self.read.weight)
        read = _project(values, of_values, self.read.bias)
        if self.recur is None or attention is None:
            return Coverage("sum", self.key.weight, self.inverse_fertilities(read))
        return Coverage(self.kind, self.key.weight, read, attention, state, self.recur.weight)

    def split(self, read: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Divides the weight ``read`` into those of attention (P,), values (P, E) and state (P, H)."""
        if self.recur is None:
            return None, read, None
        return read[:, 0], read[:, 1 : -self.state_size], read[:, -self.state_size :]

    def inverse_fertilities(self, read: Tensor) -> Tensor:
        """Computes 1 / (N sigmoid(read)), in the accumulate type."""
        return 1.0 / (LARGEST_FERTILITY * torch.sigmoid(read.to(accumulate_dtype(read.dtype))))

    def initialize(self, init: recipe.Initialization) -> None:
        """Draws initial values of all parameters."""
        for part in (self.key, self.read, self.recur):
            if part is not None:
                initialize_linear(part, init)


class Attention(nn.Module):
    """Additive (Bahdanau et al., 2015), dot, scaled dot or bilinear (Luong et al., 2015) attention.

    Attributes:
        query: (A, H) weight of the projection of decoder states to queries; None: the states are the queries.
        score: (A,) weights of the sum over tanh(query + key); None: scores are products of query and key.
        scale: factor of these products.
        coverage: coverage, a further term of query + key; None without one.
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
        self.coverage: CoverageLayer | None = None
        if config.coverage.type != "none":
            self.coverage = CoverageLayer(config.coverage, config.size, encoder_size, decoder_size)

    @property
    def layer_norm(self) -> tuple[Tensor, Tensor] | None:
        """Gain and bias of the layer normalisation, each (A,); None without one."""
        if self.gain is None or self.shift is None:
            return None
        return self.gain, self.shift

    def keys(self, values: Tensor) -> Tensor:
        """Computes the keys (B, S, A or H) from the encoder's outputs ``values`` (B, S, E), once per sentence."""
        return values if self.key is None else _project(values, self.key.weight, self.key.bias)

    def forward(
        self, states: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, implementations: Implementations
    ) -> tuple[Tensor, Tensor]:
        """Computes the attention of decoder states (B, T, H) over keys (B, S, A or H) of source lengths (B,).

        Returns:
            Contexts (B, T, E), sums of values (B, S, E), and attention weights (B, T, S).
        """
        if self.score is not None and self.query is not None:
            query = functional.linear(states, self.query)
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
        padding = padding_mask(lengths, keys.shape[1], keys.device)
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
        if self.coverage is not None:
            self.coverage.initialize(init)


def _project(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the product of the encoder's outputs ``values`` (B, S, E) with a weight (N, E), plus the bias."""
    by_time = values.transpose(0, 1)
    # Recomputing LSTMs return outputs with time as the outer axis. Multiplying them in the other order would copy them,
    # and autograd would keep the copy.
    if by_time.is_contiguous() and not values.is_contiguous():
        return functional.linear(by_time, weight, bias).transpose(0, 1)
    return functional.linear(values, weight, bias)
