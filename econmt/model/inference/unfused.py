"""Search step of an unfused decoder: its own step function, on a copy of the source for each row.

Shapes: R rows (hypotheses), S source positions, H decoder size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt.model.decoder import Memory, Recurrent
from econmt.model.unfused.decoder import UnfusedDecoder
from econmt_ops.core.precision import autocast_to
from econmt_ops.core.weights import State


class UnfusedStepDecoder:
    """Search step of an :class:`~econmt.model.unfused.decoder.UnfusedDecoder`.

    The memory of a state has the states of every layer, then the coverage (R, S, C) if there is one.

    Args:
        decoder: decoder in evaluation mode.
        embedding: target embeddings, (V, I).
        dtype: type of products; float32 is used instead of int8.
    """

    def __init__(self, decoder: UnfusedDecoder, embedding: Tensor, dtype: torch.dtype) -> None:
        self.decoder, self.embedding = decoder, embedding
        self.dtype = dtype if dtype.is_floating_point else torch.float32
        self.attention = self

    def prepare(self, keys: Tensor, may_factor: bool = True) -> tuple[Tensor, bool]:  # noqa: ARG002
        """Returns the keys unchanged, and False: they are no exponentials."""
        return keys, False

    def summands(self, values: Tensor) -> Tensor:
        """Returns the values unchanged."""
        return values

    def states(self, layers: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns no hidden states, and the states of all layers as memory."""
        return (), tuple(part.contiguous() for parts in layers for part in parts)

    def __call__(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Reads tokens (R,); returns the attention (R, S) and the state after the step."""
        sources, owners = state.sources, state.owners
        memory = Memory(
            *(part.index_select(0, owners) for part in (sources.keys, sources.values, sources.lengths))
        )
        layers, coverage = self.decoder.layer_states(state.memory)
        # Sources may have been cut since the last step, when the longest sentences left the batch.
        extra = tuple(part[:, : sources.keys.shape[1]] for part in coverage)
        words = self.embedding.index_select(0, tokens).to(self.dtype)
        with autocast_to(words.device, self.dtype):
            weights, after = self.decoder.step(words, memory, Recurrent(layers, state.output, extra))
        memory_after = (*self.states(after.layers)[1], *after.extra)
        return weights, state._replace(memory=memory_after, output=after.output.to(self.dtype))
