"""Conversion of a `PackedSequence` to a padded batch with lengths, and back.

B batch, T steps of the longest row, N positions of all rows together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class UnpackedBatch:
    """Padded batch of a packed sequence, its rows in the packed order (longest first).

    The batch sizes of a packed sequence are on the CPU, so that nothing waits for a GPU.

    Args:
        packed: Packed sequence with data (N, I).

    Attributes:
        inputs: Padded batch, (B, T, I), zero past a row's length. Time comes first in memory.
        lengths: Lengths of the rows, (B,) int64 on the CPU.
    """

    def __init__(self, packed: PackedSequence) -> None:
        self._packed = packed
        sizes = packed.batch_sizes
        steps, batch = len(sizes), int(sizes[0])
        present = torch.arange(batch) < sizes.unsqueeze(1)
        self.lengths = present.sum(0)
        self._places = present.flatten().nonzero().squeeze(1).to(packed.data.device, non_blocking=True)
        padded = packed.data.new_zeros(steps * batch, packed.data.shape[1])
        padded = padded.index_copy(0, self._places, packed.data)
        self.inputs = padded.view(steps, batch, -1).transpose(0, 1)

    def pack(self, outputs: Tensor) -> PackedSequence:
        """Packs outputs (B, T, H) as the inputs were."""
        rows = outputs.transpose(0, 1).flatten(0, 1).index_select(0, self._places)
        _, *order = self._packed
        return PackedSequence(rows, *order)
