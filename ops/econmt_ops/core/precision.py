"""Precision rules that all ops share.

* The *compute type* is the type of the op's first argument, or autocast's type while `torch.autocast` is on
  for that device (float64 is never lowered). All other floating point arguments are cast to it, and what an
  op returns has it, with the exceptions below.
* The *accumulate type* is float32, or float64 if the compute type is float64. Cell states, gates, scores,
  softmax, losses and running sums have it inside an op; cell states and losses also when they are returned.
* In float32 on a GPU, *recurrent layers* round the factors of their products to TF32 where PyTorch lets the layers of
  `torch.nn.LSTM` do so, which is its default; see `recurrent_tf32`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_WITHOUT_AUTOCAST = ("meta",)
"""Device types without autocast, for which `torch.is_autocast_enabled` raises an error. `is_autocast_available` could
list them, but torch.compile cannot trace it in torch 2.11."""


def autocast_to(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Returns a context in which products on a device are computed in a type: float32, bfloat16 or float16."""
    lowered = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype=dtype if lowered else torch.bfloat16, enabled=lowered)


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


_get_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_precision: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
"""PyTorch's functions behind ``fp32_precision``, which torch 2.9 introduced; None in older versions."""


def recurrent_tf32() -> bool:
    """Returns True if recurrent layers may use TF32 for float32 products on a GPU, as those of `torch.nn.LSTM` may.

    The setting is ``torch.backends.cudnn.rnn.fp32_precision``, which ``torch.backends.cudnn.allow_tf32`` and
    ``torch.backends.fp32_precision`` change too; in versions before torch 2.9 it is
    ``torch.backends.cudnn.allow_tf32``. The setting for other products, ``torch.backends.cuda.matmul``, has no effect.
    """
    if _get_precision is None:
        return bool(torch.backends.cudnn.allow_tf32)
    return bool(_get_precision("cuda", "rnn") == "tf32")


# torch.compile cannot trace the question; it asks once while it compiles.
recurrent_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def matmul_tf32() -> bool:
    """Returns True if PyTorch's own matrix products on a GPU use TF32 for float32."""
    if _get_precision is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(_get_precision("cuda", "matmul") == "tf32")


matmul_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


class MatmulTF32:
    """Context in which PyTorch's own matrix products on a GPU use TF32, or do not, whatever its settings say.

    The setting belongs to the process, so that products that other threads make meanwhile follow it too.

    Args:
        allowed: True if factors may be rounded to TF32.
    """

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._restore: list[tuple[str, str | bool]] | None = None

    def __enter__(self) -> None:
        if matmul_tf32() == self._allowed:
            return
        newer = _get_precision is not None
        self._restore = [("fp32_precision", _get_precision("cuda", "matmul"))] if newer else []
        # Where both generations of settings were used, PyTorch refuses to read the older ones.
        with suppress(RuntimeError):
            older: list[tuple[str, str | bool]] = [("allow_tf32", bool(torch._C._get_cublas_allow_tf32()))]
            if (level := torch._C._get_float32_matmul_precision()) == "medium":
                older.append(("matmul_precision", level))
            self._restore = [*older, *self._restore]
        torch._C._set_cublas_allow_tf32(self._allowed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._restore is None:
            return
        for name, value in self._restore:
            if name == "matmul_precision":
                torch._C._set_float32_matmul_precision(str(value))
            elif name == "allow_tf32":
                torch._C._set_cublas_allow_tf32(bool(value))
            elif not (_get_precision("cuda", "matmul") == value == "tf32"):
                _set_precision("cuda", "matmul", "none")  # inherited, if that gives the same value
                if _get_precision("cuda", "matmul") != value:
                    _set_precision("cuda", "matmul", value)
        self._restore = None
