"""Translation model for searches: encodes whole sentences, then extends translations by one token per step.

Results that do not depend on the step are computed once: prepacked weights per model; per sentence, for all of its
hypotheses, the keys in the form that scores need, and the products of values and output weight.

Shapes: B sentences, S source positions, K maximum number of rows per sentence, R rows (hypotheses), H decoder size, A
attention size, E encoder size, V target vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from econmt.model.decoder import Decoder
from econmt.model.inference.attention import StepAttention
from econmt.model.inference.cell_steps import layer_step
from econmt.model.inference.encoder import PrepackedEncoder, prepacks
from econmt.model.inference.layout import EmbeddingRows, Gates, WordShares, prepacked, value_type
from econmt.model.inference.native import NativeDecoder, NativeState
from econmt.model.inference.state import IncrementalState, Shortlist, Sources
from econmt.model.inference.weights import SearchWeights
from econmt.model.layers import weights_of
from econmt.model.translation import EncoderOutput, TranslationModel
from econmt_ops.backends import c as c_library
from econmt_ops.backends import steps_for, triton
from econmt_ops.backends.eager import advance_cell
from econmt_ops.cells.output import output_forward
from econmt_ops.cells.protocol import Cell
from econmt_ops.core.activations import tanh_
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.precision import accumulate_dtype, autocast_to
from econmt_ops.core.weights import AttentionalLSTMState, State
from econmt_ops.products.gemm import Product
from econmt_ops.products.int8 import Int8Product

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
        self.precision, self._dtype = dtype, value_type(dtype)
        with torch.no_grad():
            self._encoder = PrepackedEncoder(model, dtype) if prepacks(model, dtype) else None
            self._logits = torch.empty(
                0, model.target_size, dtype=accumulate_dtype(self._dtype), device=model.output.weight.device
            )

    @functools.cached_property
    @torch.no_grad()
    def _decoder(self) -> _StepDecoder:
        decoder = self.model.decoder
        kind = _StepDecoder if decoder.config.cell == "lstm" else _CellStepDecoder
        return kind(decoder, self.model.target_embedding.weight.detach(), self.precision)

    @functools.cached_property
    @torch.no_grad()
    def _start(self) -> Product | Int8Product | None:
        """Product of the initial state in 8 bits; None in other types, which the decoder computes by itself."""
        start = self.model.decoder.start
        if start is None or self.precision != torch.int8:
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

    def _encoded(self, source: Tensor, lengths: Tensor) -> tuple[EncoderOutput, AttentionalLSTMState]:
        """Returns the encoder's output and the decoder's initial state."""
        assert not self.model.training, "a search needs a model in evaluation mode"
        lower = autocast_to(source.device, self._dtype)
        # Memory estimates trace the model's encoder.
        if self._encoder is None or not c_library.serves(torch.empty(0)):
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
            return decoder.begin(encoded.memory, first)

    def encode_tensors(self, source: Tensor, lengths: Tensor, *, factors: bool = True) -> IncrementalState:
        """Encodes sentences for tensor operations; arguments as in :meth:`encode`.

        ``factors``: True if keys may be stored as exponentials, see :meth:`StepAttention.prepare`.
        """
        with torch.no_grad():
            encoded, first = self._encoded(source, lengths)
            keys, values, lengths = encoded.memory
            padding = padding_mask(lengths, keys.shape[1], keys.device)
            keys, factors = self._decoder.attention.prepare(keys, factors)
            summands = self._decoder.summands(values)
            covering = self._decoder.attention.coverage
            shares, coverage = (None, None) if covering is None else covering.first(values)
            sources = Sources(keys, factors, summands, padding, lengths, shares=shares)
        hidden, memory = self._decoder.states(first.layers)
        rows = torch.arange(len(source), device=source.device)
        output = first.output.to(self._dtype)
        return IncrementalState(sources, rows, 1, hidden, memory, output, coverage)

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
        return state._replace(shortlist=Shortlist(prepacked(weight, bias, self.precision), masked))

    def step(self, tokens: Tensor, state: AnyState) -> tuple[Tensor, Tensor, AnyState]:
        """See :meth:`econmt.decoding.search.model.SearchModel.step`."""
        with torch.no_grad():
            if isinstance(state, NativeState):
                return self._native.step(tokens, state)
            logits, attention, state = self.logits(tokens, state)
            return self._log_softmax(logits), attention, state

    def logits(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor, IncrementalState]:
        """Computes :meth:`step` with logits in the type of products."""
        with torch.no_grad():
            attention, state = self._decoder(tokens, state)
            read = state.output if self._readout is None else self._readout(state.output)
            short = state.shortlist
            logits = self._output(read) if short is None else short.logits(read, state.owners)
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


class _StepDecoder:
    """One step of a decoder of LSTM layers.

    With input feeding the bottom layer reads [word; o; h] and the top layer attends. Without it, the bottom layer reads
    [word; h] and attends, and the upper layers read its context.
    """

    def __init__(self, decoder: Decoder, embedding: Tensor, dtype: torch.dtype) -> None:
        config = decoder.config
        self.feeding, self.residual, self.layers = config.input_feeding, config.residual, config.layers
        self.attention = StepAttention(decoder.attention, dtype, embedding.device)
        layers = weights_of(decoder.layers)
        weights = SearchWeights.of(decoder, self.attention.query, layers[0].input)
        self.pack(decoder.cell.cell, layers, weights, embedding, dtype)
        self.from_values = prepacked(weights.values, None, dtype)
        self.size, self.dtype = config.size, value_type(dtype)
        self.reads_contexts, self.asked = weights.contexts, weights.asked
        self.query = None if weights.query is None else prepacked(weights.query, None, dtype)
        self.combine = prepacked(weights.top, weights.top_bias, dtype)
        kept = [weights.context_bias]
        kept += [None, None] if decoder.norm is None else [decoder.norm.weight, decoder.norm.bias]
        self.context_bias, *norm = (None if part is None else part.detach().to(self.dtype) for part in kept)
        self.norm = None if norm[0] is None or norm[1] is None else (norm[0], norm[1])

    def pack(
        self,
        cell: Cell,  # noqa: ARG002  all layers have four gates
        layers: tuple[Any, ...],
        weights: SearchWeights,
        embedding: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Packs the weights of the layers."""
        bottom, *upper = layers
        word = Gates([weights.word], bottom.bias, dtype)
        self.words = WordShares(EmbeddingRows(embedding, dtype), word, len(bottom.bias))
        self.bottom = Gates([*([] if weights.fed is None else [weights.fed]), bottom.hidden], None, dtype)
        self.upper = [Gates([layer.input, layer.hidden], layer.bias, dtype) for layer in upper]

    def states(self, layers: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the states of all layers as ``hidden`` and ``memory`` of an :class:`IncrementalState`."""
        hidden, memory = zip(*layers, strict=True)
        return tuple(h.to(self.dtype) for h in hidden), tuple(c.contiguous() for c in memory)

    def summands(self, values: Tensor) -> Tensor:
        """Computes the vectors that attention sums: the share of each value in the argument of tanh in o, (B, S, H).

        With a context gate its share comes first: (B, S, 2H). If layers read contexts, the values themselves follow:
        (B, S, H + E).
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
            if self.norm is None and self.context_bias is None:
                weights, output = self.attention.combine(query, share, state)
            else:
                weights, sums = self.attention(query, state)
                output = output_forward(share, sums, self.context_bias, self.norm)
        else:
            weights, output = below[0], tanh_(share + below[1][:, : self.size])
        coverage = self.attention.coverage
        after_coverage = None if coverage is None else coverage(weights, top, state)
        hidden, memory = self.states(tuple(afters))
        return weights, state._replace(hidden=hidden, memory=memory, output=output, coverage=after_coverage)

    def bottom_step(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the bottom layer's output (R, H) and its states after the step."""
        fed = (state.output,) if self.feeding else ()
        return self.advance(self.bottom(*fed, state.hidden[0], start=self.words(tokens)), 0, state)

    def upper_step(
        self, layer: int, read: Tensor, state: IncrementalState
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes an upper layer's output (R, H) and its states after the step."""
        return self.advance(self.upper[layer - 1](read, state.hidden[layer]), layer, state)

    def advance(
        self, gates: Tensor, layer: int, state: IncrementalState
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes h, in the type of products, and the states after a step from the pre-activations (R, 4H)."""
        c = state.memory[layer]
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
        return h, (h, after)


class _CellStepDecoder(_StepDecoder):
    """One step of a decoder whose layers have any other cell."""

    def pack(
        self,
        cell: Cell,
        layers: tuple[Any, ...],
        weights: SearchWeights,
        embedding: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.count = len(cell.states)
        self.embedding = EmbeddingRows(embedding, dtype)

        def product(matrix: Tensor, bias: Tensor | None) -> Gates:
            return Gates([matrix], bias, dtype)

        def extra(part: Tensor) -> Tensor:
            rounded = part.detach().to(value_type(dtype))
            return rounded.to(accumulate_dtype(rounded.dtype))

        bottom, *upper = layers
        self.fed: Gates | None = None
        if weights.fed is not None:
            self.fed, bottom = Gates([weights.fed], None, dtype), bottom._replace(input=weights.word)
        self.steps = [layer_step(cell, part, product, extra) for part in (bottom, *upper)]
        self.words = WordShares(self.embedding, self.steps[0].read, self.steps[0].width)

    def states(self, layers: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (), tuple(part.contiguous() for parts in layers for part in parts)

    def bottom_step(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, tuple[Tensor, ...]]:
        read, share = self.embedding(tokens).to(self.dtype), self.words(tokens)
        if self.fed is not None:
            share = self.fed(state.output, start=share)
        return self.steps[0](share, read, state.memory[: self.count])

    def upper_step(
        self, layer: int, read: Tensor, state: IncrementalState
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        step, begin = self.steps[layer], layer * self.count
        return step(step.read(read), read, state.memory[begin : begin + self.count])
