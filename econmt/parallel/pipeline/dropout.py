"""Dropout on chunks of time, with slices of the mask that one process would draw for the whole sequence."""

from __future__ import annotations

from torch import Tensor

from econmt_ops.core.dropout import Seed, apply_dropout, dropout, keep_mask


class ChunkedDropout:
    """Dropout on the inputs of layers, for chunks (B, C, H) of sequences (B, T, H).

    Args:
        probability: Probability that a value is dropped.
        variational: True if all positions of a row share one mask.
        steps: T.
    """

    def __init__(self, probability: float, variational: bool, steps: int) -> None:
        self._probability, self._variational, self._steps = probability, variational, steps
        self._masks: dict[int, Tensor] = {}

    def __call__(self, values: Tensor, layer: int, begin: int, seed: Seed | None, index: int = -1) -> Tensor:
        """Returns the values with dropout applied; unchanged if there is no seed.

        Args:
            values: Chunk of the inputs, (B, C, H).
            layer: Layer that reads them; each layer's mask is drawn once.
            begin: Position of the chunk's first step.
            seed, index: See :func:`econmt_ops.core.dropout.keep_mask`.
        """
        if seed is None:
            return values
        if self._variational and values.device.type != "cpu":
            # A GPU kernel generates the mask while it reads the values.
            return dropout(values, self._probability, seed, variational=True, index=index)
        if layer not in self._masks:
            shape = (len(values), 1 if self._variational else self._steps, values.shape[2])
            self._masks[layer] = keep_mask(shape, self._probability, seed, values.device, index)
        mask = self._masks[layer]
        if not self._variational:
            mask = mask[:, begin : begin + values.shape[1]]
        return apply_dropout(values, mask, self._probability)
