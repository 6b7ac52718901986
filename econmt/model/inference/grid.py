"""A search's rows at fixed places: steps that change tensors in place and whose shapes never change.

So they can be captured in a CUDA graph. There are B slots, each for a sentence, of K rows each; sentences are encoded
into a waiting room of E sentences and put into slots from there. Shapes: S source positions, R = B K rows, H decoder
size, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.model.inference.decoder import IncrementalModel
from econmt.model.inference.state import IncrementalState, Sources
from econmt_ops.core.lengths import padding_mask


class Grid:
    """See above; :class:`econmt.decoding.search.model.SearchGrid`.

    Args:
        model: whose steps are made.
        slots: B, also the places E of the waiting room.
        width: K.
        positions: S, that of the longest sentence.
    """

    def __init__(self, model: IncrementalModel, slots: int, width: int, positions: int) -> None:
        self.model = model
        device = model.model.output_weight.device
        one = torch.ones(1, 1, dtype=torch.int64, device=device)
        like = model.encode_tensors(one, one[0], factors=False)
        self._waiting = _room(like, slots, positions, 1)
        self._state = model.bind(_room(like, slots, positions, width))
        self._after = self._state

    def encode(self, source: Tensor, lengths: Tensor) -> None:
        """Fills the waiting room: ``source`` (E, S' <= S) int64, padded; ``lengths`` (E,) count EOS."""
        encoded, room = self.model.encode_tensors(source, lengths, factors=False), self._waiting
        size = source.shape[1]
        room.sources.keys[:, :size].copy_(encoded.sources.keys)
        room.sources.values[:, :size].copy_(encoded.sources.values)
        room.sources.lengths.copy_(lengths)
        if room.sources.words is not None and encoded.sources.words is not None:
            here, blank = room.sources.words, room.sources.words.room(*room.sources.words.ids.shape)
            for kept, new, padding in zip(here, encoded.sources.words, blank, strict=True):
                kept[:, :size].copy_(new)
                kept[:, size:].copy_(padding[:, size:])
        for kept, new in zip(_rows(room), _rows(encoded), strict=True):
            kept.copy_(new)

    def put(self, slots: Tensor, places: Tensor) -> None:
        """Puts the sentences at ``places`` (N,) of the waiting room into ``slots`` (N,), each in its slot's first row.

        The same pair may come several times.
        """
        here, room = self._state.sources, self._waiting.sources
        for kept, new in ((here.keys, room.keys), (here.values, room.values), (here.lengths, room.lengths)):
            kept.index_copy_(0, slots, new.index_select(0, places))
        for kept, new in zip(here.words or (), room.words or (), strict=True):
            kept.index_copy_(0, slots, new.index_select(0, places))
        here.padding.copy_(padding_mask(here.lengths, here.padding.shape[1], here.padding.device))
        first = slots * self._state.width
        for kept, new in zip(_rows(self._state), _rows(self._waiting), strict=True):
            kept.index_copy_(0, first, new.index_select(0, places))

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Reads tokens (R,): logits (R, V) and attention (R, S)."""
        logits, attention, self._after = self.model.logits(tokens, self._state)
        return logits, attention

    def select(self, rows: Tensor) -> None:
        """The rows go on from what the step has made of ``rows`` (R,), which are of their own slot each."""
        for kept, new in zip(_rows(self._state), _rows(self._after), strict=True):
            torch.index_select(new, 0, rows, out=kept)
        self._after = self._state


def _room(like: IncrementalState, sentences: int, positions: int, width: int) -> IncrementalState:
    """Zeros for the state of ``sentences`` of ``width`` rows each, of one position until they are put there."""
    sources = like.sources
    keys, values = (
        part.new_zeros(sentences, positions, part.shape[2]) for part in (sources.keys, sources.values)
    )
    lengths = torch.ones(sentences, dtype=torch.int64, device=keys.device)
    padding = padding_mask(lengths, positions, keys.device)
    hidden, memory = (
        tuple(part.new_zeros(sentences * width, part.shape[1]) for part in parts)
        for parts in (like.hidden, like.memory)
    )
    output = like.output.new_zeros(sentences * width, like.output.shape[1])
    words = None if sources.words is None else sources.words.room(sentences, positions)
    own = Sources(keys, False, values, padding, lengths, words=words)
    return IncrementalState(own, None, width, hidden, memory, output)


def _rows(state: IncrementalState) -> tuple[Tensor, ...]:
    """Returns the tensors of a state that have a row each."""
    return (*state.hidden, *state.memory, state.output)
