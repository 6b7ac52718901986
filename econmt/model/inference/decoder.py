"""Translation model for searches: encodes whole sentences, then extends translations by one token per step.

Results that do not depend on the step are computed once: prepacked weights per model; per sentence, for all of its
hypotheses, the keys in the form that scores need, and the products of values and output weight.

Shapes: B sentences, S source positions, K maximum number of rows per sentence, R rows (hypotheses), H decoder size, A
attention size, E encoder size, V target vocabulary.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econmt.model.attention import Attention
from econmt.model.cell_steps import layer_step
from econmt.model.decoder import Decoder, Recurrent
from econmt.model.inference.copying import CopyStep
from econmt.model.inference.encoder import PrepackedEncoder, prepacks
from econmt.model.inference.layout import EmbeddingRows, Gates, WordShares, is_watched, prepacked, value_type
from econmt.model.inference.native import NativeDecoder, NativeState
from econmt.model.inference.state import IncrementalState, Shortlist, Sources
from econmt.model.inference.unfused import UnfusedStepDecoder
from econmt.model.inference.weights import SearchWeights
from econmt.model.layers import weights_of
from econmt.model.translation import EncoderOutput, TranslationModel
from econmt_ops.backends import steps_for, triton
from econmt_ops.backends.eager import advance_cell
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.core.activations import tanh_
from econmt_ops.core.chunks import split_rows
from econmt_ops.core.gemm import Product
from econmt_ops.core.int8 import Int8Product
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.precision import accumulate_dtype, autocast_to
from econmt_ops.core.weights import State

AnyState = IncrementalState | NativeState
"""State of the rows of a search, for tensor operations or the C library."""


class IncrementalModel:
    """Translation model for searches; implements :class:`econmt.decoding.search.model.SearchModel`.

    Weights are copied, most of them when a step first needs them; later changes of the model have no effect.

    Args:
        model: model in evaluation mode.
        precision: type of products: float32, bfloat16, float16 or, on a CPU, int8; a float64 model stays float64.
            Scores, cell states and log-probabilities have at least float32.
    """

    def __init__(self, model: TranslationModel, precision: torch.dtype = torch.float32) -> None:
        stored = model.output.weight.dtype
        dtype = precision if stored == torch.float32 else stored
        self.model = model
        self.unfused = model.decoder.is_unfused  # then there is no grid at fixed addresses
        self.precision, self._dtype = dtype, value_type(dtype)
        with torch.no_grad():
            self._encoder = PrepackedEncoder(model, dtype) if prepacks(model, dtype) else None
            embedding, copying = model.target_embedding.weight.detach(), model.copying
            self._copying = None if copying is None else CopyStep(copying, embedding, self._dtype)
            self._logits = torch.empty(
                0, model.target_size, dtype=accumulate_dtype(self._dtype), device=model.output.weight.device
            )

    @functools.cached_property
    @torch.no_grad()
    def _decoder(self) -> Any:
        decoder = self.model.decoder
        kind: Any = _StepDecoder if decoder.cell.prepacked else _CellStepDecoder
        kind = UnfusedStepDecoder if self.unfused else kind
        dtype = self._dtype if self.unfused else self.precision
        return kind(decoder, self.model.target_embedding.weight.detach(), dtype)

    @functools.cached_property
    @torch.no_grad()
    def _start(self) -> Product | Int8Product | None:
        """Product of the initial state in 8 bits; None in other types, which the decoder computes by itself."""
        start = self.model.decoder.start
        if start is None or self.precision != torch.int8 or self.unfused:
            return None
        return prepacked(start.weight, start.bias, torch.int8)

    @functools.cached_property
    @torch.no_grad()
    def _readout(self) -> Product | Int8Product | None:
        readout = self.model.readout
        return None if readout is None else prepacked(readout.weight, readout.bias, self.precision)

    @functools.cached_property
    @torch.no_grad()
    def _output(self) -> Product | Int8Product:
        return prepacked(self.model.output.weight, self.model.output.bias, self.precision)

    @functools.cached_property
    @torch.no_grad()
    def _native(self) -> NativeDecoder:
        return NativeDecoder(self.model, self.precision)

    @property
    def native(self) -> NativeDecoder | None:
        """Decoder for the C library's search; None if the library is not installed or does not support the model."""
        return self._native if NativeDecoder.knows(self.model, self.precision) else None

    def _encoded(self, source: Tensor, lengths: Tensor) -> tuple[EncoderOutput, Recurrent]:
        """Returns the encoder's output and the decoder's initial state."""
        assert not self.model.training, "a search needs a model in evaluation mode"
        lower = autocast_to(source.device, self._dtype)
        if (
            self._encoder is None or not self._encoder.can_run or is_watched()
        ):  # memory estimates trace the model's encoder
            with lower:
                encoded = self.model.encode(source, lengths)
        else:
            encoded = self._encoder(source, lengths)
        with lower:
            return encoded, self.model.decoder.initial_state(encoded.summary, self._start)

    def encode(self, source: Tensor, lengths: Tensor) -> AnyState:
        """Encodes ``source`` (B, S) int64, including EOS, padded; ``lengths`` (B,) int64 include EOS.

        Steps from this state run in the C library if :attr:`native` is not None, with the log-probabilities of its beam
        search.
        """
        decoder = self.native
        if decoder is None:
            return self.encode_tensors(source, lengths)
        with torch.no_grad():
            encoded, first = self._encoded(source, lengths)
            return decoder.begin(encoded.memory, first, encoded.length_ratios)

    def encode_tensors(self, source: Tensor, lengths: Tensor, *, factors: bool = True) -> IncrementalState:
        """Encodes sentences for tensor operations; arguments as in :meth:`encode`.

        ``factors``: True if keys may be stored as exponentials, see :meth:`_StepAttention.prepare`.
        """
        with torch.no_grad():
            encoded, first = self._encoded(source, lengths)
            keys, values, lengths = encoded.memory
            padding = padding_mask(lengths, keys.shape[1], keys.device)
            keys, factors = self._decoder.attention.prepare(keys, factors)
            words = (
                None if self._copying is None else self._copying.prepare(self.model.words_of(source), values)
            )
            summands = self._decoder.summands(values)
            sources = Sources(keys, factors, summands, padding, lengths, words=words)
        hidden, memory = self._decoder.states(first.layers)
        rows = torch.arange(len(source), device=source.device)
        output = first.output.to(self._dtype)
        return IncrementalState(sources, rows, 1, hidden, memory, output, None, encoded.length_ratios)

    def bind(self, state: IncrementalState) -> IncrementalState:
        """Binds Triton kernels, where they run, to a state whose tensors stay at their addresses."""
        return state._replace(sources=self._decoder.attention.bind(state.sources))

    def restrict(self, state: AnyState, words: Tensor, allowed: Tensor) -> AnyState:
        """See :meth:`econmt.decoding.search.model.SearchModel.restrict`."""
        if isinstance(state, NativeState):
            return self._native.restrict(state, words, allowed)
        weight, bias = (part.detach()[words] for part in (self.model.output.weight, self.model.output.bias))
        masked = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        masked.masked_fill_(~allowed, -torch.inf)
        if state.sources.words is not None:
            state = state._replace(sources=state.sources._replace(words=state.sources.words.among(words)))
        return state._replace(shortlist=Shortlist(prepacked(weight, bias, self.precision), masked))

    def length_ratios(self, state: AnyState) -> Tensor:
        """See :meth:`econmt.decoding.search.model.SearchModel.length_ratios`."""
        assert state.length_ratios is not None, "this model has no length task"
        return state.length_ratios

    def step(self, tokens: Tensor, state: AnyState) -> tuple[Tensor, Tensor, AnyState]:
        """See :meth:`econmt.decoding.search.model.SearchModel.step`."""
        with torch.no_grad():
            if isinstance(state, NativeState):
                return self._native.step(tokens, state)
            logits, attention, state = self.logits(tokens, state)
            return logits if self._copying else self._log_softmax(logits), attention, state

    def logits(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor, IncrementalState]:
        """Computes :meth:`step` with logits in the type of products; with a copying model, with log-probabilities."""
        with torch.no_grad():
            attention, state = self._decoder(tokens, state)
            read = state.output if self._readout is None else self._readout(state.output)
            short = state.shortlist
            logits = self._output(read) if short is None else short.logits(read, state.owners)
            if self._copying is not None:
                logits = self._copying(self._log_softmax(logits), tokens, read, attention, state)
            return logits, attention, state

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """Computes the log-softmax of (R, V) in the accumulate type, in place where possible.

        On a CPU, allocating the memory pages of a new tensor of this size takes longer than writing it.
        """
        if logits.device.type != "cpu":
            return torch.log_softmax(logits, dim=-1, dtype=self._logits.dtype)
        if logits.dtype != self._logits.dtype:
            if self._logits.numel() < logits.numel():
                self._logits = torch.empty_like(logits, dtype=self._logits.dtype)
            # With shortlists, the number of columns differs between batches.
            logits = self._logits.view(-1)[: logits.numel()].view(logits.shape).copy_(logits)
        return torch.log_softmax(logits, dim=-1, out=logits)


