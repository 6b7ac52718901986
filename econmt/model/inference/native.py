"""Decoder of LSTM, GRU or SSRU layers for the C library: a whole beam search in one call, or single steps.

Both use the same arithmetic, in which no row depends on others, so that a hypothesis has the same log-probability to
the last bit in either search.

Shapes: B sentences, S source positions, R rows (hypotheses), H decoder size, A attention size, E encoder size, V target
vocabulary, N of its words.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.decoder import Memory
from econmt.model.inference.layout import TABLE_BYTES, EmbeddingRows, dense, prepacked
from econmt.model.inference.state import Shortlist
from econmt.model.inference.weights import SearchWeights, search_layers
from econmt.model.layers import weights_of
from econmt.model.translation import TranslationModel
from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import CELL_NUMBERS, SearchWeight, search_step
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.weights import AttentionalLSTMState, LowRank, Matrix

OUTPUT = 5
"""Index of the output layer among the weights, in the order of kernels.h."""


def _hidden(layer: Any) -> tuple[Matrix, ...]:
    """Returns the weight of the product with h, if the cell has one."""
    return (layer.hidden,) if hasattr(layer, "hidden") else ()


class NativeSources(NamedTuple):
    """Sources of B sentences for the C search, in float32.

    Attributes:
        keys: (B, S, A). values: shares in the argument of tanh in o, (B, S, H), followed by the values themselves if
            layers read contexts, (B, S, H + E).
        padding: (B, S) uint8. first: h and c before the first step, (layers, 2, B, H).
    """

    keys: Tensor
    values: Tensor
    padding: Tensor
    first: Tensor

    def keep(self, sentences: Tensor) -> NativeSources:
        """Selects the sentences with indices ``sentences`` (C,), cut to the longest of them."""
        padding = self.padding.index_select(0, sentences)
        size = int((padding == 0).sum(1).max())
        keys, values = (
            part[:, :size].index_select(0, sentences).contiguous() for part in (self.keys, self.values)
        )
        return NativeSources(
            keys, values, padding[:, :size].contiguous(), self.first.index_select(2, sentences)
        )


class NativeState(NamedTuple):
    """State of R rows of a search; see :class:`econmt.decoding.search.model.SearchState`.

    Attributes:
        sources: sources of B sentences, shared by the rows. owners: sentence of each row, (R,) int64.
        hidden, memory: h and c, (layers, R, H) float32. output: attentional hidden vector o, (R, H) float32.
        shortlist: output layer of selected words; None: all words.
    """

    sources: NativeSources
    owners: Tensor
    hidden: Tensor
    memory: Tensor
    output: Tensor
    shortlist: Shortlist | None = None

    def select(self, rows: Tensor, cells: Tensor, width: int) -> NativeState:
        """See :meth:`econmt.decoding.search.model.SearchState.select`."""
        hidden, memory = (part.index_select(1, rows) for part in (self.hidden, self.memory))
        owners = torch.div(cells, width, rounding_mode="floor")
        return NativeState(
            self.sources, owners, hidden, memory, self.output.index_select(0, rows), self.shortlist
        )

    def keep(self, sentences: Tensor) -> NativeState:
        """See :meth:`econmt.decoding.search.model.SearchState.keep`."""
        shortlist = None if self.shortlist is None else self.shortlist.keep(sentences)
        owners = torch.searchsorted(sentences, self.owners)
        return self._replace(sources=self.sources.keep(sentences), owners=owners, shortlist=shortlist)


class NativeDecoder:
    """Prepacked decoder weights for the C library.

    Args:
        model: model that :meth:`knows` accepts. dtype: type of products.

    Attributes:
        sizes: sizes by their names in kernels.h. weights: weights in the order of kernels.h.
        tensors: other tensors that do not depend on the sentences.
    """

    def __init__(self, model: TranslationModel, dtype: torch.dtype) -> None:
        decoder, attention = model.decoder, model.decoder.attention
        config, size = decoder.config, decoder.config.size
        embedding = EmbeddingRows(model.target_embedding.weight, dtype)
        bottom, *upper = search_layers(decoder)
        weights = SearchWeights.of(decoder, attention.query, bottom.input)
        lowest = [dense(part) for part in (weights.fed, *_hidden(bottom)) if part is not None]
        readout = model.readout
        pairs: list[tuple[Tensor, Tensor | None] | None] = [
            (dense(weights.word), bottom.bias),
            (torch.cat(lowest, 1), None) if lowest else None,
            (weights.top, weights.top_bias),
            None if weights.query is None else (weights.query, None),
            None if readout is None else (readout.weight, readout.bias),
            (model.output.weight, model.output.bias),
            *(
                (torch.cat([dense(each) for each in (layer.input, *_hidden(layer))], 1), layer.bias)
                for layer in upper
            ),
        ]
        self.weights = [None if each is None else SearchWeight(each[0], each[1], dtype) for each in pairs]
        self._values = prepacked(weights.values, None, dtype)
        self._contexts, self._scale = weights.contexts, attention.scale
        self._log_probs = torch.empty(0)
        self.sizes = {
            "layers": config.layers,
            "size": size,
            "cell": CELL_NUMBERS[config.cell],
            "fed": int(config.input_feeding),
            "residual": int(config.residual),
            "contexts": int(weights.contexts),
            "asked": weights.asked,
            "embedded": embedding.values.shape[1],
        }
        score, norm = attention.score, attention.layer_norm
        self.tensors: dict[str, Tensor | None] = {
            "embedding": embedding.values.contiguous() if embedding.steps is None else None,
            "bytes": None if embedding.steps is None else embedding.values,
            "scales": embedding.steps,
            "score": None if score is None else score.detach().contiguous(),
            "gain": None if norm is None else norm[0].detach().contiguous(),
            "shift": None if norm is None else norm[1].detach().contiguous(),
        }
        words, width = len(embedding.values), len(bottom.bias)
        if words * width * 4 <= TABLE_BYTES:
            # Memory pages of words that do not occur are never allocated.
            self.tensors["shares"] = torch.empty(words, width)
            self.tensors["known"] = torch.zeros(words, dtype=torch.uint8)

    @staticmethod
    def knows(model: TranslationModel, precision: torch.dtype) -> bool:
        """Returns True if the C library is installed and supports the model's decoder and the type of products."""
        if not SearchWeight.supports(precision):
            return False
        decoder = model.decoder
        if decoder.config.cell not in CELL_NUMBERS or not model.config.has_plain_decoder:
            return False
        if not native.serves(model.output.weight):
            return False
        if model.output.weight.dtype != torch.float32:
            return False
        parts = [part for layer in weights_of(decoder.layers) for part in (layer.input, *_hidden(layer))]
        return precision == torch.int8 or not any(isinstance(part, LowRank) for part in parts)

    def begin(self, memory: Memory, first: AttentionalLSTMState) -> NativeState:
        """Returns the state before the first target token, one row per sentence; ``first`` is that of the decoder."""
        keys, values, lengths = memory
        shares = self._values(values)
        if self._contexts:
            shares = torch.cat([shares, values.to(shares.dtype)], 2)
        keys = keys.float() if math.isclose(self._scale, 1.0) else keys.float() * self._scale
        padding = padding_mask(lengths, keys.shape[1], keys.device).to(torch.uint8)
        # The library does not read the c of a GRU, and writes the h of an SSRU before it reads it.
        pairs = [(parts[0], parts[-1]) for parts in first.layers]
        layers = torch.stack([torch.stack([part.float() for part in pair]) for pair in pairs])
        sources = NativeSources(keys.contiguous(), shares.float().contiguous(), padding, layers)
        hidden, cells = (part.contiguous() for part in layers.unbind(1))
        output = torch.zeros_like(hidden[0])
        return NativeState(sources, torch.arange(len(output)), hidden, cells, output)

    def restrict(self, state: NativeState, words: Tensor, allowed: Tensor) -> NativeState:
        """See :meth:`econmt.decoding.search.model.SearchModel.restrict`."""
        output = self.weights[OUTPUT]
        assert output is not None
        masked = torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
        return state._replace(shortlist=Shortlist(output.only(words), masked))

    def arguments(
        self, state: NativeState
    ) -> tuple[list[SearchWeight | None], dict[str, int], dict[str, Tensor | None]]:
        """Returns weights, and sizes and tensors by their names in kernels.h, for steps from a state."""
        weights, masked, sources = [*self.weights], None, state.sources
        if state.shortlist is not None:
            weights[OUTPUT], masked = state.shortlist
        sizes = {
            **self.sizes,
            **dict(zip(("sentences", "positions", "compared"), sources.keys.shape, strict=True)),
            "summed": sources.values.shape[2],
        }
        tensors = {
            "barred": masked,
            "keys": sources.keys,
            "values": sources.values,
            "padding": sources.padding,
        }
        return weights, sizes, {**self.tensors, **tensors}

    def step(self, tokens: Tensor, state: NativeState) -> tuple[Tensor, Tensor, NativeState]:
        """See :meth:`econmt.decoding.search.model.SearchModel.step`."""
        weights, sizes, tensors = self.arguments(state)
        output = weights[OUTPUT]
        assert output is not None
        seen, size = torch.empty(len(tokens), sizes["positions"]), len(tokens) * output.outputs
        # Allocating new memory pages of this size in each step would take longer than writing them.
        if self._log_probs.numel() < size:
            self._log_probs = torch.empty(size)
        log_probs = self._log_probs[:size].view(len(tokens), output.outputs)
        hidden, memory, outputs = state.hidden.clone(), state.memory.clone(), state.output.clone()
        rows = {
            "owners": state.owners,
            "tokens": tokens.contiguous(),
            "h": hidden,
            "c": memory,
            "output": outputs,
        }
        search_step(weights, sizes, tensors, {**rows, "seen": seen, "log_probs": log_probs})
        return log_probs, seen, state._replace(hidden=hidden, memory=memory, output=outputs)
