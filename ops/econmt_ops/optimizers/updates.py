"""Checks of an optimizer's arguments, and norms of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from econmt_ops.core.shapes import kind_of


def norms_of(values: Sequence[Tensor]) -> list[Tensor]:
    """Returns the norm of each tensor, at least in float32."""
    if values and values[0].is_cuda:
        narrow = any(part.dtype == torch.bfloat16 for part in values)
        return list(torch._foreach_norm(list(values), 2, torch.float32 if narrow else None))
    types = [torch.float32 if part.dtype == torch.bfloat16 else None for part in values]
    return [torch.linalg.vector_norm(part, dtype=kind) for part, kind in zip(values, types, strict=True)]


def gradient_values(parameter: Tensor) -> Tensor:
    """Returns a parameter's gradient; for a sparse one the values of its rows, after coalescing it."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    rows = gradient._indices()[0]
    # Autograd does not mark sums of sparse gradients as coalesced; coalescing needs a copy, so it is done only if due.
    if not bool((rows[1:] > rows[:-1]).all()):
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()


def check_settings(name: str, betas: tuple[float, float], settings: Mapping[str, float | Tensor]) -> None:
    """Checks the numbers of an optimizer called ``name``; a tensor is not read, because a GPU would wait.

    Raises:
        ValueError: If a decay is not in [0, 1), or another setting is negative or NaN.
    """
    for key, value in settings.items():
        if not isinstance(value, Tensor) and not value >= 0.0:
            raise ValueError(f"{name}: {key} must be at least 0, got {value}")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name}: betas must be at least 0 and less than 1, got {betas}")


def checked_parameters(name: str, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters of an optimizer called ``name`` as a list.

    Raises:
        ValueError: If one is no leaf tensor, so that it would never have a gradient, or is listed twice.
    """
    wanted = f"{name}: parameters must be leaf tensors, such as model.parameters()"
    if isinstance(parameters, Tensor):
        raise ValueError(f"{wanted}, got one tensor; write [tensor]")  # noqa: TRY004  ValueError, as the other checks
    listed = list(parameters)
    for number, parameter in enumerate(listed):
        if not isinstance(parameter, Tensor):
            raise ValueError(f"{wanted}; parameters[{number}] is {kind_of(parameter)}")  # noqa: TRY004  ValueError, as the other checks
        if not parameter.is_leaf:
            found = f"parameters[{number}], {kind_of(parameter)}, is the result of an operation"
            raise ValueError(f"{wanted}; {found}")
    if len(set(listed)) < len(listed):
        raise ValueError(f"{name}: a parameter is listed twice, so that each step would update it twice")
    return listed


def check_clipping(name: str, kind: str) -> None:
    """Checks the kind of clipping of an optimizer called ``name``; raises ValueError if it is unknown."""
    if kind not in ("norm", "value", "none"):
        raise ValueError(f"{name}: kind must be norm, value or none, got {kind!r}")
