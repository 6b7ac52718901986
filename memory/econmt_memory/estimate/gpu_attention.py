"""Memory of scaled dot product attention on a GPU, by kernel (PyTorch 2.11, aten/src/ATen/native)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


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
    seeds = [query.new_empty(0, dtype=torch.int64) for _ in range(2)]  # on the CPU
    return outputs, sums, seeds[0], seeds[1]


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


def _with_seeds(query: Tensor, key: Tensor, outputs: Tensor, sums: Tensor) -> tuple[Any, ...]:
    """Returns results with the states of the random numbers and an empty mask."""
    seeds = [query.new_empty(1, dtype=torch.int64) for _ in range(2)]
    return outputs, sums, None, None, query.shape[2], key.shape[2], *seeds, query.new_empty(0)


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """Keeps the logarithm of each row's sum (transformers/cuda/flash_attn/flash_api.cpp, mha_fwd)."""
    outputs = _by_position(query, value.shape[-1])
    return _with_seeds(query, key, outputs, query.new_empty(query.shape[:3], dtype=torch.float32))


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
    return _with_seeds(query, key, outputs, sums)


ATTENTION: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
}
"""Replacements by operator."""
