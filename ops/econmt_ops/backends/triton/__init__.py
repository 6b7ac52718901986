"""Kernels in Triton: what a step computes on a GPU between its matrix products.

The modules of this package import triton, so import them only where `is_available` says so.
"""

from __future__ import annotations

import importlib.util
import os

import torch

_CAPABILITY = (8, 0)
"""The lowest that the kernels are compiled for: Ampere, the first with bfloat16."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU: TRITON_INTERPRET=1, set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_available() -> bool:
    """Whether the kernels can run: triton is installed, and there is a CUDA device of capability 8.0, or the interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    if interpreted():
        return True
    return (
        torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= _CAPABILITY
    )


def serves(tensor: torch.Tensor) -> bool:
    """Whether the kernels can take this tensor: it is where they run, and of a type that they compute in."""
    where = "cpu" if interpreted() else "cuda"
    types = (torch.bfloat16, torch.float16, torch.float32)
    return tensor.device.type == where and tensor.dtype in types and is_available()
