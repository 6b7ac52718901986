"""Checks of the weights and states that a stack of recurrent layers is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.shapes import Shapes, kind_of
from econmt_ops.core.weights import State

_ROUNDED = ("h", "x")
"""Names of states that have the compute type; the others have the accumulate type."""


def as_layers(op: str, layers: object, kinds: Sequence[type[Any]]) -> tuple[Any, ...]:
    """Returns the weights of a stack's layers as a tuple, all of the same one of the classes ``kinds``.

    Raises:
        ValueError: ``layers`` is no tuple, or empty, or contains something else.
    """
    names = " or ".join(kind.__name__ for kind in kinds)
    wanted = f"{op}: layers must be a tuple of {names}, one per layer"
    if isinstance(layers, tuple(kinds)):
        raise ValueError(f"{wanted}, got one {type(layers).__name__}; write (weights,)")  # noqa: TRY004  as all of its errors
    if isinstance(layers, Tensor) or not isinstance(layers, Iterable):
        raise ValueError(f"{wanted}, got {kind_of(layers)}")  # noqa: TRY004  as all of its errors
    weights = tuple(layers)
    if not weights:
        raise ValueError(f"{op}: layers is empty, at least one is needed")
    check_weights(op, {f"layers[{number}]": layer for number, layer in enumerate(weights)}, kinds)
    return weights


def check_weights(op: str, weights: dict[str, Any], kinds: Sequence[type[Any]]) -> None:
    """Checks the classes of the weights of layers, given by the names under which messages speak of them.

    Raises:
        ValueError: Weights have none of the ``kinds``, or another one than those of the first layer.
    """
    (first, *_), names = weights.items(), " or ".join(kind.__name__ for kind in kinds)
    for name, layer in weights.items():
        if not isinstance(layer, tuple(kinds)):
            raise ValueError(f"{op}: {name} must be {names}, got {kind_of(layer)}")  # noqa: TRY004  as all of its errors
        if type(layer) is not type(first[1]):
            raise ValueError(f"{op}: {name} must be {type(first[1]).__name__}, as {first[0]} is")


def prepare_state(
    check: Shapes, names: Sequence[str], state: State | None, count: int, like: Tensor, dtype: torch.dtype
) -> State:
    """Returns the initial states of a stack: ``state``, checked and cast, or zeros.

    Args:
        check: Sizes of the call, B, H and I among them.
        names: Names of a layer's states; h and x have the compute type, x of the bottom layer has I values.
        state: States of every layer, or None.
        count: Number of layers.
        like: A tensor on the device of the states.
        dtype: Compute type.

    Raises:
        ValueError: ``state`` is not a tuple of states for each layer, or one does not fit.
    """
    exact = accumulate_dtype(dtype)
    types = [dtype if name in _ROUNDED else exact for name in names]
    widths = [["I" if name == "x" and number == 0 else "H" for name in names] for number in range(count)]
    if state is None:
        zeros = {
            (width, kind): like.new_zeros(check.sizes["B"], check.sizes[width], dtype=kind)
            for width, kind in {pair for row in widths for pair in zip(row, types, strict=True)}
        }
        return tuple(tuple(zeros[pair] for pair in zip(row, types, strict=True)) for row in widths)
    listed = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    if not isinstance(state, (tuple, list)) or len(state) != count:
        actual = f"a tuple of {len(state)}" if isinstance(state, (tuple, list)) else kind_of(state)
        wanted = f"state must be a tuple of {listed}, one for each of {count} layers"
        raise ValueError(f"{check.op}: {wanted}, got {actual}")
    for number, (parts, row) in enumerate(zip(state, widths, strict=True)):
        if not isinstance(parts, (tuple, list)) or len(parts) != len(names):
            raise ValueError(f"{check.op}: state[{number}] must be {listed}, got {kind_of(parts)}")
        for part, name, width in zip(parts, names, row, strict=True):
            check(f"state[{number}] {name}", part, f"B {width}")
    return tuple(tuple(part.to(kind) for part, kind in zip(parts, types, strict=True)) for parts in state)
