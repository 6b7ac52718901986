"""The linear recurrence in plain PyTorch: the definition that other implementations are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits(is_last=True)
"""Plain PyTorch under autograd, and a loop of Python over the steps."""


def standing_still(decay: Tensor, inputs: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Decay and inputs (B, T, H) with which a walk leaves h as it is where ``padding`` (B, T) is True."""
    if padding is None:
        return decay, inputs
    return decay.masked_fill(padding.unsqueeze(2), 1.0), zero_padding(inputs, padding)


def linear_recurrence(
    decay: Tensor,
    inputs: Tensor,
    *,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    stash: str,  # noqa: ARG001 - autograd keeps what it keeps
) -> Tensor:
    """See `econmt_ops.linear_recurrence`; all arguments are given, checked and cast."""
    padding = None if lengths is None else padding_mask(lengths, inputs.shape[1], inputs.device)
    decay, inputs = standing_still(decay, inputs, padding)
    exact = accumulate_dtype(inputs.dtype)
    h = inputs.new_zeros(inputs[:, 0].shape, dtype=exact) if initial is None else initial
    outputs = []
    # The accumulate type of h carries over: a product of it and a narrower type has it too.
    steps = list(zip(decay.unbind(1), inputs.unbind(1), strict=True))
    for decay_t, input_t in reversed(steps) if reverse else steps:
        h = decay_t * h + input_t
        outputs.append(h)
    if reverse:
        outputs.reverse()
    return zero_padding(torch.stack(outputs, 1).to(inputs.dtype), padding)
