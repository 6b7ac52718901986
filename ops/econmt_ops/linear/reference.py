"""The linear layer in plain PyTorch: the definition that other implementations are held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, layout: str) -> Tensor:
    """See `econmt_ops.linear`; all arguments are given, checked and cast. The layout "auto" is "row"."""
    if layout != "column":
        return functional.linear(inputs, weight, bias)
    columns = inputs.reshape(-1, inputs.shape[-1]).t()
    outputs = weight @ columns if bias is None else torch.addmm(bias.unsqueeze(1), weight, columns)
    return outputs.t().reshape(*inputs.shape[:-1], weight.shape[0])
