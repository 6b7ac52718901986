"""Dropout of chunks of time: each has its share of the mask that one process makes of all of it at once."""

from __future__ import annotations

from torch import Tensor

from econmt_ops.core.dropout import Seed, apply_dropout, dropout, keep_mask


class ChunkedDropout:
    """Drops values of what layers read, (B, C, H) of (B, T, H).

    Args:
        probability: that a value is dropped.
        variational: one mask a row for all positions.
        steps: T.
    """

    def __init__(self, probability: float, variational: bool, steps: int) -> None:
        self._probability, self._variational, self._steps = probability, variational, steps
        self._masks: dict[int, Tensor] = {}

    def __call__(self, values: Tensor, layer: int, begin: int, seed: Seed | None, index: int = -1) -> Tensor:
        """The values with some dropped; all of them without a seed.

        Args:
            values: see above.
            layer: which reads them; its mask is made once.
            begin: the first of their positions.
            seed, index: as :func:`econmt_ops.core.dropout.keep_mask` has them.
        """
        if seed is None:
            return values
        if self._variational and values.device.type != "cpu":
            # A kernel makes the mask as it reads the values.
            return dropout(values, self._probability, seed, variational=True, index=index)
        if layer not in self._masks:
            shape = (len(values), 1 if self._variational else self._steps, values.shape[2])
            self._masks[layer] = keep_mask(shape, self._probability, seed, values.device, index)
        mask = self._masks[layer]
        if not self._variational:
            mask = mask[:, begin : begin + values.shape[1]]
        return apply_dropout(values, mask, self._probability)
