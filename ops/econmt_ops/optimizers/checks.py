"""Checks of what an optimizer is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from econmt_ops.core.shapes import kind_of


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
