"""Reversal of rows within their lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends import triton
from econmt_ops.dispatch.registration import custom_op
from econmt_ops.dispatch.rule import is_transformed


def reverse_rows(tensor: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverses each row of `tensor` (B, T, D) within its own length; the function is its own inverse.

    On a GPU output and gradient take one kernel each, where PyTorch's gradient would scatter and add.
    """
    if lengths is None:
        return tensor.flip(1)
    lengths = lengths.to(tensor.device, non_blocking=True)
    if triton.runs_on(tensor.device) and not is_transformed():
        reversed_rows: Tensor = _reverse_rows(tensor, lengths)
        return reversed_rows
    position = torch.arange(tensor.shape[1], device=tensor.device)
    last = lengths.unsqueeze(1) - 1
    index = torch.where(position <= last, last - position, position)
    return tensor.gather(1, index.unsqueeze(2).expand_as(tensor))


@custom_op("econmt_ops::reverse_rows")
def _reverse_rows(tensor: Tensor, lengths: Tensor) -> Tensor:
    from econmt_ops.backends.triton import reversal  # imports triton

    return reversal.reverse(tensor, lengths)


@_reverse_rows.register_fake
def _(tensor: Tensor, _lengths: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001 - torch names them
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _reverse_rows(gradient, *ctx.saved_tensors), None


_reverse_rows.register_autograd(_backward, setup_context=_remember)
