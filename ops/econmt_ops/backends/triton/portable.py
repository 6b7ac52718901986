"""Gluon's language in plain Triton: the same words, layouts left out.

A kernel written in Gluon says which thread holds what, which plain Triton decides itself; all else is the same. So its
source, with this module in the place of ``gl``, is a plain kernel too, and one that Triton's interpreter runs.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl


def __getattr__(name: str) -> Any:
    """All other words are Triton's own."""
    return getattr(tl, name)


@triton.constexpr_function
def SliceLayout(_axis: int, _parent: None) -> None:  # noqa: N802  Gluon's name
    """No layout."""
    return


@triton.jit
def arange(start: tl.constexpr, end: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """The numbers from ``start`` on, below ``end``."""
    return tl.arange(start, end)


@triton.jit
def full(shape: tl.constexpr, value: tl.constexpr, dtype: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """A block that has one value everywhere."""
    return tl.full(shape, value, dtype)


@triton.jit
def convert_layout(value: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """The value as it is."""
    return value


def twin(kernel: Any, names: dict[str, Any]) -> Any:
    """The plain kernel of a Gluon kernel.

    Args:
        kernel: a function made by ``gluon.jit``.
        names: what its source calls by name, in this module's language: "gl" and the kernel's own functions.
    """
    source = kernel.fn
    function = FunctionType(
        source.__code__, {**source.__globals__, **names}, source.__name__, source.__defaults__
    )
    function.__annotations__ = dict(source.__annotations__)
    function.__module__, function.__qualname__ = __name__, source.__qualname__
    fixed = [parameter.name for parameter in kernel.params if parameter.do_not_specialize]
    return triton.jit(function, do_not_specialize=fixed)
