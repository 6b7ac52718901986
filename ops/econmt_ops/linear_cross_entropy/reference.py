"""Output layer and cross entropy in plain PyTorch: the definition that the other implementations are tested against."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from econmt_ops.core.arguments import CrossEntropyArguments
from econmt_ops.core.precision import accumulate_dtype


def linear_cross_entropy(call: CrossEntropyArguments) -> Tensor:
    """Implements `econmt_ops.linear_cross_entropy`."""
    hidden, bias = call.hidden, None if call.bias is None else call.bias.to(call.hidden.dtype)
    logits = functional.linear(hidden, call.weight.to(hidden.dtype), bias).to(accumulate_dtype(hidden.dtype))
    return functional.cross_entropy(
        logits,
        call.targets,
        ignore_index=call.ignore_index,
        reduction=call.reduction,
        label_smoothing=call.smoothing,
    )
