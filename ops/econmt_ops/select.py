"""Chooses which implementation of an op runs.

Every op lives in a package of its own, and each module of it named in `NAMES` that defines a function with
the op's name is one implementation. Adding an implementation is adding such a file: nothing else has to
change. All implementations of an op take the same arguments, already validated and cast by the op's public
function.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.blocks import STASHES

NAMES = ("reference", "recompute", "compiled", "triton")

RECURRENT = ("lstm", "bidirectional_lstm", "attentional_lstm")
"""The ops that take a stash level."""

_FASTEST_STASH = "gates"


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


class Resolved(NamedTuple):
    """What runs: an implementation's name, its function, and the options that it takes beside the op's arguments."""

    name: str
    function: Callable[..., Any]
    options: dict[str, str]


def keeps_gradients(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd will keep something for a backward pass through an op of these arguments."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def resolve(
    op: str,
    implementation: str,
    available: Mapping[str, Callable[..., Any]],
    tensors: Iterable[Tensor | None],
    stash: str = "auto",
) -> Resolved:
    """Returns what runs an op.

    "auto" is "recompute" where a backward pass will follow, and "reference" otherwise or where there is no other. A
    recurrent op then keeps its gates unless told otherwise: it is as fast as the reference and keeps less. Named
    implementations keep what they keep by themselves.

    Args:
        op: the op's name, for the message.
        implementation: "auto" or one of the names in `available`.
        available: the functions by name, as `implementations` returns them.
        tensors: the arguments that a gradient may be asked of.
        stash: the level that a recurrent op was given: "auto" or one of `STASHES`.

    Raises:
        ValueError: no implementation or no stash level has this name; the message names those there are.
    """
    if implementation != "auto" and implementation not in available:
        names = ", ".join(("auto", *available))
        raise ValueError(f"{op}: unknown implementation {implementation!r}; available: {names}")
    if stash != "auto" and stash not in STASHES:
        raise ValueError(f"{op}: unknown stash level {stash!r}; available: {', '.join(('auto', *STASHES))}")
    name = implementation
    if name == "auto":
        name = "recompute" if "recompute" in available and keeps_gradients(tensors) else "reference"
        stash = _FASTEST_STASH if stash == "auto" and op in RECURRENT else stash
    options = {} if stash == "auto" or name == "reference" else {"stash": stash}
    return Resolved(name, available[name], options)
