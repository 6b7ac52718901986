"""Decoders for the C library: a whole beam search in one call, or single steps.

Both use the same arithmetic, in which no row depends on others, so that a hypothesis has the same log-probability to
the last bit in either search.

Shapes: B sentences, S source positions, R rows (hypotheses), H decoder size, A attention size, E encoder size, V target
vocabulary, N of its words, W width of the coverage.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.model.decoder import Memory
from econmt.model.inference.layout import TABLE_BYTES, EmbeddingRows, prepacked
from econmt.model.inference.state import Shortlist
from econmt.model.inference.weights import DecoderParts
from econmt.model.layers import weights_of
from econmt.model.translation import TranslationModel
from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import CELL_NUMBERS, SearchWeight, search_step
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.weights import AttentionalLSTMState, LowRank

OUTPUT = 4
"""Index of the output layer among the weights, in the order of kernels.h."""


class NativeSources(NamedTuple):
    """Sources of B sentences for the C search.

    Attributes:
        tensors: those of the sentences by their names in kernels.h, float32 and ``padding`` uint8.
        first: h and c before the first step, (layers, 2, B, H).
    """

    tensors: dict[str, Tensor]
    first: Tensor

    def keep(self, sentences: Tensor) -> NativeSources:
        """Selects the sentences with indices ``sentences`` (C,), cut to the longest of them."""
        size = int((self.tensors["padding"].index_select(0, sentences) == 0).sum(1).max())
        tensors = {name: part[:, :size].index_select(0, sentences) for name, part in self.tensors.items()}
        return NativeSources(tensors, self.first.index_select(2, sentences))


class NativeState(NamedTuple):
    """State of R rows of a search; see :class:`econmt.decoding.search.model.SearchState`.

    Attributes:
        sources: sources of B sentences, shared by the rows. owners: sentence of each row, (R,) int64.
        hidden, memory: h and c, (layers, R, H) float32. output: attentional hidden vector o, (R, H) float32.
        coverage: coverage of the source positions, (R, S, W) float32; W is 0 without one.
        shortlist: output layer of selected words; None: all words.
    """

    sources: NativeSources
    owners: Tensor
    hidden: Tensor
    memory: Tensor
    output: Tensor
    coverage: Tensor
    shortlist: Shortlist | None = None

    def select(self, rows: Tensor, cells: Tensor, width: int) -> NativeState:
        """See :meth:`econmt.decoding.search.model.SearchState.select`."""
        hidden, memory = (part.index_select(1, rows) for part in (self.hidden, self.memory))
        output, coverage = (part.index_select(0, rows) for part in (self.output, self.coverage))
        owners = torch.div(cells, width, rounding_mode="floor")
        return NativeState(self.sources, owners, hidden, memory, output, coverage, self.shortlist)

    def keep(self, sentences: Tensor) -> NativeState:
        """See :meth:`econmt.decoding.search.model.SearchState.keep`."""
        shortlist = None if self.shortlist is None else self.shortlist.keep(sentences)
        owners, sources = torch.searchsorted(sentences, self.owners), self.sources.keep(sentences)
        coverage = self.coverage[:, : sources.tensors["keys"].shape[1]].contiguous()
        return self._replace(sources=sources, owners=owners, coverage=coverage, shortlist=shortlist)


class NativeDecoder:
    """Prepacked decoder weights for the C library.

    Args:
        model: model that :meth:`knows` accepts. dtype: type of products.

    Attributes:
        sizes: sizes by their names in kernels.h. weights: weights in the order of kernels.h.
        tensors: other tensors that do not depend on the sentences.
    """

    def __init__(self, model: TranslationModel, dtype: torch.dtype) -> None:
        parts = DecoderParts.of(model)
        embedding = EmbeddingRows(model.target_embedding.weight, dtype)
        self.weights = [
            None if each is None else SearchWeight(*each, dtype) for each in parts.products.values()
        ]
        self._sources = {name: prepacked(*each, dtype) for name, each in parts.sources.items()}
        self._scale, self._log_probs = model.decoder.attention.scale, torch.empty(0)
        self.sizes = parts.sizes
        self.tensors: dict[str, Tensor | None] = {
            **parts.vectors,
            "embedding": embedding.values.contiguous() if embedding.steps is None else None,
            "bytes": None if embedding.steps is None else embedding.values,
            "scales": embedding.steps,
        }
        bottom = self.weights[0]
        assert bottom is not None
        words, width = len(embedding.values), bottom.outputs
        if words * width * 4 <= TABLE_BYTES:
            # Memory pages of words that do not occur are never allocated.
            self.tensors["shares"] = torch.empty(words, width)
            self.tensors["known"] = torch.zeros(words, dtype=torch.uint8)

    @staticmethod
    def knows(model: TranslationModel, precision: torch.dtype) -> bool:
        """Returns True if the C library is installed and supports the model's decoder and the type of products."""
        if not SearchWeight.supports(precision):
            return False
        if model.decoder.config.cell not in CELL_NUMBERS:
            return False
        if not native.serves(model.output.weight):
            return False
        if model.output.weight.dtype != torch.float32:
            return False
        return precision == torch.int8 or not any(
            isinstance(layer.input, LowRank) for layer in weights_of(model.decoder.layers)
        )

    def begin(self, memory: Memory, first: AttentionalLSTMState) -> NativeState:
        """Returns the state before the first target token, one row per sentence; ``first`` is that of the decoder."""
        keys, values, lengths = memory
        shares = {name: product(values) for name, product in self._sources.items()}
        if self.sizes["contexts"]:
            shares["values"] = torch.cat([shares["values"], values.to(shares["values"].dtype)], 2)
        keys = keys.float() if math.isclose(self._scale, 1.0) else keys.float() * self._scale
        padding = padding_mask(lengths, keys.shape[1], keys.device).to(torch.uint8)
        tensors = {name: part.float().contiguous() for name, part in {**shares, "keys": keys}.items()}
        # The library does not read the c of a GRU, and writes the h of an SSRU before it reads it.
        pairs = [(parts[0], parts[-1]) for parts in first.layers]
        layers = torch.stack([torch.stack([part.float() for part in pair]) for pair in pairs])
        hidden, cells = (part.contiguous() for part in layers.unbind(1))
        output, coverage = torch.zeros_like(hidden[0]), torch.zeros(*padding.shape, self.sizes["width"])
        sources = NativeSources({**tensors, "padding": padding}, layers)
        return NativeState(sources, torch.arange(len(output)), hidden, cells, output, coverage)

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
        weights, masked, sources = [*self.weights], None, state.sources.tensors
        if state.shortlist is not None:
            weights[OUTPUT], masked = state.shortlist
        sizes = {
            **self.sizes,
            **dict(zip(("sentences", "positions", "compared"), sources["keys"].shape, strict=True)),
            "summed": sources["values"].shape[2],
        }
        return weights, sizes, {**self.tensors, **sources, "barred": masked}

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
        changing = state.hidden, state.memory, state.output, state.coverage
        hidden, memory, outputs, coverage = (part.clone() for part in changing)
        rows = {
            "owners": state.owners,
            "tokens": tokens.contiguous(),
            "h": hidden,
            "c": memory,
            "output": outputs,
            "coverage": coverage,
        }
        search_step(weights, sizes, tensors, {**rows, "seen": seen, "log_probs": log_probs})
        after = state._replace(hidden=hidden, memory=memory, output=outputs, coverage=coverage)
        return log_probs, seen, after
