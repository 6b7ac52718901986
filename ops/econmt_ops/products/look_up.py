"""Embedding look-up whose gradient takes little memory on a GPU and works in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import triton
from econmt_ops.core.precision import compute_dtype
from econmt_ops.dispatch.registration import custom_op


def look_up(table: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
    """Looks rows of a table up, as `torch.nn.functional.embedding`; on a GPU with econmt's kernel for the gradient.

    Args:
        table: (V, E).
        ids: (...), int64, each in [0, V).
        padding: Row that gets no gradient, or None.

    Returns:
        The rows, (..., E); on a GPU under autocast in its type, which is what the layers that read them compute in.
    """
    if not triton.serves(table):
        return functional.embedding(ids, table, padding)
    rows: Tensor = _look_up(table, ids, -1 if padding is None else padding, compute_dtype(table))
    return rows


@torch.no_grad()
def add_look_up_gradient(table: Tensor, incoming: Tensor, ids: Tensor) -> None:
    """Adds the gradient of a look-up to the gradient (V, E) of its table, contiguous, in a deterministic order.

    ``incoming`` (..., E), the gradient of the rows, is contiguous and may be overwritten; positions whose id in ``ids``
    (...) is V contribute nothing.
    """
    words = len(table)
    if triton.serves(table):
        from econmt_ops.backends.triton import embedding  # imports triton

        embedding.add_gradient(table, incoming, ids, words)
        return
    incoming.masked_fill_((ids == words).unsqueeze(-1), 0.0)
    table.index_add_(0, ids.flatten().clamp(max=words - 1), incoming.flatten(0, -2))


@custom_op("econmt_ops::look_up")
def _look_up(table: Tensor, ids: Tensor, _padding: int, dtype: torch.dtype) -> Tensor:
    if dtype == table.dtype:
        return functional.embedding(ids, table)
    from econmt_ops.backends.triton import embedding

    return embedding.look_up(table.contiguous(), ids, dtype)


@_look_up.register_fake
def _(table: Tensor, ids: Tensor, _padding: int, dtype: torch.dtype) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[1], dtype=dtype)


@custom_op("econmt_ops::look_up_backward")
def _look_up_backward(incoming: Tensor, ids: Tensor, words: int, padding: int, dtype: torch.dtype) -> Tensor:
    from econmt_ops.backends.triton import embedding

    return embedding.gradient(incoming, ids, words, padding, dtype)


@_look_up_backward.register_fake
def _(incoming: Tensor, _ids: Tensor, words: int, _padding: int, dtype: torch.dtype) -> Tensor:
    return incoming.new_empty(words, incoming.shape[-1], dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, int, torch.dtype], output: Tensor) -> None:  # noqa: ARG001 - torch names them
    table, ids, ctx.padding, _ = inputs
    ctx.save_for_backward(ids)
    ctx.words, ctx.dtype = len(table), table.dtype


def _backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None, None]:
    gradient = _look_up_backward(incoming, *ctx.saved_tensors, ctx.words, ctx.padding, ctx.dtype)
    return gradient, None, None, None


_look_up.register_autograd(_backward, setup_context=_remember)
