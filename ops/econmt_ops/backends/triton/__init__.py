"""Kernels in Triton: what a step computes on a GPU between its matrix products.

The modules of this package import triton, so import them only where `is_available` says so.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import replace
from typing import Any

import torch

from econmt_ops.dispatch.rule import MODE
from econmt_ops.dispatch.traits import Traits

_RELEASE = (3, 6)
"""The first of Triton that the kernels are tested with."""

_CAPABILITY = (8, 0)
"""The lowest that the kernels are compiled for: Ampere, the first with bfloat16."""

_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""In which they compute."""

MOST_UNITS = 1600
"""Of an LSTM layer in one launch: weights of more do not fit the shared memory of any device."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU: TRITON_INTERPRET=1, set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _is_installed() -> bool:
    """Whether there is a triton that has what the kernels use; told without importing it."""
    try:
        release = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(release[0]), int(release[1])) >= _RELEASE


_INSTALLED = _is_installed()


def is_available() -> bool:
    """Whether the kernels can run: with triton, on a CUDA device of capability 8.0 or in the interpreter."""
    if not _INSTALLED:
        return False
    if interpreted():
        return True
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= _CAPABILITY


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device, or would on the one that it stands for while memory is estimated."""
    if MODE.device is not None and MODE.device != device.type:
        return MODE.device == "cuda" and _INSTALLED
    return device.type == ("cpu" if interpreted() else "cuda") and is_available()


def serves(tensor: torch.Tensor) -> bool:
    """Whether the kernels can take this tensor: it is where they run, and of a type that they compute in."""
    return tensor.dtype in _TYPES and runs_on(tensor.device)


def with_kernels(traits: Traits, **others: Any) -> Traits:
    """The traits of an implementation that is another one with kernels of this package; ``others`` differ too."""
    own: dict[str, Any] = {"devices": frozenset({"cuda"}), "dtypes": _TYPES, "has_kernels": True}
    return replace(traits, **(own | {"needs": "triton", "is_available": is_available} | others))
