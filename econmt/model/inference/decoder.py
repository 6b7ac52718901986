"""A translation model laid out for a search: whole sentences are encoded, translations grow a token at a time.

What does not depend on the step is made once: weights once a model, in the layout that products of few rows read
fastest; of the source once a sentence, for all of its hypotheses, the keys as the scores want them and the values times
their part of the combination.

Shapes: B sentences, S source positions, K rows a sentence at most, R rows (hypotheses), H decoder size, A attention
size, E encoder size, V target vocabulary.
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
from econmt.model.decoder import Decoder, Recurrent
from econmt.model.inference.cells import layer_step
from econmt.model.inference.copying import CopyStep
from econmt.model.inference.encoder import LaidOutEncoder
from econmt.model.inference.layout import Gates, is_watched, prepacked, value_type
from econmt.model.inference.native import NativeDecoder, NativeSources, NativeState
from econmt.model.inference.state import IncrementalState, Shortlist, Sources
from econmt.model.inference.unfused import PlainStepDecoder
from econmt.model.inference.weights import SearchWeights
from econmt.model.inference.words import OutputWords
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
    """The model as a search wants it (:class:`econmt.decoding.search.model.SearchModel`).

    Weights are copied, most when a step first needs them so: after they have changed, make a new one.

    Args:
        model: in evaluation mode.
        precision: of products, float32, bfloat16 or, on a CPU, int8; a model in float64 stays in it. Scores, cell
            states and log-probabilities have float32 at least.
    """

    def __init__(self, model: TranslationModel, precision: torch.dtype = torch.float32) -> None:
        own = model.output_weight.dtype
        dtype = precision if own == torch.float32 else own
        self.model = model
        self.plain = model.decoder.steps  # its own, which no grid at fixed places holds
        self.precision, self._dtype = dtype, value_type(dtype)
        with torch.no_grad():
            on_cpu = model.output_weight.device.type == "cpu"
            laid_out_encoder = on_cpu and model.encoder.prepacked and not self.plain
            self._encoder = LaidOutEncoder(model, dtype) if laid_out_encoder else None
            embedding, copying = model.target_embedding.weight.detach(), model.copying
            self._copying = None if copying is None else CopyStep(copying, embedding, self._dtype)
            self._logits = torch.empty(
                0, model.target_size, dtype=accumulate_dtype(self._dtype), device=model.output_weight.device
            )

    @functools.cached_property
    @torch.no_grad()
    def _decoder(self) -> Any:
        decoder = self.model.decoder
        kind: Any = _StepDecoder if decoder.cell.prepacked else _CellStepDecoder
        kind = PlainStepDecoder if self.plain else kind
        dtype = self._dtype if self.plain else self.precision
        return kind(decoder, self.model.target_embedding.weight.detach(), dtype)

    @functools.cached_property
    @torch.no_grad()
    def _readout(self) -> Product | Int8Product | None:
        readout = self.model.readout
        return None if readout is None else prepacked(readout.weight, readout.bias, self.precision)

    @functools.cached_property
    @torch.no_grad()
    def _output(self) -> Product | Int8Product:
        return prepacked(self.model.output_weight, self.model.output_bias, self.precision)

    @functools.cached_property
    @torch.no_grad()
    def _native(self) -> NativeDecoder:
        return NativeDecoder(self.model, self.precision)

    @property
    def native(self) -> NativeDecoder | None:
        """The decoder as the C library's search reads it; None: the library is not there, or does not know it."""
        return self._native if NativeDecoder.knows(self.model) else None

    def encode_for_native(self, source: Tensor, lengths: Tensor) -> NativeSources:
        """Encodes as :meth:`encode`, for :attr:`native`."""
        with torch.no_grad():
            encoded, first = self._encoded(source, lengths)
            return self._native.begin(encoded.memory, first)

    def _encoded(self, source: Tensor, lengths: Tensor) -> tuple[EncoderOutput, Recurrent]:
        """Returns the encoder's output and the decoder's first state."""
        assert not self.model.training, "a search needs a model in evaluation mode"
        lower = autocast_to(source.device, self._dtype)
        if self._encoder is None or is_watched():  # estimates know the model's own encoder
            with lower:
                encoded = self.model.encode(source, lengths)
        else:
            encoded = self._encoder(source, lengths)
        with lower:
            return encoded, self.model.decoder.initial_state(encoded.summary)

    def encode(self, source: Tensor, lengths: Tensor) -> AnyState:
        """Encode ``source`` (B, S) int64, EOS included, padded; ``lengths`` (B,) int64 count EOS.

        Steps from this state are the C library's where :attr:`native` is one of its decoders: its beam search gives
        the same log-probabilities.
        """
        decoder = self.native
        if decoder is None:
            return self.encode_tensors(source, lengths)
        with torch.no_grad():
            encoded, first = self._encoded(source, lengths)
            return decoder.start(decoder.begin(encoded.memory, first), encoded.length_ratios)

    def encode_tensors(self, source: Tensor, lengths: Tensor, *, factors: bool = True) -> IncrementalState:
        """Encodes as :meth:`encode`, for tensor operations.

        ``factors``: whether keys may be made factors, see :meth:`_StepAttention.prepare`.
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
        """A state whose rows are a grid at a fixed place, read by our kernels where they run."""
        return state._replace(sources=self._decoder.attention.bind(state.sources))

    def restrict(self, state: AnyState, words: Tensor, allowed: Tensor) -> AnyState:
        """See :meth:`econmt.decoding.search.model.SearchModel.restrict`."""
        if isinstance(state, NativeState):
            return self._native.restrict(state, words, allowed)
        weight, bias = (part.detach()[words] for part in (self.model.output_weight, self.model.output_bias))
        masked = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        masked.masked_fill_(~allowed, -torch.inf)
        if state.sources.words is not None:
            state = state._replace(sources=state.sources._replace(words=state.sources.words.among(words)))
        return state._replace(shortlist=Shortlist(prepacked(weight, bias, self.precision), masked))

    def length_ratios(self, encoded: AnyState) -> Tensor:
        """See :meth:`econmt.decoding.search.model.SearchModel.length_ratios`."""
        assert encoded.length_ratios is not None, "this model has no length task"
        return encoded.length_ratios

    def initial_state(self, encoded: AnyState) -> AnyState:
        """The state before the first target token, one row a sentence."""
        return encoded

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

        On the CPU new tensors of this size are new pages each time, which take longer than what is written into them.
        """
        if logits.device.type != "cpu":
            return torch.log_softmax(logits, dim=-1, dtype=self._logits.dtype)
        if logits.dtype != self._logits.dtype:
            if self._logits.numel() < logits.numel():
                self._logits = torch.empty_like(logits, dtype=self._logits.dtype)
            # Of a shortlist rows have other lengths than those before.
            logits = self._logits.view(-1)[: logits.numel()].view(logits.shape).copy_(logits)
        return torch.log_softmax(logits, dim=-1, out=logits)


