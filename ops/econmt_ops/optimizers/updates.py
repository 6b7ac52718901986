"""Arguments of an optimizer's update of one parameter, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends.cuda.adam import AdamTensors


class Update(NamedTuple):
    """Arguments of one update: values, their gradient, their moments, and the scalars of the state by name.

    ``salt`` and ``begin`` are arguments of `econmt_ops.optimizers.stochastic_rounding.round_into`.
    """

    values: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    numbers: dict[str, Tensor]
    salt: int = 0
    begin: int = 0


def adam_tensors(update: Update) -> AdamTensors:
    """Returns an update as Adam's kernel takes it."""
    first, second = update.moments
    return AdamTensors(update.values, update.gradient, first, second, update.numbers["step"], update.salt)


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
