"""Pointwise work and reductions of a recurrent step, in PyTorch operators, torch.compile, C and Triton."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from econmt_ops.backends import c as library

if TYPE_CHECKING:
    from econmt_ops.backends.eager import EagerSteps

BACKENDS = {
    "eager": "econmt_ops.backends.eager:EagerSteps",
    "c": "econmt_ops.backends.c.steps:CSteps",
    "compiled": "econmt_ops.backends.compiled:CompiledSteps",
    "triton": "econmt_ops.backends.triton.steps:TritonSteps",
}
"""Classes by backend name, as "module:class", imported at first use; the constructor takes a tensor of the call."""


def steps_for(like: Tensor, backend: str = "eager") -> EagerSteps:
    """Returns the backend of one call.

    Args:
        like: a tensor of the call's compute type, on its device.
        backend: "eager", which uses the C library where it can; "compiled"; "triton", which falls back to "eager" for
            float64; or another name added to `BACKENDS`.
    """
    if backend == "compiled":
        from econmt_ops.backends.compiled import is_available

        backend = "compiled" if is_available() else "eager"
    if backend == "triton" and like.dtype == torch.float64:
        backend = "eager"
    if backend == "eager" and library.serves(like):
        backend = "c"
    module, name = BACKENDS[backend].split(":")
    steps: EagerSteps = getattr(importlib.import_module(module), name)(like)
    return steps
