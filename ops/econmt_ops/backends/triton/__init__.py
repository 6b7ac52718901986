"""Triton kernels for the work between the matrix products on a GPU.

The modules of this package import triton, so import them only if `is_available` returns True.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.dispatch.rule import MODE
from econmt_ops.dispatch.traits import Traits

_RELEASE = (3, 6)
"""Lowest version of Triton that the kernels are tested with."""

CAPABILITY = (8, 0)
"""Lowest CUDA compute capability: Ampere, the first with bfloat16 and asynchronous copies to shared memory."""

_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""Types that the kernels support."""

MOST_UNITS = 1600
"""Maximum units of a persistent LSTM layer: the weights of more do not fit the shared memory of any device."""


def interpreted() -> bool:
    """Returns True if Triton's interpreter runs the kernels on the CPU: TRITON_INTERPRET=1 at import of triton."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _is_installed() -> bool:
    """Returns True if a recent enough triton is installed, without importing it."""
    try:
        release = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(release[0]), int(release[1])) >= _RELEASE


_INSTALLED = _is_installed()


def why_unused() -> str:
    """Returns the reason why the kernels are not used on a GPU, in a few words; "" if they are.

    The GPU is the current one, or that of `econmt_ops.dispatch.device_limits` where there is none.
    """
    if torch.version.hip is not None:
        return "they are made for NVIDIA's GPUs and are not tested with ROCm"
    if not _INSTALLED:
        return f"they need Triton {_RELEASE[0]}.{_RELEASE[1]} or newer"
    capability = limits_of(torch.device("cuda")).capability
    if capability < CAPABILITY:
        least, own = (".".join(map(str, each)) for each in (CAPABILITY, capability))
        return f"they need compute capability {least}, and this GPU has {own}"
    return ""


def is_available() -> bool:
    """Returns True if the kernels run: on a CUDA device of capability 8.0 or higher, or in the interpreter.

    An estimate for another device asks about the GPU that it is for, which this machine may not have.
    """
    if MODE.device is not None:
        return not why_unused()
    if interpreted():
        return _INSTALLED
    return torch.cuda.is_available() and not why_unused()


def runs_on(device: torch.device) -> bool:
    """Returns True if the kernels run on a device, or on its target device while memory is estimated."""
    if MODE.device is not None and MODE.device != device.type:
        return MODE.device == "cuda" and is_available()
    return device.type == ("cpu" if interpreted() else "cuda") and is_available()


def serves(tensor: torch.Tensor) -> bool:
    """Returns True if the kernels support a tensor's device and type."""
    return tensor.dtype in _TYPES and runs_on(tensor.device)


def with_kernels(traits: Traits, **others: Any) -> Traits:
    """Returns the traits of an implementation when it uses this package's kernels; ``others`` override more fields."""
    own: dict[str, Any] = {"devices": frozenset({"cuda"}), "dtypes": _TYPES, "has_kernels": True}
    return replace(traits, **(own | {"is_available": is_available} | others))


def on_kernels(
    function: Callable[..., Any], traits: Traits, **others: Any
) -> tuple[Callable[..., Any], Traits]:
    """Returns an implementation that takes ``backend``, and its traits, with this package's kernels."""
    return functools.partial(function, backend="triton"), with_kernels(traits, **others)
