"""The linear recurrence by one thread a channel, step by step: what a scan on a GPU is compared with.

It needs triton and a GPU, so import it only there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 32
"""Of a program: a warp, a thread each."""


@triton.jit(do_not_specialize=["steps"])
def walk(decay, inputs, outputs, steps, hidden, CHANNELS: tl.constexpr):
    """Outputs (B, T, H)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    at = tl.program_id(1).to(tl.int64) * steps * hidden + channel
    there = channel < hidden
    h = tl.zeros((CHANNELS,), tl.float32)
    for _ in range(steps):
        h = tl.load(decay + at, mask=there) * h + tl.load(inputs + at, mask=there)
        tl.store(outputs + at, h, mask=there)
        at += hidden


@triton.jit(do_not_specialize=["steps"])
def walk_back(decay, outputs, doutputs, ddecay, dinputs, steps, hidden, CHANNELS: tl.constexpr):
    """The gradients of decay and inputs (B, T, H)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    at = (tl.program_id(1).to(tl.int64) * steps + steps - 1) * hidden + channel
    there = channel < hidden
    carry = tl.zeros((CHANNELS,), tl.float32)
    for t in range(steps):
        delta = tl.load(doutputs + at, mask=there) + carry
        before = tl.load(outputs + at - hidden, mask=there & (t < steps - 1), other=0.0)
        tl.store(dinputs + at, delta, mask=there)
        tl.store(ddecay + at, delta * before, mask=there)
        carry = tl.load(decay + at, mask=there) * delta
        at -= hidden


class _Serial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor, inputs: Tensor) -> Tensor:
        rows, steps, hidden = inputs.shape
        outputs = torch.empty_like(inputs)
        walk[(triton.cdiv(hidden, _CHANNELS), rows)](
            decay, inputs, outputs, steps, hidden, CHANNELS=_CHANNELS, num_warps=1
        )
        ctx.save_for_backward(decay, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, doutputs: Tensor) -> tuple[Tensor, Tensor]:
        decay, outputs = ctx.saved_tensors
        rows, steps, hidden = outputs.shape
        ddecay, dinputs = torch.empty_like(decay), torch.empty_like(decay)
        walk_back[(triton.cdiv(hidden, _CHANNELS), rows)](
            decay, outputs, doutputs.contiguous(), ddecay, dinputs, steps, hidden, CHANNELS=_CHANNELS, num_warps=1
        )  # fmt: skip
        return ddecay, dinputs


def serial(decay: Tensor, inputs: Tensor) -> Tensor:
    """The outputs (B, T, H) for decay and inputs (B, T, H), contiguous, float32."""
    outputs: Tensor = _Serial.apply(decay, inputs)
    return outputs
