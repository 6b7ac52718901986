"""The rules of precision that all ops share.

* The *compute type* is the type of the op's first argument, or autocast's type while `torch.autocast` is on
  for that device (float64 is never lowered). All other floating point arguments are cast to it, and what an
  op returns has it, with the exceptions below.
* The *accumulate type* is float32, or float64 if the compute type is float64. Cell states, gates, scores,
  softmax, losses and running sums have it inside an op; cell states and losses also when they are returned.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_WITHOUT_AUTOCAST = ("meta",)
"""Types of devices that have no autocast, of which `torch.is_autocast_enabled` must not be asked. PyTorch could tell
them (`is_autocast_available`), but torch.compile cannot trace that question in torch 2.11."""


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
    """Returns a context without autocast: inside an op only the casts that the op itself makes take place."""
    device_type = first.device.type
    if _autocast_is_on(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
