"""Rows in which the state begins anew at some steps, run as rows of independent segments.

The persistent kernels of LSTM layers heed resets themselves, see `econmt_ops.lstm.call_plans.resets_plan`. In all other
cases each row gets an *empty step* before a step at which its state begins anew. An empty step has inputs of zero and
an extra input column whose weights close the gates, so that the states after it are exactly zero, and so is every
gradient with respect to the states before it. Layers therefore run their usual kernels, on rows that are longer by the
number of empty steps. The states before a reset have to be finite, because they are multiplied by zero.

B batch, T steps, S steps with the empty ones, H hidden, D directions, L layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.weights import GRUWeights
from econmt_ops.lstm.call_plans import merged
from econmt_ops.lstm.reference import CLOSED, COLUMNS

States = tuple[Tensor, ...]
"""States of all layers, (D L, B, H) each: (h, c) of an LSTM, (h,) of a GRU."""

_MULTIPLE = 8
"""Empty steps of a batch are rounded up to a multiple, so that kernels and plans meet fewer shapes."""


class Segments:
    """Batch whose rows have an empty step before each reset.

    The number of empty steps depends on the values of ``resets``: if they are on a GPU, the host waits for it once. It
    does not if they are on the CPU, nor while torch.compile traces or a CUDA graph is captured; the rows then get room
    for a reset at every step, S = 2 T - 1.

    Args:
        resets: (B, T) bool.
        lengths: Lengths of the rows, (B,) int64; None if every row has T steps. Resets past a row's length do nothing.
        device: Device of the inputs.

    Attributes:
        lengths: Lengths of the rows with the empty steps, (B,). steps: S.
    """

    def __init__(self, resets: Tensor, lengths: Tensor | None, device: torch.device) -> None:
        steps = resets.shape[1]
        if lengths is not None:
            resets = resets.to(lengths.device, non_blocking=True)
            resets = resets & ~padding_mask(lengths, steps, resets.device)
        number = torch.arange(steps, device=resets.device)
        before = (resets & (number > 0)).cumsum(1)
        added = before[:, -1]
        self.steps = steps + _room(added, steps)
        self.lengths = added + (steps if lengths is None else lengths)
        self._places = (number + before).to(device, non_blocking=True)

    def spread(self, rows: Tensor) -> Tensor:
        """Returns rows (B, T, I) with the empty steps, (B, S, I)."""
        room = rows.new_zeros(rows.shape[0], self.steps, rows.shape[2])
        return room.scatter_(1, self._places.unsqueeze(2).expand_as(rows), rows)

    def collect(self, outputs: Tensor) -> Tensor:
        """Returns outputs (B, S, H) without the empty steps, (B, T, H)."""
        return outputs.gather(1, self._places.unsqueeze(2).expand(-1, -1, outputs.shape[2]))

    def prepare(self, read: Tensor, weights: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """Returns what a layer reads, (B, S, I), with columns that mark the empty steps, and weights that read them."""
        used = read.new_zeros(read.shape[0], self.steps).scatter_(1, self._places, 1.0)
        marks = [1.0 - used, used, *[torch.zeros_like(used)] * (COLUMNS - 2)]
        return torch.cat([read, torch.stack(marks, 2)], 2), tuple(closing(part) for part in merged(weights))


def first_states(resets: Tensor, lengths: Tensor | None, state: States, directions: int) -> States:
    """Returns initial states (D L, B, H), zero for the forward direction of rows that begin with a reset.

    ``resets`` and ``lengths``: see `Segments`; a row of length 0 keeps its state.
    """
    begins = resets[:, 0].to(state[0].device, non_blocking=True).unsqueeze(0)
    if lengths is not None:
        begins = begins & (lengths.to(begins.device, non_blocking=True) > 0)
    if directions == 2:
        begins = torch.cat([begins, torch.zeros_like(begins)])
    masked = []
    for part in state:
        by_layer = part.reshape(-1, directions, *part.shape[1:])
        masked.append(by_layer.masked_fill(begins.unsqueeze(2), 0.0).view(part.shape))
    return tuple(masked)


def _room(added: Tensor, steps: int) -> int:
    """Returns the number of empty steps that rows get, from those that each needs, (B,)."""
    static = torch.compiler.is_compiling() or isinstance(added, FakeTensor) or added.is_meta
    if static or (added.is_cuda and torch.cuda.is_current_stream_capturing()):
        return steps - 1
    most = int(added.max()) if added.numel() else 0
    return min(-(-most // _MULTIPLE) * _MULTIPLE, steps - 1)


def closing(weights: Any) -> Any:
    """Returns the weights of a layer with input columns for the marks of `Segments.prepare`.

    The first column closes the first two gates: i and f of an LSTM, r and z of a GRU. In a GRU the second one holds the
    input bias: without a bias the candidate n of an empty step is 0.
    """
    zeros = torch.zeros_like(weights.bias)
    is_gru = isinstance(weights, GRUWeights)
    closed = zeros.clone()
    closed[: 2 * len(zeros) // (3 if is_gru else 4)] = -CLOSED
    second, bias = (weights.bias, zeros) if is_gru else (zeros, weights.bias)
    columns = torch.stack([closed, second, *[zeros] * (COLUMNS - 2)], 1)
    return weights._replace(input=torch.cat([weights.input, columns], 1), bias=bias)
