"""Attention of one target position at a time in PyTorch, with types and inputs that no fused operation supports.

Shapes: B rows, S source positions, A attention size, H decoder size, I embedding size, E encoder size, C coverage.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config import recipe
from econmt.model.attention import Attention
from econmt.model.layers import initialize_linear, initialize_matrix
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.precision import accumulate_dtype

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "softrelu": functional.softplus,
}


def sparsemax(scores: Tensor) -> Tensor:
    """Projects scores (..., S) onto the simplex, along the last axis (Martins and Astudillo, 2016).

    Masked scores must be the smallest finite number. Differentiable almost everywhere: the gradient of the weights
    above 0, minus its mean over them.
    """
    # Shifted so that the largest score is 0 and sums do not overflow; scores below -1 have weight 0.
    scores = (scores - scores.amax(-1, keepdim=True).detach()).clamp(min=-2.0)
    ordered = scores.sort(-1, descending=True).values
    total = ordered.cumsum(-1)
    numbers = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    support = (1.0 + numbers * ordered > total).sum(-1, keepdim=True)
    threshold = (total.gather(-1, support - 1) - 1.0) / support
    return (scores - threshold).clamp(min=0.0)


class CoverageLayer(nn.Module):
    """Coverage (B, S, C): the attention that each source position got so far, an input of the attention scores.

    count: C_t = C_{t-1} + a_t. fertility: C_t = C_{t-1} + a_t / (N sigmoid(u . v_s)) with N the largest fertility (Tu
    et al., 2016, equations 8 and 9). Activations: C_t = f(W [C_{t-1}; a_t; v_s; h_t] + b). gru: a GRU with state C and
    inputs [a_t; v_s; h_t] (their equation 6).
    """

    def __init__(
        self, config: recipe.Coverage, attention_size: int, encoder_size: int, decoder_size: int
    ) -> None:
        super().__init__()
        self.kind, self.width, self.most = config.type, config.num_hidden, float(config.max_fertility)
        self.key = nn.Linear(self.width, attention_size, bias=False)
        parts = {"fertility": 1, "gru": 3 * self.width}.get(self.kind, self.width)
        reads = encoder_size if self.kind == "fertility" else 1 + encoder_size + decoder_size
        self.read = None if self.kind == "count" else nn.Linear(reads, parts)
        self.recur = (
            nn.Linear(self.width, parts, bias=False) if self.kind not in ("count", "fertility") else None
        )

    def first(self, values: Tensor) -> Tensor:
        """Returns the coverage before the first step: zeros, (B, S, C)."""
        return values.new_zeros(*values.shape[:2], self.width, dtype=accumulate_dtype(values.dtype))

    def forward(self, coverage: Tensor, weights: Tensor, values: Tensor, states: Tensor) -> Tensor:
        """Computes the coverage after a step from that before it, (B, S, C), and attention weights (B, S) of the step.

        ``values`` are (B, S, E), decoder ``states`` (B, H).
        """
        weights = weights.to(coverage.dtype).unsqueeze(2)
        if self.read is None:
            return coverage + weights
        if self.kind == "fertility":
            expected = self.most * torch.sigmoid(self.read(values).to(coverage.dtype))
            return coverage + weights / expected
        assert self.recur is not None
        reads = [
            weights.to(values.dtype),
            values,
            states.to(values.dtype)[:, None].expand(-1, values.shape[1], -1),
        ]
        read, recurrent = self.read(torch.cat(reads, dim=2)), self.recur(coverage)
        if self.kind != "gru":
            return _ACTIVATIONS[self.kind]((read + recurrent).to(coverage.dtype))
        (ri, zi, ni), (rh, zh, nh) = (part.to(coverage.dtype).chunk(3, dim=2) for part in (read, recurrent))
        update = torch.sigmoid(zi + zh)
        new = torch.tanh(ni + torch.sigmoid(ri + rh) * nh)
        return torch.lerp(new, coverage, update)

    def initialize(self, init: recipe.Initialization) -> None:
        """Draws initial values of all parameters."""
        for part in (self.key, self.read, self.recur):
            if part is not None:
                initialize_linear(part, init)


class UnfusedAttention(Attention):
    """Attention of one decoder state per row, of any type.

    mhdot: q = W_q s, k = W_k v_s and W_v v_s are divided into heads; in each, softmax(q . k / sqrt(A / heads)) weights
    the values. The returned weights are the mean over heads. location: softmax of W_q s, one score per position.
    """

    def __init__(
        self, config: recipe.AttentionSection, encoder_size: int, decoder_size: int, word_size: int
    ) -> None:
        query_inputs = decoder_size + (word_size if config.use_prev_word else 0)
        super().__init__(config, encoder_size, query_inputs)
        self.config = config
        self.value: nn.Linear | None = None
        self.coverage: CoverageLayer | None = None
        if config.type in ("mhdot", "location"):
            self.query = nn.Parameter(torch.empty(config.size, query_inputs))
        if config.type == "mhdot":
            self.key = nn.Linear(encoder_size, config.size, bias=False)
            self.value = nn.Linear(encoder_size, encoder_size, bias=False)
            self.scale = 1.0 / math.sqrt(config.size / config.mhdot_heads)
        if config.coverage.type != "none":
            self.coverage = CoverageLayer(config.coverage, config.size, encoder_size, decoder_size)

    def values(self, values: Tensor) -> Tensor:
        """See :class:`econmt.model.attention.Attention`."""
        return values if self.value is None else self.value(values)

    def step(
        self,
        states: Tensor,
        words: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        coverage: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Computes the attention of one decoder state per row.

        Args:
            states: (B, H). words: embeddings of the previous words, (B, I). keys: (B, S, .). values: (B, S, E).
            lengths: source lengths, (B,). coverage: (B, S, C), or None without coverage.

        Returns:
            Contexts (B, E), weights (B, S), and the coverage after the step.
        """
        query = torch.cat([states, words.to(states.dtype)], dim=1) if self.config.use_prev_word else states
        padding = padding_mask(lengths, values.shape[1], values.device)
        heads = self.config.mhdot_heads if self.config.type == "mhdot" else 1
        # Sums over many values need at least float32, also if products are in bfloat16.
        with torch.autocast(values.device.type, enabled=False):
            weights = self._weights(query, keys, padding, coverage, heads)
            parts = values.view(*values.shape[:2], heads, -1).to(weights.dtype)
            contexts = torch.einsum("bhs,bshe->bhe", weights, parts).flatten(1)
        mean_weights = weights.mean(1)
        if self.coverage is not None:
            assert coverage is not None
            coverage = self.coverage(coverage, mean_weights, values, states)
        return contexts.to(values.dtype), mean_weights, coverage

    def _weights(
        self, query: Tensor, keys: Tensor, padding: Tensor, coverage: Tensor | None, heads: int
    ) -> Tensor:
        """Computes the weights of each head, (B, heads, S), in the accumulate type."""
        exact = accumulate_dtype(query.dtype)
        positions = padding.shape[1]
        if self.config.type == "fixed":
            last = positions - padding.sum(1, keepdim=True) - 1
            return (torch.arange(positions, device=padding.device) == last).to(exact)[:, None]
        if self.query is not None:
            query = functional.linear(query.to(exact), self.query.to(exact))
        if self.config.type == "location":
            known = query[:, :positions]
            scores = functional.pad(known, (0, positions - known.shape[1]), value=torch.finfo(exact).min)[
                :, None
            ]
        elif self.score is not None:
            scores = self._compared(query, keys.to(exact), coverage)[:, None]
        else:
            parts = keys.to(exact).view(*keys.shape[:2], heads, -1)
            scores = (
                torch.einsum("bha,bsha->bhs", query.to(exact).view(len(query), heads, -1), parts) * self.scale
            )
        scores = scores.masked_fill(padding[:, None], torch.finfo(exact).min)
        return sparsemax(scores) if self.config.function == "sparsemax" else torch.softmax(scores, dim=-1)

    def _compared(self, query: Tensor, keys: Tensor, coverage: Tensor | None) -> Tensor:
        """Computes additive scores (B, S)."""
        assert self.score is not None
        hidden = query[:, None] + keys
        if self.coverage is not None:
            assert coverage is not None
            hidden = hidden + functional.linear(
                coverage.to(hidden.dtype), self.coverage.key.weight.to(hidden.dtype)
            )
        if self.layer_norm is not None:
            gain, shift = (part.to(hidden.dtype) for part in self.layer_norm)
            hidden = functional.layer_norm(hidden, hidden.shape[-1:], gain, shift, LAYER_NORM_EPSILON)
        return torch.tanh(hidden) @ self.score.to(hidden.dtype)

    def initialize(self, init: recipe.Initialization) -> None:
        """See :class:`econmt.model.attention.Attention`."""
        super().initialize(init)
        if self.value is not None:
            initialize_matrix(self.value.weight, init)
        if self.coverage is not None:
            self.coverage.initialize(init)
