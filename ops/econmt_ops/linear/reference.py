"""Linear layer in plain PyTorch: the definition that other implementations are tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.dispatch.rule import is_transformed
from econmt_ops.dispatch.traits import Traits
from econmt_ops.products.packed import packed_linear

TRAITS = Traits()
"""Traits of plain PyTorch under autograd."""


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, layout: str) -> Tensor:
    """Computes the layer; arguments are complete, checked and cast, and the layout is not "auto"."""
    if layout == "row" or (layout == "packed" and is_transformed()):
        return functional.linear(inputs, weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    if layout == "packed":
        outputs = packed_linear(rows, weight, bias)
    elif layout == "transposed":
        turned = weight.t().contiguous()
        outputs = rows @ turned if bias is None else torch.addmm(bias, rows, turned)
    else:
        columns = rows.t()
        outputs = weight @ columns if bias is None else torch.addmm(bias.unsqueeze(1), weight, columns)
        outputs = outputs.t()
    shaped: Tensor = outputs.reshape(*inputs.shape[:-1], weight.shape[0])
    return shaped