class _StepAttention:
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
        # On a GPU tanh is one instruction, and checking the range of exponentials would synchronise.
        self.negated = norm is None and device.type == "cpu" and not triton.runs_on(device)
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
        if not triton.serves(sources.keys):
            return sources
        kernels = importlib.import_module("econmt_ops.backends.triton.attention").AttentionLauncher(
            sources.keys, sources.values, self.score, self.norm, self.scale, sources.lengths
        )
        # A kernel that works on copies would not see later changes.
        in_place = kernels.keys is sources.keys and kernels.values is sources.values
        return sources._replace(kernels=kernels) if in_place else sources

    def __call__(self, query: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor]:
        """Attends with queries (R, A); returns the weights (R, S) and the weighted sums (R, .) of the values."""
        sources, cells = state.sources, state.cells
        if sources.kernels is not None:
            return self._by_kernels(query, None, state)
        grid = query
        if cells is not None:
            grid = query.new_zeros(len(sources.keys) * state.width, query.shape[1])
            grid.index_copy_(0, cells, query)
        scores = self._scores(grid.view(len(sources.keys), state.width, -1), sources)
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
        sources.kernels.forward(query, share, weights, [outputs], group=state.width)
        return weights, outputs

    def _scores(self, query: Tensor, sources: Sources) -> Tensor:
        """Computes scores (B, K, S) of queries (B, K, A), up to a constant, in the accumulate type."""
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
            self._weighted_sums(query[rows].unsqueeze(2), sources.keys[rows].unsqueeze(1), sources.factors)
            for rows in parts
        ]
        return scores[0] if len(scores) == 1 else torch.cat(scores)

    def _weighted_sums(self, query: Tensor, keys: Tensor, factors: bool) -> Tensor:
        """Computes scores (B, K, S) of queries (B, K, 1, A) and keys (B, 1, S, A), both as :meth:`prepare` has them."""
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
        if self.negated:
            return torch.matmul(hidden.neg_().sigmoid_(), self.score)
        if self.norm is not None:
            hidden = functional.layer_norm(hidden, hidden.shape[3:], *self.norm, eps=LAYER_NORM_EPSILON)
        return torch.matmul(hidden.tanh_(), self.score)


