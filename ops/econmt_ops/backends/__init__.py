"""What a step computes between its products, by PyTorch, by torch.compile, in C and in Triton."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.protocol import StepKernels

BACKENDS = {
    "eager": "econmt_ops.backends.eager:EagerSteps",
    "c": "econmt_ops.backends.c.steps:CSteps",
    "compiled": "econmt_ops.backends.compiled:CompiledSteps",
    "triton": "econmt_ops.backends.triton.steps:TritonSteps",
}
"""The classes by name, imported when they are first asked for; each is made from a tensor of the call."""


def steps_for(like: Tensor, backend: str = "eager") -> StepKernels:
    """The steps of one call.

    Args:
        like: a tensor of the call's compute type, on its device.
        backend: "eager", for which the C library works where it can, "compiled", "triton", which leaves float64 to
            "eager", or another name that was put into `BACKENDS`.
    """
    if backend == "compiled":
        from econmt_ops.backends.compiled import is_available

        backend = "compiled" if is_available() else "eager"
    if backend == "triton" and like.dtype == torch.float64:
        backend = "eager"
    if backend == "eager" and library.serves(like):
        backend = "c"
    module, name = BACKENDS[backend].split(":")
    steps: StepKernels = getattr(importlib.import_module(module), name)(like)
    return steps
