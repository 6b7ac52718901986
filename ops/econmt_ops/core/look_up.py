"""Embedding look-up whose gradient takes little memory on a GPU and works in a CUDA graph."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import triton
from econmt_ops.dispatch.registration import custom_op


def look_up(table: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
    """Looks rows of a table up, as `torch.nn.functional.embedding`; on a GPU with econmt's kernel for the gradient.

    Args:
        table: (V, E).
        ids: (...), int64, each in [0, V).
        padding: Row that gets no gradient, or None.

    Returns:
        The rows, (..., E).
    """
    if not triton.serves(table):
        return functional.embedding(ids, table, padding)
    rows: Tensor = _look_up(table, ids, -1 if padding is None else padding)
    return rows


@torch.no_grad()
def add_look_up_gradient(table: Tensor, incoming: Tensor, ids: Tensor) -> None:
    """Adds the gradient of a look-up to the gradient of its table, in a deterministic order.

    Args:
        table: Gradient of the table, (V, E), contiguous.
        incoming: Gradient of the rows, (..., E), contiguous; may be overwritten.
        ids: (...), int64, each in [0, V]; positions with id V contribute nothing.
    """
    words = len(table)
    if triton.serves(table):
        kernels = importlib.import_module("econmt_ops.backends.triton.embedding")
        kernels.add_gradient(table, incoming, ids, words)
        return
    incoming.masked_fill_((ids == words).unsqueeze(-1), 0.0)
    table.index_add_(0, ids.flatten().clamp(max=words - 1), incoming.flatten(0, -2))


@custom_op("econmt_ops::look_up")
def _look_up(table: Tensor, ids: Tensor, _padding: int) -> Tensor:
    return functional.embedding(ids, table)


@_look_up.register_fake
def _(table: Tensor, ids: Tensor, _padding: int) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[1])


@custom_op("econmt_ops::look_up_backward")
def _look_up_backward(incoming: Tensor, ids: Tensor, words: int, padding: int) -> Tensor:
    kernels = importlib.import_module("econmt_ops.backends.triton.embedding")
    gradient: Tensor = kernels.gradient(incoming, ids, words, padding)
    return gradient


@_look_up_backward.register_fake
def _(incoming: Tensor, _ids: Tensor, words: int, _padding: int) -> Tensor:
    return incoming.new_empty(words, incoming.shape[-1])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:  # noqa: ARG001 - torch names them
    table, ids, ctx.padding = inputs
    ctx.save_for_backward(ids)
    ctx.words = len(table)


def _backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
    return _look_up_backward(incoming, *ctx.saved_tensors, ctx.words, ctx.padding), None, None


_look_up.register_autograd(_backward, setup_context=_remember)