class _StepDecoder:
    """One step of a decoder of LSTM layers.

    With input feeding the bottom layer reads [word; o; h] and the top layer attends. Without it, the bottom layer reads
    [word; h] and attends, and the upper layers read its context.
    """

    def __init__(self, decoder: Decoder, embedding: Tensor, dtype: torch.dtype) -> None:
        config = decoder.config
        self.feeding, self.residual, self.layers = config.input_feeding, config.residual, config.layers
        self.attention = _StepAttention(decoder.attention, dtype, embedding.device)
        weights = SearchWeights.of(decoder, self.attention.query)
        self.pack(decoder, weights, embedding, dtype)
        self.from_values = prepacked(weights.values, None, dtype)
        self.size, self.dtype = config.size, value_type(dtype)
        self.reads_contexts, self.asked = weights.contexts, weights.asked
        self.query = None if weights.query is None else prepacked(weights.query, None, dtype)
        self.combine = prepacked(weights.top, weights.top_bias, dtype)

    def pack(self, decoder: Decoder, weights: SearchWeights, embedding: Tensor, dtype: torch.dtype) -> None:
        """Packs the weights of the layers."""
        bottom, *upper = weights_of(decoder.layers)
        word = Gates([weights.word], bottom.bias, dtype)
        self.words = WordShares(EmbeddingRows(embedding, dtype), word, 4 * decoder.config.size)
        self.bottom = Gates([*([] if weights.fed is None else [weights.fed]), bottom.hidden], None, dtype)
        self.upper = [Gates([layer.input, layer.hidden], layer.bias, dtype) for layer in upper]

    def states(self, layers: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the states of all layers as ``hidden`` and ``memory`` of an :class:`IncrementalState`."""
        hidden, memory = zip(*layers, strict=True)
        return tuple(h.to(self.dtype) for h in hidden), tuple(c.contiguous() for c in memory)

    def summands(self, values: Tensor) -> Tensor:
        """Computes the vectors that attention sums: the share of each value in the argument of tanh in o, (B, S, H).

        If layers read contexts, the values themselves follow: (B, S, H + E).
        """
        shares = self.from_values(values)
        return torch.cat([shares, values.to(shares.dtype)], 2) if self.reads_contexts else shares

    def __call__(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, IncrementalState]:
        """Reads tokens (R,); returns the attention (R, S) and the state after the step."""
        top, after = self.bottom_step(tokens, state)
        afters = [after]
        below = None
        if self.reads_contexts:
            below = self.attention(top if self.query is None else self.query(top), state)
        for layer in range(1, self.layers):
            read = top if below is None else torch.cat([top, below[1][:, self.size :]], 1)
            h, after = self.upper_step(layer, read, state)
            afters.append(after)
            top = h + top if self.residual else h
        combined = self.combine(top)
        share = combined[:, self.asked :]
        if below is None:
            query = combined[:, : self.asked] if self.asked else top
            weights, output = self.attention.combine(query, share, state)
        else:
            weights, output = below[0], tanh_(share + below[1][:, : self.size])
        hidden, memory = self.states(tuple(afters))
        return weights, state._replace(hidden=hidden, memory=memory, output=output)

    def bottom_step(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the bottom layer's output (R, H) and its states after the step."""
        fed = (state.output,) if self.feeding else ()
        gates = self.bottom(*fed, state.hidden[0], start=self.words(tokens))
        h, c = self._advance(gates, state.memory[0])
        return h, (h, c)

    def upper_step(
        self, layer: int, read: Tensor, state: IncrementalState
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes an upper layer's output (R, H) and its states after the step."""
        gates = self.upper[layer - 1](read, state.hidden[layer])
        h, c = self._advance(gates, state.memory[layer])
        return h, (h, c)

    def _advance(self, gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Computes h, in the type of products, and c after a step from the pre-activations (R, 4H)."""
        h, after = torch.empty_like(c, dtype=self.dtype), torch.empty_like(c)
        if triton.serves(gates):
            steps_for(gates, "triton").cell_forward(gates, c, after, [h], keep=False)
        elif gates.is_cuda:
            # One kernel instead of nine, because launching kernels dominates the time of a step on a GPU.
            gates = gates.to(c.dtype)
            output, after, _ = torch.ops.aten._thnn_fused_lstm_cell(gates, torch.zeros_like(gates), c)
            h.copy_(output)
        else:
            advance_cell(gates.to(c.dtype), c, h, after)
        return h, after


class _CellStepDecoder(_StepDecoder):
    """One step of a decoder without input feeding whose layers have any other cell."""

    def pack(
        self,
        decoder: Decoder,
        weights: SearchWeights,  # noqa: ARG002  each cell splits its weights itself
        embedding: Tensor,
        dtype: torch.dtype,
    ) -> None:
        assert not self.feeding
        cell = decoder.cell.cell
        self.count = len(cell.states)
        self.embedding = EmbeddingRows(embedding, dtype)

        def product(matrix: Tensor, bias: Tensor | None) -> Gates:
            return Gates([matrix], bias, dtype)

        def extra(part: Tensor) -> Tensor:
            rounded = part.detach().to(value_type(dtype))
            return rounded.to(accumulate_dtype(rounded.dtype))

        self.steps = [layer_step(cell, part, product, extra) for part in weights_of(decoder.layers)]
        self.words = WordShares(self.embedding, self.steps[0].read, self.steps[0].width)

    def states(self, layers: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (), tuple(part.contiguous() for parts in layers for part in parts)

    def bottom_step(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, tuple[Tensor, ...]]:
        read = self.embedding(tokens).to(self.dtype)
        return self.steps[0](self.words(tokens), read, state.memory[: self.count])

    def upper_step(
        self, layer: int, read: Tensor, state: IncrementalState
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        step, begin = self.steps[layer], layer * self.count
        return step(step.read(read), read, state.memory[begin : begin + self.count])
