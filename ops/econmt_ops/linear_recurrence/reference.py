"""The linear recurrence in plain PyTorch: the definition that the other implementations are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits(is_last=True)
"""Plain PyTorch under autograd, with a Python loop over the steps."""


def standing_still(decay: Tensor, inputs: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns decay 1 and inputs 0 where ``padding`` (B, T) is True, so that h passes unchanged; both (B, T, H)."""
    if padding is None:
        return decay, inputs
    return decay.masked_fill(padding.unsqueeze(2), 1.0), zero_padding(inputs, padding)


def first_state(inputs: Tensor, initial: Tensor | None) -> Tensor:
    """Returns the state (B, H) before the first step: ``initial``, or zeros."""
    if initial is not None:
        return initial
    return inputs.new_zeros(inputs.shape[0], inputs.shape[2], dtype=accumulate_dtype(inputs.dtype))


def linear_recurrence(call: RecurrenceArguments) -> Tensor:
    """Implements `econmt_ops.linear_recurrence` for checked and cast arguments."""
    inputs, reverse = call.inputs, call.reverse
    padding = padding_mask(call.lengths, inputs.shape[1], inputs.device)
    decay, inputs = standing_still(call.decay, inputs, padding)
    h, outputs = first_state(inputs, call.initial), []
    # h stays in the accumulate type: its product with a narrower type has the wider one.
    steps = list(zip(decay.unbind(1), inputs.unbind(1), strict=True))
    for decay_t, input_t in reversed(steps) if reverse else steps:
        h = decay_t * h + input_t
        outputs.append(h)
    if reverse:
        outputs.reverse()
    return zero_padding(torch.stack(outputs, 1).to(inputs.dtype), padding)
