"""Memory of scaled dot product attention on a GPU, by kernel (PyTorch 2.11, aten/src/ATen/native)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _seeds(query: Tensor, on_device: bool) -> tuple[Tensor, Tensor]:
    """Returns the states of the random numbers; those on the CPU take no memory of the GPU."""
    size = 1 if on_device else 0
    return query.new_empty(size, dtype=torch.int64), query.new_empty(size, dtype=torch.int64)


def _by_position(query: Tensor, width: int) -> Tensor:
    """Creates an output (B, H, T, D) that is contiguous as (B, T, H, D)."""
    rows, heads, steps = query.shape[:3]
    return query.new_empty(rows, steps, heads, width).transpose(1, 2)


def _efficient_attention(
    query: Tensor, _key: Tensor, value: Tensor, _bias: Tensor | None, keeps: bool, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keeps the logarithm of each row's sum, in whole blocks of 32 rows (transformers/cuda/attention.cu)."""
    rows, heads, steps = query.shape[:3]
    outputs = _by_position(query, value.shape[-1])
    sums = query.new_empty(rows, heads, -(-steps // 32) * 32 if keeps else 0, dtype=torch.float32)
    return outputs, sums, *_seeds(query, False)


def _efficient_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes gradients contiguous as (B, T, H, D) (transformers/cuda/attention_backward.cu)."""
    gradient = gradient.transpose(1, 2).contiguous()
    results = [_by_position(each, each.shape[-1]) for each in (query, key, value)]
    rows, heads, steps = query.shape[:3]
    if query.dtype is torch.float32:
        products = gradient * others[1].transpose(1, 2)  # with the outputs
        sums = products.sum(-1)
        del products
        delta = sums.transpose(1, 2).contiguous()
    else:
        delta = query.new_empty(rows, heads, steps, dtype=torch.float32)
    del delta
    return results[0], results[1], results[2], None


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """Keeps the logarithm of each row's sum (transformers/cuda/flash_attn/flash_api.cpp, mha_fwd)."""
    rows, heads, steps = query.shape[:3]
    outputs = _by_position(query, value.shape[-1])
    sums = query.new_empty(rows, heads, steps, dtype=torch.float32)
    nothing = query.new_empty(0)
    return outputs, sums, None, None, steps, key.shape[2], *_seeds(query, True), nothing


def _flash_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, outputs: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums the gradient of queries in float32 (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    gradient, outputs = gradient.transpose(1, 2).contiguous(), outputs.transpose(1, 2).contiguous()
    results = [_by_position(each, each.shape[-1]) for each in (query, key, value)]
    rows, heads, steps, size = query.shape
    steps, size = -(-steps // 128) * 128, -(-size // 32) * 32
    sums = query.new_empty(rows, heads, steps, dtype=torch.float32)
    accumulated = query.new_empty(rows, steps, heads, size, dtype=torch.float32)
    del sums, accumulated
    return results[0], results[1], results[2]


def _cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, _bias: Tensor | None, keeps: bool, *_: Any, **__: Any
) -> tuple[Any, ...]:
    """Keeps the logarithm of each row's sum (cudnn/MHA.cpp)."""
    outputs = torch.empty_like(query) if query.shape == value.shape else _by_position(query, value.shape[-1])
    sums = query.new_empty(*query.shape[:3], 1, dtype=torch.float32) if keeps else query.new_empty(0)
    nothing = query.new_empty(0)
    return outputs, sums, None, None, query.shape[2], key.shape[2], *_seeds(query, True), nothing


def _cudnn_attention_backward(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


ATTENTION: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
}
"""Replacements by operator."""