class _StepAttention:
    """Attention over the sentences that rows share: a grid of queries (B, K) instead of copies of the source.

    Attributes:
        query: (A, H) what makes queries of states, or None: they are queries.
        turned: whether keys and queries are -2 times those of the attention.
    """

    def __init__(self, attention: Attention, dtype: torch.dtype, device: torch.device) -> None:
        dtype = value_type(dtype)
        self.accumulate = accumulate_dtype(dtype)
        norm = attention.layer_norm
        if norm is not None:
            norm = norm[0].detach().to(self.accumulate), norm[1].detach().to(self.accumulate)
        self.norm = norm
        self.dtype = dtype
        # On a GPU tanh is one instruction, and what makes it of exponentials would have to be waited for.
        self.turned = norm is None and device.type == "cpu" and not triton.runs_on(device)
        self.scale = attention.scale
        self.query: Tensor | None = None
        self.score: Tensor | None = None
        if attention.query is not None and attention.score is not None:
            # tanh x = 2 sigmoid(2 x) - 1: twice the sum of sigmoids, and a constant that no softmax feels.
            outer, inner = (2.0, -2.0) if self.turned else (1.0, 1.0)
            self.query = attention.query.detach() * inner
            self.score = attention.score.detach().to(self.accumulate) * outer
        # exp of anything within is a normal number
        self.largest = math.log(torch.finfo(self.accumulate).max) - 2.0
        self._one = torch.ones((), dtype=self.accumulate, device=device)
        self._workspace = torch.empty(0, dtype=self.accumulate, device=device)

    def prepare(self, keys: Tensor, may_factor: bool = True) -> tuple[Tensor, bool]:
        """The keys (B, S, A) as the scores want them, and whether they are factors, which they need not become.

        tanh(q + k) = 2 sigmoid(2 q + 2 k) - 1, and sigmoid(2 q + 2 k) = 1 / (1 + exp(-2 q) exp(-2 k)): with the second
        factor made once a sentence and the first once a step, no exponential is left for each row and position. The
        factors of q are those of a q held within a range; keys within half of that range make tanh 1 or -1, to the
        last bit, outside of it. Other keys are not turned into factors.
        """
        if not self.turned:
            return keys.to(self.dtype), False
        if self.score is None:
            return keys, False
        keys = keys.to(self.accumulate) * -2.0
        if not may_factor:
            return keys, False
        low, high = keys.aminmax()
        if not _is_within(low, high, self.largest / 2):
            return keys, False
        return keys.exp_(), True

    def bind(self, sources: Sources) -> Sources:
        """The sources with our kernels, where they run; keys and values must stay where they are from now on."""
        if not triton.serves(sources.keys):
            return sources
        kernels = importlib.import_module("econmt_ops.backends.triton.attention").AttentionLauncher(
            sources.keys, sources.values, self.score, self.norm, self.scale, sources.lengths
        )
        # Copies would not follow.
        stay = kernels.keys is sources.keys and kernels.values is sources.values
        return sources._replace(kernels=kernels) if stay else sources

    def __call__(self, query: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor]:
        """Look at the source with queries (R, A): the weights (R, S) and the sums (R, .) of the values."""
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
        found = weights.flatten(0, 1), sums.flatten(0, 1)
        return found if cells is None else (found[0].index_select(0, cells), found[1].index_select(0, cells))

    def combine(self, query: Tensor, share: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor]:
        """The weights (R, S) and tanh(share + sums) (R, H), the sums being the first H of the values'."""
        if state.sources.kernels is not None:
            return self._by_kernels(query, share, state)
        weights, sums = self(query, state)
        return weights, tanh_(share + sums)

    def _by_kernels(
        self, query: Tensor, share: Tensor | None, state: IncrementalState
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`combine` or, without a share, :meth:`__call__`."""
        sources = state.sources
        weights = query.new_empty(len(query), sources.keys.shape[1], dtype=self.accumulate)
        outputs = query.new_empty(len(query), sources.values.shape[2])
        sources.kernels.forward(query, share, weights, [outputs], group=state.width)
        return weights, outputs

    def _scores(self, query: Tensor, sources: Sources) -> Tensor:
        """The scores (B, K, S) of the products' queries (B, K, A), up to a constant, in the accumulate type."""
        if self.score is None:
            return torch.bmm(query, sources.keys.transpose(1, 2)).to(self.accumulate).mul_(self.scale)
        query = query.to(self.accumulate)
        if sources.factors:
            query = query.clamp_(-self.largest, self.largest).exp_()
        parts = [slice(None)]
        if query.device.type == "cpu":  # as much at a time as stays in its caches
            size = query.shape[1] * query.shape[2] * query.itemsize
            parts = split_rows(len(query), sources.keys.shape[1], size)
        found = [
            self._weighted_sums(query[rows].unsqueeze(2), sources.keys[rows].unsqueeze(1), sources.factors)
            for rows in parts
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _weighted_sums(self, query: Tensor, keys: Tensor, factors: bool) -> Tensor:
        """The scores (B, K, S) of queries (B, K, 1, A) and keys (B, 1, S, A), which may be ``turned``, or factors."""
        assert self.score is not None
        shape = (*query.shape[:2], *keys.shape[2:])
        # The same memory for all steps: new pages would take longer than what is written into them.
        if self._workspace.numel() < math.prod(shape):
            self._workspace = self._workspace.new_empty(math.prod(shape))
        room = self._workspace[: math.prod(shape)].view(shape)
        if factors:
            # A quotient takes as long as a reciprocal, and a sum less than a product with the weights.
            torch.addcmul(self._one, query, keys, out=room)
            return torch.div(self.score, room, out=room).sum(3)
        torch.add(query, keys, out=room)
        if self.turned:
            return torch.matmul(room.neg_().sigmoid_(), self.score)
        if self.norm is not None:
            room = functional.layer_norm(room, room.shape[3:], *self.norm, eps=LAYER_NORM_EPSILON)
        return torch.matmul(room.tanh_(), self.score)


def _is_within(low: Tensor, high: Tensor, bound: float) -> bool:
    """Returns True if the numbers lie between -bound and bound; False while :func:`is_watched`."""
    return not is_watched() and -bound <= float(low) and float(high) <= bound


class _StepDecoder:
    """One step of either decoder, of LSTM layers.

    With input feeding the bottom layer reads [word; o; h] and the attention looks from the top layer; without, the
    bottom layer reads [word; h], the attention looks from it, and the upper layers read its context.
    """

    def __init__(self, decoder: Decoder, embedding: Tensor, dtype: torch.dtype) -> None:
        config = decoder.config
        self.feeding, self.residual, self.layers = config.input_feeding, config.residual, config.layers
        self.attention = _StepAttention(decoder.attention, dtype, embedding.device)
        weights = SearchWeights.of(decoder, self.attention.query)
        self.lay_out(decoder, weights, embedding, dtype)
        self.from_values = prepacked(weights.values, None, dtype)
        self.size, self.dtype = config.size, value_type(dtype)
        self.reads_contexts, self.asked = weights.contexts, weights.asked
        self.query = None if weights.query is None else prepacked(weights.query, None, dtype)
        self.combine = prepacked(weights.own, weights.own_bias, dtype)

    def lay_out(
        self, decoder: Decoder, weights: SearchWeights, embedding: Tensor, dtype: torch.dtype
    ) -> None:
        """Packs the layers' weights."""
        bottom, *upper = weights_of(decoder.layers)
        word = Gates([weights.word], bottom.bias, dtype)
        self.words = OutputWords(embedding, word, 4 * decoder.config.size)
        self.bottom = Gates([*([] if weights.fed is None else [weights.fed]), bottom.hidden], None, dtype)
        self.upper = [Gates([layer.input, layer.hidden], layer.bias, dtype) for layer in upper]

    def states(self, layers: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The first states of all layers as `IncrementalState` has them, hidden and memory."""
        hidden, memory = zip(*layers, strict=True)
        return tuple(h.to(self.dtype) for h in hidden), tuple(c.contiguous() for c in memory)

    def summands(self, values: Tensor) -> Tensor:
        """Returns the vectors that attention sums: the values' share of the argument of tanh in o, (B, S, H).

        Where layers read the contexts, the values themselves come after them: (B, S, H + E).
        """
        shares = self.from_values(values)
        return torch.cat([shares, values.to(shares.dtype)], 2) if self.reads_contexts else shares

    def __call__(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, IncrementalState]:
        """Read tokens (R,): the attention (R, S) and the state after the step."""
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
        """h, in the type of products, and c after a step, from its gates (R, 4H)."""
        h, after = torch.empty_like(c, dtype=self.dtype), torch.empty_like(c)
        if triton.serves(gates):
            steps_for(gates, "triton").cell_forward(gates, c, after, [h], keep=False)
        elif gates.is_cuda:
            # One kernel instead of nine: a step's time on a GPU is the time of launching kernels.
            gates = gates.to(c.dtype)
            made, after, _ = torch.ops.aten._thnn_fused_lstm_cell(gates, torch.zeros_like(gates), c)
            h.copy_(made)
        else:
            advance_cell(gates.to(c.dtype), c, h, after)
        return h, after


class _CellStepDecoder(_StepDecoder):
    """One step of a decoder without input feeding, of layers of any other cell."""

    def lay_out(
        self,
        decoder: Decoder,
        weights: SearchWeights,  # noqa: ARG002  the cells split their own
        embedding: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """See `_StepDecoder`."""
        assert not self.feeding
        cell = decoder.cell.cell
        self.count = len(cell.states)
        self.embedding = embedding
        self.steps = [layer_step(cell, weights, dtype) for weights in weights_of(decoder.layers)]
        self.words = OutputWords(embedding, self.steps[0].read, self.steps[0].width)

    def states(self, layers: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `_StepDecoder`."""
        return (), tuple(part.contiguous() for parts in layers for part in parts)

    def bottom_step(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `_StepDecoder`."""
        read = self.embedding.index_select(0, tokens).to(self.dtype)
        return self.steps[0](self.words(tokens), read, state.memory[: self.count])

    def upper_step(
        self, layer: int, read: Tensor, state: IncrementalState
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `_StepDecoder`."""
        step, begin = self.steps[layer], layer * self.count
        return step(step.read(read), read, state.memory[begin : begin + self.count])
