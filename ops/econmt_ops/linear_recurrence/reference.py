"""The linear recurrence in plain PyTorch: the definition that other implementations are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.dispatch.traits import Traits

TRAITS = Traits()
"""Plain PyTorch under autograd."""


def linear_recurrence(decay: Tensor, inputs: Tensor, *, initial: Tensor, reverse: bool) -> Tensor:
    """See `econmt_ops.linear_recurrence`; all arguments are given, checked and cast."""
    h = initial
    outputs = []
    # The accumulate type of `initial` carries over: a product of it and a narrower type has it too.
    steps = list(zip(decay.unbind(1), inputs.unbind(1), strict=True))
    for decay_t, input_t in reversed(steps) if reverse else steps:
        h = decay_t * h + input_t
        outputs.append(h)
    if reverse:
        outputs.reverse()
    return torch.stack(outputs, 1).to(inputs.dtype)
