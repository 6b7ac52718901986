"""Parameters stored in bfloat16 during training, and in float32 wherever else they are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from econmt.config.training import Training


def store_parameters(model: nn.Module, training: Training) -> None:
    """Stores the matrices of a model that are trained in the type of the recipe, in place; vectors stay float32."""
    if training.param_dtype == "float32":
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() > 1 and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


@contextmanager
def in_float32(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gives parameters in bfloat16 equal values in float32 within the context; values set there are rounded after it.

    Their memory in bfloat16 stays, because CUDA graphs refer to its address.
    """
    stored = [(parameter, parameter.data) for parameter in parameters if parameter.dtype == torch.bfloat16]
    for parameter, narrow in stored:
        parameter.data = narrow.float()
    try:
        yield
    finally:
        for parameter, narrow in stored:
            narrow.copy_(parameter.data)
            parameter.data = narrow
