"""Chooses which implementation of an op runs.

Every op lives in a package of its own, and each module of it named in `NAMES` that defines a function with
the op's name is one implementation. Adding an implementation is adding such a file: nothing else has to
change. All implementations of an op take the same arguments, already validated and cast by the op's public
function.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("reference", "recompute", "compiled", "triton")


def implementations(package: str, op: str) -> dict[str, Callable[..., Any]]:
    """Collects the implementations of an op that a package holds.

    A module whose needs are not met on this machine (a compiler that is not installed, say) defines
    `is_available() -> bool` and is left
    out when that returns False; it must still be importable.

    Args:
        package: the package's full name, `econmt_ops.lstm` for example.
        op: the op's name, which is the name of the function in every implementation.

    Returns:
        The functions by implementation name, in the order of `NAMES`.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in NAMES:
        if importlib.util.find_spec(f"{package}.{name}") is None:
            continue
        module = importlib.import_module(f"{package}.{name}")
        is_available = getattr(module, "is_available", None)
        if hasattr(module, op) and (is_available is None or is_available()):
            found[name] = getattr(module, op)
    return found


def resolve(op: str, implementation: str, available: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns the function that runs an op.

    Args:
        op: the op's name, for the message.
        implementation: "auto" or one of the names in `available`.
        available: the functions by name, as `implementations` returns them.

    Raises:
        ValueError: no implementation has this name; the message names those there are.
    """
    if implementation == "auto":
        return available["reference"]
    if implementation not in available:
        names = ", ".join(("auto", *available))
        raise ValueError(f"{op}: unknown implementation {implementation!r}; available: {names}")
    return available[implementation]
