"""GRU in plain PyTorch: the definition that other implementations are tested against.

In float32 and float64 a layer is torch's own GRU (cuDNN's on a GPU), in 16-bit types a loop of steps accumulating in
float32. Lengths cost nothing: rows begin at position 0, h is the only state, and values after a row's end are replaced
by zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from econmt_ops.cells.gru import GRU
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.stack import StackOptions, last_of, run_cells
from econmt_ops.core.weights import GRUWeights, State
from econmt_ops.layers import stepped
from econmt_ops.lstm.cudnn import MOST_STEPS, cudnn_gru
from econmt_ops.lstm.reference import STEPWISE

TRAITS = stepped.REFERENCE


def _layer(
    inputs: Tensor, weights: GRUWeights, state: Sequence[Tensor], lengths: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs one layer; see `econmt_ops.core.stack.RunLayer`."""
    by_cudnn = inputs.is_cuda and not torch.compiler.is_compiling()
    if inputs.dtype in STEPWISE or (by_cudnn and isinstance(inputs, FakeTensor)):
        return stepped.reference_layer(GRU, inputs, weights, state, lengths)
    padding = None if lengths is None else padding_mask(lengths, inputs.shape[1], inputs.device)
    inputs, training = zero_padding(inputs, padding), torch.is_grad_enabled()
    h = state[0].unsqueeze(0).contiguous()
    if by_cudnn and torch.cudnn_is_acceptable(inputs):
        parts = []
        for part in torch.split(inputs, MOST_STEPS, 1):
            parts.append(cudnn_gru(part, h, None, list(weights), training)[0])
            h = parts[-1][:, -1].unsqueeze(0)
        outputs = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    else:
        outputs, _ = torch.gru(inputs, h, list(weights), True, 1, 0.0, training, False, True)
    outputs = zero_padding(outputs, padding)
    return outputs, (last_of(outputs, state[0], lengths),)


def gru(
    inputs: Tensor, layers: tuple[GRUWeights, ...], state: State, options: StackOptions
) -> tuple[Tensor, State]:
    """Runs a stack of layers."""
    return run_cells(_layer, inputs, layers, state, options)
