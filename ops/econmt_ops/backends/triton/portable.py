"""Gluon's language in plain Triton: the same functions without layouts.

A Gluon kernel states which thread holds which value; plain Triton decides that itself. With this module in place of
``gl``, the source of a Gluon kernel is therefore also a plain kernel, which Triton's interpreter can run.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl


def __getattr__(name: str) -> Any:
    """Returns any other name from triton.language."""
    return getattr(tl, name)


@triton.constexpr_function
def SliceLayout(_axis: int, _parent: None) -> None:  # noqa: N802  Gluon's name
    """Returns None in place of a layout."""
    return


@triton.jit
def arange(start: tl.constexpr, end: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """Returns the integers from ``start`` to below ``end``."""
    return tl.arange(start, end)


@triton.jit
def full(shape: tl.constexpr, value: tl.constexpr, dtype: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """Returns a block filled with one value."""
    return tl.full(shape, value, dtype)


@triton.jit
def convert_layout(value: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """Returns the value unchanged."""
    return value


def twin(kernel: Any, names: dict[str, Any]) -> Any:
    """Returns the plain Triton version of a Gluon kernel.

    Args:
        kernel: a function made by ``gluon.jit``.
        names: globals to replace in its source: "gl" and the kernel's helper functions.
    """
    source = kernel.fn
    function = FunctionType(
        source.__code__, {**source.__globals__, **names}, source.__name__, source.__defaults__
    )
    function.__annotations__ = dict(source.__annotations__)
    function.__module__, function.__qualname__ = __name__, source.__qualname__
    fixed = [parameter.name for parameter in kernel.params if parameter.do_not_specialize]
    return triton.jit(function, do_not_specialize=fixed)
