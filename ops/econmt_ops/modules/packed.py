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
        batch: B if it is known, so that torch.compile need not read it from the batch sizes.

    Attributes:
        inputs: Padded batch, (B, T, I), zero past a row's length. Time comes first in memory.
        lengths: Lengths of the rows, (B,) int64 on the CPU.
    """

    def __init__(self, packed: PackedSequence, batch: int | None = None) -> None:
        self._packed = packed
        data, sizes, order, _ = packed
        if batch is None:
            batch = int(sizes[0]) if order is None else len(order)
        steps, ends = len(sizes), sizes.cumsum(0)
        self.lengths = (sizes.unsqueeze(1) > torch.arange(batch, device=sizes.device)).sum(0)
        number = torch.arange(len(data), device=sizes.device)
        step = torch.searchsorted(ends, number, right=True)
        places = step * batch + number - (ends - sizes)[step]
        self._places = places.to(data.device, non_blocking=True)
        padded = data.new_zeros(steps * batch, data.shape[1]).index_copy(0, self._places, data)
        self.inputs = padded.view(steps, batch, -1).transpose(0, 1)

    def pack(self, outputs: Tensor) -> PackedSequence:
        """Packs outputs (B, T, H) as the inputs were."""
        rows = outputs.transpose(0, 1).flatten(0, 1).index_select(0, self._places)
        _, *order = self._packed
        return PackedSequence(rows, *order)
