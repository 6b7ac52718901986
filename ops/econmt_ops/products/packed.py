"""Linear layer by oneDNN, which packs the weight into blocks; on many processors it is faster than the BLAS.

PyTorch's `linear` uses a BLAS such as MKL in float32 and oneDNN only in bfloat16; here both use oneDNN. B rows, I
inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.dispatch.registration import custom_op

_DTYPES = (torch.float32, torch.bfloat16)


def is_available(like: Tensor) -> bool:
    """Returns True if oneDNN multiplies tensors like this one: on the CPU, in float32 or, where supported, bfloat16.

    It returns False while a dispatch mode is active, because fake tensors, profilers and counters know ordinary
    products only.
    """
    if like.device.type != "cpu" or like.dtype not in _DTYPES or not torch._C._has_mkldnn:
        return False
    if torch._C._len_torch_dispatch_stack() > 0:
        return False
    return like.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def dense(operand: Tensor) -> Tensor:
    """Returns a weight or a bias in a layout that oneDNN handles: contiguous, or the transpose of a contiguous matrix.

    oneDNN ignores the stride of a bias and returns wrong numbers; for columns of a larger matrix it has no fast kernel
    and takes seconds instead of milliseconds.
    """
    if operand.is_contiguous() or operand.t().is_contiguous():
        return operand
    return operand.contiguous()


@custom_op("econmt_ops::packed_linear")
def packed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes inputs (B, I) times weight (O, I) transposed plus bias (O,) by oneDNN, or by torch if unavailable."""
    if not is_available(inputs):
        return functional.linear(inputs, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(
        inputs.contiguous(), weight.contiguous(), None if bias is None else dense(bias), "none", [], ""
    )
    return result


@packed_linear.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return inputs.new_empty(inputs.shape[0], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    inputs, weight = ctx.saved_tensors
    wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
    return (
        gradient @ weight if wants_inputs else None,
        gradient.t() @ inputs if wants_weight else None,
        gradient.sum(0) if wants_bias else None,
    )


packed_linear.register_autograd(_backward, setup_context=_setup_context)
