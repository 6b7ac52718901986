"""Attention and coverage of the rows of a search.

Shapes: B sentences, S source positions, K maximum number of rows per sentence, R rows (hypotheses), A attention size,
W width of the coverage.
"""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor
from torch.nn import functional

from econmt.model.attention import Attention, CoverageLayer
from econmt.model.inference.layout import is_watched, prepacked, value_type
from econmt.model.inference.state import IncrementalState, Sources
from econmt_ops.backends import triton
from econmt_ops.backends.protocol import AttentionInputs
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.cells.coverage import coverage_forward
from econmt_ops.core.activations import tanh_
from econmt_ops.core.chunks import split_rows
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import Coverage


class StepCoverage:
    """Coverage of rows.

    Attributes:
        key: weight of the coverage in the scores, (A, W).
    """

    def __init__(self, layer: CoverageLayer, dtype: torch.dtype) -> None:
        exact = accumulate_dtype(value_type(dtype))
        self.key = layer.key.weight.detach().to(exact)
        self._layer, self._kind, self._state, self._read = layer, "sum", None, None
        self._weights: tuple[Tensor | None, Tensor | None] = None, None
        if layer.read is not None:
            attention, values, state = layer.split(layer.read.weight.detach())
            self._read = prepacked(values, layer.read.bias, dtype)
            if attention is not None and state is not None and layer.recur is not None:
                self._kind = layer.kind
                self._weights = attention.to(exact), layer.recur.weight.detach().to(exact)
                self._state = prepacked(state, None, dtype)

    def first(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the shares (B, S, P) of the encoder's outputs (B, S, E), and the coverage (B, S, W) of no step."""
        shares = values.new_ones(*values.shape[:2], 1) if self._read is None else self._read(values)
        if self._read is not None and self._state is None:
            shares = self._layer.inverse_fertilities(shares)
        shares = shares.to(self.key.dtype)
        return shares, shares.new_zeros(*shares.shape[:2], self.key.shape[1])

    def __call__(self, attention: Tensor, top: Tensor, state: IncrementalState) -> Tensor | None:
        """Returns the coverage (R, S, W) after a step with attention (R, S) and the top layer's output (R, H)."""
        before = state.coverage
        assert before is not None
        assert state.sources.shares is not None
        shares = state.sources.shares.index_select(0, state.owners)
        read = None if self._state is None else self._state(top).to(before.dtype)
        attended, recurrent = self._weights
        weights = Coverage(self._kind, self.key, shares, attended, recurrent=recurrent)
        return coverage_forward(weights, before, attention, read)


class StepAttention:
    """Attention of rows that share sentences: a grid of queries (B, K) instead of a copy of the source for each row.

    Attributes:
        query: query weight, (A, H); None: states are queries.
        negated: True if keys and queries are -2 times those of the attention.
    """

    def __init__(self, attention: Attention, dtype: torch.dtype, device: torch.device) -> None:
        dtype = value_type(dtype)
        self.accumulate = accumulate_dtype(dtype)
        norm = attention.layer_norm
        if norm is not None:
            norm = norm[0].detach().to(self.accumulate), norm[1].detach().to(self.accumulate)
        self.norm = norm
        self.dtype = dtype
        self.coverage = None if attention.coverage is None else StepCoverage(attention.coverage, dtype)
        # On a GPU tanh is one instruction, and checking the range of exponentials would synchronise.
        plain = norm is None and self.coverage is None
        self.negated = plain and device.type == "cpu" and not triton.runs_on(device)
        self.scale = attention.scale
        self.query: Tensor | None = None
        self.score: Tensor | None = None
        if attention.query is not None and attention.score is not None:
            # tanh x = 2 sigmoid(2 x) - 1, where the constant does not change a softmax.
            outer, inner = (2.0, -2.0) if self.negated else (1.0, 1.0)
            self.query = attention.query.detach() * inner
            self.score = attention.score.detach().to(self.accumulate) * outer
        # Bound of arguments whose exponential is a normal number.
        self.largest = math.log(torch.finfo(self.accumulate).max) - 2.0
        self._one = torch.ones((), dtype=self.accumulate, device=device)
        self._workspace = torch.empty(0, dtype=self.accumulate, device=device)

    def prepare(self, keys: Tensor, may_factor: bool = True) -> tuple[Tensor, bool]:
        """Returns the keys (B, S, A) in the form that scores need, and True if they are stored as exponentials.

        tanh(q + k) = 2 sigmoid(2 q + 2 k) - 1, and sigmoid(2 q + 2 k) = 1 / (1 + exp(-2 q) exp(-2 k)). With exp(-2 k)
        computed once per sentence and exp(-2 q) once per step, no exponential per row and position remains. Queries are
        clamped to a range; if keys lie within half of that range, tanh is exactly 1 or -1 wherever clamping changes a
        query. Keys outside of it are not stored as exponentials.
        """
        if not self.negated:
            return keys.to(self.dtype), False
        if self.score is None:
            return keys, False
        keys = keys.to(self.accumulate) * -2.0
        if not may_factor:
            return keys, False
        low, high = keys.aminmax()
        bound = self.largest / 2
        if is_watched() or not (-bound <= float(low) and float(high) <= bound):
            return keys, False
        return keys.exp_(), True

    def bind(self, sources: Sources) -> Sources:
        """Adds Triton kernels to the sources, where they run; keys and values must keep their addresses."""
        if self.coverage is not None or not triton.serves(sources.keys):
            return sources
        inputs = AttentionInputs(
            sources.keys, sources.values, self.score, self.norm, self.scale, sources.lengths
        )
        kernels = importlib.import_module("econmt_ops.backends.triton.attention").TritonAttention(inputs)
        # A kernel that works on copies would not see later changes.
        in_place = kernels.keys is sources.keys and kernels.values is sources.values
        return sources._replace(kernels=kernels) if in_place else sources

    def __call__(self, query: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor]:
        """Attends with queries (R, A); returns the weights (R, S) and the weighted sums (R, .) of the values."""
        sources = state.sources
        if sources.kernels is not None:
            return self._by_kernels(query, None, state)
        cells, coverage = state.cells, state.coverage
        scores = self._scores(state.grid(query), None if coverage is None else state.grid(coverage), sources)
        scores.masked_fill_(sources.padding.unsqueeze(1), torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, 2)
        sums = torch.bmm(weights.to(sources.values.dtype), sources.values)
        weights, sums = weights.flatten(0, 1), sums.flatten(0, 1)
        if cells is None:
            return weights, sums
        return weights.index_select(0, cells), sums.index_select(0, cells)

    def combine(self, query: Tensor, share: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor]:
        """Attends with queries (R, A); returns the weights (R, S) and tanh(share + weighted sums), (R, H)."""
        if state.sources.kernels is not None:
            return self._by_kernels(query, share, state)
        weights, sums = self(query, state)
        return weights, tanh_(share + sums)

    def _by_kernels(
        self, query: Tensor, share: Tensor | None, state: IncrementalState
    ) -> tuple[Tensor, Tensor]:
        """Computes :meth:`combine` or, if ``share`` is None, :meth:`__call__` by Triton kernels."""
        sources = state.sources
        weights = query.new_empty(len(query), sources.keys.shape[1], dtype=self.accumulate)
        outputs = query.new_empty(len(query), sources.values.shape[2])
        sources.kernels.attend(query, share, weights, [outputs], group=state.width)
        return weights, outputs

    def _scores(self, query: Tensor, coverage: Tensor | None, sources: Sources) -> Tensor:
        """Computes scores (B, K, S), up to a constant, from queries (B, K, A) and coverage (B, K, S, W) or None."""
        if self.score is None:
            return torch.bmm(query, sources.keys.transpose(1, 2)).to(self.accumulate).mul_(self.scale)
        query = query.to(self.accumulate)
        if sources.factors:
            query = query.clamp_(-self.largest, self.largest).exp_()
        parts = [slice(None)]
        if query.device.type == "cpu":  # parts that fit into its caches
            size = query.shape[1] * query.shape[2] * query.itemsize
            parts = split_rows(len(query), sources.keys.shape[1], size)
        scores = [
            self._weighted_sums(
                query[rows].unsqueeze(2),
                sources.keys[rows].unsqueeze(1),
                None if coverage is None else coverage[rows],
                sources.factors,
            )
            for rows in parts
        ]
        return scores[0] if len(scores) == 1 else torch.cat(scores)

    def _weighted_sums(self, query: Tensor, keys: Tensor, coverage: Tensor | None, factors: bool) -> Tensor:
        """Computes scores (B, K, S) of queries (B, K, 1, A) and keys (B, 1, S, A), both as :meth:`prepare` has them.

        ``coverage``: (B, K, S, W), or None.
        """
        assert self.score is not None
        shape = (*query.shape[:2], *keys.shape[2:])
        # Reused by all steps: allocating new memory pages would take longer than writing them.
        if self._workspace.numel() < math.prod(shape):
            self._workspace = self._workspace.new_empty(math.prod(shape))
        hidden = self._workspace[: math.prod(shape)].view(shape)
        if factors:
            # A division takes as long as a reciprocal, and a sum less time than a product with the weights.
            torch.addcmul(self._one, query, keys, out=hidden)
            return torch.div(self.score, hidden, out=hidden).sum(3)
        torch.add(query, keys, out=hidden)
        if self.coverage is not None and coverage is not None:
            hidden += functional.linear(coverage, self.coverage.key)
        if self.negated:
            return torch.matmul(hidden.neg_().sigmoid_(), self.score)
        if self.norm is not None:
            hidden = functional.layer_norm(hidden, hidden.shape[3:], *self.norm, eps=LAYER_NORM_EPSILON)
        return torch.matmul(hidden.tanh_(), self.score)
