"""Search state at fixed addresses and with fixed shapes, so that steps can be captured in a CUDA graph.

There are B slots of K rows, one slot per sentence. Sentences are encoded into a buffer of B waiting sentences and
copied from there into slots.

Shapes: S source positions, R = B K rows, H decoder size, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.model.inference.decoder import IncrementalModel
from econmt.model.inference.state import IncrementalState, Sources
from econmt_ops.core.lengths import padding_mask


class Grid:
    """Search state of a translation model; implements :class:`econmt.decoding.search.model.SearchGrid`.

    Args:
        slots: B, number of slots and of waiting sentences.
        width: K, rows per slot.
        positions: S, length of the longest sentence including EOS.
    """

    def __init__(self, model: IncrementalModel, slots: int, width: int, positions: int) -> None:
        self.model = model
        device = model.model.output.weight.device
        one = torch.ones(1, 1, dtype=torch.int64, device=device)
        like = model.encode_tensors(one, one[0], factors=False)
        self._waiting = _zeros(like, slots, positions, 1)
        self._state = model.bind(_zeros(like, slots, positions, width))
        self._after = self._state

    def encode(self, source: Tensor, lengths: Tensor) -> None:
        """Encodes the waiting sentences: ``source`` (B, S' <= S) int64, padded; ``lengths`` (B,) include EOS."""
        encoded, waiting = self.model.encode_tensors(source, lengths, factors=False), self._waiting
        size = source.shape[1]
        for kept, new in zip(_positions(waiting.sources), _positions(encoded.sources), strict=True):
            kept[:, :size].copy_(new)
        waiting.sources.lengths.copy_(lengths)
        for kept, new in zip(_rows(waiting), _rows(encoded), strict=True):
            kept[:, : new.shape[1]].copy_(new)  # the first coverage is zero at all positions

    def put(self, slots: Tensor, entries: Tensor) -> None:
        """Copies the waiting sentences ``entries`` (N,) into ``slots`` (N,), each into the first row of its slot.

        The same pair may occur several times.
        """
        here, waiting = self._state.sources, self._waiting.sources
        for kept, new in zip(
            (*_positions(here), here.lengths), (*_positions(waiting), waiting.lengths), strict=True
        ):
            kept.index_copy_(0, slots, new.index_select(0, entries))
        here.padding.copy_(padding_mask(here.lengths, here.padding.shape[1], here.padding.device))
        first = slots * self._state.width
        for kept, new in zip(_rows(self._state), _rows(self._waiting), strict=True):
            kept.index_copy_(0, first, new.index_select(0, entries))

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Reads tokens (R,); returns logits (R, V) and attention (R, S)."""
        logits, attention, self._after = self.model.logits(tokens, self._state)
        return logits, attention

    def select(self, rows: Tensor) -> None:
        """Continues each row from the state after the step of one of ``rows`` (R,), which is in the same slot."""
        for kept, new in zip(_rows(self._state), _rows(self._after), strict=True):
            torch.index_select(new, 0, rows, out=kept)
        self._after = self._state


def _zeros(like: IncrementalState, sentences: int, positions: int, width: int) -> IncrementalState:
    """Returns a zero state of ``sentences`` sentences, each with ``width`` rows and a source of one token."""
    sources = like.sources
    keys, values, *shares = (
        part.new_zeros(sentences, positions, part.shape[2]) for part in _positions(sources)
    )
    lengths = torch.ones(sentences, dtype=torch.int64, device=keys.device)
    padding = padding_mask(lengths, positions, keys.device)
    hidden, memory = (
        tuple(part.new_zeros(sentences * width, part.shape[1]) for part in parts)
        for parts in (like.hidden, like.memory)
    )
    output = like.output.new_zeros(sentences * width, like.output.shape[1])
    coverage = like.coverage
    if coverage is not None:
        coverage = coverage.new_zeros(sentences * width, positions, coverage.shape[2])
    own = Sources(keys, False, values, padding, lengths, shares=shares[0] if shares else None)
    return IncrementalState(own, None, width, hidden, memory, output, coverage)


def _rows(state: IncrementalState) -> tuple[Tensor, ...]:
    """Returns the tensors of a state whose first axis is that of rows."""
    covered = () if state.coverage is None else (state.coverage,)
    return (*state.hidden, *state.memory, state.output, *covered)


def _positions(sources: Sources) -> tuple[Tensor, ...]:
    """Returns the tensors of sources with a vector for each position, (B, S, .)."""
    return (sources.keys, sources.values, *(() if sources.shares is None else (sources.shares,)))
