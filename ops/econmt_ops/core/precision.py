"""Precision rules that all ops share.

* The *compute type* is the type of the op's first argument, or autocast's type while `torch.autocast` is enabled for
  that device (float64 is never lowered). All other floating point arguments are cast to it, and results have it, with
  the exceptions below.
* The *accumulate type* is float32, or float64 if the compute type is float64. Inside an op it is the type of cell
  states, gates, scores, softmax, losses and running sums; cell states and losses are also returned in it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_WITHOUT_AUTOCAST = ("meta",)
"""Device types without autocast, for which `torch.is_autocast_enabled` raises an error. `is_autocast_available` could
list them, but torch.compile cannot trace it in torch 2.11."""


def autocast_to(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Returns a context in which products on a device are computed in a type, float32 or bfloat16."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def _autocast_is_on(device_type: str) -> bool:
    return device_type not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(device_type)


def compute_dtype(first: Tensor) -> torch.dtype:
    """Returns the type in which an op computes its products, given the op's first argument."""
    if first.dtype != torch.float64 and _autocast_is_on(first.device.type):
        return torch.get_autocast_dtype(first.device.type)
    return first.dtype


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which an op of this compute type accumulates: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def explicit_casts(first: Tensor) -> AbstractContextManager[None]:
    """Returns a context without autocast, so that inside an op only its own casts take place."""
    device_type = first.device.type
    if _autocast_is_on(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
